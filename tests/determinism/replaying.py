"""Replays recorded histories and writes down all that the code asks for: ``python -m tests.determinism.replaying FOLDER
TIMES`` prints a digest of each history's commands, the same for every replay, in every process, on every Python.

Needs the SDK and what that needs, nothing of the tests' own fixtures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fencepost.code_run import CodeRun
from fencepost.decisions import Cancelled, micros
from fencepost.ops import Op
from fencepost.testing.replaying import Replayer
from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.workflow import Workflow
from tests.determinism import playing

WORKFLOWS: dict[str, Workflow[..., Any]] = {each.workflow_id: each for each in (playing.program, playing.child)}
_ENDS = {
    "run_completed": pb.ADVANCE_OUTCOME_COMPLETE,
    "run_continued": pb.ADVANCE_OUTCOME_CONTINUE_AS_NEW,
    "run_failed": pb.ADVANCE_OUTCOME_FAIL,
    "run_cancelled": pb.ADVANCE_OUTCOME_FAIL,
}


def write(folder: Path, run_id: str, events: Iterable[run_pb2.Event]) -> Path:
    """Keep a history for other processes."""
    path = folder / f"{run_id}.history"
    path.write_bytes(run_service_pb2.GetHistoryResponse(events=events).SerializeToString())
    return path


def histories(folder: Path) -> Iterator[tuple[str, list[run_pb2.Event]]]:
    """The histories of a folder, by the ids of their runs."""
    for path in sorted(folder.glob("*.history")):
        yield path.stem, list(run_service_pb2.GetHistoryResponse.FromString(path.read_bytes()).events)


class Asked(dict[Any, Any]):
    """What a run is about to send; it notes what is put into it, and after which event."""

    def __init__(self, run: CodeRun, notes: list[str]) -> None:
        super().__init__()
        self._run = run
        self._notes = notes

    def __setitem__(self, key: Any, item: Any) -> None:
        super().__setitem__(key, item)
        self._notes.append(f"{self._run.seq} {_text(item)}")


def _text(item: object) -> str:
    if isinstance(item, Op):
        call = "" if item.call is None else str(item.call.args)
        seconds = None if item.seconds is None else micros(item.seconds)
        parts = (item.number, item.kind, item.name, item.digest.hex(), seconds, item.input.json, item.options)
        return f"{parts} {item.attributes} {call} {item.shielded}"
    if isinstance(item, Cancelled):
        return f"cancel {item.op.number}"
    return f"patch {item}"


def replay(run_id: str, events: Sequence[run_pb2.Event]) -> list[str]:
    """Feed a history, and return all that the function asked for, with the event that it had been fed last, and what it
    ended with. Raises NondeterminismError for any difference, in inputs too.
    """
    end, last = _end_of(events)
    workflow = WORKFLOWS[events[0].run_started.workflow_id]
    run = CodeRun(workflow, run_id, seen_seq=last, advance_no=1, on_input_change="block")
    notes: list[str] = []
    run.book.unsent = Asked(run, notes)
    run.book.to_begin = Asked(run, notes)
    run.feed(events[:last])
    if end:
        decision = run.decision()
        assert decision is not None, f"{run_id}: it goes on, and the history has {end}"
        assert decision.outcome == _ENDS[end], f"{run_id}: {decision} and not {end}"
        notes.append(f"{decision.outcome} {decision.output} {decision.failure}")
    run.evict()
    return notes


def _end_of(events: Sequence[run_pb2.Event]) -> tuple[str, int]:
    """How the run ended, if its function has, and up to which event the function was fed."""
    final = events[-1].WhichOneof("kind") or ""
    for event in events:
        kind = event.WhichOneof("kind")
        if kind == "run_ending" and event.run_ending.state != run_pb2.RUN_STATE_CANCELLED:
            return final, event.seq - 1
        if kind in _ENDS:
            return ("" if kind == "run_cancelled" else final), event.seq - 1
    return "", len(events)


def digest(run_id: str, events: Sequence[run_pb2.Event], times: int) -> str:
    """A digest of what the code asks for. Raises AssertionError unless each of so many replays gives the same, and
    NondeterminismError if the kit's own replayer finds a difference.
    """
    Replayer(WORKFLOWS[events[0].run_started.workflow_id], on_input_change="block").replay(events, run_id=run_id)
    first = replay(run_id, events)
    for _ in range(times - 1):
        again = replay(run_id, events)
        assert again == first, (
            f"{run_id}: {[pair for pair in zip(first, again, strict=False) if pair[0] != pair[1]][:1]}"
        )
    return blake2b("\n".join(first).encode(), digest_size=16).hexdigest()


def main(folder: str, times: str) -> None:
    for run_id, events in histories(Path(folder)):
        sys.stdout.write(f"{run_id} {len(events)} {digest(run_id, events, int(times))}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
