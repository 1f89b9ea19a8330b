"""The oracle of one run: what every command answers, and what the run is afterwards.

Each command takes the time. Memory of requests and outcomes is asked before state (I6); a token is compared before
anything is changed (I2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.properties.oracle_ends import Ends
from tests.properties.oracle_model import (
    Answer,
    Complete,
    Fail,
    Failure,
    Outcome,
    Place,
    Task,
    Timer,
    Undoable,
    Value,
)

OK, LEASE_LOST, ALREADY_DONE = Answer("OK"), Answer("LEASE_LOST"), Answer("ALREADY_DONE")
REFUSED = Answer("OUTPUT_SCHEMA_MISMATCH")
NO_RETRY = frozenset({"RUN_TIMEOUT", "DEFINITION_REMOVED"})
_TYPES: dict[str, type | tuple[type, ...]] = {"integer": int, "object": dict, "array": list, "string": str}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the servers are set to."""

    free_redeliveries: int = 3
    cancel_grace: float = 30.0


def _outcome_proper(outcome: Outcome) -> Outcome:
    """What makes an outcome another: all but when to try again."""
    return replace(outcome, retry_after=None) if isinstance(outcome, Fail) else outcome


class Run(Ends):
    """One run."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        data: Any,
        now: float,
        limits: Limits,
        start_delay: float | None = None,
        run_timeout: float | None = None,
    ) -> None:
        super().__init__(manifest)
        self.late = []
        self.dropped = []
        self.kept = ([], [], [])
        self.limits = limits
        self.grace = limits.cancel_grace
        self.now = now
        self.outcomes: dict[tuple[int, int], tuple[Outcome, Answer, bool]] = {}
        self.requests: dict[str, tuple[object, Answer]] = {}
        self.input = Value(data, self.emit("run_started"))
        self.outputs[""] = data
        if run_timeout is not None:
            self.timers.append(Timer(1, "RUN_TIMEOUT", now + run_timeout))
        if start_delay:
            seq = self.emit("timer_started", node_id="", scope_id=0, item=0)
            self.timers.append(Timer(seq, "START_DELAY", now + start_delay))
        else:
            self.begin(Place(self.nodes), self.input)

    # What workers do

    def may_lease(self, task: Task) -> bool:
        """Whether a worker may be given the task now."""
        allowed = self.fixed_state in ("", "UNDOING")
        return allowed and task.holder is None and not task.stuck and task.ready_at <= self.now

    def lease(self, task_id: int, token: int, worker: str, now: float) -> Task:
        """A worker was given a task; fails if it may not have it, or the token has not grown (I3)."""
        self.now = now
        task = self.tasks[task_id]
        assert self.may_lease(task), f"{self.state}: task {task_id} may not be leased: {task}"
        assert token > task.token, f"the token of task {task_id} did not grow: {task.token} to {token}"
        task.token, task.holder, task.lease_until = token, worker, now + task.lease
        task.attempt += 1
        task.leased_once = True
        self.timers = [timer for timer in self.timers if (timer.seq, timer.kind) != (task_id, "QUEUE_TIMEOUT")]
        return task

    def held(self, task_id: int, token: int) -> Task | None:
        """The task, if this token is its current lease."""
        task = self.tasks.get(task_id)
        return task if task and task.holder and task.token == token else None

    def heartbeat(self, task_id: int, token: int, now: float) -> tuple[Answer, bool]:
        """Renew a lease; also tells whether the step should stop."""
        self.now = now
        task = self.held(task_id, token)
        if task is None:
            return LEASE_LOST, False
        if not task.cancelled:
            task.lease_until = now + task.lease
        return OK, task.cancelled

    def checkpoint(self, task_id: int, token: int, number: int, data: Any, now: float) -> Answer:
        """Save a numbered state of a step."""
        self.now = now
        task = self.held(task_id, token)
        if task is None:
            return LEASE_LOST
        return OK if self._save(task, number, data) else ALREADY_DONE

    def _save(self, task: Task, number: int, data: Any) -> bool:
        if task.checkpoint and number <= task.checkpoint[0]:
            return False
        task.checkpoint = (number, data)
        return True

    def report(self, task_id: int, token: int, outcome: Outcome, now: float) -> Answer:
        """A worker tells what became of a lease."""
        self.now = now
        before, answer, ended_it = self.outcomes.get((task_id, token), (None, OK, False))
        # What left the step alive is remembered as long as it lives; what ended it, with its event.
        if before is not None and (ended_it or task_id in self.tasks):
            same = _outcome_proper(before) == _outcome_proper(outcome)
            return LEASE_LOST if not same else ALREADY_DONE if answer == OK else answer
        task = self.held(task_id, token)
        if task is None:
            return LEASE_LOST
        if isinstance(outcome, Complete):
            answer = self._complete(task, outcome.output)
        elif isinstance(outcome, Fail):
            if outcome.checkpoint:
                self._save(task, *outcome.checkpoint)
            failure = Failure(outcome.kind, outcome.code, task.node_id, task.attempt)
            self._attempt_failed(task, failure, outcome.retry_after, outcome.feedback)
            answer = OK
        else:
            self._released(task)
            answer = OK
        self.outcomes[task_id, token] = (outcome, answer, task_id not in self.tasks)
        return answer

    def _complete(self, task: Task, output: Any) -> Answer:
        schema = {} if task.undoes else task.node.get("output_schema", {})
        if "type" in schema and not isinstance(output, _TYPES[schema["type"]]):
            failure = Failure("CORRECTIVE", "OUTPUT_SCHEMA_MISMATCH", task.node_id, task.attempt)
            self._attempt_failed(task, failure, None, "violations")
            return REFUSED
        kind = "undo_completed" if task.undoes else "step_completed"
        seq = self.emit(
            kind,
            task_id=task.task_id,
            node_id=task.node_id,
            output=output,
            fencing_token=task.token,
            attempt=task.attempt,
        )
        self.touched = True
        self.drop_task(task)
        value = Value(output, seq)
        if task.undoes:
            self.undo_log.remove(task.undoes)
            self.go_on_ending()
            return OK
        if task.node.get("undo"):
            self.undo_log.append(Undoable(seq, task.place, task.token, False, task.input, output))
        if self.ending:
            self.late.append((task.place, value))
            self.go_on_ending()
        else:
            self.done(task.place, value)
        return OK

    def _released(self, task: Task) -> None:
        task.redeliveries += 1
        task.holder = None
        if self.ending and not task.undoes:
            self.stop(task)
            self.go_on_ending()
        elif task.redeliveries <= self.limits.free_redeliveries:
            task.attempt -= 1
            task.ready_at = self.now
        else:
            failure = Failure("OPERATIONAL", "NOT_DELIVERED", task.node_id, task.attempt)
            self._attempt_failed(task, failure, 0.0, None)

    def _attempt_failed(self, task: Task, failure: Failure, retry_after: float | None, feedback: Any) -> None:
        corrective, operational = failure.kind == "CORRECTIVE", failure.kind == "OPERATIONAL"
        task.corrective += corrective
        task.operational += operational
        count = task.corrective if corrective else task.operational
        delay = task.policy.delay(failure.kind, count, retry_after)
        task.holder, task.last_failure, self.touched = None, failure, True
        task.feedback = feedback if corrective else None
        if self.ending and not task.undoes:
            delay = None
        if delay is None:
            self._step_failed(task, failure)
            return
        task.ready_at = self.now + delay
        if failure.kind not in task.told:
            task.told.add(failure.kind)
            self.emit(
                "undo_retrying" if task.undoes else "step_retrying",
                task_id=task.task_id,
                node_id=task.node_id,
                failure=failure,
                fencing_token=task.token,
            )

    def _step_failed(self, task: Task, failure: Failure, *, reported: bool = True) -> None:
        if failure.code == "NOT_DELIVERED":
            task.stuck = True
            self.block(failure)
        elif task.undoes:
            self.undo_failed(task, failure)
        else:
            seq = self.emit(
                "step_failed",
                task_id=task.task_id,
                node_id=task.node_id,
                failure=failure,
                **({"fencing_token": task.token} if reported else {}),
                operational_failures=task.operational,
                corrective_failures=task.corrective,
            )
            self.drop_task(task)
            self.dropped.append(task)
            self.may_have_acted(task, seq)
            self.node_failed(failure)

    # What time does

    def pass_time(self, now: float) -> None:
        """Leases that have run out expire, timers that are due fire."""
        self.now = now
        for task in sorted(self.tasks.values(), key=lambda task: task.lease_until):
            if task.holder and task.lease_until <= now and task.task_id in self.tasks:
                self._expire(task)
        while due := [timer for timer in self.timers if timer.fire_at <= now and not timer.fired]:
            self._fire(min(due, key=lambda timer: (timer.fire_at, timer.seq)))

    def _expire(self, task: Task) -> None:
        failure = Failure("OPERATIONAL", "LEASE_EXPIRED", task.node_id, task.attempt)
        if task.cancelled:
            self.stop(task)
            self.go_on_ending()
        else:
            self._attempt_failed(task, failure, None, None)
        task.token += 1

    def _fire(self, timer: Timer) -> None:
        node_id = timer.place.node["id"] if timer.place else ""
        self.emit("timer_fired", timer_seq=timer.seq, node_id=node_id, kind=timer.kind)
        if self.fixed_state == "PAUSED":
            timer.fired = True
        else:
            self._act_on(timer)

    def _act_on(self, timer: Timer) -> None:
        self.timers.remove(timer)
        if timer.kind == "START_DELAY":
            self.begin(Place(self.nodes), self.input)
            return
        self.touched = True
        if timer.kind == "RUN_TIMEOUT":
            self.end("FAILED", Failure("PERMANENT", "RUN_TIMEOUT"), self.grace)
        elif timer.kind == "SLEEP":
            assert timer.place is not None
            assert timer.value is not None
            self.done(timer.place, timer.value)
        elif timer.kind == "SIGNAL_TIMEOUT":
            wait = next(wait for wait in self.waits if wait.seq == timer.seq)
            self.waits.remove(wait)
            self.again.append((wait.place, Value(None, 0)))
            failure = Failure("PERMANENT", "SIGNAL_TIMEOUT", wait.place.node["id"])
            self.emit("node_failed", node_id=wait.place.node["id"], failure=failure)
            self.node_failed(failure)
        else:
            task = self.tasks[timer.seq]
            self._step_failed(task, Failure("PERMANENT", timer.kind, task.node_id, task.attempt), reported=False)

    # What callers do

    def once(self, request_id: str, request: object, act: Any) -> Answer:
        """The first answer to a request id, or what ``act`` answers (I6)."""
        if request_id and request_id in self.requests:
            before, answer = self.requests[request_id]
            return answer if before == request else Answer("REQUEST_ID_CONFLICT")
        answer = act()
        assert isinstance(answer, Answer)
        if request_id and answer.code == "OK":
            self.requests[request_id] = (request, answer)
        return answer

    def _illegal(self) -> Answer:
        return Answer("ILLEGAL_TRANSITION", self.state)

    def _told(self) -> Answer:
        return Answer("OK", self.state)

    def signal(self, name: str, payload: Any, request_id: str, now: float) -> Answer:
        """A signal comes."""
        self.now = now

        def act() -> Answer:
            if self.final:
                return self._illegal()
            seq = self.emit("signal_received", signal_name=name, payload=payload, request_id=request_id)
            self.signals.append((seq, name, payload))
            self.take_signals()
            return Answer("OK", self.state, seq)

        return self.once(request_id, ("signal", name, payload), act)

    def cancel(self, grace: float, now: float) -> Answer:
        """The run is asked to end."""
        self.now = now
        if self.final and self.fixed_state != "CANCELLED":
            return self._illegal()
        if not self.final and self.ending is None:
            self.failure = None
            self.end("CANCELLED", Failure("PERMANENT", "RUN_CANCELLED"), grace)
        return self._told()

    def terminate(self, reason: str, now: float) -> Answer:
        """The run ends at once."""
        self.now = now
        if self.final and self.fixed_state != "TERMINATED":
            return self._illegal()
        if not self.final:
            self.emit("run_terminated", reason=reason)
            self.failure = None
            self.settle_as("TERMINATED")
        return self._told()

    def pause(self, now: float) -> Answer:
        """No step is leased until the run is resumed."""
        self.now = now
        if self.fixed_state not in ("", "PAUSED"):
            return self._illegal()
        if not self.fixed_state:
            self.fixed_state = "PAUSED"
            self.emit("run_paused")
        return self._told()

    def resume(self, now: float) -> Answer:
        """The run goes on; what was recorded meanwhile acts now."""
        self.now = now
        if self.final:
            return self._illegal()
        if self.fixed_state == "PAUSED":
            self.fixed_state = ""
            self.emit("run_resumed")
            for timer in [timer for timer in self.timers if timer.fired]:
                if timer in self.timers:
                    self._act_on(timer)
            self.take_signals()
        return self._told()

    def retry(self, reason: str, skip_undo: bool, key_taken: bool, now: float) -> Answer:
        """A failed or blocked run goes on from where it stopped, with fresh attempts."""
        self.now = now
        if self.fixed_state == "BLOCKED" and self.ending:
            self._retry_undo(reason, skip_undo)
        elif self.fixed_state == "BLOCKED" and not skip_undo:
            self._go_on_from_block(reason)
        elif self.fixed_state != "FAILED" or skip_undo or (self.failure and self.failure.code in NO_RETRY):
            return self._illegal()
        elif any(event.kind == "undo_completed" for event in self.events):
            return Answer("ALREADY_UNDONE")
        elif any(event.kind == "undo_skipped" for event in self.events):
            return self._illegal()
        elif key_taken:
            return Answer("KEY_TAKEN")
        else:
            self._go_on_from_failure(reason)
        return self._told()

    def _go_on_from_block(self, reason: str) -> None:
        self.emit("run_retried", reason=reason)
        self.fixed_state, self.failure = "", None
        for task in self.tasks.values():
            if task.stuck:
                self._refresh(task)

    def _retry_undo(self, reason: str, skip_undo: bool) -> None:
        self.emit("run_retried", reason=reason)
        self.fixed_state, self.failure = "UNDOING", None
        stuck = [task for task in self.tasks.values() if task.stuck]
        if skip_undo:
            entry = stuck[0].undoes if stuck else self.undoable()[-1]
            assert entry is not None
            self.tasks.clear()
            self.undo_log.remove(entry)
            self.emit("undo_skipped", node_id=entry.node["id"], of_seq=entry.of_seq, reason=reason)
        for task in stuck:
            self._refresh(task)
        self.go_on_ending()

    def _refresh(self, task: Task) -> None:
        task.stuck, task.cancelled, task.holder = False, False, None
        task.attempt = task.operational = task.corrective = task.redeliveries = 0
        task.ready_at = self.now
        task.told.clear()

    def _go_on_from_failure(self, reason: str) -> None:
        self.emit("run_retried", reason=reason)
        self.fixed_state, self.failure, self.ending = "", None, None
        self.undo_log = [entry for entry in self.undo_log if not entry.unfinished]
        for task in self.dropped:
            self._refresh(task)
            self.tasks[task.task_id] = task
        late, again, self.dropped, self.late, self.again = self.late, self.again, [], [], []
        self.timers, self.waits, self.signals = self.kept
        for place, value in again:
            self.begin(place, value)
        for place, value in late:
            self.done(place, value)
        self.take_signals()
