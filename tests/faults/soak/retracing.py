"""Takes a history of a graph run back to its causes, and lets the oracle of tests/properties say what follows of them.

What came from outside (reports, signals, calls, times) is read from the history; all else in it, the oracle has to come
to by itself: which node begins when, what a join gives, what is undone and in which order, and how the run ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fencepost.v1 import run_pb2
from tests.properties.comparing import differing_events, differing_run, failure_of
from tests.properties.oracle_model import Complete, Fail, Task
from tests.properties.oracle_run import Limits, Run

DUE = -1.0
_ATTEMPT_ENDS = ("step_completed", "step_failed", "step_cancelled", "step_retrying")


class Illegal(Exception):
    """The history has something that can't follow from what was before it."""


class Retraced:
    """One history; ``run`` is the oracle's idea of it."""

    def __init__(self, manifest: Mapping[str, Any], events: Sequence[run_pb2.Event]) -> None:
        self._events = events
        self._kinds = [str(event.WhichOneof("kind")) for event in events]
        given = json.loads(events[0].run_started.input.json or "null")
        delayed = len(events) > 1 and self._kinds[1] == "timer_started" and not events[1].timer_started.node_id
        self.run = Run(manifest, given, 0.0, Limits(), start_delay=1.0 if delayed else None)

    def retrace(self) -> None:
        """Raises Illegal, or what the oracle raises, where the history is none."""
        while (number := len(self.run.events)) < len(self._events):
            kind = self._kinds[number]
            cause = _CAUSES.get(kind)
            if cause is None:
                raise Illegal(f"event {number + 1}: {kind} does not follow from {self._kinds[:number][-3:]}")
            self._hold(number)
            cause(self, getattr(self._events[number], kind))
            if len(self.run.events) == number:
                raise Illegal(f"event {number + 1}: {kind} can't be: the run is {self.run.state}")

    # Leases leave no events. Which steps were leased when the run began to end shows in how they ended.

    def _hold(self, number: int) -> None:
        ending = next((i for i in range(number, len(self._kinds)) if self._kinds[i] == "run_ending"), None)
        if ending is None:
            return
        for task in self.run.tasks.values():
            end = self._end_of(task, number)
            if task.undoes is not None or task.holder is not None:
                continue
            if end is None:
                if self._kinds[-1] == "run_terminated":  # amid its grace
                    self._take(task, 0)
                continue
            if end < ending:
                continue
            token = getattr(self._events[end], self._kinds[end]).fencing_token
            if self._kinds[end] != "step_cancelled" or not self._is_at_once(ending, end):
                self._take(task, token)
            elif token:  # somebody had it, and it came back
                task.leased_once = True

    def _end_of(self, task: Task, number: int) -> int | None:
        """The event with which a task ends: -1 if only its attempt does, None if nothing of it ends."""
        for i in range(number, len(self._kinds)):
            kind = self._kinds[i]
            if kind in _ATTEMPT_ENDS and getattr(self._events[i], kind).task_id == task.task_id:
                return -1 if kind == "step_retrying" else i
        return None

    def _is_at_once(self, ending: int, end: int) -> bool:
        """Whether a step was cancelled in the moment in which its run began to end: in the order of the steps."""
        between = [self._events[i] for i in range(ending + 1, end + 1)]
        ids = [event.step_cancelled.task_id for event in between if event.HasField("step_cancelled")]
        return len(ids) == len(between) and ids == sorted(ids)

    def _take(self, task: Task, token: int, attempt: int = 0) -> Task:
        if token and token < task.token:
            raise Illegal(f"the token of task {task.task_id} went from {task.token} to {token}")
        task.token, task.attempt = token or task.token, attempt or task.attempt + 1
        task.holder, task.lease_until, task.leased_once = "somebody", math.inf, True
        timers = [timer for timer in self.run.timers if (timer.seq, timer.kind) != (task.task_id, "QUEUE_TIMEOUT")]
        self.run.timers = timers
        return task

    def _task(self, said: Any, attempt: int) -> Task:
        task = self.run.tasks.get(said.task_id)
        if task is None:
            raise Illegal(f"task {said.task_id} was over")
        return self._take(task, said.fencing_token, attempt)

    # Causes

    def completed(self, said: Any) -> None:
        """A step or an undo has an output."""
        self._task(said, said.attempt)
        self._report(said, Complete(json.loads(said.output.json or "null")))

    def _report(self, said: Any, outcome: Complete | Fail) -> None:
        answer = self.run.report(said.task_id, said.fencing_token, outcome, 0.0)
        if answer.code != "OK" and not isinstance(outcome, Fail):
            raise Illegal(f"task {said.task_id} was answered {answer}")

    def failed(self, said: Any) -> None:
        """An attempt has failed."""
        failure = failure_of(said.failure)
        task = self._task(said, failure.attempt)
        if isinstance(said, run_pb2.StepFailed):
            task.operational = said.operational_failures - (failure.kind == "OPERATIONAL")
            task.corrective = said.corrective_failures - (failure.kind == "CORRECTIVE")
        self._report(said, Fail(failure.kind, failure.code))

    def cancelled(self, said: Any) -> None:
        """The grace of a step is over."""
        task = self._task(said, 0)
        task.attempt -= 1
        task.cancelled, task.lease_until = True, DUE
        self.run.pass_time(0.0)

    def fired(self, said: Any) -> None:
        """A time has come."""
        kind = run_pb2.TimerKind.Name(said.kind).removeprefix("TIMER_KIND_")
        timers = [timer for timer in self.run.timers if (timer.seq, timer.kind) == (said.timer_seq, kind)]
        if not timers:
            raise Illegal(f"there is no timer {said.timer_seq} {kind}")
        timers[0].fire_at = DUE
        self.run.pass_time(0.0)

    def signalled(self, said: Any) -> None:
        """A signal has come."""
        payload = json.loads(said.payload.json or "null")
        self.run.signal(said.signal_name, payload, said.request_id, 0.0)

    def ending(self, said: Any) -> None:
        """Somebody has cancelled the run: all else that ends one has an event before."""
        self.run.cancel(said.grace.ToNanoseconds() / 1e9, 0.0)

    def was_cancelled(self, said: Any) -> None:
        """The same, and nothing was left to end."""
        self.run.cancel(0.0, 0.0)

    def terminated(self, said: Any) -> None:
        """Somebody has terminated the run."""
        self.run.terminate(said.reason, 0.0)

    def paused(self, said: Any) -> None:
        """Somebody has paused the run."""
        self.run.pause(0.0)

    def resumed(self, said: Any) -> None:
        """Somebody has resumed the run."""
        self.run.resume(0.0)

    def retried(self, said: Any) -> None:
        """Somebody has retried the run."""
        self.run.retry(said.reason, False, False, 0.0)


_CAUSES: Mapping[str, Callable[[Retraced, Any], None]] = {
    "step_completed": Retraced.completed,
    "undo_completed": Retraced.completed,
    "step_retrying": Retraced.failed,
    "undo_retrying": Retraced.failed,
    "step_failed": Retraced.failed,
    "undo_failed": Retraced.failed,
    "step_cancelled": Retraced.cancelled,
    "timer_fired": Retraced.fired,
    "signal_received": Retraced.signalled,
    "run_ending": Retraced.ending,
    "run_cancelled": Retraced.was_cancelled,
    "run_terminated": Retraced.terminated,
    "run_paused": Retraced.paused,
    "run_resumed": Retraced.resumed,
    "run_retried": Retraced.retried,
}


def differences(manifest: Mapping[str, Any], message: run_pb2.Run, events: Sequence[run_pb2.Event]) -> list[str]:
    """Where a run and its history are another than the oracle has it."""
    retraced = Retraced(manifest, events)
    try:
        retraced.retrace()
    except (Illegal, AssertionError, KeyError) as error:
        return [f"{type(error).__name__}: {error}"]
    return [*differing_events(retraced.run.events, events), *differing_run(retraced.run, message)]
