"""`python -m benchmarks` as a process, as small as can be: what it prints holds together. No figure is judged."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.__main__ import BENCHMARKS, parsed
from benchmarks.evidence import Batches
from benchmarks.plan import PROFILES, STEPS
from benchmarks.processes import ROOT

TINY = PROFILES["tiny"]
TIMEOUT = 170

FIGURES = {
    "throughput": {
        "steps_per_second",
        "steps_per_second_2_workers",
        "steps_per_second_with_starts",
        "sql_steps_per_second",
        "ratio",
        "submit_runs_per_second",
        "batch_mean",
        "sql_batch_mean",
    },
    "local": {"steps_per_second", "alone_p50_ms", "alone_p99_ms"},
    "latency": {
        f"{load}_{kind}_{share}_ms"
        for load in ("idle", "half_load")
        for kind in ("submit", "step")
        for share in ("p50", "p95", "p99")
    },
    "submit": {"single_runs_per_second", "batched_runs_per_second"},
    "backlog": {"empty_steps_per_second", "other_queue_ratio", "same_queue_ratio"},
    "history": {"empty_steps_per_second", "history_ratio", "events"},
    "fanout": {"steps_per_second", "few_ms_per_item", "many_ms_per_item", "ratio"},
    "timers": {"timers_per_second", "late_p50_ms", "late_p99_ms"},
    "longtx": {"held_ratio", "last_ratio"},
    "payload": {f"{size}_steps_per_second" for size in ("100_b", "1_kb", "32_kb", "1_mb")},
    "streams": {"idle_memory_mib", "connected_memory_mib", "out_memory_mib", "steps_per_second"},
    "idle": {"alone_queries_per_second", "alone_memory_mib", "worker_queries_per_second"},
    "servers": {"1_server_steps_per_second", "2_servers_ratio", "2_servers_of_sql", "sql_steps_per_second"},
    "sql": {"steps_per_second", "batch_100_steps_per_second"},
    "undo": {"undo_seconds"},
    "code": {"cold_seconds", "replay_events_per_second"},
}
"""What other programs read from each: all are more than nothing."""
GROUPS = [
    ("throughput", "local", "latency", "submit", "sql"),
    ("backlog", "history", "fanout", "undo"),
    ("servers", "idle", "code"),
    ("longtx", "payload", "streams", "timers"),
]
"""Those that a test measures one after the other: together they need a database server only once."""
UNITS = {"submit": "run", "timers": "timer", "idle": "second"}
"""What costs are counted for, where it is not steps."""
WITHOUT_COSTS = {"code"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for everything temporary that another user, PostgreSQL's, can enter too."""
    with tempfile.TemporaryDirectory(prefix="fencepost-test-bench-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


COMMAND = [sys.executable, "-m", "benchmarks"]


def environment(folder: Path) -> dict[str, str]:
    return {"TMPDIR": str(folder), "PATH": "/usr/bin:/bin"}


def bench(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environment(folder)
    )


def processes_in(folder: Path) -> list[psutil.Process]:
    """Those that have the folder in their command line or their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(process)
    return found


def test_every_benchmark_is_tried_here() -> None:
    assert sorted(name for group in GROUPS for name in group) == sorted(BENCHMARKS)


@pytest.mark.parametrize("names", GROUPS, ids=" ".join)
def test_benchmarks_end_with_one_json_object_that_adds_up(names: Sequence[str], folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = bench(*names, "--profile", "tiny", "--json", str(file), folder=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(file.read_text()) == found
    assert list(found["results"]) == list(names)
    for name, result in found["results"].items():
        assert f"\n{name}: " in f"\n{done.stdout}", "a table with its name"
        assert result["benchmark"] == name
        assert {figure for figure in FIGURES[name] if not result[figure] > 0} == set(), name
        check_costs(name, result["costs"])
        assert {"python", "postgres", "fencepost-server"} <= result["versions"].keys()
        assert result["hardware"]["processors"] > 0
        settings = result["database"]["settings"]
        assert (settings["fsync"], settings["synchronous_commit"], settings["full_page_writes"]) == ("on", "on", "on")
        if name == "throughput":
            check_throughput(result)
    assert "fsync=on, synchronous_commit=on" in done.stdout
    assert list(folder.iterdir()) == [], "it left files behind"


def check_costs(name: str, costs: dict[str, dict[str, float]]) -> None:
    assert bool(costs) == (name not in WITHOUT_COSTS), name
    unit = UNITS.get(name, "step")
    for part, cost in costs.items():
        alone = name == "sql" or part == "statements alone"
        parts = {"database", "driver"} if alone else {"database", "server", "worker", "driver"}
        names = {f"{each}_cpu_ms_per_1000_{unit}s" for each in parts}
        assert cost.keys() == names | {f"transactions_per_{unit}", f"wal_bytes_per_{unit}"}, (name, part)
        assert name == "idle" or cost[f"wal_bytes_per_{unit}"] > 0, (name, part)


def check_throughput(result: dict[str, Any]) -> None:
    runs = TINY.runs * TINY.rounds * len(TINY.workers)
    assert result["counts"] == {
        "runs_started": runs,
        "runs_completed": runs,
        "steps_completed": runs * STEPS,
        "outputs_right": runs,
    }
    assert result["ratio"] == pytest.approx(result["steps_per_second"] / result["sql_steps_per_second"], rel=0.01)
    assert all(len(values) == TINY.rounds for values in result["by_round"].values())


def test_a_rate_is_over_the_time_in_which_so_many_steps_were_completed() -> None:
    batches = Batches(sizes=[10, 20, 30, 40], times=[101.0, 102.0, 104.0, 112.0])
    assert batches.rate(100.0, 60) == 60 / 4
    assert batches.rate(100.0, 61) == 100 / 12
    assert batches.rate(100.0, 1000) == 100 / 12, "if there are fewer: over all of them"


def test_every_command_of_the_page_is_understood() -> None:
    text = (ROOT / "docs/performance.md").read_text("utf-8")
    commands = re.findall(r"^(?:\.venv/bin/python -m benchmarks|make bench ARGS=)(.+?)(?: *#.*)?$", text, re.MULTILINE)
    shown = re.findall(r"^(?:make bench ARGS|\.venv/bin/python )", text, re.MULTILINE)
    assert len(commands) == len(shown) > 0, "of some commands the words were not found"
    for words in commands:
        assert parsed(shlex.split(words.strip('"'))).benchmarks


def test_the_page_tells_of_every_benchmark_and_every_option() -> None:
    text = (ROOT / "docs/performance.md").read_text("utf-8")
    assert [name for name in [*BENCHMARKS, "peers"] if f"| `{name}` |" not in text] == []
    options = re.findall(
        r"--[a-z-]+", subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True).stdout
    )
    assert [option for option in options if option != "--help" and f"`{option} " not in text] == []


def test_peers_that_cannot_be_set_up_are_named_with_the_reason(folder: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "peers", "--profile", "tiny"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        # No npm on this path, and no index for pip.
        env={"TMPDIR": str(folder), "PATH": str(folder), "PIP_NO_INDEX": "1"},
    )
    assert (done.returncode, done.stdout.count("\n")) == (1, 1), done.stderr
    faults = {fault["peer"]: fault["error"] for line in done.stderr.splitlines() if (fault := told(line))}
    names = {"absurd", "dbos", "procrastinate", "restate", "temporal_activities", "temporal_local_activities"}
    assert faults.keys() == names
    assert faults["restate"] == "npm is not installed"
    assert "No matching distribution found" in faults["dbos"]
    assert "no peer could be measured" in json.loads(done.stdout)["error"]
    assert list(folder.iterdir()) == []


def told(line: str) -> dict[str, Any]:
    """The object on a line of progress, or an empty one."""
    return dict(json.loads(line)) if line.startswith('{"peer"') else {}


def test_a_benchmark_that_is_told_to_stop_takes_everything_down_first(folder: Path) -> None:
    command = [*COMMAND, "throughput", "--rounds", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder)
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("throughput: warming up")
            assert len(processes_in(folder)) > 3, "PostgreSQL, a server and a worker should be there"
            process.send_signal(signal.SIGTERM)
            stdout, _ = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    assert (process.returncode, stdout) == (130, "")
    assert processes_in(folder) == []
    assert list(folder.iterdir()) == []


def test_a_setting_that_the_server_would_refuse_is_refused_before_anything_is_started(folder: Path) -> None:
    done = bench("throughput", "--set", "lanes=0", "--set", "no_such=1", folder=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "lanes: 0 is not between" in done.stderr
    assert "FENCEPOST_NO_SUCH: no such setting" in done.stderr
    assert list(folder.iterdir()) == []
