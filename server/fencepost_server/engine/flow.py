"""The decider of graphs: what follows when a node is entered or left (semantics: control flow).

``pump`` works off what an operation has put into the context's queue. Each activation of a node has a place: the top
sequence, or one branch or item of an open parallel or map node. A join counts; only the last one reads outputs.
"""

from __future__ import annotations

import base64
import json
from datetime import timedelta

from fencepost_server.domain.graph import GraphNode
from fencepost_server.domain.input_mapping import MappingFailed
from fencepost_server.domain.json_pointer import MISSING, follow, parse_pointer
from fencepost_server.domain.jsontext import written
from fencepost_server.domain.model import EventType, Payload, RunState, TimerKind
from fencepost_server.domain.nodes import (
    ChildNode,
    ChooseNode,
    MapNode,
    ParallelNode,
    SignalNode,
    SleepNode,
    StepNode,
)
from fencepost_server.domain.rows import Place, ScopeRow
from fencepost_server.domain.violation import Violation
from fencepost_server.engine import children, deciding, ending, steps
from fencepost_server.engine.context import Activation, NotJson, RunContext, Value

WHOLE_ITEM = -1
"""In the table output: the output of a whole branch or item, rather than of one node."""


_MAX_WRITTEN = 16 << 20
"""Bytes of payloads that one batch adds to one run before the rest is put off: a map may build a large input for each
of a thousand items.
"""
_MAX_OPENED = 20_000
"""Items of maps that one batch opens in one run before it puts further maps off: there may be thousands of maps in a
map, with thousands of items each.
"""
_MAX_OPENED_IN_ALL = 3 * _MAX_OPENED
"""The same of all runs of one batch together: many may be started at once."""


async def pump(ctx: RunContext) -> None:
    """Work off the queue. Once the run is ending nothing is begun: what would have been is kept for a retry."""
    while (activation := ctx.next_activation()) is not None:
        entering, index, place, value = activation
        if ctx.graph.code is not None:  # its function decides what follows
            if entering and ctx.control.decider is None:
                deciding.begin(ctx, value)
            continue
        if ctx.written > _MAX_WRITTEN and not ctx.is_ending:
            _put_off(ctx, [activation, *ctx.take_activations()])
            return
        if ctx.is_ending:
            ending.stop_at(ctx, index, place, value, entering=entering)
        elif entering:
            await _enter(ctx, ctx.graph.nodes[index], place, value)
        else:
            await _leave(ctx, ctx.graph.nodes[index], place, value)


def _put_off(ctx: RunContext, activations: list[Activation]) -> None:
    """Go on in another batch, by timers that are due at once: whoever fires them, nothing is forgotten."""
    for entering, index, place, value in activations:
        ctx.control.stops += 1
        ctx.control.open_waits += 1
        ctx.start_timer(-ctx.control.stops, TimerKind.PUT_OFF, ctx.now, index, place, value, enter=int(entering))


async def _enter(ctx: RunContext, node: GraphNode, place: Place, value: Value) -> None:
    if node.parent is None:
        ctx.run.node_index = node.index
    if node.mapping is not None or node.arrival:
        try:
            value = await _arriving(ctx, node, place, value)
        except _Refused as error:
            await ending.fail_node(ctx, node, place, value, "INVALID_NODE_INPUT", str(error))
            return
    match node.node:
        case StepNode():
            steps.schedule(ctx, node, place, value)
        case SleepNode(seconds=seconds):
            _sleep(ctx, node, place, value, seconds)
        case SignalNode():
            await _await_signal(ctx, node, node.node, place, value)
        case ParallelNode():
            scope_id = _open_scope(ctx, node, place, value, len(node.bodies), len(node.bodies), 0)
            for item, body in enumerate(node.bodies):
                ctx.enter(body, Place(scope_id, item), value)
        case MapNode() if _has_opened_enough(ctx):
            _put_off(ctx, [(True, node.index, place, value)])
        case MapNode():
            await _map(ctx, node, node.node, place, value)
        case ChooseNode():
            await _choose(ctx, node, node.node, place, value)
        case ChildNode():
            await children.schedule(ctx, node, node.node, place, value)


async def _leave(ctx: RunContext, node: GraphNode, place: Place, value: Value) -> None:
    if node.recorded:
        _record(ctx, place, node.index, value.seq)
    if node.next is not None:
        await _enter(ctx, ctx.graph.nodes[node.next], place, value)
        return
    if node.parent is None:
        if ctx.graph.output_checks and (fault := await _broken_output(ctx, value)):
            await ending.fail_after(ctx, node, place, value, "OUTPUT_SCHEMA_MISMATCH", fault)
            return
        ctx.run.output_seq = value.seq
        ctx.output_size = value.size
        ctx.event(EventType.RUN_COMPLETED, input_seq=value.seq)
        ending.end(ctx, RunState.COMPLETED)
        return
    parent = ctx.graph.nodes[node.parent]
    if isinstance(parent.node, ChooseNode):
        ctx.leave(parent.index, place, value)
    else:
        await _item_done(ctx, parent, place, value)


async def _broken_output(ctx: RunContext, value: Value) -> str:
    """What is wrong with the output of the workflow; empty if nothing is."""
    if (await ctx.payload(value)).binary is not None:
        return ""
    output = await ctx.json(value)
    faults = [fault for check in ctx.graph.output_checks for fault in check.violations(output)]
    told = "; ".join(f"{fault.path or 'output'}: {fault.message}" for fault in faults[:10])
    return f"the output breaks the schema of the workflow: {told}" if faults else ""


def _record(ctx: RunContext, place: Place, index: int, seq: int) -> None:
    ctx.control.extras = True
    ctx.changes.rows.add("insert_output", ctx.run.run_id, place.scope, place.item, index, seq)


# Inputs


class _Refused(ValueError):
    """A node can't take its input."""


async def _arriving(ctx: RunContext, node: GraphNode, place: Place, value: Value) -> Value:
    """The value that a node begins with: built by its mapping, checked where nobody else does."""
    if node.mapping is not None:
        sources = {source: await _source(ctx, node, place, source) for source in node.mapping.sources}
        try:
            built = node.mapping.build(sources, ctx.env.limits.max_payload_bytes)
        except MappingFailed as error:
            raise _Refused(_told(node, error.violations)) from None
        payload = Payload(json=written(built))
        if len((payload.json or "").encode()) > ctx.env.limits.max_payload_bytes:
            raise _Refused(f"node {node.id}: the input is larger than {ctx.env.limits.max_payload_bytes} bytes")
        seq = ctx.event(EventType.INPUT_BUILT, node_index=node.index, payload=payload, place=place)
        value = Value(seq, payload.size, payload)
        ctx.keep(seq, payload)
    for check in node.arrival:
        payload = await ctx.payload(value)
        if payload.binary is None and (faults := check.violations(await ctx.json(value))):
            raise _Refused(_told(node, faults))
    return value


def _told(node: GraphNode, faults: tuple[Violation, ...] | list[Violation]) -> str:
    return f"node {node.id}: " + "; ".join(f"{fault.path or 'input'}: {fault.message}" for fault in faults[:10])


async def _source(ctx: RunContext, node: GraphNode, place: Place, source: str) -> object:
    """What a mapping takes from: the run's input, an earlier output, or the item of a map around the node."""
    try:
        if not source:
            return await ctx.source(1)
        index = ctx.graph.by_id[source]
        item = await _item_around(ctx, node, place, index)
        if item is not None:
            return await ctx.json(item)
        seq = await ctx.recorded(*await _place_of(ctx, place, index))
        if seq is None:
            raise _Refused(f"node {node.id}: {source} has no output")
        return await ctx.source(seq)
    except NotJson:
        raise _Refused(f"node {node.id}: the value of {source or 'the input'} is binary") from None


async def _item_around(ctx: RunContext, node: GraphNode, place: Place, index: int) -> Value | None:
    """The current item of a map node, if the place is inside it."""
    while place.scope:
        scope = await ctx.scope(place.scope)
        if scope.node_index == index:
            return Value(scope.scope_id + 1 + place.item, 0)
        place = scope.parent
    return None


async def _place_of(ctx: RunContext, place: Place, index: int) -> tuple[int, int, int]:
    """Where an earlier node was active, seen from a place at or below it: scope, node, item."""
    container = _container(ctx, index)
    while place.scope:
        scope = await ctx.scope(place.scope)
        if scope.node_index == container:
            break
        place = scope.parent
    return place.scope, index, place.item


def _container(ctx: RunContext, index: int) -> int | None:
    """The parallel or map node whose scope a node is active in."""
    parent = ctx.graph.nodes[index].parent
    while parent is not None and isinstance(ctx.graph.nodes[parent].node, ChooseNode):
        parent = ctx.graph.nodes[parent].parent
    return parent


# Waiting


def _sleep(ctx: RunContext, node: GraphNode, place: Place, value: Value, seconds: float) -> None:
    fire_at = ctx.now + timedelta(seconds=seconds)
    seq = ctx.event(
        EventType.TIMER_STARTED, node_index=node.index, input_seq=value.seq,
        detail={"fire_at": fire_at.isoformat()}, place=place,
    )  # fmt: skip
    ctx.control.open_waits += 1
    ctx.start_timer(seq, TimerKind.SLEEP, fire_at, node.index, place, value)


async def _await_signal(ctx: RunContext, node: GraphNode, signal: SignalNode, place: Place, value: Value) -> None:
    timeout = signal.timeout_seconds
    fire_at = None if timeout is None else ctx.now + timedelta(seconds=timeout)
    detail = {"name": signal.signal}
    if fire_at is not None:
        detail["timeout_at"] = fire_at.isoformat()
    seq = ctx.event(EventType.SIGNAL_AWAITED, node_index=node.index, input_seq=value.seq, detail=detail, place=place)
    control = ctx.control
    if control.signals and not control.paused:
        rows = await ctx.read("signal", ctx.run.run_id, signal.signal)
        if rows:
            signal_seq, size = rows[0]
            ctx.changes.rows.add("delete_signal", ctx.run.run_id, signal_seq, signal.signal)
            control.signals -= 1
            control.began = True
            ctx.event(EventType.SIGNAL_TAKEN, node_index=node.index, task_id=seq, input_seq=signal_seq, place=place)
            ctx.leave(node.index, place, Value(signal_seq, size))
            return
    control.open_waits += 1
    control.extras = True
    where = {"node": node.index, "scope": place.scope, "item": place.item, "timed": fire_at is not None,
             "seq": value.seq, "size": value.size}  # fmt: skip
    ctx.changes.rows.add("insert_wait", ctx.run.run_id, seq, signal.signal, json.dumps(where))
    if fire_at is not None:
        ctx.start_timer(seq, TimerKind.SIGNAL_TIMEOUT, fire_at, node.index, place, value)


def take_signal(ctx: RunContext, wait_seq: int, name: str, where: str, signal_seq: int, size: int) -> None:
    """A wait takes a signal and ends. The caller removes the signal's row, if it has one."""
    place = json.loads(where)
    at = Place(place["scope"], place["item"])
    rows = ctx.changes.rows
    rows.add("delete_wait", ctx.run.run_id, wait_seq, name)
    if place["timed"]:
        rows.add("delete_timer", ctx.run.run_id, wait_seq, TimerKind.SIGNAL_TIMEOUT)
    ctx.control.open_waits -= 1
    ctx.control.began = True
    ctx.event(EventType.SIGNAL_TAKEN, node_index=place["node"], task_id=wait_seq, input_seq=signal_seq, place=at)
    ctx.leave(place["node"], at, Value(signal_seq, size))


# Scopes


def _open_scope(
    ctx: RunContext, node: GraphNode, place: Place, value: Value, total: int, begun: int, item_bytes: int
) -> int:
    scope_id = ctx.event(
        EventType.SCOPE_OPENED, node_index=node.index, input_seq=value.seq, detail={"items": total}, place=place
    )
    ctx.open_scope(
        ScopeRow(ctx.run.run_id, scope_id, node.index, total, 0, begun, item_bytes, 0, place.scope, place.item)
    )
    return scope_id


def _has_opened_enough(ctx: RunContext) -> bool:
    """Whether further maps are for another batch."""
    return ctx.opened >= _MAX_OPENED or ctx.changes.opened >= _MAX_OPENED_IN_ALL


async def _map(ctx: RunContext, node: GraphNode, map_: MapNode, place: Place, value: Value) -> None:
    """All inputs are written at once, as events that follow the opening: item i's is event scope + 1 + i."""
    try:
        items = follow(await ctx.json(value), parse_pointer(map_.over))
    except NotJson as error:
        await ending.fail_node(ctx, node, place, value, "INVALID_NODE_INPUT", f"node {node.id}: {error}")
        return
    if _has_opened_enough(ctx):  # by now: while this one was read, other runs have opened theirs
        _put_off(ctx, [(True, node.index, place, value)])
        return
    limit = ctx.env.limits.max_map_items
    if not isinstance(items, list):
        what = "points nowhere" if items is MISSING else "is no array"
        message = f"node {node.id}: {map_.over or 'the input'} {what}"
        await ending.fail_node(ctx, node, place, value, "INVALID_NODE_INPUT", message)
        return
    if len(items) > limit:
        message = f"node {node.id}: {map_.over or 'the input'} has {len(items)} items; at most {limit} are accepted"
        await ending.fail_node(ctx, node, place, value, "INVALID_NODE_INPUT", message)
        return
    ctx.opened += len(items)
    ctx.changes.opened += len(items)
    texts = [written(item) for item in items]
    largest = max(map(len, texts), default=0)
    begun = min(len(texts), map_.max_parallel)
    scope_id = _open_scope(ctx, node, place, value, len(texts), begun, largest)
    for item, text in enumerate(texts):
        payload = Payload(json=text)
        seq = ctx.event(
            EventType.ITEM_OPENED, node_index=node.index, task_id=scope_id, payload=payload, detail={"item": item}
        )
        ctx.keep(seq, payload)
    for item in range(begun):
        ctx.enter(node.bodies[0], Place(scope_id, item), Value(scope_id + 1 + item, len(texts[item])))
    if not texts:
        await _join(ctx, node, await ctx.scope(scope_id))


async def _item_done(ctx: RunContext, parent: GraphNode, place: Place, value: Value) -> None:
    """A branch or item has ended: count it, begin the next one, join after the last."""
    scope = await ctx.scope(place.scope)
    _record(ctx, place, WHOLE_ITEM, value.seq)
    scope.done += 1
    scope.output_bytes += value.size
    if scope.next_item < scope.total:
        item = scope.next_item
        scope.next_item += 1
        ctx.enter(parent.bodies[0], Place(place.scope, item), Value(place.scope + 1 + item, scope.item_bytes))
    if scope.done == scope.total:
        await _join(ctx, parent, scope)
    else:
        ctx.change_scope(scope)


async def _join(ctx: RunContext, node: GraphNode, scope: ScopeRow) -> None:
    """The joined output: an object of the branches' outputs, an array of the items', or their count if that is too
    large.
    """
    limit = ctx.env.limits.max_payload_bytes
    text = json.dumps({"count": scope.total})
    if scope.output_bytes + scope.total <= limit:
        rows = await ctx.read("outputs", ctx.run.run_id, scope.scope_id)
        parts = [_as_json(json_text, binary) for _item, json_text, binary in rows]
        if isinstance(node.node, ParallelNode):
            names = [json.dumps(ctx.graph.nodes[body].branch) for body in node.bodies]
            joined = "{" + ",".join(f"{name}:{part}" for name, part in zip(names, parts, strict=True)) + "}"
        else:
            joined = "[" + ",".join(parts) + "]"
        if len(joined.encode()) <= limit:
            text = joined
    payload = Payload(json=text)
    seq = ctx.event(
        EventType.SCOPE_CLOSED, node_index=node.index, task_id=scope.scope_id, payload=payload, place=scope.parent
    )
    ctx.close_scope(scope)
    ctx.leave(node.index, scope.parent, Value(seq, payload.size, payload))


def _as_json(json_text: str | None, binary: bytes | None) -> str:
    """One part of a joined output. What is binary is told as base64, because JSON has nothing else for it."""
    if binary is not None:
        return json.dumps({"binary": base64.b64encode(binary).decode()})
    return json_text if json_text is not None else "null"


async def _choose(ctx: RunContext, node: GraphNode, choose: ChooseNode, place: Place, value: Value) -> None:
    conditional = any(case.when is not None for case in choose.cases)
    try:
        looked_at = await ctx.json(value) if conditional else None
    except NotJson:
        looked_at = MISSING
    chosen = next((i for i, case in enumerate(choose.cases) if case.when is None or case.when.holds(looked_at)), None)
    ctx.event(
        EventType.CHOICE_MADE, node_index=node.index, input_seq=value.seq,
        detail={"case": -1 if chosen is None else chosen}, place=place,
    )  # fmt: skip
    if chosen is None:
        ctx.leave(node.index, place, value)
    else:
        ctx.enter(node.bodies[chosen], place, value)
