"""What the commands of a code run do: each becomes one event, and the rows that go with it (semantics: code runs).

Steps, children, timers, attributes and undoing are the same rows and the same code as for graphs; the node that stands
for an op is made of the options that came with its command, which are kept with its rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from fencepost_server.domain.code import op_node
from fencepost_server.domain.model import EventType, Failure, FailureKind, Payload, TaskKind, TaskRow, TimerKind
from fencepost_server.domain.nodes import ChildNode
from fencepost_server.domain.ops import (
    Advance,
    AdvanceOutcome,
    AwaitSignal,
    CancelOp,
    LocalStep,
    MarkPatch,
    OpCommand,
    ScheduleStep,
    SetAttributes,
    StartChild,
    StartTimer,
)
from fencepost_server.domain.rows import TOP, ChildRow, TaskExtra, UndoRow
from fencepost_server.engine import children, ending, offering, steps, undoing
from fencepost_server.engine.context import RunContext, Value
from fencepost_server.engine.local_steps import detail_of

_MAX_ATTRIBUTES = 32
_GOES_ON = (AdvanceOutcome.CONTINUE, AdvanceOutcome.WAIT)


async def apply(ctx: RunContext, task: TaskRow, advance: Advance) -> tuple[int, ...] | Failure:
    """Do what an Advance asks for. Returns the number of each command's event; or what no further try could mend, and
    then nothing is done.
    """
    attributes: dict[str, str] = {}
    if any(isinstance(command, SetAttributes) for command in advance.commands):
        merged = await _merged(ctx, advance)
        if isinstance(merged, Failure):
            return merged
        attributes = merged
    opens = await _opens(ctx, advance)
    begun: dict[int, int] = {}
    seqs = []
    for command in advance.commands:
        seq = await _apply(ctx, task, command, begun, opens)
        if not isinstance(command, MarkPatch | CancelOp):
            begun[command.op] = seq
        seqs.append(seq)
    if attributes or any(isinstance(command, SetAttributes) for command in advance.commands):
        ctx.changes.rows.add("set_attributes", ctx.run.run_id, json.dumps(attributes))
    if advance.taken_signals:  # counted as they are there: a replay may name again what was taken before
        taken = await ctx.read("take_signals", ctx.run.run_id, json.dumps(advance.taken_signals))
        ctx.control.signals -= len(taken)
    for seq in advance.ended_waits:
        _end_wait(ctx, seq)
    return tuple(seqs)


@dataclass(slots=True)
class _Opens:
    """What is open of a run, by the event that began it, if commands are to stop any of it."""

    steps: dict[int, TaskRow] = field(default_factory=dict)
    children: dict[int, ChildRow] = field(default_factory=dict)
    stays: bool = True
    """What the Advance begins is stopped neither by it nor by the end that it brings: it may be leased at once."""


async def _opens(ctx: RunContext, advance: Advance) -> _Opens:
    """Read at once for all commands: a function may stop thousands of ops."""
    opens = _Opens(stays=advance.outcome in _GOES_ON)
    if any(isinstance(command, CancelOp) for command in advance.commands):
        opens.stays = False
        if ctx.control.open_steps:
            rows = await ctx.read("open_tasks", ctx.run.run_id)
            opens.steps = {task.task_id: task for task in (TaskRow(*row) for row in rows)}
        if ctx.control.open_children:
            rows = await ctx.read("children", ctx.run.run_id)
            opens.children = {child.seq: child for child in (ChildRow(*row) for row in rows)}
    return opens


async def _apply(ctx: RunContext, task: TaskRow, command: OpCommand, begun: dict[int, int], opens: _Opens) -> int:
    match command:
        case LocalStep():
            return local_step(ctx, command, task.token)
        case ScheduleStep():
            return _schedule(ctx, command, opens)
        case StartTimer():
            return _timer(ctx, command)
        case AwaitSignal():
            return _await_signal(ctx, command)
        case StartChild():
            return _start_child(ctx, command)
        case CancelOp():
            return await _cancel(ctx, command, begun, opens)
        case MarkPatch():
            return ctx.event(EventType.PATCH_MARKED, detail={"patch": command.patch_id})
        case SetAttributes():
            detail = {"op": command.op, "attributes": dict(command.attributes)}
            return ctx.event(EventType.ATTRIBUTES_SET, detail=detail)


def local_step(ctx: RunContext, step: LocalStep, token: int) -> int:
    """A step that ran in the worker: one event, and if it can be undone its input and a row of the undo log."""
    detail: dict[str, Any] = json.loads(detail_of(step))
    if step.failure is not None:
        return ctx.event(EventType.LOCAL_STEP_ENDED, token=token, detail=detail)
    output = step.output or Payload(json="null")
    if not step.options:
        return ctx.event(EventType.LOCAL_STEP_ENDED, token=token, payload=output, detail=detail)
    node = op_node("local", step.name, step.options)
    source = step.input or Payload(json="null")
    if node.undo is None:
        return ctx.event(EventType.LOCAL_STEP_ENDED, token=token, payload=output, detail=detail)
    input_seq = ctx.event(EventType.INPUT_BUILT, payload=source, detail={"op": step.op, "node": step.name})
    seq = ctx.event(EventType.LOCAL_STEP_ENDED, token=token, payload=output, detail=detail)
    undoing.insert(ctx, UndoRow(
        ctx.run.run_id, seq, False, 0, -step.op, input_seq, source.size, seq, token, 0, 0,
        json.dumps(["local", step.name, step.options]),
    ))  # fmt: skip
    return seq


def _schedule(ctx: RunContext, step: ScheduleStep, opens: _Opens) -> int:
    plan = ("step", step.handler, step.options)
    node = op_node(*plan)
    work = node.work
    assert work is not None  # it is a step's
    detail = {"op": step.op, "node": step.handler, "handler": step.handler, "queue": work.queue,
              "input_hash": step.input_hash.hex(), "options": step.options}  # fmt: skip
    seq = ctx.event(EventType.STEP_SCHEDULED, payload=step.input, detail=detail)
    value = Value(seq, step.input.size, step.input)
    offering.offer(ctx, node, work, seq, value, TaskExtra(plan=plan), at_once=opens.stays)
    steps.start_timeouts(ctx, node, seq, TOP)
    return seq


def schedule_again(ctx: RunContext, asked: tuple[str, str], task_id: int, size: int, token: int) -> None:
    """A step that had failed for good is tried again, with fresh attempts. ``asked``: its handler and options."""
    plan = ("step", *asked)
    node = op_node(*plan)
    assert node.work is not None  # it is a step's
    offering.offer(ctx, node, node.work, task_id, Value(task_id, size), TaskExtra(plan=plan), token=token)
    steps.start_timeouts(ctx, node, task_id, TOP)


def _timer(ctx: RunContext, timer: StartTimer) -> int:
    fire_at = ctx.now + timedelta(seconds=timer.seconds)
    detail = {"op": timer.op, "delay": timer.seconds, "fire_at": fire_at.isoformat()}
    seq = ctx.event(EventType.TIMER_STARTED, detail=detail)
    ctx.start_timer(seq, TimerKind.SLEEP, fire_at, 0, TOP, Value(0, 0))
    return seq


def _await_signal(ctx: RunContext, wait: AwaitSignal) -> int:
    detail: dict[str, Any] = {"op": wait.op, "name": wait.name}
    if wait.ended:
        return ctx.event(EventType.SIGNAL_AWAITED, detail=detail)
    fire_at = None
    if wait.seconds is not None:
        fire_at = ctx.now + timedelta(seconds=wait.seconds)
        detail["timeout_at"] = fire_at.isoformat()
    seq = ctx.event(EventType.SIGNAL_AWAITED, detail=detail)
    ctx.control.extras = True
    where = {"node": 0, "scope": 0, "item": 0, "timed": fire_at is not None, "seq": 0, "size": 0}
    ctx.changes.rows.add("insert_wait", ctx.run.run_id, seq, wait.name, json.dumps(where))
    if fire_at is not None:
        ctx.start_timer(seq, TimerKind.SIGNAL_TIMEOUT, fire_at, 0, TOP, Value(0, 0))
    return seq


def _end_wait(ctx: RunContext, seq: int) -> None:
    rows, run_id = ctx.changes.rows, ctx.run.run_id
    rows.add("end_wait", run_id, seq)
    rows.add("delete_timer", run_id, seq, TimerKind.SIGNAL_TIMEOUT)


def _start_child(ctx: RunContext, child: StartChild) -> int:
    plan = ["child", child.workflow_id, child.options]
    run = ctx.run
    run_id = children.child_id(run.run_id, run.next_seq)
    detail = {"op": child.op, "node": child.workflow_id, "child": run_id, "workflow": child.workflow_id,
              "input_hash": child.input_hash.hex()}  # fmt: skip
    seq = ctx.event(EventType.CHILD_SCHEDULED, payload=child.input, detail=detail)
    where = {"node": 0, "scope": 0, "item": 0, "seq": seq, "size": child.input.size, "plan": plan}
    node = op_node("child", child.workflow_id, child.options).node
    assert isinstance(node, ChildNode)  # of that kind
    children.start(ctx, seq, run_id, node, where)
    return seq


async def _cancel(ctx: RunContext, command: CancelOp, begun: dict[int, int], opens: _Opens) -> int:
    """Stop an op: a step that is open, a timer, a wait, a child. What has ended meanwhile stays as it is."""
    of_seq = command.of_seq or begun.get(command.op, 0)
    seq = ctx.event(EventType.OP_CANCELLED, task_id=of_seq, detail={"op": command.op})
    if not of_seq:
        return seq
    run_id = ctx.run.run_id
    if of_seq in begun.values():  # of this very Advance: it is not among what was read before
        for row in await ctx.read("open_task", run_id, of_seq):
            opens.steps[of_seq] = TaskRow(*row)
        for row in await ctx.read("child", run_id, of_seq):
            opens.children[of_seq] = ChildRow(*row)
    if (task := opens.steps.pop(of_seq, None)) is not None:
        extra = TaskExtra.from_json(task.extra)
        if extra.kind is TaskKind.STEP:  # no op has begun another one
            ctx.revoke(task, "RUN_CANCELLED")
            ending.step_over(ctx, ctx.node(0, extra.plan), seq, task, extra, keep=False)
            await ending.no_more_parked(ctx, task)
        return seq
    if (child := opens.children.pop(of_seq, None)) is not None:
        children.cancel(ctx, child)
        return seq
    ctx.changes.rows.add("delete_timer", run_id, of_seq, TimerKind.SLEEP)
    ctx.changes.rows.add("delete_timer", run_id, of_seq, TimerKind.SIGNAL_TIMEOUT)
    ctx.changes.rows.add("end_wait", run_id, of_seq)
    return seq


async def _merged(ctx: RunContext, advance: Advance) -> dict[str, str] | Failure:
    """The attributes of the run after an Advance."""
    rows = await ctx.read("attributes", ctx.run.run_id)
    merged: dict[str, str] = json.loads(rows[0][0]) if rows and rows[0][0] else {}
    for command in advance.commands:
        if isinstance(command, SetAttributes):
            merged.update(command.attributes)
            merged = {key: value for key, value in merged.items() if value}
    if len(merged) > _MAX_ATTRIBUTES:
        message = f"the run would have {len(merged)} attributes; at most {_MAX_ATTRIBUTES} are accepted"
        return Failure(FailureKind.PERMANENT, "DECIDER_FAILING", message)
    return merged
