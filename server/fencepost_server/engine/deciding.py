"""The decider of code runs, seen from the server: the life of their DECIDE task, and what an Advance does.

A code run has one DECIDE task, from its start until its function has ended. It is ready, leased, or idle: then the
function waits, nobody holds anything of it, and the next event for it makes the task ready, or leases it again to the
session that decided last. What an Advance does is in engine.advancing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

from fencepost_server.domain.code import op_node
from fencepost_server.domain.errors import FencepostError, IllegalTransition
from fencepost_server.domain.model import (
    DECIDE_TASK,
    PARKED_UNTIL,
    EventType,
    Failure,
    FailureKind,
    LeasedTask,
    Outcome,
    Payload,
    RunState,
    TaskKind,
    TaskRow,
    TimerKind,
    next_token,
)
from fencepost_server.domain.ops import (
    Decide,
    HistoryEvent,
)
from fencepost_server.domain.retry import decide as decide_retry
from fencepost_server.domain.rows import TOP, Decider, TaskExtra
from fencepost_server.engine import advancing, applying, ending, offering, steps
from fencepost_server.engine.changes import NewTask, Ready
from fencepost_server.engine.context import RunContext, Value, failure_json
from fencepost_server.engine.operations import LEASE_LOST, OK, Answer, Commanded, Report, ReportKind, WorkerSession

_EXTRA = TaskExtra(kind=TaskKind.DECIDE, plan=("decide", "decide", "")).to_json()
_LEASE_MS = 60_000
_PAGE_BYTES = 1 << 20
_MAX_TRIED = 100


# The task


def begin(ctx: RunContext, value: Value, *, anew: bool = True) -> None:
    """The function is to be called; ``anew``: for the first time."""
    code = ctx.graph.code
    assert code is not None  # only code runs have a function
    ctx.control.decider = Decider()
    row = TaskRow(
        ctx.run.run_id, DECIDE_TASK, code.queue, code.handler, ctx.run.priority, 0, 1, value.size, ctx.now,
        0, 0, 0, 0, 0, _LEASE_MS, None, None, None, None, extra=_EXTRA,
    )  # fmt: skip
    if ctx.control.paused:
        offering.park_until_resumed(row)
    ctx.changes.rows.new_tasks.append(NewTask(row, ctx.run.namespace))
    ctx.control.extras = True
    if row.resume_at is not None:
        return
    begins = anew and ctx.recent and ctx.recent[0].seq == 1  # all that it has to be told is at hand
    session = ctx.env.taker(ctx.run, code.queue, code.handler) if begins else None
    if session is None:
        ctx.ready(row)
        return
    offering.lease(ctx, row, session.session_id)
    _tell(ctx, ctx.control.decider, session, row.token, 0, page_of(tuple(ctx.recent)))


async def cannot_try_again(ctx: RunContext) -> FencepostError | None:
    """Why a function that has raised can't go on from there: it has acted on the failure that it let through, which a
    replay without that failure would not.
    """
    decider = ctx.control.decider
    if decider is None or not decider.failed_seq:
        return None
    [event] = await ctx.read("op_event", ctx.run.run_id, decider.failed_seq) or [(0, None, None, True)]
    type_, _task_id, _token, acted = event
    kind = {EventType.STEP_FAILED: "a step", EventType.LOCAL_STEP_ENDED: "a local step"}.get(type_)
    if kind is not None and not acted and decider.failed_seq > decider.seen_seq:
        return None
    return IllegalTransition(
        "the function ended with the failure of a child, which is not tried again: start a new run"
        if type_ == EventType.CHILD_ENDED
        else "the function went on after the failure that it ended with: start a new run",
        metadata={"state": ctx.state.name, "event": "RETRY"},
    )


async def begin_again(ctx: RunContext) -> None:
    """The function of a run that had failed is called again, the step that failed is tried again. Tokens go on (I3)."""
    decider = ctx.control.decider
    assert decider is not None  # it had begun
    for type_, task_id, token, _acted in await ctx.read("op_event", ctx.run.run_id, decider.failed_seq):
        if type_ == EventType.STEP_FAILED:
            [(detail, size)] = await ctx.read("op_scheduled", ctx.run.run_id, task_id)
            asked = json.loads(detail)
            applying.schedule_again(ctx, (asked["handler"], asked.get("options", "")), task_id, size, token)
    begin(ctx, Value(1, 0), anew=False)
    ctx.changes.rows.new_tasks[-1].row.token = decider.token
    ctx.control.decider = decider
    decider.over = decider.idle = False
    decider.failed_seq = 0


async def settle(ctx: RunContext) -> None:
    """At the end of what a batch does to a code run: an event came that the function has to see."""
    if not ctx.inputs:
        return
    ctx.inputs = False
    control = ctx.control
    decider = control.decider
    if decider is None or decider.over or ctx.state.final:
        return
    if control.paused:
        decider.awaited = True
        ctx.settle()
        return
    if decider.idle:
        decider.idle = False
        await _wake(ctx, decider)
        ctx.settle()
        return
    await _push(ctx)


async def _wake(ctx: RunContext, decider: Decider) -> None:
    """The task is leased to whoever decided last, with what has happened since, or ready for anyone."""
    code, run = ctx.graph.code, ctx.run
    assert code is not None  # only code runs have a decider
    session = ctx.env.sticky(decider.session) if decider.session else None
    if session is None:
        ctx.changes.rows.add("wake_decider", run.run_id, ctx.now)
        ctx.changes.ready.append(Ready(run.namespace, code.queue, code.handler, run.priority))
    else:
        await _lease(ctx, decider, session, decider.token, decider.known)


async def _lease(ctx: RunContext, decider: Decider, session: WorkerSession, token: int, known: int) -> None:
    """Lease the task to a session that has room, with the events after ``known``. ``token``: its last one."""
    run = ctx.run
    page = page_of(await since(ctx, known))
    token = next_token(token, ctx.env.epoch)
    expires_at = ctx.now + timedelta(milliseconds=_LEASE_MS)
    ctx.changes.rows.add("lease_decider", run.run_id, session.session_id, token, expires_at)
    _tell(ctx, decider, session, token, known, page)


def _tell(
    ctx: RunContext, decider: Decider, session: WorkerSession, token: int, known: int, page: tuple[HistoryEvent, ...]
) -> None:
    """The session gets the task that is leased to it, with a page of the events after ``known``."""
    code, run = ctx.graph.code, ctx.run
    assert code is not None  # only code runs have a decider
    leased = LeasedTask(
        run.run_id, DECIDE_TASK, token, run.namespace, run.workflow_id, run.definition_hash, code.handler, code.queue,
        run.priority, "", 1, _LEASE_MS / 1000, None, Payload(json="null"), None, run.user_id, 0, session.last_frame(),
        TaskKind.DECIDE,
    )  # fmt: skip
    leased.decide = Decide(page, known, run.next_seq - 1, decider.advance_no, decider.seen_seq, code.compatibility_id)
    ctx.changes.leased.append((session, leased))


async def _push(ctx: RunContext) -> None:
    """Whoever holds the run is told what has happened meanwhile; its next Advance is, in any case."""
    rows = await ctx.read("open_task", ctx.run.run_id, DECIDE_TASK)
    if not rows:
        return
    task = TaskRow(*rows[0])
    if task.lease_session is None or not ctx.recent:
        return
    events = tuple(ctx.recent)
    push = (task.lease_session, ctx.run.run_id, DECIDE_TASK, task.token, events[0].seq - 1, page_of(events))
    ctx.changes.pushed.append(push)


async def since(ctx: RunContext, seq: int) -> tuple[HistoryEvent, ...]:
    """The events after ``seq``, those of this batch among them; of many only the first."""
    if ctx.run.next_seq - 1 == seq:
        return ()
    if ctx.recent and ctx.recent[0].seq <= seq + 1:
        return tuple(event for event in ctx.recent if event.seq > seq)
    rows = await ctx.read("history", ctx.run.run_id, seq)
    return tuple(history_event(row) for row in rows)


def history_event(row: tuple[Any, ...]) -> HistoryEvent:
    """From the columns of the statement history."""
    seq, type_, at, task_id, token, attempt, json_text, binary, metadata, detail = row
    payload = None
    if json_text is not None or binary is not None:
        payload = Payload(json_text, None if binary is None else bytes(binary), metadata)
    return HistoryEvent(seq, type_, at, task_id, token, attempt, payload, detail)


def page_of(events: tuple[HistoryEvent, ...]) -> tuple[HistoryEvent, ...]:
    """As many as one frame may take; a worker reads the rest."""
    size = 0
    for index, event in enumerate(events):
        size += event.size
        if size > _PAGE_BYTES:
            return events[:index]
    return events


def resumed(ctx: RunContext) -> None:
    """The end of a pause."""
    decider = ctx.control.decider
    if decider is not None and decider.awaited:
        decider.awaited = False
        ctx.inputs = True


async def report(ctx: RunContext, report: Report, task: TaskRow) -> Answer:
    """What became of a DECIDE task whose token is current."""
    match report.kind:
        case ReportKind.ADVANCE:
            assert report.advance is not None  # the edge made it
            return await advancing.advance(ctx, report, task, report.advance)
        case ReportKind.FAIL:
            assert report.failure is not None  # the edge made it
            return _failed(ctx, report, task, report.failure)
        case ReportKind.RELEASE | ReportKind.UNDELIVERED:
            task.redeliveries += 1
            if task.redeliveries <= ctx.env.limits.free_redeliveries:
                task.attempt -= 1
                _give_back(ctx, report, task, 0.0)
                return OK
            message = "the task came back without having been begun too often"
            return _failed(ctx, report, task, Failure(FailureKind.OPERATIONAL, "NOT_DELIVERED", message))
        case ReportKind.EXPIRE:
            if not steps.has_expired(ctx, task):
                return LEASE_LOST
            ctx.revoke(task, "LEASE_EXPIRED")
            message = "the lease ran out without a heartbeat"
            return _failed(ctx, report, task, Failure(FailureKind.OPERATIONAL, "LEASE_EXPIRED", message))
        case _:
            return Answer(Outcome.REFUSED, "INVALID_FRAME", "the task decides: it goes on with Advance")


def _failed(ctx: RunContext, report: Report, task: TaskRow, failure: Failure) -> Answer:
    """A worker could not decide. Another attempt, or the run waits for a person, or for another worker: no deploy and
    no crash ends it.
    """
    failure = replace(failure, attempt=task.attempt, feedback=None)
    task.operational_failures += 1
    work = op_node("decide", "decide", "").work
    assert work is not None  # it is a step's
    retry = decide_retry(
        work.retry, FailureKind.OPERATIONAL, task.operational_failures, 0, report.retry_after, ctx.env.random()
    )
    if retry is None:
        told = f"workers failed {task.operational_failures} times to decide: {failure.code}: {failure.message}"
        block(ctx, report, task, Failure(FailureKind.PERMANENT, "DECIDER_FAILING", told))
        return OK
    task.last_failure = failure.to_json()
    _give_back(ctx, report, task, retry.delay)
    return OK


def _give_back(ctx: RunContext, report: Report, task: TaskRow, delay: float) -> None:
    """The task is ready again, for any worker that has the code."""
    task.visible_at = ctx.now + timedelta(seconds=delay)
    steps.hand_back(ctx, report, task, OK, delay)


def block(ctx: RunContext, report: Report, task: TaskRow, failure: Failure) -> None:
    """The run goes on when there is a worker that can, or by RetryRun."""
    decider = ctx.control.decider
    if decider is not None and report.session is not None:
        decider.tried = [*decider.tried[1 - _MAX_TRIED :], report.session.nonce]
    steps.park(ctx, report, task, failure)


async def offered(ctx: RunContext, session_id: str) -> Commanded:
    """A worker that has the code is to try a run that is blocked. A process that has tried is not asked again, and a
    history that is full is left as it is.
    """
    control, run = ctx.control, ctx.run
    decider = control.decider
    tasks = [TaskRow(*row) for row in await ctx.read("open_tasks", run.run_id)]
    mine = next((task for task in tasks if task.task_id == DECIDE_TASK and task.visible_at == PARKED_UNTIL), None)
    full = run.next_seq + 2 > ctx.env.limits.max_history_events
    full = full or (run.failure is not None and json.loads(run.failure)["code"] == "HISTORY_TOO_LONG")
    if decider is None or decider.over or control.paused or not control.blocked or mine is None or full:
        return Commanded(ctx.state)
    session = ctx.env.sticky(session_id)
    if session is None or session.nonce in decider.tried:
        return Commanded(ctx.state)
    # Steps that nobody could begin are left: a person has to see to them.
    others = ending.blocked_by(ctx, [task for task in tasks if task is not mine])
    if control.ending is not None and not others:
        run.state = RunState.ENDING
    ctx.event(EventType.RUN_RETRIED, detail={"reason": "a worker with its code is to try"})
    await _lease(ctx, decider, session, mine.token, 0)
    ctx.changes.rows.add("reset_decider", run.run_id)
    return Commanded(ctx.state)


# Ends


async def asked_to_end(ctx: RunContext, state: RunState, failure: Failure, grace: float) -> None:
    """A cancel, or a timeout of the run: the function is told, may clean up for ``grace`` seconds, and can't refuse."""
    control = ctx.control
    ctx.run.failure = failure.to_json()
    ctx.run.state = RunState.ENDING
    control.ending = {"state": int(state), "failure": failure_json(failure), "retryable": False, "grace": grace}
    detail = {"state": int(state), "failure": failure_json(failure), "grace": grace}
    seq = ctx.event(EventType.RUN_ENDING, detail=detail)
    ctx.start_timer(seq, TimerKind.GRACE, ctx.now + timedelta(seconds=grace), 0, TOP, Value(0, 0))
    if control.paused:
        control.paused = False
        for namespace, queue, handler, priority, _visible_at in await ctx.read("unpark", ctx.run.run_id):
            ctx.changes.ready.append(Ready(namespace, queue, handler, priority))


async def grace_over(ctx: RunContext) -> None:
    """The function has not ended in its grace."""
    if ctx.control.ending is not None and not ctx.is_ending:
        await cut_short(ctx, "RUN_ENDED")


async def cut_short(ctx: RunContext, reason: str) -> None:
    """The clean-up of a run that is to end is over: what is open is stopped."""
    await fence(ctx, reason)
    await ending.stop_open(ctx, 0.0)
    await ending.go_on(ctx)


async def fence(ctx: RunContext, reason: str) -> None:
    """The function has no say any more: whoever holds the run loses it."""
    decider = ctx.control.decider
    if decider is None or decider.over:
        return
    for row in await ctx.read("open_task", ctx.run.run_id, DECIDE_TASK):
        task = TaskRow(*row)
        ctx.revoke(task, reason)
        ctx.remove_task(task)
    over(ctx, decider)


def over(ctx: RunContext, decider: Decider) -> None:
    """The function has no say any more."""
    decider.over = True
    decider.idle = False
    ctx.control.blocked = False
