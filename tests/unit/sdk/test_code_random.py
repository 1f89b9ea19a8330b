"""Programs made by chance, lived through by chance, are replayed to the same, whatever happened."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fencepost import decisions
from tests.unit.sdk.random_programs import live
from tests.unit.sdk.replaying import replayed

ROOT = Path(__file__).resolve().parents[3]
KINDS = {
    "run_started", "local_step_ended", "step_scheduled", "step_completed", "step_failed", "timer_started",
    "timer_fired", "signal_awaited", "signal_received", "child_scheduled", "child_ended", "op_cancelled",
    "patch_marked", "attributes_set", "run_ending", "input_built", "run_paused",
}  # fmt: skip
REPLAYS = 50


@pytest.mark.parametrize(("first", "most"), [(0, 5_000), (20, 5_000), (40, 1), (60, 1), (80, 3)])
def test_fifty_replays_see_what_the_first_execution_saw(first: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is decided at once may be too much for one Advance, and then a crash comes between two parts of it.
    monkeypatch.setattr(decisions, "_MAX_COMMANDS", most)
    for seed in range(first, first + 20):
        program, story, run = live(seed)
        seen = list(program.seen)
        run.evict()
        for _ in range(REPLAYS):
            replay = replayed(program.workflow, story)
            assert program.seen == seen
            replay.evict()


def test_chance_leaves_no_kind_of_event_out() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(100, 180):
        _, story, run = live(seed)
        kinds.update(story.kinds)
        run.evict()
    assert set(kinds) == KINDS


def test_other_processes_with_other_hash_seeds_and_other_pythons_see_the_same() -> None:
    """Row 40 of the field failures."""
    pythons = {sys.executable} | {
        path for minor in range(12, 16) if (path := shutil.which(f"python3.{minor}")) and _has_packages(path)
    }
    told = {
        (python, seed): _run(python, ["-W", "error", "-m", "tests.unit.sdk.random_programs", "0", "25"], seed)
        for python in pythons
        for seed in ("1", "2", "3")
    }
    assert len(set(told.values())) == 1, told


def _run(python: str, arguments: list[str], hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT}:{ROOT}/worker_sdk/python"}
    command = [python, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout


def _has_packages(python: str) -> bool:
    command = [python, "-c", "import msgspec, grpc, google.protobuf"]
    return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0
