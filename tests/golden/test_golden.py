"""What earlier versions have recorded is replayed by the code of today; every kind of event is among it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fencepost import EventKind, NondeterminismError
from fencepost.testing.replaying import Replayer
from fencepost_server.domain.model import EventType
from tests.golden import workflows

FOLDER = Path(__file__).parent
HISTORIES = sorted(FOLDER.glob("*.json"), key=lambda path: path.name)
CUT_OFF = {"stubborn-1"}
"""Runs that were ended while their functions went on."""
GRAPHS_ONLY = {
    EventType.SIGNAL_TAKEN, EventType.SCOPE_OPENED, EventType.ITEM_OPENED, EventType.SCOPE_CLOSED,
    EventType.CHOICE_MADE, EventType.NODE_FAILED,
}  # fmt: skip
"""What only graphs have: of nodes, and of signals that a node takes. A function is told by what follows."""


def documents(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def replayer(path: Path) -> Replayer:
    return Replayer(workflows.ALL[documents(path)[0]["workflow_id"]], on_input_change="block")


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_a_history_of_an_earlier_version_is_replayed_by_todays_code(path: Path) -> None:
    recorded = documents(path)
    replay = replayer(path).replay(path, user_id="golden")
    assert replay.events == len(recorded)
    assert replay.ops >= max(event.get("op", 0) for event in recorded), "one that was given up at once has no event"
    failure = recorded[-1].get("failure")
    found = None if replay.failure is None else replay.failure.code
    assert found == (None if failure is None or path.stem in CUT_OFF else failure["code"])


def test_every_type_of_event_that_code_runs_have_is_in_a_golden_history() -> None:
    there = {event["kind"] for path in HISTORIES for event in documents(path)}
    wanted = {each.name.lower() for each in EventType if each not in GRAPHS_ONLY}
    assert wanted - there == set(), "tests/golden/make.py tells no story of these"
    assert {kind.value for kind in EventKind} >= there


def test_an_op_that_is_left_out_of_a_golden_history_is_noticed(tmp_path: Path) -> None:
    ops = 0
    for path in HISTORIES:
        recorded = documents(path)
        if recorded[-1]["kind"] not in {"run_completed", "run_continued"}:
            continue  # it was stopped: what the function asked for last may not have been decided yet
        for left_out in [number for number, event in enumerate(recorded) if "op" in event]:
            ops += 1
            changed = tmp_path / f"{path.stem}-{left_out}.json"
            changed.write_text("\n".join(json.dumps(event) for event in _without(recorded, left_out)))
            with pytest.raises(NondeterminismError):
                replayer(path).replay(changed, user_id="golden")
    assert ops > 40


def _without(recorded: list[dict[str, Any]], left_out: int) -> list[dict[str, Any]]:
    """A history in which one event is another, of which the function is told nothing."""
    event = recorded[left_out]
    nothing = {"seq": event["seq"], "event_time": event["event_time"], "kind": "run_paused", "reason": "for tests"}
    return [*recorded[:left_out], nothing, *recorded[left_out + 1 :]]


def test_a_step_that_is_called_with_something_else_is_noticed(tmp_path: Path) -> None:
    path = FOLDER / "everything-1.json"
    recorded = documents(path)
    output = next(event for event in recorded if event["kind"] == "local_step_ended")
    output["payload"] += 1
    changed = tmp_path / path.name
    changed.write_text("\n".join(json.dumps(event) for event in recorded))
    with pytest.raises(NondeterminismError, match=r"history has another input of step golden\.report"):
        replayer(path).replay(changed, user_id="golden")
