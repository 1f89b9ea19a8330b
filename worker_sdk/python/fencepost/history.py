"""What each kind of event means to a run in memory.

A handler is given the run and the event, and tells whether it was an input: then the function runs. Events that record
what the function asked for are matched with it. Kinds without a handler tell the function nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from fencepost.codec import NULL, Value
from fencepost.decisions import micros
from fencepost.models import Failure, failure_of, value_of
from fencepost.op_book import OpBook
from fencepost.ops import ATTRIBUTES, CHILD, LOCAL, SIGNAL, SLEEP, STEP, op_text
from fencepost.outcomes import child_failed, signal_timeout, step_cancelled, step_failed
from fencepost.v1 import payload_pb2, run_pb2

_WAITS = (run_pb2.TIMER_KIND_SLEEP, run_pb2.TIMER_KIND_SIGNAL_TIMEOUT)

_STOPS = ("run_ending", "step_cancelled")


class Fed(Protocol):
    """The run that is fed."""

    book: OpBook

    def begin(self, started: run_pb2.Event) -> None:
        """Call the function."""

    def end(self, why: Failure) -> None:
        """Cancel the function."""

    def count(self, payload: Value) -> None:
        """The history has this payload."""


def payload_of(payload: payload_pb2.Payload) -> Value:
    """A payload as a value; most are JSON and nothing else."""
    text = payload.json
    if text and not payload.metadata:
        return Value(text)
    return value_of(payload)


def passed_by(told: Iterable[tuple[run_pb2.Event, str | None]]) -> frozenset[int]:
    """The events of a whole history that the function is not told, because the run was retried later: the failure that
    it had let through, and what the server did to end the run. ``told`` is each event with its kind.
    """
    passed: set[int] = set()
    ended: list[int] = []
    failed = False
    for event, kind in told:
        if kind in _STOPS:
            ended.append(event.seq)
        elif kind == "run_failed":
            failed = True
        elif kind == "run_retried":
            # Without a failure of the run it was blocked, and goes on to end if it was ending.
            if failed:
                passed.update(ended)
            if event.run_retried.ignored_seq:
                passed.add(event.run_retried.ignored_seq)
            ended, failed = [], False
    return frozenset(passed)


def _input(run: Fed, event: run_pb2.Event) -> None:
    time = event.event_time
    run.book.now = (time.seconds, time.nanos)


def _run_started(run: Fed, event: run_pb2.Event) -> bool:
    _input(run, event)
    run.begin(event)
    return True


def _local_step_ended(run: Fed, event: run_pb2.Event) -> bool:
    ended, book = event.local_step_ended, run.book
    op = book.matched(ended.op, LOCAL, ended.name, ended.input_hash)
    book.to_begin.pop(op.number, None)
    _input(run, event)
    if ended.HasField("failure"):
        book.reject(op, step_failed(op, failure_of(ended.failure), ended.attempts))
    else:
        output = payload_of(ended.output)
        run.count(output)
        book.resolve(op, output)
    return True


def _step_scheduled(run: Fed, event: run_pb2.Event) -> bool:
    step = event.step_scheduled
    op = run.book.matched(step.op, STEP, step.handler, step.input_hash)
    run.count(op.input)
    return False


def _step_completed(run: Fed, event: run_pb2.Event) -> bool:
    completed, book = event.step_completed, run.book
    _input(run, event)
    output = payload_of(completed.output)
    run.count(output)
    op = book.ended(completed.task_id)
    if op is not None:
        book.resolve(op, output)
    return True


def _step_failed(run: Fed, event: run_pb2.Event) -> bool:
    failed, book = event.step_failed, run.book
    _input(run, event)
    op = book.ended(failed.task_id)
    if op is not None:
        # The counters leave out a permanent failure, which is counted by no limit.
        attempts = failed.failure.attempt or failed.operational_failures + failed.corrective_failures
        book.reject(op, step_failed(op, failure_of(failed.failure), attempts))
    return True


def _step_cancelled(run: Fed, event: run_pb2.Event) -> bool:
    _input(run, event)
    op = run.book.ended(event.step_cancelled.task_id)
    if op is not None:
        run.book.reject(op, step_cancelled(op))
    return True


def _timer_started(run: Fed, event: run_pb2.Event) -> bool:
    timer, book = event.timer_started, run.book
    if not timer.op:
        return False  # of the run as a whole
    seconds = timer.delay.seconds + timer.delay.nanos / 1e9
    op = book.matched(timer.op, SLEEP, "", b"", seconds)
    if micros(op.seconds or 0.0) != micros(seconds):
        book.input_changed(op, f"history has {op_text(SLEEP, '', seconds)}, code asks for {op.text}")
    return False


def _timer_fired(run: Fed, event: run_pb2.Event) -> bool:
    fired, book = event.timer_fired, run.book
    _input(run, event)
    op = book.ended(fired.timer_seq) if fired.kind in _WAITS else None
    if op is None:
        return True
    if op.kind is SIGNAL:
        book.signals.give_up(op)
        book.reject(op, signal_timeout(op))
    elif op.fire is not None:
        fire, op.fire = op.fire, None
        fire()
    else:
        book.resolve(op, NULL)
    return True


def _signal_awaited(run: Fed, event: run_pb2.Event) -> bool:
    awaited = event.signal_awaited
    run.book.matched(awaited.op, SIGNAL, awaited.signal_name, b"")
    return False


def _signal_received(run: Fed, event: run_pb2.Event) -> bool:
    signal, book = event.signal_received, run.book
    _input(run, event)
    payload = payload_of(signal.payload)
    run.count(payload)
    op = book.signals.came(signal.signal_name, event.seq, payload)
    if op is not None:
        book.take_signal(op, event.seq, payload)
    return True


def _child_scheduled(run: Fed, event: run_pb2.Event) -> bool:
    child = event.child_scheduled
    op = run.book.matched(child.op, CHILD, child.workflow_id, child.input_hash)
    run.count(op.input)
    return False


def _child_ended(run: Fed, event: run_pb2.Event) -> bool:
    ended, book = event.child_ended, run.book
    _input(run, event)
    output = payload_of(ended.output)
    run.count(output)
    op = book.ended(ended.child_seq)
    if op is not None:
        if ended.state == run_pb2.RUN_STATE_COMPLETED:
            book.resolve(op, output)
        else:
            book.reject(op, child_failed(op, ended))
    return True


def _attributes_set(run: Fed, event: run_pb2.Event) -> bool:
    told, book = event.attributes_set, run.book
    op = book.matched(told.op, ATTRIBUTES, "", b"")
    if dict(told.attributes) != op.attributes:
        book.input_changed(op, "history has other attributes")
    return False


def _op_cancelled(run: Fed, event: run_pb2.Event) -> bool:
    run.book.matched_cancel(event.op_cancelled.op, event.op_cancelled.of_seq)
    return False


def _run_ending(run: Fed, event: run_pb2.Event) -> bool:
    _input(run, event)
    run.end(failure_of(event.run_ending.failure))
    return True


HANDLERS: dict[str, Callable[[Fed, run_pb2.Event], bool]] = {
    "run_started": _run_started,
    "local_step_ended": _local_step_ended,
    "step_scheduled": _step_scheduled,
    "step_completed": _step_completed,
    "step_failed": _step_failed,
    "step_cancelled": _step_cancelled,
    "timer_started": _timer_started,
    "timer_fired": _timer_fired,
    "signal_awaited": _signal_awaited,
    "signal_received": _signal_received,
    "child_scheduled": _child_scheduled,
    "child_ended": _child_ended,
    "attributes_set": _attributes_set,
    "op_cancelled": _op_cancelled,
    "run_ending": _run_ending,
}
