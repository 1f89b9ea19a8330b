"""What an Advance does: the function of a code run has decided, and is told what it has not seen (semantics: code
runs).

It is compared with the token like every report (I2), and numbered besides: one that is repeated has its effect once
(I6), and none is left out. engine.deciding has the life of the task under which it comes.
"""

from __future__ import annotations

from dataclasses import replace

from fencepost_server.domain.model import (
    DECIDE_TASK,
    IDLE_UNTIL,
    EventType,
    Failure,
    FailureKind,
    Outcome,
    Payload,
    RunState,
    TaskRow,
)
from fencepost_server.domain.ops import (
    Advance,
    AdvanceAnswer,
    AdvanceOutcome,
    HistoryEvent,
    ScheduleStep,
    StartChild,
)
from fencepost_server.domain.rows import Decider
from fencepost_server.engine import applying, continuing, deciding, ending, offering
from fencepost_server.engine.context import INPUTS, RunContext
from fencepost_server.engine.operations import ALREADY_DONE, LEASE_LOST, OK, Answer, Report

_MAX_REFUSALS = 3
_MOVED_BYTES = 16 << 20
_ENDS = (AdvanceOutcome.COMPLETE, AdvanceOutcome.FAIL, AdvanceOutcome.CONTINUE_AS_NEW)


def repeated(ctx: RunContext, report: Report) -> Answer | None:
    """The answer to an Advance that was accepted before."""
    decider = None if ctx.plain is None else ctx.plain.decider
    advance = report.advance
    if decider is None or advance is None or report.task_id != DECIDE_TASK:
        return None
    if advance.advance_no == decider.advance_no and report.digest.hex() == decider.digest:
        return ALREADY_DONE
    return None


def _accepted(decider: Decider, report: Report, advance: Advance) -> None:
    decider.advance_no = advance.advance_no
    decider.tried = []
    decider.digest = report.digest.hex()
    if advance.outcome is AdvanceOutcome.FAIL and not advance.commands:
        decider.failed_seq = advance.failed_seq  # a retry goes on from before this Advance
    else:
        decider.seen_seq = advance.seen_seq


async def advance(ctx: RunContext, report: Report, task: TaskRow, advance: Advance) -> Answer:
    """An Advance whose token is current, answered."""
    control, run = ctx.control, ctx.run
    decider = control.decider
    assert decider is not None  # its task is there
    if (refused := _cannot_be(ctx, decider, advance)) is not None:
        return refused
    if advance.outcome is AdvanceOutcome.BLOCK:
        assert advance.failure is not None  # the edge saw to it
        deciding.block(ctx, report, task, replace(advance.failure, kind=FailureKind.PERMANENT, feedback=None))
        return OK
    if run.next_seq + len(advance.commands) > ctx.env.limits.max_history_events and advance.outcome not in _ENDS:
        message = f"the history of the run would have more than {ctx.env.limits.max_history_events} events"
        deciding.block(ctx, report, task, Failure(FailureKind.PERMANENT, "HISTORY_TOO_LONG", message))
        return LEASE_LOST  # nothing of it counts, and the task is nobody's
    unseen = await deciding.since(ctx, advance.seen_seq)
    as_new = advance.outcome is AdvanceOutcome.CONTINUE_AS_NEW
    if as_new and (refused := await _cannot_continue(ctx, advance)) is not None:
        return refused
    before = run.next_seq
    applied = await applying.apply(ctx, task, advance)
    if isinstance(applied, Failure):
        deciding.block(ctx, report, task, applied)
        return LEASE_LOST
    control.began = True
    _accepted(decider, report, advance)
    kept, refused_end = True, False
    if advance.outcome in _ENDS and _must_see(ctx, decider, advance, unseen, run.next_seq - before):
        decider.refusals += 1
        refused_end = True
    elif advance.outcome in _ENDS:
        kept = False
        decider.session, decider.token = task.lease_session or "", task.token
        ctx.remove_task(task)
        deciding.over(ctx, decider)
        await _ended(ctx, advance)
    elif control.paused or (advance.outcome is AdvanceOutcome.WAIT and not unseen and not ctx.inputs):
        kept = False
        _let_go(ctx, task, decider, idle=advance.outcome is AdvanceOutcome.WAIT and not unseen)
    if kept:
        decider.refusals = decider.refusals if refused_end else 0
        if task.attempt > 1 or task.operational_failures or task.redeliveries:
            task.attempt, task.operational_failures, task.redeliveries = 1, 0, 0
            ctx.changes.rows.add("reset_decider", run.run_id)
    last_seq = run.next_seq - 1
    if not kept:
        decider.known = last_seq
    page = deciding.page_of(unseen)
    return Answer(Outcome.OK, advance=AdvanceAnswer(applied, run.last_event_at, page, last_seq, kept, refused_end))


def _cannot_be(ctx: RunContext, decider: Decider, advance: Advance) -> Answer | None:
    """Why an Advance is refused, and nothing of it done."""
    if advance.advance_no != decider.advance_no + 1:
        message = f"advance_no {advance.advance_no} came where {decider.advance_no + 1} was expected"
        return Answer(Outcome.REFUSED, "ADVANCE_OUT_OF_ORDER", message)
    if not decider.seen_seq <= advance.seen_seq < ctx.run.next_seq:
        message = f"seen_seq must be from {decider.seen_seq} to {ctx.run.next_seq - 1}"
        return Answer(Outcome.REFUSED, "INVALID_FRAME", message)
    return None


def _must_see(
    ctx: RunContext, decider: Decider, advance: Advance, unseen: tuple[HistoryEvent, ...], written: int
) -> bool:
    """The function ends without having seen events that it might have acted on. After three times, signals do not count
    any more: they might come for ever.
    """
    if ctx.control.ending is not None and not ctx.is_ending and advance.outcome is not AdvanceOutcome.CONTINUE_AS_NEW:
        return False  # what it ends as is decided
    if unseen and unseen[-1].seq < ctx.run.next_seq - 1 - written:
        return True  # there are more than were read
    inputs = [event for event in unseen if event.type in INPUTS]
    if advance.outcome is AdvanceOutcome.CONTINUE_AS_NEW:
        return any(event.type != EventType.SIGNAL_RECEIVED for event in inputs)
    if decider.refusals >= _MAX_REFUSALS:
        inputs = [event for event in inputs if event.type != EventType.SIGNAL_RECEIVED]
    return bool(inputs)


def _let_go(ctx: RunContext, task: TaskRow, decider: Decider, *, idle: bool) -> None:
    """The worker gives the run back: nobody holds it until there is an event, or the end of a pause."""
    session = task.lease_session or ""
    task.attempt = task.operational_failures = task.redeliveries = 0
    task.last_failure = None
    task.visible_at = IDLE_UNTIL if idle else ctx.now
    if ctx.control.paused:
        offering.back_to_ready(ctx, task, 0.0)
    else:
        offering.back_to_ready(ctx, task, None)
    decider.idle = idle
    decider.token = task.token
    decider.session = session
    decider.refusals = 0


async def _ended(ctx: RunContext, advance: Advance) -> None:
    """The function has ended, and was let."""
    control = ctx.control
    if control.ending is not None:
        ctx.changes.rows.add("delete_grace", ctx.run.run_id)
        grace = control.ending.get("grace")  # none: an older release has asked it to end
        await ending.stop_open(ctx, ctx.env.limits.cancel_grace if grace is None else grace)
        await ending.go_on(ctx)
    elif advance.outcome is AdvanceOutcome.FAIL:
        assert advance.failure is not None  # the edge saw to it
        retryable = not advance.commands
        await ending.begin(ctx, RunState.FAILED, replace(advance.failure, feedback=None), retryable=retryable)
    elif advance.outcome is AdvanceOutcome.CONTINUE_AS_NEW:
        await _continued(ctx, advance)
    else:
        await _completed(ctx, advance)


async def _continued(ctx: RunContext, advance: Advance) -> None:
    if continuing.is_removed(ctx):
        hash_ = ctx.run.definition_hash.hex()
        message = f"definition {hash_} of workflow {ctx.run.workflow_id!r} was removed"
        failure = Failure(FailureKind.PERMANENT, "DEFINITION_REMOVED", message)
        await ending.begin(ctx, RunState.FAILED, failure, retryable=False)
        return
    if advance.output is not None and advance.output.binary is None:
        faults = continuing.following_graph(ctx).input_violations(advance.value)
        if faults:
            told = "; ".join(f"{fault.path or 'input'}: {fault.message}" for fault in faults[:10])
            message = f"the run can't continue as new: its input breaks the schema of the workflow: {told}"
            failure = Failure(FailureKind.PERMANENT, "INPUT_SCHEMA_MISMATCH", message)
            await ending.begin(ctx, RunState.FAILED, failure)
            return
    await continuing.continue_as_new(ctx, advance)


async def _completed(ctx: RunContext, advance: Advance) -> None:
    output = advance.output or Payload(json="null")
    if output.binary is None:
        faults = [fault for check in ctx.graph.output_checks for fault in check.violations(advance.value)]
        if faults:
            told = "; ".join(f"{fault.path or 'output'}: {fault.message}" for fault in faults[:10])
            message = f"the output breaks the schema of the workflow: {told}"
            failure = Failure(FailureKind.PERMANENT, "OUTPUT_SCHEMA_MISMATCH", message)
            await ending.begin(ctx, RunState.FAILED, failure, retryable=False)
            return
    await ending.stop_open(ctx, 0.0)
    detail = {"unread_signals": ctx.control.signals} if ctx.control.signals else None
    ctx.run.output_seq = ctx.event(EventType.RUN_COMPLETED, input_seq=ctx.run.next_seq, payload=output, detail=detail)
    ctx.output_size = output.size
    ending.end(ctx, RunState.COMPLETED)


async def _cannot_continue(ctx: RunContext, advance: Advance) -> Answer | None:
    control = ctx.control
    if control.signals:
        [(size,)] = await ctx.read("signals_size", ctx.run.run_id)
        if size > _MOVED_BYTES:
            message = (
                f"a run can't continue as new with more than {_MOVED_BYTES >> 20} MiB of signals that it has not read"
            )
            return Answer(Outcome.REFUSED, "ILLEGAL_TRANSITION", message)
    opens = any(isinstance(command, ScheduleStep | StartChild) for command in advance.commands)
    if control.ending is None and (control.open_steps or control.open_children or opens):
        message = "a run can't continue as new while steps or children of it are open"
        return Answer(Outcome.REFUSED, "ILLEGAL_TRANSITION", message)
    return None
