"""Continue as new: a run ends, and another one of the same chain goes on with its work, in one transaction.

What moves along: signals that nobody has taken, the undo log, the dedupe key, the parent, the time by which the run has
to have ended, labels. The new run takes the definition that is active, as every run that starts.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta

from fencepost_server.domain.graph import Graph
from fencepost_server.domain.model import EventType, Payload, RunRow, RunState, TimerKind
from fencepost_server.domain.ops import Advance
from fencepost_server.domain.rows import TOP, Control
from fencepost_server.engine import children, ending, flow
from fencepost_server.engine.changes import NewRun
from fencepost_server.engine.context import RunContext, Value

_TICK = timedelta(microseconds=1)


def following_graph(ctx: RunContext) -> Graph:
    """The definition that the next run takes."""
    return ctx.env.active.get((ctx.run.namespace, ctx.run.workflow_id), ctx.graph)


def is_removed(ctx: RunContext) -> bool:
    """The run's definition was removed, and there is none that the next run could take. The removal holds the lock of
    the deployment that this batch shares: it finds all runs that were made before it, and none is made after it (I9).
    """
    key = (ctx.run.namespace, ctx.run.workflow_id)
    return key not in ctx.env.active and ctx.run.definition_hash in ctx.env.removed.get(key, ())


async def continue_as_new(ctx: RunContext, advance: Advance) -> None:
    """End the run as CONTINUED, and begin the next one."""
    run, control = ctx.run, ctx.control
    next_id = children.child_id(run.run_id, run.next_seq)
    graph = following_graph(ctx)
    chain = control.chain or run.run_id
    attributes = (await ctx.read("attributes", run.run_id))[0][0]
    # The last run of a chain is known by being the newest one, also if the database's clock was put back.
    born = max(ctx.now, run.last_event_at + _TICK)
    new = RunRow(
        next_id, run.namespace, run.workflow_id, graph.hash, run.user_id, run.priority, RunState.PENDING, 0, 1,
        born, run.dedupe_key,
    )  # fmt: skip
    fresh = Control(parent=control.parent, depth=control.depth, chain=chain, previous_run=run.run_id)
    new.control = fresh.to_json()
    ctx.changes.rows.new_runs[next_id] = NewRun(
        new, "", attributes, None if control.parent is None else control.parent[0], chain
    )
    for key, value in (json.loads(attributes) if attributes else {}).items():
        ctx.changes.rows.add("insert_attribute", next_id, key, value, run.namespace, born)
    following = RunContext(ctx.env, new, graph)
    start = _start(following, ctx, advance.output or Payload(json="null"), await _run_timeout(ctx))
    await _move_signals(ctx, following)
    _move_undo_log(ctx, following)
    following.enter(0, TOP, start)
    await flow.pump(following)
    if run.dedupe_key:
        ctx.changes.rows.add(
            "move_key", run.namespace, run.workflow_id, run.dedupe_key, run.run_id, next_id, graph.hash
        )
    following.settle()
    ctx.changes.changed.add(next_id)
    _end(ctx, next_id)


async def _run_timeout(ctx: RunContext) -> tuple[object, ...] | None:
    """The row of its timer; also of one that has passed in a pause, which acts when the next run is resumed."""
    for row in await ctx.read("timer", ctx.run.run_id, 1, TimerKind.RUN_TIMEOUT):
        return row
    fired = await ctx.read("fired_timers", ctx.run.run_id) if ctx.control.paused else ()
    return next((row for row in fired if row[2] == TimerKind.RUN_TIMEOUT), None)


def _start(following: RunContext, ctx: RunContext, value: Payload, deadline: tuple[object, ...] | None) -> Value:
    """The first events of the next run, and the input of its function."""
    detail: dict[str, object] = {"continued_from": ctx.run.run_id}
    fire_at = None
    if deadline is not None:
        fire_at = deadline[4]
        assert isinstance(fire_at, datetime)  # the column's type
        detail["deadline_at"] = fire_at.isoformat()
    following.event(EventType.RUN_STARTED, payload=value, detail=detail)
    start = Value(1, value.size, value)
    if isinstance(fire_at, datetime) and deadline is not None:
        where = json.loads(str(deadline[5]))
        following.start_timer(1, TimerKind.RUN_TIMEOUT, fire_at, 0, TOP, start, ms=where["ms"])
    following.control.paused = ctx.control.paused
    if following.control.paused:
        following.event(EventType.RUN_PAUSED, detail={"reason": f"as run {ctx.run.run_id} was"})
    return start


async def _move_signals(ctx: RunContext, following: RunContext) -> None:
    """Signals that nobody has taken come to the next run, in their order, as events of it."""
    if not ctx.control.signals:
        return
    for name, size, json_text, binary, metadata, detail in await ctx.read("unread_signals", ctx.run.run_id):
        payload = Payload(json_text, None if binary is None else bytes(binary), metadata)
        seq = following.event(EventType.SIGNAL_RECEIVED, payload=payload, detail=json.loads(detail))
        following.control.signals += 1
        following.control.extras = True
        following.changes.rows.add("insert_signal", following.run.run_id, seq, name, size)
    following.inputs = False  # it has not begun to wait


def _move_undo_log(ctx: RunContext, following: RunContext) -> None:
    """The order stays: what is moved gets numbers below all of the new run."""
    if ctx.control.undos:
        following.control.undos = ctx.control.undos
        following.control.undone = ctx.control.undone
        following.control.extras = True
        ctx.changes.rows.add("move_undo", ctx.run.run_id, following.run.run_id, ctx.run.next_seq)


def _end(ctx: RunContext, next_id: str) -> None:
    run, control = ctx.run, ctx.control
    ctx.event(EventType.RUN_CONTINUED, detail={"next": next_id})
    control.next_run = next_id
    control.parent = None  # it hears of the chain's last run
    control.undos = control.signals = 0
    run.dedupe_key = ""  # which is the next run's by now
    ending.end(ctx, RunState.CONTINUED)
