"""The life of a step, and of the undo of one: scheduled, completed, failed, given back, expired (semantics: steps).

Every write by a worker is compared with the fencing token here (I2), and a repeat is recognised here (I6).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from fencepost_server.domain.graph import GraphNode
from fencepost_server.domain.model import (
    NULL,
    PARKED_UNTIL,
    Checkpoint,
    Ended,
    EventType,
    Failure,
    FailureKind,
    Outcome,
    Payload,
    RunState,
    TaskKind,
    TaskRow,
    TimerKind,
)
from fencepost_server.domain.retry import decide
from fencepost_server.domain.rows import PLAIN, TOP, Place, TaskExtra
from fencepost_server.domain.violation import Violation
from fencepost_server.engine import advancing, deciding, ending, offering, undoing
from fencepost_server.engine.context import RunContext, Value, failure_json
from fencepost_server.engine.operations import ALREADY_DONE, LEASE_LOST, OK, Answer, Report, ReportKind

# How many outcomes of a task that lives on are remembered for repeats; an older one is told LEASE_LOST, which
# changes nothing either.
REMEMBERED_OUTCOMES = 8

_RELEASE_DIGEST = b"release"


def schedule(ctx: RunContext, node: GraphNode, place: Place, value: Value) -> None:
    """A step is to be run."""
    work = node.work
    assert work is not None  # only steps are scheduled
    task_id = ctx.event(EventType.STEP_SCHEDULED, node_index=node.index, input_seq=value.seq, place=place)
    extra = PLAIN if place is TOP or place == TOP else TaskExtra(scope=place.scope, item=place.item)
    offering.offer(ctx, node, work, task_id, value, extra)
    start_timeouts(ctx, node, task_id, place)


def start_timeouts(ctx: RunContext, node: GraphNode, task_id: int, place: Place) -> None:
    """Those of a step as a whole."""
    for kind, seconds in node.timeouts:
        fire_at = ctx.now + timedelta(seconds=seconds)
        ctx.start_timer(task_id, kind, fire_at, node.index, place, Value(0, 0), task=task_id)


# Reports


async def report(ctx: RunContext, report: Report) -> Answer:
    """One report by a worker or a loop, answered."""
    if report.kind is ReportKind.ADVANCE and (repeated := advancing.repeated(ctx, report)) is not None:
        return repeated
    task = ctx.tasks.get(report.task_id)
    if task is None:
        return _answer_of_ended(report, ctx.ended.get(report.task_id))
    if task.token != report.token or task.lease_session is None:
        return _answer_of_earlier(report, task)
    ctx.report = report
    ctx.took_slot = False
    extra = TaskExtra.from_json(task.extra)
    if extra.kind is TaskKind.DECIDE:
        return await deciding.report(ctx, report, task)
    match report.kind:
        case ReportKind.COMPLETE:
            return await _complete(ctx, report, task, extra)
        case ReportKind.FAIL:
            assert report.failure is not None  # the edge made it
            if report.checkpoint is not None:
                _checkpoint(ctx, task, report.checkpoint)
            return await _fail(ctx, report, task, extra, report.failure, OK)
        case ReportKind.CHECKPOINT:
            assert report.checkpoint is not None  # the edge made it
            return _checkpoint(ctx, task, report.checkpoint)
        case ReportKind.RELEASE | ReportKind.UNDELIVERED:
            return await _give_back(ctx, report, task, extra)
        case ReportKind.EXPIRE:
            return await _expire(ctx, report, task, extra)
        case ReportKind.ADVANCE:
            return Answer(Outcome.REFUSED, "INVALID_FRAME", "the task is a step: it ends with Complete or Fail")


def complete_plain(ctx: RunContext, report: Report) -> Answer | None:
    """A completion in a plain sequence, where nothing has to be asked for: what ``report`` and what follows would do,
    in one go. It is most of what a busy server does, and takes half the time so. None: it is not that simple.
    """
    task = ctx.tasks.get(report.task_id)
    if task is None or task.token != report.token or task.lease_session is None or task.extra is not None:
        return None
    node = ctx.graph.nodes[task.node_index]
    output = report.output or NULL
    if node.checks and output.binary is None and node.violations(report.value):
        return None
    run = ctx.run
    run.state = RunState.RUNNING
    completed = ctx.event(
        EventType.STEP_COMPLETED, node_index=task.node_index, task_id=task.task_id, token=task.token,
        attempt=task.attempt, digest=report.digest, payload=output,
    )  # fmt: skip
    ctx.remove_task(task)
    if node.next is None:
        run.output_seq = completed
        ctx.event(EventType.RUN_COMPLETED, input_seq=completed)
        ending.end(ctx, RunState.COMPLETED)
    else:
        ctx.report = report
        run.node_index = node.next
        schedule(ctx, ctx.graph.nodes[node.next], TOP, Value(completed, output.size, output))
    return OK


def report_broken(ctx: RunContext, report: Report) -> Answer:
    """A report on a run whose definition can't be read. What a worker has done or decided is refused, and its lease
    left to it; a task that comes back is parked, with its reason.
    """
    if report.kind is ReportKind.ADVANCE and (repeated := advancing.repeated(ctx, report)) is not None:
        return repeated
    task = ctx.tasks.get(report.task_id)
    if task is None:
        return _answer_of_ended(report, ctx.ended.get(report.task_id))
    if task.token != report.token or task.lease_session is None:
        return _answer_of_earlier(report, task)
    if report.kind in (ReportKind.COMPLETE, ReportKind.FAIL, ReportKind.CHECKPOINT, ReportKind.ADVANCE):
        return Answer(Outcome.REFUSED, "UNKNOWN_DEFINITION", ctx.graph.broken)
    if report.kind is ReportKind.EXPIRE and not has_expired(ctx, task):
        return LEASE_LOST
    failure = Failure(FailureKind.PERMANENT, "UNKNOWN_DEFINITION", ctx.graph.broken, None, "", task.attempt)
    if report.kind is ReportKind.UNDELIVERED:
        task.attempt -= 1
    return park(ctx, report, task, failure)


def block_broken(ctx: RunContext) -> None:
    """Something is due for a run whose definition can't be read: it waits for a person, once told."""
    if ctx.state in (RunState.PENDING, RunState.RUNNING, RunState.WAITING):
        failure = Failure(FailureKind.PERMANENT, "UNKNOWN_DEFINITION", ctx.graph.broken)
        ctx.run.failure = failure.to_json()
        ctx.event(EventType.RUN_BLOCKED, detail={"failure": failure_json(failure)})
        ctx.changes.blocked.append((ctx.run.run_id, ctx.run.workflow_id, failure.code))
        ctx.control.blocked = True


def _checkpoint(ctx: RunContext, task: TaskRow, checkpoint: Checkpoint) -> Answer:
    """A state for the next attempt. It counts only if its number is larger than the stored one."""
    if checkpoint.number <= task.checkpoint_number:
        return ALREADY_DONE
    task.checkpoint_number = checkpoint.number
    state = checkpoint.state
    kept = [row for row in ctx.changes.rows.extra.get("save_checkpoint", ()) if row[:2] != (task.run_id, task.task_id)]
    row = (task.run_id, task.task_id, checkpoint.number, state.json, state.binary, state.metadata)
    ctx.changes.rows.extra["save_checkpoint"] = [*kept, row]
    return OK


async def _complete(ctx: RunContext, report: Report, task: TaskRow, extra: TaskExtra) -> Answer:
    node = ctx.node(task.node_index, extra.plan)
    output = report.output or NULL
    if extra.kind is TaskKind.UNDO:
        _event_of(ctx, EventType.UNDO_COMPLETED, report, task, payload=output)
        _over(ctx, task, Ended(EventType.UNDO_COMPLETED, task.token, report.digest, None))
        undoing.completed(ctx, extra)
        await ending.go_on(ctx)
        return OK
    if output.binary is None and (faults := node.violations(report.value)):
        return await _broken_output(ctx, report, task, extra, faults)
    _began(ctx)
    completed = _event_of(ctx, EventType.STEP_COMPLETED, report, task, payload=output)
    _over(ctx, task, Ended(EventType.STEP_COMPLETED, task.token, report.digest, None))
    ending.stop_timeouts(ctx, node, task)
    if node.undo is not None:
        undoing.remember(ctx, node, completed, task, extra, completed)
    value = Value(completed, output.size, output)
    if ctx.is_ending:
        ending.stop_at(ctx, node.index, extra.place, value, entering=False)
        await ending.go_on(ctx)
    else:
        ctx.leave(node.index, extra.place, value)
    return OK


async def _broken_output(
    ctx: RunContext, report: Report, task: TaskRow, extra: TaskExtra, faults: list[Violation]
) -> Answer:
    """A CORRECTIVE failure, raised here, with each violation as feedback."""
    feedback = json.dumps([{"path": v.path, "message": v.message} for v in faults])
    message = f"the output breaks the schema of node {ctx.node(task.node_index, extra.plan).id}"
    failure = Failure(FailureKind.CORRECTIVE, "OUTPUT_SCHEMA_MISMATCH", message, Payload(json=feedback))
    refused = Answer(Outcome.REFUSED, "OUTPUT_SCHEMA_MISMATCH", message, tuple(faults))
    return await _fail(ctx, report, task, extra, failure, refused)


async def _fail(
    ctx: RunContext, report: Report, task: TaskRow, extra: TaskExtra, failure: Failure, answer: Answer
) -> Answer:
    """An attempt has failed: another one, or the end of the step."""
    node = ctx.node(task.node_index, extra.plan)
    failure = Failure(failure.kind, failure.code, failure.message, failure.feedback, node.id, task.attempt)
    first = not task.operational_failures if failure.kind is FailureKind.OPERATIONAL else not task.corrective_failures
    if failure.kind is FailureKind.OPERATIONAL:
        task.operational_failures += 1
    elif failure.kind is FailureKind.CORRECTIVE:
        task.corrective_failures += 1
    retry = decide(
        ctx.work(task, extra).retry,
        failure.kind,
        task.operational_failures,
        task.corrective_failures,
        report.retry_after,
        ctx.env.random(),
    )
    undo = extra.kind is TaskKind.UNDO
    if not undo:
        _began(ctx)
    if retry is None or (ctx.is_ending and not undo):
        await fail_for_good(ctx, report, task, extra, failure, answer)
        return answer
    task.visible_at = ctx.now + timedelta(seconds=retry.delay)
    if first:
        kind = EventType.UNDO_RETRYING if undo else EventType.STEP_RETRYING
        detail = {"failure": failure_json(failure), "ready_at": task.visible_at.isoformat()}
        _event_of(ctx, kind, report, task, detail=detail)
    task.last_failure = failure.to_json()
    task.feedback = task.last_failure if failure.kind is FailureKind.CORRECTIVE else None
    hand_back(ctx, report, task, answer, retry.delay)
    return answer


async def fail_for_good(
    ctx: RunContext, report: Report | None, task: TaskRow, extra: TaskExtra, failure: Failure, answer: Answer
) -> None:
    """A step ends without an output, and its run with it; an undo stays what it is, and blocks the run."""
    undo = extra.kind is TaskKind.UNDO
    kind = EventType.UNDO_FAILED if undo else EventType.STEP_FAILED
    detail = {
        "failure": failure_json(failure),
        "operational_failures": task.operational_failures,
        "corrective_failures": task.corrective_failures,
        **_remembered(answer),
    }
    seq = _event_of(ctx, kind, report, task, detail=detail)
    ended = Ended(kind, task.token, None if report is None else report.digest, json.dumps(_remembered(answer)))
    if undo:
        _over(ctx, task, ended)
        undoing.failed(ctx, task, extra, failure)
        return
    ctx.ended[task.task_id] = ended
    task.last_failure = replace(failure, feedback=None).to_json()
    if failure.kind is FailureKind.CORRECTIVE:
        task.feedback = failure.to_json()  # for an operator's retry
    if report is not None:
        _note(report, task, answer)
    if ctx.graph.code is not None:  # its function is told, and decides what follows
        ending.step_over(ctx, ctx.node(task.node_index, extra.plan), seq, task, extra, keep=False)
        await ending.no_more_parked(ctx, task)
        await ending.go_on(ctx)
        return
    await ending.begin(ctx, RunState.FAILED, failure, over=ending.Over(seq, task, extra))


async def _give_back(ctx: RunContext, report: Report, task: TaskRow, extra: TaskExtra) -> Answer:
    """Not begun: free three times, then each time is an attempt (else a task could travel for ever)."""
    if ctx.is_ending and extra.kind is not TaskKind.UNDO:
        await _stopped(ctx, report, task, extra)
        return OK
    free = ctx.env.limits.free_redeliveries
    task.redeliveries += 1
    if task.redeliveries <= free:
        task.attempt -= 1
        task.visible_at = ctx.now
        hand_back(ctx, report, task, OK, 0.0)
        return OK
    failure = Failure(
        FailureKind.OPERATIONAL, "NOT_DELIVERED", "the task came back without having been begun too often"
    )
    if task.operational_failures + 1 >= ctx.work(task, extra).retry.max_attempts and extra.kind is TaskKind.STEP:
        return park(ctx, report, task, failure)
    return await _fail(ctx, report, task, extra, failure, OK)


def park(ctx: RunContext, report: Report, task: TaskRow, failure: Failure) -> Answer:
    """Nobody could even begin it: the step is not to blame, so the run waits for a person instead of failing."""
    plan = TaskExtra.from_json(task.extra).plan
    node_id = ctx.graph.node_id(task.node_index) if plan is None else "" if plan[0] == "decide" else plan[1]
    failure = Failure(failure.kind, failure.code, failure.message, None, node_id, task.attempt)
    task.operational_failures += 1
    task.last_failure = ctx.run.failure = failure.to_json()
    task.visible_at = PARKED_UNTIL
    ctx.event(EventType.RUN_BLOCKED, detail={"failure": failure_json(failure)})
    ctx.changes.blocked.append((ctx.run.run_id, ctx.run.workflow_id, failure.code))
    ctx.control.blocked = True
    if ctx.is_ending:
        ctx.run.state = RunState.BLOCKED
    hand_back(ctx, report, task, OK, None)
    return OK


async def _expire(ctx: RunContext, report: Report, task: TaskRow, extra: TaskExtra) -> Answer:
    """The sweeper's candidate, checked again under the locks: renewed meanwhile, or held by the outage guard, it
    stays.
    """
    if not has_expired(ctx, task):
        return LEASE_LOST
    session, token = task.lease_session, task.token
    if ctx.is_ending and extra.kind is not TaskKind.UNDO:
        ctx.revoke(task, "RUN_ENDED")
        await _stopped(ctx, report, task, extra)
        return OK
    if task.attempt_deadline_at is not None and task.attempt_deadline_at <= ctx.now:
        code, message = "ATTEMPT_TIMEOUT", f"the attempt ran longer than {(task.timeout_ms or 0) / 1000:g} s"
    else:
        code, message = "LEASE_EXPIRED", "the lease ran out without a heartbeat"
    answer = await _fail(ctx, report, task, extra, Failure(FailureKind.OPERATIONAL, code, message), OK)
    if session is not None:
        ctx.changes.revoked.append((session, task.run_id, task.task_id, token, code))
    return answer


def has_expired(ctx: RunContext, task: TaskRow) -> bool:
    """Not renewed meanwhile, nor held by the outage guard."""
    return task.lease_expires_at is not None and task.lease_expires_at <= ctx.now and ctx.now >= ctx.env.hold_until


async def _stopped(ctx: RunContext, report: Report, task: TaskRow, extra: TaskExtra) -> None:
    """A step comes back, or never does, while its run ends: it is over."""
    digest = _digest(report)
    ctx.ended[task.task_id] = Ended(EventType.STEP_CANCELLED, task.token, digest, None)
    ending.cancelled(ctx, task, extra, digest)
    await ending.go_on(ctx)


async def timed_out(ctx: RunContext, task: TaskRow, kind: TimerKind, seconds: float) -> None:
    """A step has waited too long for a worker, or taken too long in all."""
    extra = TaskExtra.from_json(task.extra)
    node = ctx.node(task.node_index, extra.plan)
    if kind is TimerKind.QUEUE_TIMEOUT:
        code, message = "QUEUE_TIMEOUT", f"no worker took the step in {seconds:g} s"
    else:
        code, message = "TOTAL_TIMEOUT", f"the step took longer than {seconds:g} s in all"
    failure = Failure(FailureKind.PERMANENT, code, message, None, node.id, task.attempt)
    ctx.revoke(task, code)
    await fail_for_good(ctx, None, task, extra, failure, OK)


# Shared parts


def _began(ctx: RunContext) -> None:
    """A worker has reported on a step of the run."""
    control = ctx.plain
    if control is None:
        if ctx.run.state == RunState.PENDING:
            ctx.run.state = RunState.RUNNING
    else:
        control.began = True


def _event_of(
    ctx: RunContext,
    kind: EventType,
    report: Report | None,
    task: TaskRow,
    *,
    payload: Payload | None = None,
    detail: dict[str, Any] | None = None,
) -> int:
    if ctx.graph.code is not None:
        plan = TaskExtra.from_json(task.extra).plan
        detail = {**(detail or {}), "node": "" if plan is None else plan[1]}
    return ctx.event(
        kind, node_index=task.node_index, task_id=task.task_id, token=task.token, attempt=task.attempt,
        digest=None if report is None else report.digest, payload=payload, detail=detail,
    )  # fmt: skip


def _over(ctx: RunContext, task: TaskRow, ended: Ended) -> None:
    """A task is over, and how is remembered for repeats in this batch; later ones find its event."""
    ctx.remove_task(task)
    ctx.ended[task.task_id] = ended
    if ctx.plain is not None:
        ctx.control.open_steps -= 1


def hand_back(ctx: RunContext, report: Report, task: TaskRow, answer: Answer, delay: float | None) -> None:
    """Fence off the holder, remember the outcome, and let others take the task after ``delay`` (None: never)."""
    _note(report, task, answer)
    offering.back_to_ready(ctx, task, delay)


def _note(report: Report, task: TaskRow, answer: Answer) -> None:
    """What was reported under the present token, for repeats."""
    outcomes = json.loads(task.outcomes) if task.outcomes else []
    digest = report.digest or _RELEASE_DIGEST
    outcomes.append({"token": task.token, "digest": digest.hex(), **_remembered(answer)})
    task.outcomes = json.dumps(outcomes[-REMEMBERED_OUTCOMES:])


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
    digest = _digest(report)
    if ended is None or ended.token != report.token or ended.digest != digest or not digest:
        return LEASE_LOST
    return _recalled(json.loads(ended.detail) if ended.detail else {})


def _digest(report: Report) -> bytes:
    """Of what was reported. All releases of a lease say the same."""
    return _RELEASE_DIGEST if report.kind is ReportKind.RELEASE else report.digest


def _answer_of_earlier(report: Report, task: TaskRow) -> Answer:
    """The token is not current: this very outcome was recorded before, or the lease was lost."""
    digest = (report.digest or _RELEASE_DIGEST).hex()
    memory: Sequence[Mapping[str, object]] = json.loads(task.outcomes) if task.outcomes else ()
    for entry in memory:
        if entry["token"] == report.token and entry["digest"] == digest:
            return _recalled(entry)
    return LEASE_LOST
