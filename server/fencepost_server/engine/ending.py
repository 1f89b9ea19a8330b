"""How a run ends: ENDING, while steps and children that are under way finish or are stopped, then UNDOING, if anything
can be undone, then a final state (semantics: ends). The first cause wins.

What a FAILED run would have gone on with is kept, for RetryRun; of all others nothing is left but their history.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from fencepost_server.domain.graph import GraphNode
from fencepost_server.domain.model import (
    PARKED_UNTIL,
    EventType,
    Failure,
    FailureKind,
    RunState,
    TaskKind,
    TaskRow,
    next_token,
)
from fencepost_server.domain.nodes import ChildNode
from fencepost_server.domain.rows import ChildRow, Control, Place, TaskExtra, stopped_task
from fencepost_server.engine import deciding, offering, undoing
from fencepost_server.engine.context import Activation, RunContext, Value, failure_json
from fencepost_server.engine.operations import MessageKind


async def fail_node(ctx: RunContext, node: GraphNode, place: Place, value: Value, code: str, message: str) -> None:
    """A node that is no step can't go on: the run ends, and a retry enters the node again."""
    await fail_node_with(ctx, node, place, value, Failure(FailureKind.PERMANENT, code, message, None, node.id))


async def fail_after(ctx: RunContext, node: GraphNode, place: Place, value: Value, code: str, message: str) -> None:
    """A node has ended, and nothing can follow: a retry goes on behind it, and does not run it again (I5)."""
    failure = Failure(FailureKind.PERMANENT, code, message, None, node.id)
    await fail_node_with(ctx, node, place, value, failure, entering=False)


async def fail_node_with(
    ctx: RunContext, node: GraphNode, place: Place, value: Value, failure: Failure, *, entering: bool = True
) -> None:
    """As ``fail_node``, with the whole failure; ``entering``: whether a retry enters the node again."""
    ctx.event(EventType.NODE_FAILED, node_index=node.index, detail={"failure": failure_json(failure)}, place=place)
    await begin(ctx, RunState.FAILED, failure, stopped=(entering, node.index, place, value))


@dataclass(frozen=True, slots=True)
class Over:
    """A step that has failed for good, in event ``seq``."""

    seq: int
    task: TaskRow
    extra: TaskExtra


async def begin(
    ctx: RunContext,
    state: RunState,
    failure: Failure,
    *,
    grace: float | None = None,
    fence: bool = False,
    retryable: bool = True,
    over: Over | None = None,
    stopped: Activation | None = None,
) -> None:
    """The run is to end as ``state``, unless it is ending already. Steps under way have a grace; with ``fence`` they
    lose their leases at once. ``over`` is the step and ``stopped`` the node that this comes from: a retry goes on
    there, unless ``retryable`` says that there is none.
    """
    assert not ctx.state.final  # final states absorb (I4)
    control = ctx.control
    first = control.ending is None
    if control.decider is not None and not control.decider.over:
        if not fence:
            if first:
                await deciding.asked_to_end(
                    ctx, state, failure, ctx.env.limits.cancel_grace if grace is None else grace
                )
            return
        await deciding.fence(ctx, "RUN_ENDED")
    if first:
        failure = replace(failure, feedback=None)
        ctx.run.failure = failure.to_json()
        ctx.run.state = RunState.ENDING
        control.ending = {
            "state": int(state),
            "failure": failure_json(failure),
            "retryable": retryable and state is RunState.FAILED,
        }
        control.paused = control.blocked = False
    if over is not None:
        step_over(ctx, ctx.graph.nodes[over.task.node_index], over.seq, over.task, over.extra)
    for entering, index, place, value in (*((stopped,) if stopped else ()), *ctx.take_activations()):
        stop_at(ctx, index, place, value, entering=entering)
    if first:
        grace = ctx.env.limits.cancel_grace if grace is None else grace
        if control.open_steps or control.open_children or control.undos:
            detail = {"state": int(state), "failure": failure_json(failure), "grace": grace}
            ctx.event(EventType.RUN_ENDING, detail=detail)
        await stop_open(ctx, 0.0 if fence else grace)
    await go_on(ctx)


async def stop_open(ctx: RunContext, grace: float) -> None:
    """Nothing follows any more from what is open: steps have ``grace`` seconds, timers stop, children are told."""
    control = ctx.control
    if control.open_steps:
        cancelled_run = control.ending is not None and control.ending["state"] == RunState.CANCELLED
        await _stop_tasks(ctx, grace, "RUN_CANCELLED" if cancelled_run else "RUN_ENDED")
    if control.extras:
        await _stop_extras(ctx, control)


async def fence_tasks(ctx: RunContext) -> None:
    """The definition was removed while the run was ending: its grace is over (I9)."""
    await _stop_tasks(ctx, 0.0, "RUN_ENDED")
    await go_on(ctx)


async def _stop_tasks(ctx: RunContext, grace: float, reason: str) -> None:
    """Nobody gets a task any more; who has one is asked to stop, and has ``grace`` seconds for it."""
    tasks = [TaskRow(*row) for row in await ctx.read("open_tasks", ctx.run.run_id)]
    extras = {task.task_id: TaskExtra.from_json(task.extra) for task in tasks}
    steps = [task for task in tasks if extras[task.task_id].kind is TaskKind.STEP]
    offering.take_back(ctx, steps)
    for task in steps:
        if task.lease_session is None or grace <= 0:
            ctx.revoke(task, reason)
            cancelled(ctx, task, extras[task.task_id])
            continue
        deadline = ctx.now + timedelta(seconds=grace)
        ctx.changes.rows.add("cancel_task", task.run_id, task.task_id, deadline, reason)
        ctx.changes.cancelled.append((task.lease_session, task.run_id, task.task_id, task.token, reason, grace))


def cancelled(ctx: RunContext, task: TaskRow, extra: TaskExtra, digest: bytes | None = None) -> None:
    """An open step is over, because its run is. ``digest`` is of the report that brought it back, for repeats (I6)."""
    node = ctx.node(task.node_index, extra.plan)
    seq = ctx.event(
        EventType.STEP_CANCELLED, node_index=task.node_index, task_id=task.task_id, token=task.token or None,
        digest=digest or None, place=extra.place, detail=None if extra.plan is None else {"node": node.id},
    )  # fmt: skip
    step_over(ctx, node, seq, task, extra)


def step_over(
    ctx: RunContext, node: GraphNode, seq: int, task: TaskRow, extra: TaskExtra, *, keep: bool = True
) -> None:
    """A step has ended in event ``seq`` without completing: its task goes, and what a retry or an undo needs stays.
    ``keep``: whether a retry of the run takes it up again.
    """
    undoing.could_have_acted(ctx, node, seq, task, extra)
    stop_timeouts(ctx, node, task)
    control = ctx.control
    retryable = keep and control.ending is not None and control.ending["retryable"]
    ctx.remove_task(task, keep_checkpoint=retryable)
    control.open_steps -= 1
    if retryable:
        control.extras = True
        if task.token:  # 0: no worker has had it yet
            task.token = next_token(task.token, ctx.env.epoch)
        ctx.changes.rows.add("insert_stopped", task.run_id, task.task_id, stopped_task(task))


async def no_more_parked(ctx: RunContext, task: TaskRow) -> None:
    """A step of a code run is over, and the run goes on: if it was this one that blocked it, nothing does any more."""
    if ctx.control.blocked and task.visible_at == PARKED_UNTIL and task.resume_at is None:
        blocked_by(ctx, [TaskRow(*row) for row in await ctx.read("open_tasks", ctx.run.run_id)])


def blocked_by(ctx: RunContext, tasks: Sequence[TaskRow]) -> bool:
    """Whether any of the tasks that are left is parked: else the run is BLOCKED no more."""
    control = ctx.control
    parked = [task for task in tasks if task.visible_at == PARKED_UNTIL and task.resume_at is None]
    control.blocked = bool(parked)
    ending_failure = None if control.ending is None else json.dumps(control.ending["failure"])
    ctx.run.failure = parked[0].last_failure if parked else ending_failure
    return control.blocked


def stop_timeouts(ctx: RunContext, node: GraphNode, task: TaskRow) -> None:
    """The timeouts of a step that has ended."""
    for kind, _seconds in node.timeouts:
        ctx.changes.rows.add("delete_timer", task.run_id, task.task_id, kind)


async def _stop_extras(ctx: RunContext, control: Control) -> None:
    """Timers stop, children are told."""
    ctx.changes.rows.add("stop_timers", ctx.run.run_id)
    if control.open_children:
        await _end_children(ctx, terminate=False)
    if control.ending is not None and not control.ending["retryable"]:
        control.open_waits = 0


async def _end_children(ctx: RunContext, *, terminate: bool) -> None:
    """Each open child is cancelled, terminated or left alone, as its node says. With ``terminate`` the run does not
    wait for what becomes of it.
    """
    control = ctx.control
    for row in await ctx.read("children", ctx.run.run_id):
        child = ChildRow(*row)
        on_parent_end = _on_parent_end(ctx, child)
        if on_parent_end == "abandon":  # its row stays for a retry, which waits for it again
            control.open_children -= 1
            continue
        kind = MessageKind.TERMINATE_CHILD if on_parent_end == "terminate" else MessageKind.CANCEL_CHILD
        if terminate:
            control.open_children -= 1
        ctx.send(child.child_run_id, kind, child.seq, {"parent_seq": child.seq})


def _on_parent_end(ctx: RunContext, child: ChildRow) -> str:
    """What becomes of a child; if the definition can't be read, what is the default."""
    if ctx.graph.broken:
        return "cancel"
    where = json.loads(child.place)
    node = ctx.node(where["node"], where.get("plan")).node
    assert isinstance(node, ChildNode)  # children are started by such nodes
    return node.on_parent_end


async def go_on(ctx: RunContext) -> None:
    """Of a run that is ending: when nothing is under way any more, undo what there is to undo, then end."""
    control = ctx.control
    if control.ending is None or control.open_steps or control.open_children or control.undo_failed:
        return
    if not ctx.is_ending:  # a code run cleans up
        return
    if control.undos:
        if control.ending["retryable"]:
            control.ending["retryable"] = False
            ctx.changes.rows.add("delete_stopped", ctx.run.run_id)
        await undoing.next_one(ctx)
        return
    state = RunState(control.ending["state"])
    ctx.run.failure = json.dumps(control.ending["failure"])
    kind = EventType.RUN_CANCELLED if state is RunState.CANCELLED else EventType.RUN_FAILED
    ctx.event(kind, detail={"failure": control.ending["failure"]})
    end(ctx, state)


def stop_at(ctx: RunContext, index: int, place: Place, value: Value, *, entering: bool) -> None:
    """What the run would have gone on with, had it not ended: a retry does."""
    ending = ctx.control.ending
    if ending is None or not ending["retryable"]:
        return
    what = {"enter" if entering else "leave": [index, place.scope, place.item, value.seq, value.size]}
    # Its key: a number that no other stopped row of the run has. Tasks have theirs, these have numbers below zero.
    ctx.control.stops += 1
    ctx.control.extras = True
    ctx.changes.rows.add("insert_stopped", ctx.run.run_id, -ctx.control.stops, json.dumps(what))


async def terminate(ctx: RunContext, reason: str) -> None:
    """The run ends at once: leases are gone, nothing is undone."""
    control = ctx.control
    if control.open_steps or control.decider is not None:
        tasks = [TaskRow(*row) for row in await ctx.read("open_tasks", ctx.run.run_id)]
        offering.take_back(ctx, tasks)
        for task in tasks:
            ctx.revoke(task, "RUN_TERMINATED")
            ctx.remove_task(task)
        control.open_steps = 0
    if control.open_children:
        await _end_children(ctx, terminate=True)
    control.ending = None
    ctx.run.failure = Failure(FailureKind.PERMANENT, "RUN_TERMINATED", reason or "terminated").to_json()
    ctx.event(EventType.RUN_TERMINATED, detail={"reason": reason})
    end(ctx, RunState.TERMINATED)


def end(ctx: RunContext, state: RunState) -> None:
    """The run is over: its parent is told, its dedupe key is free again."""
    assert not ctx.state.final  # final states absorb (I4)
    run = ctx.run
    run.state = state
    run.ended_at = run.last_event_at
    ctx.take_activations()
    if run.dedupe_key:
        ctx.changes.freed_keys.append(run)
    ctx.changes.ended.append(run.run_id)
    control = ctx.plain
    if control is None:
        return
    control.undo_failed = control.paused = control.blocked = False
    if control.decider is not None:
        control.decider.over = True
        control.decider.idle = False
    keep = state is RunState.FAILED and control.ending is not None and control.ending["retryable"]
    if not keep:
        control.open_steps = control.open_waits = control.open_children = control.undos = control.signals = 0
        if control.extras:
            ctx.changes.rows.add("clear_ended", run.run_id)
    if control.parent is not None:
        parent, parent_seq = control.parent
        failure = None if run.failure is None else json.loads(run.failure)
        body = {"parent_seq": parent_seq, "state": int(state), "output_seq": run.output_seq, "failure": failure,
                "size": ctx.output_size}  # fmt: skip
        ctx.send(parent, MessageKind.CHILD_ENDED, run.next_seq - 1, body)
