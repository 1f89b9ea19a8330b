"""What calls and timers do to a run: signals, control, and what falls due (semantics: ends; signals, timers).

What is allowed in which state is domain.transitions' to say.
"""

from __future__ import annotations

import json

from fencepost_server.domain.errors import (
    AlreadyUndone,
    DatabaseUnavailable,
    DefinitionRemoved,
    FencepostError,
    IllegalTransition,
    InputSchemaMismatch,
    KeyTaken,
    ParentDecided,
    RequestIdConflict,
    TooManySignals,
)
from fencepost_server.domain.jsontext import fingerprint, parse
from fencepost_server.domain.model import EventType, Failure, FailureKind, RunState, TaskRow, TimerKind
from fencepost_server.domain.nodes import SignalNode, StepNode
from fencepost_server.domain.rows import TOP, Place, TaskExtra, TimerRow, restarted_task
from fencepost_server.domain.transitions import RunEvent, Verdict
from fencepost_server.engine import children, deciding, ending, flow, offering, steps, undoing
from fencepost_server.engine.changes import Ready
from fencepost_server.engine.context import Rows, RunContext, Value
from fencepost_server.engine.operations import Command, Commanded, CommandKind, Fire
from fencepost_server.engine.starting import comparable

_KEY_TRIES = 50
_EVENTS = {
    CommandKind.SIGNAL: RunEvent.SIGNAL,
    CommandKind.CANCEL: RunEvent.CANCEL,
    CommandKind.TERMINATE: RunEvent.TERMINATE,
    CommandKind.PAUSE: RunEvent.PAUSE,
    CommandKind.RESUME: RunEvent.RESUME,
    CommandKind.RETRY: RunEvent.RETRY,
    CommandKind.REMOVE: RunEvent.REMOVE,
    CommandKind.OFFER: RunEvent.RETRY,
}


async def command(ctx: RunContext, command: Command) -> Commanded | FencepostError:
    """One command, answered. A repeat of an accepted request id gets its first answer, whatever the state is now
    (I6).
    """
    if command.request_id:
        rows = await ctx.read("request", _chain(ctx), command.request_id)
        if rows:
            return _remembered(command, *rows[0])
    if ctx.state is RunState.CONTINUED and ctx.plain is not None and ctx.plain.next_run:
        return Commanded(ctx.state, next_run=ctx.plain.next_run)
    event = _EVENTS[command.kind]
    verdict = Verdict.ACT if command.kind is CommandKind.OFFER else ctx.verdict(event)
    if verdict is Verdict.REFUSE:
        return _illegal(ctx, event)
    answer: Commanded | FencepostError | None = None
    if verdict is not Verdict.KEEP:
        answer = await _act(ctx, command)
        await flow.pump(ctx)
        ctx.settle()
    if isinstance(answer, FencepostError):
        return answer
    answer = Commanded(ctx.state, 0 if answer is None else answer.seq)
    # What changes nothing is repeatable by itself: only a caller's own id may have to recall it after a later change.
    if command.request_id and (verdict is not Verdict.KEEP or not command.unnamed):
        remembered = json.dumps({"state": int(answer.state), "seq": answer.seq})
        row = (_chain(ctx), command.request_id, command.fingerprint, remembered)
        ctx.changes.rows.add("insert_request", *row)
    return answer


def _chain(ctx: RunContext) -> str:
    """Where requests are remembered: with the first run of a chain, for all of it."""
    return (ctx.plain.chain if ctx.plain is not None else "") or ctx.run.run_id


def _remembered(command: Command, fingerprint: bytes, answer: str) -> Commanded | FencepostError:
    if bytes(fingerprint) != command.fingerprint:
        return RequestIdConflict(
            f"the request id {command.request_id!r} was used for another request on run {command.run_id}",
            metadata={
                "existing_run_id": command.run_id,
                "existing_fingerprint": bytes(fingerprint).hex(),
                "request_fingerprint": command.fingerprint.hex(),
            },
        )
    value = json.loads(answer)
    return Commanded(RunState(value["state"]), value["seq"])


def _illegal(ctx: RunContext, event: RunEvent) -> FencepostError:
    return IllegalTransition(
        f"a run that is {ctx.state.name} can't be {event.value}",
        metadata={"state": ctx.state.name, "event": event.name},
    )


async def _act(ctx: RunContext, command: Command) -> Commanded | FencepostError | None:
    match command.kind:
        case CommandKind.SIGNAL:
            return await _signal(ctx, command)
        case CommandKind.CANCEL:
            message = f"cancelled: {command.reason}" if command.reason else "cancelled"
            failure = Failure(FailureKind.PERMANENT, "RUN_CANCELLED", message)
            await ending.begin(ctx, RunState.CANCELLED, failure, grace=command.grace)
        case CommandKind.TERMINATE:
            await ending.terminate(ctx, command.reason)
        case CommandKind.PAUSE:
            control = ctx.control
            control.paused = True
            ctx.event(EventType.RUN_PAUSED, detail={"reason": command.reason})
            if control.open_steps or control.decider is not None:
                await ctx.read("park", ctx.run.run_id)
        case CommandKind.RESUME:
            await _resume(ctx, command)
        case CommandKind.RETRY:
            return await _retry(ctx, command)
        case CommandKind.REMOVE:
            await _remove(ctx)
        case CommandKind.OFFER:
            return await deciding.offered(ctx, command.reason)
    return None


async def _signal(ctx: RunContext, command: Command) -> Commanded | FencepostError:
    control, run = ctx.control, ctx.run
    payload = command.payload
    if payload.binary is None:
        faults = ctx.graph.signal_violations(command.name, parse(payload.json or "null"))
        if faults:
            message = f"the payload breaks the schema of signal {command.name!r}"
            return InputSchemaMismatch(message, violations=faults)
    waits: Rows = []
    if ctx.graph.code is None and control.open_waits and not control.paused and not ctx.is_ending:
        waits = await ctx.read("wait", run.run_id, command.name)
    if not waits and control.signals >= ctx.env.limits.max_pending_signals:
        return TooManySignals(f"the run holds {control.signals} signals already")
    detail = {"name": command.name}
    if command.request_id and not command.unnamed:
        detail["request_id"] = command.request_id
    seq = ctx.event(EventType.SIGNAL_RECEIVED, payload=payload, detail=detail)
    if waits:
        _run_id, wait_seq, name, where = waits[0]
        flow.take_signal(ctx, wait_seq, name, where, seq, payload.size)
        return Commanded(ctx.state, seq)
    control.signals += 1
    control.extras = True
    ctx.changes.rows.add("insert_signal", run.run_id, seq, command.name, payload.size)
    return Commanded(ctx.state, seq)


async def _resume(ctx: RunContext, command: Command) -> None:
    """Tasks may be taken again; then what was only recorded acts: signals, and what fell due."""
    control = ctx.control
    control.paused = False
    ctx.event(EventType.RUN_RESUMED, detail={"reason": command.reason})
    _hint(ctx, await ctx.read("unpark", ctx.run.run_id))
    if ctx.graph.code is not None:
        deciding.resumed(ctx)
    else:
        await _take_signals(ctx)
    if control.extras:
        for row in await ctx.read("fired_timers", ctx.run.run_id):
            if ctx.is_ending or ctx.state.final:  # what is left stays where it is, for a retry
                break
            timer = TimerRow(*row)
            ctx.changes.rows.add("delete_timer", timer.run_id, timer.seq, timer.kind)
            await _due(ctx, timer)
            await flow.pump(ctx)


def _hint(ctx: RunContext, places: Rows) -> None:
    for namespace, queue, handler, priority, visible_at in places:
        delay = max(0.0, (visible_at - ctx.now).total_seconds())
        ctx.changes.ready.append(Ready(namespace, queue, handler, priority, delay))


async def _take_signals(ctx: RunContext, *, pump: bool = True) -> None:
    """Waits and signals that met while nothing could act; then, with ``pump``, what follows from that."""
    control = ctx.control
    while control.signals and control.open_waits and not ctx.is_ending and not ctx.state.final:
        rows = await ctx.read("matches", ctx.run.run_id)
        if not rows:
            return
        for _run_id, wait_seq, name, where, signal_seq, size in rows:
            ctx.changes.rows.add("delete_signal", ctx.run.run_id, signal_seq, name)
            control.signals -= 1
            flow.take_signal(ctx, wait_seq, name, where, signal_seq, size)
        if pump:
            await flow.pump(ctx)


async def _retry(ctx: RunContext, command: Command) -> FencepostError | None:
    """A run goes on from where it stopped, with fresh attempts."""
    control, run = ctx.control, ctx.run
    if control.undo_failed:
        control.undo_failed = False
        ctx.event(EventType.RUN_RETRIED, detail={"reason": command.reason})
        if command.skip_undo:
            await undoing.skip(ctx, command.reason)
        assert control.ending is not None  # undoing is part of it
        run.failure = json.dumps(control.ending["failure"])
        run.state = RunState.UNDOING
        await ending.go_on(ctx)
        return None
    if command.skip_undo:
        return IllegalTransition(
            "no step of the run failed to be undone", metadata={"state": ctx.state.name, "event": RunEvent.RETRY.name}
        )
    if run.state == RunState.BLOCKED:
        control.blocked = False
        run.failure = None if control.ending is None else json.dumps(control.ending["failure"])
        if control.ending is not None:
            run.state = RunState.ENDING
        ctx.event(EventType.RUN_RETRIED, detail={"reason": command.reason})
        if control.decider is not None:
            control.decider.tried.clear()
        _hint(ctx, await ctx.read("unblock", run.run_id))
        return None
    if (refused := await _cannot_go_on(ctx)) is not None:
        return refused
    await _go_on_again(ctx, command.reason)
    return None


async def _cannot_go_on(ctx: RunContext) -> FencepostError | None:
    """Why a FAILED run can't be retried; else it holds its dedupe key again."""
    control, run = ctx.control, ctx.run
    if control.undone:
        return AlreadyUndone("steps of the run were undone")
    if control.parent is not None:
        return ParentDecided(f"the parent run {control.parent[0]} was told of the failure")
    if control.ending is None or not control.ending["retryable"]:
        return _illegal(ctx, RunEvent.RETRY)
    if ctx.graph.code is not None and (refused := await deciding.cannot_try_again(ctx)) is not None:
        return refused
    if any(removed for (removed,) in await ctx.read("removed", run.namespace, run.workflow_id, run.definition_hash)):
        return DefinitionRemoved(f"definition {run.definition_hash.hex()} of workflow {run.workflow_id!r} was removed")
    return await _take_key(ctx) if run.dedupe_key else None


async def _take_key(ctx: RunContext) -> FencepostError | None:
    """The run holds its dedupe key again, or why it can't."""
    run = ctx.run
    key = (run.namespace, run.workflow_id, run.dedupe_key)
    # Of the request that brought the key: of a chain, that of its first run.
    asked = await ctx.payload_of(_chain(ctx), 1)
    print_ = fingerprint(run.workflow_id, comparable(asked))
    for _ in range(_KEY_TRIES):
        if await ctx.read("take_key", *key, run.run_id, run.definition_hash, print_):
            return None
        for (holder,) in await ctx.read("key_holder", *key):  # none: its run has ended between the two
            if holder == run.run_id:  # it has failed in this batch, at whose end it would be freed
                ctx.changes.freed_keys = [freed for freed in ctx.changes.freed_keys if freed is not run]
                return None
            return KeyTaken(
                f"the dedupe key {run.dedupe_key!r} is held by run {holder}", metadata={"existing_run_id": holder}
            )
    return DatabaseUnavailable("a key changed hands too often")


async def _go_on_again(ctx: RunContext, reason: str) -> None:
    control, run = ctx.control, ctx.run
    control.ending = None
    run.failure = run.ended_at = None
    run.state = RunState.RUNNING
    decider = control.decider
    ignored = 0 if decider is None else decider.failed_seq
    ctx.event(EventType.RUN_RETRIED, detail={"reason": reason, **({"ignored": ignored} if ignored else {})})
    stopped = [json.loads(row[0]) for row in await ctx.read("take_stopped", run.run_id)]
    left = await children.left_alone(ctx)
    control.open_children += len(left)
    ctx.changes.timers.append(ctx.now)
    for what in stopped:
        if "task" in what:
            _restart(ctx, restarted_task(what["task"], ctx.now))
        else:
            ((direction, (index, scope, item, seq, size)),) = what.items()
            go = ctx.enter if direction == "enter" else ctx.leave
            go(index, Place(scope, item), Value(seq, size))
    if ctx.graph.code is not None:
        ctx.take_activations()
        await deciding.begin_again(ctx)
    else:
        # Before nodes are entered anew: waits that are older come first.
        await _take_signals(ctx, pump=False)
        await flow.pump(ctx)
        await _take_signals(ctx)
    await children.take_up(ctx, left)
    await flow.pump(ctx)


def _restart(ctx: RunContext, task: TaskRow) -> None:
    """A step that was stopped is ready again; its checkpoint and what it was told before stay."""
    offering.put(ctx, task)
    ctx.changes.rows.add(
        "restore_task", task.run_id, task.task_id, task.checkpoint_number, task.last_failure, task.feedback,
        task.outcomes, task.token,
    )  # fmt: skip
    ctx.ready(task)
    extra = TaskExtra.from_json(task.extra)
    steps.start_timeouts(ctx, ctx.node(task.node_index, extra.plan), task.task_id, extra.place)


async def _remove(ctx: RunContext) -> None:
    """The definition of the run was removed: its steps are fenced off at once, what they did is undone (I9)."""
    if ctx.is_ending:
        await ending.fence_tasks(ctx)
        return
    if ctx.control.ending is not None:  # a code run cleans up, for a cause that stands
        await deciding.cut_short(ctx, "DEFINITION_REMOVED")
        return
    message = f"definition {ctx.run.definition_hash.hex()} of workflow {ctx.run.workflow_id!r} was removed"
    failure = Failure(FailureKind.PERMANENT, "DEFINITION_REMOVED", message)
    await ending.begin(ctx, RunState.FAILED, failure, fence=True, retryable=False)


# Timers


async def fire(ctx: RunContext, fire: Fire) -> None:
    """A timer is due: it acts, or waits for the end of a pause. One that is gone, or whose run ends, does nothing."""
    rows = await ctx.read("timer", ctx.run.run_id, fire.seq, fire.kind)
    if not rows:
        return
    timer = TimerRow(*rows[0])
    if timer.fire_at > ctx.now:
        return
    verdict = ctx.verdict(RunEvent.TIMER)
    if timer.kind == TimerKind.PUT_OFF and verdict is Verdict.LATER:
        verdict = Verdict.ACT  # of a paused run: what it begins waits there
    changes = ctx.changes.rows
    if verdict is Verdict.LATER:
        recorded = timer.kind not in (TimerKind.QUEUE_TIMEOUT, TimerKind.TOTAL_TIMEOUT)
        if recorded:
            _fired(ctx, timer)
        place = json.dumps({**json.loads(timer.place), "fired": recorded})
        changes.add("park_timer", timer.run_id, timer.seq, timer.kind, place)
        return
    changes.add("delete_timer", timer.run_id, timer.seq, timer.kind)
    if verdict is Verdict.ACT:
        await _due(ctx, timer)
        await flow.pump(ctx)
        ctx.settle()


def _fired(ctx: RunContext, timer: TimerRow) -> None:
    where = json.loads(timer.place)
    of_run = timer.kind in (TimerKind.RUN_TIMEOUT, TimerKind.START_DELAY, TimerKind.GRACE)
    ctx.event(
        EventType.TIMER_FIRED, node_index=None if of_run else where["node"], task_id=timer.seq,
        detail={"kind": timer.kind}, place=Place(where["scope"], where["item"]),
    )  # fmt: skip


async def _due(ctx: RunContext, timer: TimerRow) -> None:
    """What a timer does. That one of a paused run fired is an event already."""
    where = json.loads(timer.place)
    place, value = Place(where["scope"], where["item"]), Value(where["seq"], where["size"])
    kind = TimerKind(timer.kind)
    control = ctx.control
    if kind in (TimerKind.QUEUE_TIMEOUT, TimerKind.TOTAL_TIMEOUT):
        await _step_timed_out(ctx, timer, kind, where["task"])
        return
    if kind is TimerKind.PUT_OFF:
        control.open_waits -= 1
        go = ctx.enter if where["enter"] else ctx.leave
        go(where["node"], place, value)
        return
    if not where.get("fired"):
        _fired(ctx, timer)
    if kind is TimerKind.SLEEP:
        control.began = True
        if ctx.graph.code is None:  # else its function knows
            control.open_waits -= 1
            ctx.leave(where["node"], place, value)
    elif kind is TimerKind.START_DELAY:
        control.open_waits -= 1
        ctx.enter(0, TOP, value)
    elif kind is TimerKind.GRACE:
        await deciding.grace_over(ctx)
    elif kind is TimerKind.SIGNAL_TIMEOUT and ctx.graph.code is not None:
        ctx.changes.rows.add("end_wait", ctx.run.run_id, timer.seq)
    elif kind is TimerKind.SIGNAL_TIMEOUT:
        node = ctx.graph.nodes[where["node"]]
        signal = node.node
        assert isinstance(signal, SignalNode)  # only such nodes have this timeout
        ctx.changes.rows.add("delete_wait", ctx.run.run_id, timer.seq, signal.signal)
        control.open_waits -= 1
        message = f"no signal {signal.signal!r} came in {signal.timeout_seconds or 0:g} s"
        await ending.fail_node(ctx, node, place, value, "SIGNAL_TIMEOUT", message)
    else:
        message = f"the run took longer than {where['ms'] / 1000:g} s"
        failure = Failure(FailureKind.PERMANENT, "RUN_TIMEOUT", message)
        await ending.begin(ctx, RunState.FAILED, failure, retryable=False)


async def _step_timed_out(ctx: RunContext, timer: TimerRow, kind: TimerKind, task_id: int) -> None:
    rows = await ctx.read("open_task", ctx.run.run_id, task_id)
    if not rows:
        return
    task = TaskRow(*rows[0])
    if kind is TimerKind.QUEUE_TIMEOUT and task.token > 0:  # a worker had it, also if it came back
        return
    _fired(ctx, timer)
    step = ctx.node(task.node_index, TaskExtra.from_json(task.extra).plan).node
    assert isinstance(step, StepNode)  # only steps have these timeouts
    seconds = step.queue_timeout_seconds if kind is TimerKind.QUEUE_TIMEOUT else step.total_timeout_seconds
    await steps.timed_out(ctx, task, kind, seconds or 0.0)
