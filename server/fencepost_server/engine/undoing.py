"""Undoing what a run has done: its completed steps in the reverse order of their completion, one at a time (I8).

Each is a task of its own, with its own retries; what can't be undone blocks the run until a person decides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from fencepost_server.domain.graph import GraphNode
from fencepost_server.domain.model import EventType, Failure, FailureKind, Payload, RunState, TaskKind, TaskRow
from fencepost_server.domain.rows import Place, TaskExtra, UndoRow
from fencepost_server.engine import offering
from fencepost_server.engine.context import RunContext, Value, failure_json, payload_of_row


def remember(
    ctx: RunContext,
    node: GraphNode,
    of_seq: int,
    task: TaskRow,
    extra: TaskExtra,
    output_seq: int | None,
) -> None:
    """A step has completed, or, without an output, has ended otherwise: it can be undone."""
    insert(ctx, UndoRow(
        ctx.run.run_id, of_seq, output_seq is None, node.index, task.task_id, task.input_seq, task.input_bytes,
        output_seq, task.token, extra.place.scope, extra.place.item, _text(extra.plan),
    ))  # fmt: skip


def remember_child(
    ctx: RunContext, node: GraphNode, of_seq: int, place: Place, value: Value, plan: Sequence[str] | None
) -> None:
    """A child has completed: it is undone by the handler of the node that started it. ``value`` was its input."""
    insert(ctx, UndoRow(
        ctx.run.run_id, of_seq, False, node.index, 0, value.seq, value.size, of_seq, 0, place.scope, place.item,
        _text(plan),
    ))  # fmt: skip


def _text(plan: Sequence[str] | None) -> str | None:
    return None if plan is None else json.dumps(plan)


def insert(ctx: RunContext, row: UndoRow) -> None:
    """One more thing that can be undone."""
    ctx.control.undos += 1
    ctx.control.extras = True
    ctx.changes.rows.add(
        "insert_undo", row.run_id, row.of_seq, row.unfinished, row.node_index, row.task_id, row.input_seq,
        row.input_bytes, row.output_seq, row.token, row.scope_id, row.item, row.plan,
    )  # fmt: skip


def could_have_acted(ctx: RunContext, node: GraphNode, of_seq: int, task: TaskRow, extra: TaskExtra) -> None:
    """A step has ended without completing: where its undo handler says so, it is undone all the same."""
    if node.undo_unfinished and (task.attempt > 0 or extra.acted):
        remember(ctx, node, of_seq, task, extra, None)


async def next_one(ctx: RunContext) -> None:
    """Begin to undo the next step. There is one."""
    row, value, output = await _next_row(ctx)
    plan = _plan(row)
    node = ctx.node(row.node_index, plan)
    work = node.undo
    assert work is not None  # else there would be no such row
    ctx.run.state = RunState.UNDOING
    task_id = ctx.event(
        EventType.UNDO_SCHEDULED, node_index=node.index, input_seq=row.input_seq,
        detail={**_of(row), "handler": work.handler, "queue": work.queue, **_named(plan)},
    )  # fmt: skip
    extra = TaskExtra(
        TaskKind.UNDO, row.scope_id, row.item, row.of_seq, row.output_seq, row.unfinished, row.task_id, plan=plan,
        origin=row.origin or "",
    )  # fmt: skip
    offering.offer(ctx, node, work, task_id, value, extra, token=row.token, undo_output=output)


async def _next_row(ctx: RunContext) -> tuple[UndoRow, Value, Payload | None]:
    """What is undone next. Read with what follows it, so that most of the time it is known already."""
    found, ctx.next_undo = ctx.next_undo, None
    if found is None:
        rows = await ctx.read("next_undo", ctx.run.run_id)
        ctx.changes.undo_logs.append(rows)
        found = rows[0]
    row = UndoRow(*found[:14])
    value = Value(row.input_seq, row.input_bytes, payload_of_row(found[14:17]))
    return row, value, None if row.output_seq is None else payload_of_row(found[17:20])


def _of(row: UndoRow) -> dict[str, object]:
    """What is undone: an event of this run, or of an earlier one of its chain."""
    return {"of": row.of_seq} if row.origin is None else {"of": row.origin_seq, "of_run": row.origin}


def _plan(row: UndoRow) -> tuple[str, str, str] | None:
    if row.plan is None:
        return None
    kind, name, options = json.loads(row.plan)
    return kind, name, options


def _named(plan: tuple[str, str, str] | None) -> dict[str, str]:
    """The name for people, of an op."""
    return {} if plan is None else {"node": plan[1]}


def completed(ctx: RunContext, extra: TaskExtra) -> None:
    """An undo task has completed: its step is undone."""
    _forget(ctx, extra.of)
    ctx.control.undone = True
    ctx.next_undo = ctx.env.undo_orders.after(ctx.run.run_id, extra.of)


def _forget(ctx: RunContext, of_seq: int) -> None:
    ctx.control.undos -= 1
    ctx.changes.rows.add("delete_undo", ctx.run.run_id, of_seq)


def failed(ctx: RunContext, task: TaskRow, extra: TaskExtra, failure: Failure) -> None:
    """An undo task has failed for good: the run is BLOCKED until RetryRun. The step stays next in the log, and its
    tokens go on from this task's.
    """
    control = ctx.control
    control.undo_failed = True
    ctx.changes.rows.add("update_undo", ctx.run.run_id, extra.of, task.token)
    message = f"step {failure.node_id} can't be undone: {failure.code}: {failure.message}"
    blocked = Failure(FailureKind.PERMANENT, "UNDO_FAILED", message, None, failure.node_id, failure.attempt)
    ctx.run.failure = blocked.to_json()
    ctx.run.state = RunState.BLOCKED
    ctx.event(EventType.RUN_BLOCKED, detail={"failure": failure_json(blocked)})
    ctx.changes.blocked.append((ctx.run.run_id, ctx.run.workflow_id, blocked.code))


async def skip(ctx: RunContext, reason: str) -> None:
    """An operator leaves the step that is next as it is."""
    row, _value, _output = await _next_row(ctx)
    detail = {"reason": reason, **_named(_plan(row)), **({} if row.origin is None else _of(row))}
    ctx.event(EventType.UNDO_SKIPPED, node_index=row.node_index, input_seq=row.of_seq, detail=detail)
    _forget(ctx, row.of_seq)
    ctx.control.undone = True
