"""Putting a task where workers find it: leased to the session that has just ended the work before it, or to one that
waits for work; or ready for a claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from fencepost_server.domain.graph import GraphNode, Work
from fencepost_server.domain.model import DECIDE_TASK, PARKED_UNTIL, LeasedTask, Payload, TaskRow, next_token
from fencepost_server.domain.rows import TaskExtra
from fencepost_server.engine.changes import NewTask
from fencepost_server.engine.context import RunContext, Value
from fencepost_server.engine.operations import WorkerSession


def offer(
    ctx: RunContext,
    node: GraphNode,
    work: Work,
    task_id: int,
    value: Value,
    extra: TaskExtra,
    *,
    token: int = 0,
    undo_output: Payload | None = None,
    at_once: bool = True,
) -> None:
    """A new task. It is leased at once if its input is at hand and whoever reported can take it, or, if nobody has, one
    that waits for work; nobody gets it while the run is paused. ``token`` is the last one of what it goes on from (I3).
    ``at_once`` False: it is left to a claim.
    """
    row = TaskRow(
        ctx.run.run_id, task_id, work.queue, work.handler, ctx.run.priority, node.index, value.seq, value.size, ctx.now,
        0, 0, 0, 0, token, work.lease_ms, work.timeout_ms, None, None, None, extra=extra.to_json(),
    )  # fmt: skip
    put(ctx, row)
    if row.resume_at is not None:
        return
    taking = _taking(ctx, work) if at_once and value.payload is not None else None
    if taking is None:
        ctx.ready(row)
        return
    session, depth, frame_id = taking
    assert value.payload is not None  # only what is at hand is leased at once
    lease(ctx, row, session.session_id)
    ctx.changes.leased.append(
        (
            session,
            LeasedTask(
                row.run_id, task_id, row.token, ctx.run.namespace, ctx.run.workflow_id, ctx.run.definition_hash,
                work.handler, work.queue, row.priority, node.id, 1, work.lease_ms / 1000,
                None if work.timeout_ms is None else work.timeout_ms / 1000, value.payload, None, ctx.run.user_id,
                depth, frame_id, extra.kind, None, undo_output, extra.unfinished,
                extra.step_key(row.run_id),
            ),
        )
    )  # fmt: skip


def put(ctx: RunContext, row: TaskRow) -> None:
    """Insert a task: nobody's yet, and parked while the run is paused."""
    control = ctx.plain
    if control is not None:
        control.open_steps += 1
        if control.paused:
            park_until_resumed(row)
    ctx.changes.rows.new_tasks.append(NewTask(row, ctx.run.namespace))


def park_until_resumed(row: TaskRow) -> None:
    """Nobody gets it while its run is paused."""
    row.resume_at, row.visible_at = row.visible_at, PARKED_UNTIL


def _taking(ctx: RunContext, work: Work) -> tuple[WorkerSession, int, int] | None:
    """The session that takes a new task at once, how many tasks in a row its slot gets so, and the last frame that it
    sent: whoever has reported, once, because a report frees one slot; or, if nobody has, one that waits for work. The
    slot of a DECIDE task is none for a step.
    """
    report = ctx.report
    if report is None or report.task_id == DECIDE_TASK:
        waiting = ctx.env.taker(ctx.run, work.queue, work.handler)
        return None if waiting is None else (waiting, 1, waiting.last_frame())
    if ctx.took_slot:
        return None
    depth = ctx.env.eager(report, ctx.run, work.queue, work.handler)
    if depth is None or report.session is None:
        return None
    ctx.took_slot = True
    return report.session, depth, report.frame_id


def lease(ctx: RunContext, row: TaskRow, session_id: str) -> None:
    """The first attempt at a new task is that session's."""
    ctx.leased[row.task_id] = row.token
    row.attempt = 1
    row.token = next_token(row.token, ctx.env.epoch)
    row.lease_session = session_id
    lease_ms = row.lease_ms
    if row.timeout_ms is not None:
        row.attempt_deadline_at = ctx.now + timedelta(milliseconds=row.timeout_ms)
        lease_ms = min(lease_ms, row.timeout_ms)
    row.lease_expires_at = ctx.now + timedelta(milliseconds=lease_ms)


def take_back(ctx: RunContext, tasks: Sequence[TaskRow]) -> None:
    """These are stopped. Those that this very batch has leased nobody has been told of: nobody had them."""
    untold = {task.task_id: task for task in tasks if task.task_id in ctx.leased}
    if not untold:
        return
    run_id = ctx.run.run_id
    ctx.changes.leased = [
        (session, leased)
        for session, leased in ctx.changes.leased
        if leased.run_id != run_id or leased.task_id not in untold
    ]
    for task_id, task in untold.items():
        task.token, task.attempt = ctx.leased.pop(task_id), 0
        task.lease_session = task.lease_expires_at = task.attempt_deadline_at = None


def back_to_ready(ctx: RunContext, task: TaskRow, delay: float | None) -> None:
    """A task is nobody's again, under another token, from ``task.visible_at`` on (``delay`` None: never)."""
    task.token = next_token(task.token, ctx.env.epoch)
    task.lease_session = task.lease_expires_at = task.attempt_deadline_at = None
    control = ctx.plain
    if control is not None and control.paused and delay is not None:
        park_until_resumed(task)
        delay = None
    ctx.changes.rows.changed_tasks[task.run_id, task.task_id] = task
    if delay is not None:
        ctx.ready(task, delay)
