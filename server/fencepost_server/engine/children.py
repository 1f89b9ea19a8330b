"""Child runs: started, told to end and heard of by messages of the outbox, each applied once (semantics: children).

A child's id is fixed by the event that schedules it, so that however often its start is delivered there is one child.
A start whose parent is ending by then is dropped, and the parent told as if the child had been cancelled.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from fencepost_server.domain.graph import GraphNode
from fencepost_server.domain.model import EventType, Failure, FailureKind, Payload, RunState
from fencepost_server.domain.nodes import ChildNode
from fencepost_server.domain.rows import ChildRow, Control, Place
from fencepost_server.domain.transitions import RunEvent, Verdict
from fencepost_server.engine import ending, undoing
from fencepost_server.engine.context import Rows, RunContext, Value, failure_json
from fencepost_server.engine.operations import Deliver, MessageKind

MAX_DEPTH = 32
"""Children of children: cycles are refused at registration, but which definition is active may change."""
_MAX_HOPS = 1000
"""Runs of one chain that are looked through for its last."""


def child_id(run_id: str, seq: int) -> str:
    """The id of the child that event ``seq`` of a run schedules."""
    return str(uuid.uuid5(uuid.UUID(run_id), str(seq)))


async def schedule(ctx: RunContext, node: GraphNode, child: ChildNode, place: Place, value: Value) -> None:
    """A child is to be started."""
    control = ctx.control
    if control.depth + 1 > MAX_DEPTH:
        message = f"node {node.id}: more than {MAX_DEPTH} runs would be inside each other"
        await ending.fail_node(ctx, node, place, value, "INVALID_NODE_INPUT", message)
        return
    run = ctx.run
    run_id = child_id(run.run_id, run.next_seq)
    seq = ctx.event(
        EventType.CHILD_SCHEDULED, node_index=node.index, input_seq=value.seq,
        detail={"child": run_id, "workflow": child.workflow}, place=place,
    )  # fmt: skip
    where = {"node": node.index, "scope": place.scope, "item": place.item, "seq": value.seq, "size": value.size}
    start(ctx, seq, run_id, child, where)


def start(ctx: RunContext, seq: int, run_id: str, child: ChildNode, where: dict[str, Any]) -> None:
    """Write a child down, and send for it. ``where`` is what its row tells of the node that starts it. One that is left
    alone when its parent ends is started although the parent has completed meanwhile.
    """
    run, control = ctx.run, ctx.control
    ctx.changes.rows.add("insert_child", run.run_id, seq, run_id, json.dumps(where))
    control.open_children += 1
    control.extras = True
    _send_for(ctx, seq, run_id, child, where)


def _send_for(ctx: RunContext, seq: int, run_id: str, child: ChildNode, where: dict[str, Any]) -> None:
    run, control = ctx.run, ctx.control
    body = {
        "parent_seq": seq, "workflow": child.workflow, "input_seq": where["seq"], "user_id": run.user_id,
        "priority": run.priority, "depth": control.depth + 1, "size": where["size"],
    }  # fmt: skip
    if child.on_parent_end == "abandon":
        body["detached"] = True
    ctx.send(run_id, MessageKind.START_CHILD, seq, body)


def cancel(ctx: RunContext, child: ChildRow) -> None:
    """A function wants a child no more. Its row says so: one that has not begun by then never does."""
    ctx.send(child.child_run_id, MessageKind.CANCEL_CHILD, child.seq, {"parent_seq": child.seq})
    place = json.dumps({**json.loads(child.place), "cancelled": True})
    ctx.changes.rows.add("update_child", child.run_id, child.seq, place)


def answer_for_missing(
    deliver: Deliver, failure: Failure, state: RunState = RunState.CANCELLED
) -> tuple[str, int, str, int, str, str]:
    """The message to a parent whose child never was: a row of insert_message. If that is because the parent was ending
    when the start came, it says so: the parent can have been retried before it gets to know. It also says if the start
    was refused: there is no run to look at.
    """
    parent_seq = json.loads(deliver.body)["parent_seq"]
    body = {"parent_seq": parent_seq, "state": int(state), "output_seq": None, "failure": failure_json(failure)}
    if deliver.kind is MessageKind.START_CHILD:
        body["start_dropped" if state is RunState.CANCELLED else "start_refused"] = True
    kind = int(MessageKind.CHILD_ENDED)
    return (deliver.source_run, kind, deliver.run_id, 0, deliver.namespace, json.dumps(body))


def never_started() -> Failure:
    """The failure of a child whose parent ended before it began."""
    return Failure(FailureKind.PERMANENT, "RUN_CANCELLED", "the parent ended before the child had begun")


async def told_to_end(ctx: RunContext, deliver: Deliver) -> None:
    """The parent of the run ends, and takes it along. What has continued as new is told as that."""
    if ctx.plain is not None and ctx.plain.next_run:
        found = await ctx.read("chain_end", ctx.plain.chain or ctx.run.run_id)
        ctx.send(
            found[0][0] if found else ctx.plain.next_run, deliver.kind, deliver.source_seq, json.loads(deliver.body)
        )
        return
    if deliver.kind is MessageKind.TERMINATE_CHILD:
        if ctx.verdict(RunEvent.TERMINATE) is Verdict.ACT:
            await ending.terminate(ctx, f"its parent, run {deliver.source_run}, ended")
        return
    if ctx.verdict(RunEvent.CANCEL) is Verdict.ACT:
        message = f"cancelled with its parent, run {deliver.source_run}"
        await ending.begin(ctx, RunState.CANCELLED, Failure(FailureKind.PERMANENT, "RUN_CANCELLED", message))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a child ended."""

    run_id: str
    state: RunState
    output_seq: int | None
    failure: Failure | None
    refused: bool = False
    """It could not be started: no such run is there."""


async def ended(ctx: RunContext, deliver: Deliver) -> None:
    """A child of the run has ended. What a run that has ended itself had left alone, a retry looks up."""
    body = json.loads(deliver.body)
    rows = await ctx.read("child", ctx.run.run_id, body["parent_seq"])
    if not rows or ctx.state.final:
        return
    child = ChildRow(*rows[0])
    if body.get("start_dropped") and ctx.control.ending is None:  # it goes on: the retry came before this
        await _begin_anew(ctx, child)
    elif not (ctx.is_ending and _left_alone(ctx, child)):
        failure = None if body["failure"] is None else Failure.from_json(json.dumps(body["failure"]))
        state, refused = RunState(body["state"]), body.get("start_refused", False)
        outcome = _Outcome(deliver.source_run, state, body["output_seq"], failure, refused)
        await _ended(ctx, child, outcome)


async def left_alone(ctx: RunContext) -> list[ChildRow]:
    """The children that a run had when it failed and did not end with it."""
    return [ChildRow(*row) for row in await ctx.read("children", ctx.run.run_id)]


async def take_up(ctx: RunContext, left: list[ChildRow]) -> None:
    """A run goes on after a failure: it waits again for the children that it had left alone, and hears of those that
    have ended meanwhile. One that is not kept any more is started anew. They are counted as open already.
    """
    for child in left:
        if ctx.is_ending:
            return
        run_id, found = await _last_of_chain(ctx, child.child_run_id)
        if not found:
            if not await ctx.read("child_on_its_way", child.child_run_id, ctx.run.run_id):
                await _begin_anew(ctx, child)
            continue
        state, output_seq = RunState(found[0][0]), found[0][4]
        if output_seq is not None and not await ctx.read("payload", run_id, output_seq):
            await _begin_anew(ctx, child)  # it is being deleted, newest events first: its output is gone
        elif state.final:
            failure = None if found[0][5] is None else Failure.from_json(found[0][5])
            await _ended(ctx, child, _Outcome(run_id, state, output_seq, failure))


async def _begin_anew(ctx: RunContext, child: ChildRow) -> None:
    """A child that is not there, and is counted as open, is started once more; not one that is not wanted any more."""
    index, place, value = _where(child)
    plan = _plan(child)
    if json.loads(child.place).get("cancelled"):
        await _ended(ctx, child, _Outcome(child.child_run_id, RunState.CANCELLED, None, never_started()))
        return
    if plan is not None:  # of a code run: an op has one child, which has not begun
        node = ctx.node(index, plan).node
        assert isinstance(node, ChildNode)  # such a plan is of a child
        _send_for(ctx, child.seq, child.child_run_id, node, json.loads(child.place))
        return
    ctx.control.open_children -= 1
    ctx.changes.rows.add("delete_child", child.run_id, child.seq)
    ctx.enter(index, place, value)


async def _last_of_chain(ctx: RunContext, run_id: str) -> tuple[str, Rows]:
    """The run that a child has become, by continuing as new, and its row of the statement run_state. Those before it,
    even the first, may be kept no more.
    """
    for (newest,) in await ctx.read("chain_end", run_id):
        run_id = newest
    found = await ctx.read("run_state", run_id)
    for _ in range(_MAX_HOPS):  # the newest is the last, unless the database's clock was put back
        if not found or found[0][0] != RunState.CONTINUED or not found[0][3]:
            break
        next_run = Control.from_json(found[0][3]).next_run
        if not next_run:
            break
        run_id, found = next_run, await ctx.read("run_state", next_run)
    return run_id, found


def _left_alone(ctx: RunContext, child: ChildRow) -> bool:
    """Nobody waits for such a child once its parent ends."""
    node = ctx.node(_where(child)[0], _plan(child)).node
    return isinstance(node, ChildNode) and node.on_parent_end == "abandon"


def _plan(child: ChildRow) -> list[str] | None:
    """Of a child of a code run: what stands for its node."""
    plan: list[str] | None = json.loads(child.place).get("plan")
    return plan


def _where(child: ChildRow) -> tuple[int, Place, Value]:
    """The node that started a child, where, and with what."""
    where = json.loads(child.place)
    return where["node"], Place(where["scope"], where["item"]), Value(where["seq"], where["size"])


async def _ended(ctx: RunContext, child: ChildRow, outcome: _Outcome) -> None:
    index, place, value = _where(child)
    node = ctx.node(index, _plan(child))
    ctx.changes.rows.add("delete_child", child.run_id, child.seq)
    ctx.control.open_children -= 1
    ctx.control.began = True
    if outcome.state is RunState.COMPLETED and outcome.output_seq is not None:
        await _completed(ctx, node, child, outcome, place, value)
        return
    cause = outcome.failure
    why = "" if cause is None else f": {cause.code}: {cause.message}"
    what = (
        "the child could not be started" if outcome.refused else f"child run {outcome.run_id} is {outcome.state.name}"
    )
    failure = Failure(
        FailureKind.PERMANENT if cause is None else cause.kind,
        "CHILD_FAILED", f"{what}{why}", None, node.id,
    )  # fmt: skip
    _event(ctx, node, child, outcome.state, place, failure=failure)
    if ctx.graph.code is not None:  # its function is told
        await ending.go_on(ctx)
    elif ctx.is_ending:
        ending.stop_at(ctx, index, place, value, entering=True)
        await ending.go_on(ctx)
    else:
        await ending.begin(ctx, RunState.FAILED, failure, stopped=(True, index, place, value))


async def _completed(
    ctx: RunContext, node: GraphNode, child: ChildRow, outcome: _Outcome, place: Place, value: Value
) -> None:
    assert outcome.output_seq is not None  # it has completed
    payload = await ctx.payload_of(outcome.run_id, outcome.output_seq)
    faults = [] if payload.binary is not None else node.violations(await ctx.json(Value(0, 0, payload)))
    ended_seq = _event(ctx, node, child, RunState.COMPLETED, place, payload=payload)
    if faults:
        told = "; ".join(f"{fault.path or 'output'}: {fault.message}" for fault in faults[:10])
        message = f"the output of child run {child.child_run_id} breaks the schema of node {node.id}: {told}"
        await ending.fail_node(ctx, node, place, value, "OUTPUT_SCHEMA_MISMATCH", message)
        return
    if node.undo is not None:
        undoing.remember_child(ctx, node, ended_seq, place, value, _plan(child))
    output = Value(ended_seq, payload.size, payload)
    if ctx.is_ending:
        ending.stop_at(ctx, node.index, place, output, entering=False)
        await ending.go_on(ctx)
    else:
        ctx.leave(node.index, place, output)


def _event(
    ctx: RunContext,
    node: GraphNode,
    child: ChildRow,
    state: RunState,
    place: Place,
    *,
    payload: Payload | None = None,
    failure: Failure | None = None,
) -> int:
    detail: dict[str, Any] = {"child": child.child_run_id, "state": int(state)}
    if failure is not None:
        detail["failure"] = failure_json(failure)
    if ctx.graph.code is not None:
        detail["node"] = node.id
    return ctx.event(
        EventType.CHILD_ENDED, node_index=node.index, task_id=child.seq, payload=payload, detail=detail, place=place
    )
