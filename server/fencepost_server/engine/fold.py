"""Folds the operations of a batch, in their order, over the rows that the batch has locked.

No I/O: rows, time, epoch and randomness come in, changed rows, events and answers go out. Every write by a
worker is compared with the fencing token here (I2), every event gets its number here (I4), and a repeat is
recognised here (I6). Called by engine.commit between reading and writing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from fencepost_server.domain.graph import Graph
from fencepost_server.domain.model import (
    NULL,
    PARKED_UNTIL,
    Ended,
    EventType,
    Failure,
    FailureKind,
    LeasedTask,
    Outcome,
    Payload,
    RunRow,
    RunState,
    TaskRow,
    first_token,
    next_token,
)
from fencepost_server.domain.retry import decide
from fencepost_server.domain.violation import Violation
from fencepost_server.engine.operations import (
    ALREADY_DONE,
    LEASE_LOST,
    OK,
    Answer,
    Report,
    ReportKind,
    Start,
    Started,
    WorkerSession,
)

# How many outcomes of a task that lives on are remembered for repeats; an older one is told LEASE_LOST, which
# changes nothing either.
REMEMBERED_OUTCOMES = 8

_RELEASE_DIGEST = b"release"

# Far enough, and with room on both sides: the last instant of the calendar is past its end in some time zones.

TaskKey = tuple[str, int]
EventRow = tuple[
    str, int, int, datetime, int | None, int | None, int | None, int | None, int | None, bytes | None, str | None,
    bytes | None, str | None, str | None,
]  # fmt: skip
"""run_id, seq, type, at, node_index, task_id, token, attempt, input_seq, digest, payload, binary, metadata, detail."""


@dataclass(slots=True)
class NewTask:
    """A task to insert: leased already, or ready."""

    row: TaskRow
    namespace: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Work that somebody may take, now or after ``delay`` seconds."""

    namespace: str
    queue: str
    handler: str
    priority: int
    delay: float = 0.0


@dataclass(slots=True)
class Changes:
    """What a batch writes, and whom it then tells what."""

    now: datetime
    new_runs: list[tuple[RunRow, str]] = field(default_factory=list)
    changed_runs: dict[str, RunRow] = field(default_factory=dict)
    events: list[EventRow] = field(default_factory=list)
    new_tasks: list[NewTask] = field(default_factory=list)
    gone_tasks: list[TaskKey] = field(default_factory=list)
    changed_tasks: dict[TaskKey, TaskRow] = field(default_factory=dict)
    reports: list[tuple[Report, Answer]] = field(default_factory=list)
    starts: list[tuple[Start, Started]] = field(default_factory=list)
    leased: list[tuple[WorkerSession, LeasedTask]] = field(default_factory=list)
    revoked: list[tuple[str, str, int, int, str]] = field(default_factory=list)
    """(session_id, run_id, task_id, token, reason) of leases that a loop ended."""
    ready: list[Ready] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    freed_keys: list[RunRow] = field(default_factory=list)
    """Runs that have ended and held a dedupe key."""


Eager = Callable[[Report, RunRow, str, str], int | None]
"""May the session of a report take the next step of its run (queue, handler) at once? Its depth, or None."""


@dataclass(slots=True)
class Fold:
    """One batch under decision. ``ended`` has, for tasks that are gone, how each ended."""

    now: datetime
    epoch: int
    hold_until: datetime
    runs: Mapping[str, RunRow]
    tasks: dict[TaskKey, TaskRow]
    ended: dict[TaskKey, Ended]
    graphs: Mapping[bytes, Graph]
    free_redeliveries: int
    random: Callable[[], float]
    eager: Eager
    changes: Changes = field(init=False)

    def __post_init__(self) -> None:
        self.changes = Changes(self.now)

    # Starts

    def start(self, start: Start, graph: Graph) -> None:
        """A new run: its first event, its first step."""
        node = graph.nodes[0]
        run = RunRow(
            start.run_id, start.namespace, start.workflow_id, graph.hash, start.user_id, start.priority,
            RunState.PENDING, 0, 1, self.now, start.dedupe_key,
        )  # fmt: skip
        self._event(run, EventType.RUN_STARTED, payload=start.input)
        task_id = self._event(run, EventType.STEP_SCHEDULED, node_index=0, input_seq=1)
        row = TaskRow(
            run.run_id, task_id, node.step.queue, node.step.handler, run.priority, 0, 1, start.input.size, self.now,
            0, 0, 0, 0, 0, node.lease_ms, node.timeout_ms, None, None, None,
        )  # fmt: skip
        self.changes.new_tasks.append(NewTask(row, run.namespace))
        self.changes.ready.append(Ready(run.namespace, row.queue, row.handler, row.priority))
        self.changes.new_runs.append((run, start.request_key))
        self.changes.starts.append((start, Started(run.run_id, True, graph.hash)))

    # Reports

    def report(self, report: Report) -> None:
        """One report by a worker or a loop, answered."""
        self.changes.reports.append((report, self._answer(report)))

    def _answer(self, report: Report) -> Answer:
        run = self.runs.get(report.run_id)
        if run is None or run.namespace != report.namespace:
            return LEASE_LOST
        key = (report.run_id, report.task_id)
        task = self.tasks.get(key)
        if task is None:
            return _answer_of_ended(report, self.ended.get(key))
        if task.token != report.token or task.lease_session is None:
            return _answer_of_earlier(report, task)
        match report.kind:
            case ReportKind.COMPLETE:
                return self._complete(report, run, task)
            case ReportKind.FAIL:
                assert report.failure is not None  # the edge made it
                return self._fail(report, run, task, report.failure, OK)
            case ReportKind.RELEASE | ReportKind.UNDELIVERED:
                return self._give_back(report, run, task)
            case ReportKind.EXPIRE:
                return self._expire(report, run, task)

    def _complete(self, report: Report, run: RunRow, task: TaskRow) -> Answer:
        graph = self.graphs[run.definition_hash]
        node = graph.nodes[task.node_index]
        output = report.output or NULL
        if output.binary is None and (faults := node.violations(report.value)):
            feedback = json.dumps([{"path": v.path, "message": v.message} for v in faults])
            message = f"the output breaks the schema of node {node.step.id}"
            failure = Failure(FailureKind.CORRECTIVE, "OUTPUT_SCHEMA_MISMATCH", message, Payload(json=feedback))
            refused = Answer(Outcome.REFUSED, "OUTPUT_SCHEMA_MISMATCH", message, tuple(faults))
            return self._fail(report, run, task, failure, refused)
        run.state = RunState.RUNNING
        completed = self._event(
            run, EventType.STEP_COMPLETED, node_index=task.node_index, task_id=task.task_id, token=task.token,
            attempt=task.attempt, digest=report.digest, payload=output,
        )  # fmt: skip
        self._remove(task, Ended(EventType.STEP_COMPLETED, task.token, report.digest, None))
        if task.node_index + 1 < len(graph.nodes):
            self._schedule_next(report, run, graph, task.node_index + 1, completed, output)
        else:
            run.output_seq = completed
            self._event(run, EventType.RUN_COMPLETED, input_seq=completed)
            self._end(run, RunState.COMPLETED)
        return OK

    def _schedule_next(
        self, report: Report, run: RunRow, graph: Graph, index: int, input_seq: int, value: Payload
    ) -> None:
        """Insert the next step: leased to the session that completed the one before if it can take it, else ready."""
        node, step = graph.nodes[index], graph.nodes[index].step
        run.node_index = index
        task_id = self._event(run, EventType.STEP_SCHEDULED, node_index=index, input_seq=input_seq)
        row = TaskRow(
            run.run_id, task_id, step.queue, step.handler, run.priority, index, input_seq, value.size, self.now,
            0, 0, 0, 0, 0, node.lease_ms, node.timeout_ms, None, None, None,
        )  # fmt: skip
        depth = self.eager(report, run, step.queue, step.handler)
        if depth is None or report.session is None:
            self.changes.ready.append(Ready(run.namespace, step.queue, step.handler, run.priority))
        else:
            self._lease(row, report.session.session_id)
            self.changes.leased.append(
                (
                    report.session,
                    LeasedTask(
                        run.run_id, task_id, row.token, run.namespace, run.workflow_id, run.definition_hash,
                        step.handler, step.queue, run.priority, step.id, 1, node.lease_ms / 1000,
                        None if node.timeout_ms is None else node.timeout_ms / 1000, value, None, run.user_id,
                        depth, report.frame_id,
                    ),
                )
            )  # fmt: skip
        self.changes.new_tasks.append(NewTask(row, run.namespace))

    def _lease(self, row: TaskRow, session_id: str) -> None:
        row.attempt = 1
        row.token = first_token(self.epoch)
        row.lease_session = session_id
        lease_ms = row.lease_ms
        if row.timeout_ms is not None:
            row.attempt_deadline_at = self.now + timedelta(milliseconds=row.timeout_ms)
            lease_ms = min(lease_ms, row.timeout_ms)
        row.lease_expires_at = self.now + timedelta(milliseconds=lease_ms)

    def _fail(self, report: Report, run: RunRow, task: TaskRow, failure: Failure, answer: Answer) -> Answer:
        """An attempt has failed: another one, or the end of the step and its run."""
        step = self.graphs[run.definition_hash].nodes[task.node_index].step
        failure = Failure(failure.kind, failure.code, failure.message, failure.feedback, step.id, task.attempt)
        first = (
            not task.operational_failures if failure.kind is FailureKind.OPERATIONAL else not task.corrective_failures
        )
        if failure.kind is FailureKind.OPERATIONAL:
            task.operational_failures += 1
        elif failure.kind is FailureKind.CORRECTIVE:
            task.corrective_failures += 1
        retry = decide(
            step.retry,
            failure.kind,
            task.operational_failures,
            task.corrective_failures,
            report.retry_after,
            self.random(),
        )
        run.state = RunState.RUNNING
        text = failure.to_json()
        if retry is None:
            detail = {
                "failure": json.loads(text),
                "operational_failures": task.operational_failures,
                "corrective_failures": task.corrective_failures,
                **_remembered(answer),
            }
            self._event(
                run, EventType.STEP_FAILED, node_index=task.node_index, task_id=task.task_id, token=task.token,
                attempt=task.attempt, digest=report.digest, detail=json.dumps(detail),
            )  # fmt: skip
            self._remove(task, Ended(EventType.STEP_FAILED, task.token, report.digest, json.dumps(_remembered(answer))))
            # The feedback, as large as a payload, stays with the step's event: out of the hot row, and out of lists.
            run.failure = replace(failure, feedback=None).to_json()
            self._event(run, EventType.RUN_FAILED, detail=json.dumps({"failure": json.loads(run.failure)}))
            self._end(run, RunState.FAILED)
            return answer
        task.visible_at = self.now + timedelta(seconds=retry.delay)
        if first:
            detail = {"failure": json.loads(text), "ready_at": task.visible_at.isoformat()}
            self._event(
                run, EventType.STEP_RETRYING, node_index=task.node_index, task_id=task.task_id, token=task.token,
                attempt=task.attempt, digest=report.digest, detail=json.dumps(detail),
            )  # fmt: skip
        task.last_failure = text
        task.feedback = text if failure.kind is FailureKind.CORRECTIVE else None
        self._back_to_ready(report, run, task, answer, retry.delay)
        return answer

    def _give_back(self, report: Report, run: RunRow, task: TaskRow) -> Answer:
        """Not begun: free three times, then each time is an attempt (else a task could travel for ever)."""
        if task.redeliveries < self.free_redeliveries:
            task.redeliveries += 1
            task.attempt -= 1
            task.visible_at = self.now
            self._back_to_ready(report, run, task, OK, 0.0)
            return OK
        task.redeliveries += 1
        failure = Failure(
            FailureKind.OPERATIONAL, "NOT_DELIVERED", "the task came back without having been begun too often"
        )
        policy = self.graphs[run.definition_hash].nodes[task.node_index].step.retry
        if task.operational_failures + 1 >= policy.max_attempts:
            return self._park(report, run, task, failure)
        return self._fail(report, run, task, failure, OK)

    def _park(self, report: Report, run: RunRow, task: TaskRow, failure: Failure) -> Answer:
        """Nobody could even begin it: the step is not to blame, so the run waits for a person instead of failing."""
        step = self.graphs[run.definition_hash].nodes[task.node_index].step
        failure = Failure(failure.kind, failure.code, failure.message, None, step.id, task.attempt)
        task.operational_failures += 1
        task.last_failure = run.failure = failure.to_json()
        task.visible_at = PARKED_UNTIL
        self._event(run, EventType.RUN_BLOCKED, detail=json.dumps({"failure": json.loads(task.last_failure)}))
        run.state = RunState.BLOCKED
        self._back_to_ready(report, run, task, OK, None)
        return OK

    def _expire(self, report: Report, run: RunRow, task: TaskRow) -> Answer:
        """The sweeper's candidate, checked again under the locks: renewed meanwhile, or held by the outage
        guard, it stays.
        """
        if task.lease_expires_at is None or task.lease_expires_at > self.now or self.now < self.hold_until:
            return LEASE_LOST
        session, token = task.lease_session, task.token
        if task.attempt_deadline_at is not None and task.attempt_deadline_at <= self.now:
            code, message = "ATTEMPT_TIMEOUT", f"the attempt ran longer than {(task.timeout_ms or 0) / 1000:g} s"
        else:
            code, message = "LEASE_EXPIRED", "the lease ran out without a heartbeat"
        answer = self._fail(report, run, task, Failure(FailureKind.OPERATIONAL, code, message), OK)
        if session is not None:
            self.changes.revoked.append((session, task.run_id, task.task_id, token, code))
        return answer

    # Shared steps

    def _back_to_ready(self, report: Report, run: RunRow, task: TaskRow, answer: Answer, delay: float | None) -> None:
        """Fence off the holder, remember the outcome, and let others take the task after ``delay`` (None: never)."""
        outcomes = json.loads(task.outcomes) if task.outcomes else []
        digest = report.digest or _RELEASE_DIGEST
        outcomes.append({"token": task.token, "digest": digest.hex(), **_remembered(answer)})
        task.outcomes = json.dumps(outcomes[-REMEMBERED_OUTCOMES:])
        task.token = next_token(task.token, self.epoch)
        task.lease_session = task.lease_expires_at = task.attempt_deadline_at = None
        self.changes.changed_tasks[task.run_id, task.task_id] = task
        if delay is not None:
            self.changes.ready.append(Ready(run.namespace, task.queue, task.handler, task.priority, delay))

    def _remove(self, task: TaskRow, ended: Ended) -> None:
        key = (task.run_id, task.task_id)
        self.tasks.pop(key)
        self.changes.changed_tasks.pop(key, None)
        self.changes.gone_tasks.append(key)
        self.ended[key] = ended

    def _end(self, run: RunRow, state: RunState) -> None:
        run.state = state
        run.ended_at = run.last_event_at
        if run.dedupe_key:
            self.changes.freed_keys.append(run)
        self.changes.ended.append(run.run_id)

    def _event(
        self,
        run: RunRow,
        kind: EventType,
        *,
        node_index: int | None = None,
        task_id: int | None = None,
        token: int | None = None,
        attempt: int | None = None,
        input_seq: int | None = None,
        digest: bytes | None = None,
        payload: Payload | None = None,
        detail: str | None = None,
    ) -> int:
        """Append to the run's history; returns the event's number. Time never runs backwards in a history."""
        seq = run.next_seq
        run.next_seq = seq + 1
        run.last_event_at = max(run.last_event_at, self.now)
        json_text, binary, metadata = (
            (None, None, None) if payload is None else (payload.json, payload.binary, payload.metadata)
        )
        self.changes.events.append(
            (run.run_id, seq, kind, run.last_event_at, node_index, task_id, token, attempt, input_seq, digest,
             json_text, binary, metadata, detail)
        )  # fmt: skip
        if run.run_id in self.runs:
            self.changes.changed_runs[run.run_id] = run
        return seq


def _remembered(answer: Answer) -> dict[str, object]:
    """What of an answer a repeat has to be told again."""
    if answer.outcome is Outcome.OK:
        return {}
    return {
        "reason": answer.reason,
        "message": answer.message,
        "violations": [[v.path, v.message] for v in answer.violations],
    }


def _recalled(memory: Mapping[str, object]) -> Answer:
    """The answer to a repeat: what was refused is refused again, what was accepted is ALREADY_DONE."""
    if "reason" not in memory:
        return ALREADY_DONE
    violations = memory["violations"]
    assert isinstance(violations, list)  # as _remembered wrote it
    return Answer(
        Outcome.REFUSED,
        str(memory["reason"]),
        str(memory["message"]),
        tuple(Violation(path, message) for path, message in violations),
    )


def _answer_of_ended(report: Report, ended: Ended | None) -> Answer:
    """The task is gone: this very outcome ended it, or somebody else's did."""
    if ended is None or ended.token != report.token or ended.digest != report.digest or not report.digest:
        return LEASE_LOST
    return _recalled(json.loads(ended.detail) if ended.detail else {})


def _answer_of_earlier(report: Report, task: TaskRow) -> Answer:
    """The token is not current: this very outcome was recorded before, or the lease was lost."""
    digest = (report.digest or _RELEASE_DIGEST).hex()
    memory: Sequence[Mapping[str, object]] = json.loads(task.outcomes) if task.outcomes else ()
    for entry in memory:
        if entry["token"] == report.token and entry["digest"] == digest:
            return _recalled(entry)
    return LEASE_LOST
