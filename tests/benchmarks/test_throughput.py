"""A tiny `python -m benchmarks throughput`, as a process: what it prints holds together. No figure is judged."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

RUNS, ROUNDS, STEPS, SLOTS = 12, 2, 10, 8
TIMEOUT = 150

FIGURES = {
    "steps_per_second",
    "steps_per_second_with_starts",
    "sql_steps_per_second",
    "ratio",
    "submit_runs_per_second",
    "step_p50_ms",
    "step_p99_ms",
    "submit_p50_ms",
    "batch_mean",
    "sql_batch_mean",
    "transactions_per_step",
    "sql_transactions_per_step",
    "wal_bytes_per_step",
    "sql_wal_bytes_per_step",
}


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


def test_throughput_ends_with_one_json_object_whose_counts_add_up(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    sizes = ("--runs", str(RUNS), "--rounds", str(ROUNDS), "--slots", str(SLOTS), "--workers", "2")
    done = bench("throughput", "--profile", "quick", *sizes, "--json", str(file), folder=folder)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(file.read_text()) == result
    assert result["counts"] == {
        "runs_started": ROUNDS * RUNS,
        "runs_completed": ROUNDS * RUNS,
        "steps_completed": ROUNDS * RUNS * STEPS,
        "outputs_right": ROUNDS * RUNS,
    }
    assert {name for name in FIGURES if not result[name] > 0} == set()
    assert result["ratio"] == pytest.approx(result["steps_per_second"] / result["sql_steps_per_second"], rel=0.01)
    assert all(len(values) == ROUNDS for values in result["by_round"].values())
    assert result["cpu_seconds_per_1000_steps"].keys() == {"database", "server", "worker"}
    assert result["sql_cpu_seconds_per_1000_steps"].keys() == {"database", "driver"}
    assert {"python", "postgres", "fencepost-server"} <= result["versions"].keys()
    assert result["hardware"]["processors"] > 0
    settings = result["database"]["settings"]
    assert (settings["fsync"], settings["synchronous_commit"], settings["full_page_writes"]) == ("on", "on", "on")
    assert "fsync=on, synchronous_commit=on" in done.stdout
    assert list(folder.iterdir()) == [], "it left files behind"


def test_a_benchmark_that_is_told_to_stop_takes_everything_down_first(folder: Path) -> None:
    command = [*COMMAND, "throughput", "--rounds", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder)
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("warming up")
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
