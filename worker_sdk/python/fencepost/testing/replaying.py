"""Replays histories with the code of today, and names the first difference.

A history does not say which events the worker had seen when it decided last. All before its last command, most often;
but an event may have come while that was on its way. So a difference counts only if there is one whichever of the
last events were seen. Of a run whose function has ended there is no such doubt, and the end is compared as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fencepost.code_run import CodeRun
from fencepost.codec import Value
from fencepost.decisions import Cancelled, Decision, Unsent
from fencepost.events import Event, event_of
from fencepost.failure import Failed
from fencepost.models import Failure
from fencepost.testing.histories import History, HistoryUnreadable, files, read
from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.workflow import Workflow
from fencepost.workflow_errors import NondeterminismError

Tell = Callable[[str], object]

_COMMANDS = frozenset(
    {"local_step_ended", "step_scheduled", "timer_started", "signal_awaited", "child_scheduled", "attributes_set",
     "patch_marked", "op_cancelled"}
)  # fmt: skip
_ENDS = {
    "run_completed": (pb.ADVANCE_OUTCOME_COMPLETE, "completed"),
    "run_continued": (pb.ADVANCE_OUTCOME_CONTINUE_AS_NEW, "continued as new"),
    "run_failed": (pb.ADVANCE_OUTCOME_FAIL, "failed"),
    "run_ending": (pb.ADVANCE_OUTCOME_FAIL, "failed"),
}
_ALL_ASKED = (pb.ADVANCE_OUTCOME_COMPLETE, pb.ADVANCE_OUTCOME_CONTINUE_AS_NEW)
_SERVERS_FAILURES = frozenset({"RUN_TIMEOUT", "DEFINITION_REMOVED"})
# The function had ended otherwise, and the server refused what it ended with.
_REFUSED = {
    "OUTPUT_SCHEMA_MISMATCH": pb.ADVANCE_OUTCOME_COMPLETE,
    "INPUT_SCHEMA_MISMATCH": pb.ADVANCE_OUTCOME_CONTINUE_AS_NEW,
}
_MOST_TRIES = 50


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a replay without a difference.

    ``events`` were replayed, ``ops`` durable calls were made. ``output`` and ``failure`` are what the function ended
    with, as computed now; neither is there if it goes on.
    """

    run_id: str
    events: int
    ops: int
    output: Value | None = None
    failure: Failure | None = None

    def __str__(self) -> str:
        return f"{self.events} events and {self.ops} ops, {self.end}"

    @property
    def end(self) -> str:
        """How the function stands at the end, for people."""
        if self.failure is not None:
            return f"fails with {self.failure.code}: {self.failure.message}"
        return "goes on" if self.output is None else "completes"


class Replayer:
    """Replays histories of one workflow. Needs no server.

    ``on_input_change="block"`` makes a difference of an op whose input is another; with "warn" it is logged, as it is
    by a worker.
    """

    def __init__(self, workflow: Workflow[..., Any], *, on_input_change: Literal["warn", "block"] = "warn") -> None:
        self._workflow = workflow
        self._on_input_change: Literal["warn", "block"] = on_input_change

    def replay(self, history: History, *, run_id: str = "", user_id: str = "", tell: Tell | None = None) -> Replay:
        """Replay one history: a file that ``fencepost runs history RUN --json`` was written to, or events.

        ``run_id`` and ``user_id`` are what the function finds in its context, which events do not say (files do say the
        run's id). ``tell`` is given a line for people for each event and each op. Raises NondeterminismError with the
        first difference, HistoryUnreadable, and ValueError for a history of another workflow.
        """
        events, known = read(history)
        run_id = run_id or known
        self._check_workflow(events[0])
        end = _end_of_function(events)
        candidates = _seen(events if end is None else events[: end - 1], ended=end is not None)
        first: NondeterminismError | None = None
        for seen in candidates:
            try:
                return self._try(events, seen, end, run_id, user_id, tell)
            except NondeterminismError as error:
                first = first or error
                tell = None
        assert first is not None  # there is one candidate at least
        raise first

    def replay_folder(self, folder: str | os.PathLike[str]) -> list[Replay]:
        """Replay all files of histories (.json, .jsonl) in a folder and in those below it.

        Raises as `replay`, with the file's name before what is wrong; HistoryUnreadable if there is none.
        """
        done = []
        for path in files(folder):
            try:
                done.append(self.replay(path))
            except NondeterminismError as error:
                raise NondeterminismError(f"{path}: {error.message}") from error
            except HistoryUnreadable:
                raise  # which has named it
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        return done

    def _check_workflow(self, started: run_pb2.Event) -> None:
        found = started.run_started.workflow_id
        if found != self._workflow.workflow_id:
            raise ValueError(f"the history is of {found}, not of {self._workflow.workflow_id}")

    def _try(
        self, events: Sequence[run_pb2.Event], seen: int, end: int | None, run_id: str, user_id: str, tell: Tell | None
    ) -> Replay:
        run = _Told(
            self._workflow, run_id, seen_seq=seen, advance_no=0, user_id=user_id, on_input_change=self._on_input_change
        )
        run.tell, run.history = tell, events
        fed = events if end is None else events[: end - 1]
        try:
            run.feed(fed)
            run.tell_events(len(fed))
            unsent = list(run.book.unsent.values())
            decision = run.decision()
            if end is not None:
                _compare_ends(run, decision, events[end - 1])
                if decision is not None and decision.outcome in _ALL_ASKED:
                    _check_recorded(unsent)
            return _replay_of(run, decision, len(events))
        except NondeterminismError as error:
            run.tell_events(run.seq)
            raise run.explained(error) from None
        finally:
            run.evict()


class _Told(CodeRun):
    """A run that tells what happens to it."""

    tell: Tell | None = None
    history: Sequence[run_pb2.Event] = ()
    _told_events = 0
    _told_ops = 0

    def _turn(self) -> None:
        self.tell_events(self.seq)
        super()._turn()
        first, self._told_ops = self._told_ops + 1, self.book._last
        if self.tell is not None:
            for number in range(first, self._told_ops + 1):
                op = self.book.ops.get(number)
                if op is not None:
                    self.tell(f"{'':8}op {number}: {op.text}")

    def _tell_end(self, failure: Failed | None) -> None:
        """It has been told, when it happened."""

    def tell_events(self, seq: int) -> None:
        """All events up to that one have been fed."""
        first, self._told_events = self._told_events, max(self._told_events, seq)
        if self.tell is not None:
            for message in self.history[first : self._told_events]:
                self.tell(_line(event_of(message)))

    def explained(self, error: NondeterminismError) -> NondeterminismError:
        """The difference, with what may have led to it that is not in the code."""
        if self.run_id or (self._context._random is None and self._context._ids is None):
            return error
        return NondeterminismError(
            f"{error.message} (ctx.random and ctx.uuid4 depend on the run's id, which this history does not say: "
            "give it as run_id)"
        )


def _line(event: Event) -> str:
    seq, _, rest = str(event).partition(" ")
    return f"{seq:>5}  {rest}"


def _end_of_function(events: Sequence[run_pb2.Event]) -> int | None:
    """The number of the event by which the function has ended; None if it has not, or the server ended the run."""
    end = 0
    by_server = False
    for event in events:
        kind = event.WhichOneof("kind")
        if kind == "run_retried":
            end, by_server = 0, False
        elif not end and not by_server and kind in _ENDS:
            cancelled = kind == "run_ending" and event.run_ending.state != run_pb2.RUN_STATE_FAILED
            failed = kind in {"run_failed", "run_ending"}
            by_server = cancelled or (failed and _failure_of(event).code in _SERVERS_FAILURES)
            end = 0 if by_server else event.seq
        elif kind in {"run_cancelled", "run_terminated"}:
            by_server = by_server or not end
    return end or None


def _seen(events: Sequence[run_pb2.Event], *, ended: bool) -> list[int]:
    """Up to which event what the code decided may be recorded, the likeliest first."""
    commands = (event.seq for event in reversed(events) if event.WhichOneof("kind") in _COMMANDS)
    last = len(events) if ended else next(commands, 1) - 1
    candidates = [last]
    while last > 1 and len(candidates) < _MOST_TRIES:
        kind = events[last - 1].WhichOneof("kind")
        if kind in _COMMANDS and kind != "local_step_ended":
            break
        last -= 1
        candidates.append(last)
    return candidates


def _compare_ends(run: _Told, decision: Decision | None, end: run_pb2.Event) -> None:
    """Raises NondeterminismError unless the function ends as the history says."""
    outcome, how = _ENDS[end.WhichOneof("kind") or ""]
    outcomes = {outcome}
    if how == "failed":
        outcomes.add(_REFUSED.get(_failure_of(end).code, outcome))
    if decision is not None and decision.outcome in outcomes:
        return
    raise NondeterminismError(f"event {end.seq}: history has the run {how}, code {_does(run, decision)}")


def _check_recorded(unsent: Sequence[Unsent]) -> None:
    """The function has ended, so that all it asked for is in the history. Raises NondeterminismError otherwise.

    Not so if it has failed: what it asked for last is never sent.
    """
    for item in unsent:
        if isinstance(item, str):
            raise NondeterminismError(f"patch {item}: history has nothing, code asks for it")
        op, what = (item.op, "cancel of ") if isinstance(item, Cancelled) else (item, "")
        raise NondeterminismError(f"op {op.number}: history has nothing, code asks for {what}{op.text}")


def _failure_of(event: run_pb2.Event) -> run_pb2.Failure:
    return event.run_failed.failure if event.HasField("run_failed") else event.run_ending.failure


def _does(run: _Told, decision: Decision | None) -> str:
    """What the function does in place of ending, or how else it ends, for people."""
    if decision is not None and decision.outcome == pb.ADVANCE_OUTCOME_COMPLETE:
        return "completes"
    if decision is not None and decision.outcome == pb.ADVANCE_OUTCOME_CONTINUE_AS_NEW:
        return "continues as new"
    if decision is not None and decision.failure is not None:
        return f"fails with {decision.failure.code}: {decision.failure.message}"
    asked = [op for op in run.book.ops.values() if not op.seq]
    if asked:
        return f"asks for {asked[0].text}"
    waiting = [op for op in run.book.ops.values() if op.awaited]
    return f"waits for {waiting[0].text}" if waiting else "waits"


def _replay_of(run: _Told, decision: Decision | None, events: int) -> Replay:
    ends = decision is not None and decision.outcome in {pb.ADVANCE_OUTCOME_COMPLETE, pb.ADVANCE_OUTCOME_FAIL}
    if decision is None or not ends:
        return Replay(run.run_id, events, run.book._last)
    return Replay(run.run_id, events, run.book._last, decision.output, _failure(decision.failure))


def _failure(failed: Failed | None) -> Failure | None:
    return None if failed is None else Failure(failed.kind, failed.code, failed.message, failed.feedback)
