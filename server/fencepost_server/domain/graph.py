"""What a graph definition is at run time: its nodes by index, with what follows each and what its output has to be.

A node's index is its position in preorder (a container comes before the nodes in it): the number that stored rows
have. The deciding itself is engine.flow's; this is what it looks things up in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fencepost_server.domain.input_mapping import InputMapping
from fencepost_server.domain.jsontext import canonical_value
from fencepost_server.domain.manifest import Manifest, parse_manifest
from fencepost_server.domain.model import TimerKind
from fencepost_server.domain.nodes import (
    ChildNode,
    ChooseNode,
    MapNode,
    Node,
    SignalNode,
    StepNode,
    Undo,
    bodies,
)
from fencepost_server.domain.policy import RetryPolicy
from fencepost_server.domain.schema import CompiledSchema, compile_schema
from fencepost_server.domain.violation import Violation


@dataclass(frozen=True, slots=True)
class Work:
    """What a task of a node is made of: its step's, or that of the step's undo."""

    handler: str
    queue: str
    lease_ms: int
    timeout_ms: int | None
    retry: RetryPolicy


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node. ``checks``: what its output has to satisfy. ``arrival``: what its input has to, where nobody else
    sees to that. ``recorded``: something later refers to its output.
    """

    index: int
    id: str
    node: Node
    next: int | None
    parent: int | None
    """The container whose body it is in."""
    bodies: tuple[int, ...]
    """The first node of each body."""
    branch: str
    """Of the last node of a branch of a parallel node, found by its first: the name of its output."""
    work: Work | None
    undo: Work | None
    undo_unfinished: bool
    mapping: InputMapping | None
    checks: tuple[CompiledSchema, ...]
    arrival: tuple[CompiledSchema, ...]
    recorded: bool
    timeouts: tuple[tuple[TimerKind, float], ...]
    """Of the step as a whole, over all attempts, in seconds."""

    def violations(self, output: object) -> list[Violation]:
        """Every fault of an output, against the node's own schema and what follows it."""
        return _faults(self.checks, output)


@dataclass(frozen=True, slots=True)
class Code:
    """Where the DECIDE tasks of a code workflow wait: ``handler`` is made of its id and its compatibility id."""

    handler: str
    queue: str
    compatibility_id: str


@dataclass(frozen=True, slots=True)
class Graph:
    """A definition, ready to decide with. ``simple``: a sequence of steps, and nothing beyond."""

    manifest: Manifest | None
    hash: bytes
    input_checks: tuple[CompiledSchema, ...]
    nodes: tuple[GraphNode, ...]
    simple: bool
    by_id: dict[str, int] = field(hash=False)
    signal_checks: dict[str, tuple[CompiledSchema, ...]] = field(hash=False)
    """What the payload of a signal of that name has to satisfy."""
    output_checks: tuple[CompiledSchema, ...] = ()
    """What the output of the workflow has to satisfy, where no step makes it that could be told."""
    code: Code | None = None
    """Of a code workflow: who decides. It has no nodes."""
    broken: str = ""
    """Why nothing can be decided with it: its manifest is gone, or this release can't read it."""

    def node_id(self, index: int) -> str:
        """The id of a node; empty if the definition is broken."""
        return "" if self.broken or self.code is not None else self.nodes[index].id

    def input_violations(self, value: object) -> list[Violation]:
        """Every fault of a run's input."""
        return _faults(self.input_checks, value)

    def signal_violations(self, name: str, value: object) -> list[Violation]:
        """Every fault of a signal's payload."""
        return _faults(self.signal_checks.get(name, ()), value)

    def work(self, index: int, *, undo: bool) -> Work:
        """What a task of a node is made of."""
        work = self.nodes[index].undo if undo else self.nodes[index].work
        assert work is not None  # tasks are made of nodes that have it
        return work


def _faults(checks: Sequence[CompiledSchema], value: object) -> list[Violation]:
    for check in checks:
        if faults := check.violations(value):
            return faults
    return []


def decide_handler(workflow_id: str, compatibility_id: str) -> str:
    """What a DECIDE task is claimed by. No step's handler can have such a name."""
    return f"{workflow_id}@{compatibility_id}"


def compile_graph(canonical_manifest: str) -> Graph:
    """From a manifest that was valid when it was registered. Raises ManifestInvalid if this release can't read it."""
    return compile_manifest(parse_manifest(canonical_manifest))


def compile_manifest(manifest: Manifest) -> Graph:
    """From a valid manifest."""
    if manifest.code is not None:
        code = Code(
            decide_handler(manifest.workflow_id, manifest.compatibility_id), manifest.code, manifest.compatibility_id
        )
        return Graph(
            manifest, manifest.hash, _compiled(manifest.input_schema), (), False, {}, {},
            _compiled(manifest.output_schema), code,
        )  # fmt: skip
    flat = _flatten(manifest.nodes)
    by_id = {place.node.id: index for index, place in enumerate(flat)}
    sources = {source for place in flat if (mapping := _mapping(place.node)) for source in mapping.sources}
    nodes = tuple(_compile(index, place, flat, manifest, sources) for index, place in enumerate(flat))
    first = manifest.nodes[0]
    arriving = first.input_schema if isinstance(first, StepNode | ChildNode) and first.input is None else None
    signals: dict[str, list[object]] = {}
    for place in flat:
        if isinstance(place.node, SignalNode) and place.node.output_schema is not None:
            signals.setdefault(place.node.signal, []).append(place.node.output_schema)
    return Graph(
        manifest,
        manifest.hash,
        _compiled(manifest.input_schema, arriving),
        nodes,
        all(_plain(place.node) for place in flat),
        by_id,
        {name: _compiled(*schemas) for name, schemas in signals.items()},
        _output_checks(manifest),
    )


def compile_nodes(nodes: Sequence[Node]) -> tuple[GraphNode, ...]:
    """Nodes that belong to no manifest: those that stand for the ops of code workflows."""
    flat = _flatten(nodes)
    return tuple(_compile(index, place, flat, None, set()) for index, place in enumerate(flat))


def _output_checks(manifest: Manifest) -> tuple[CompiledSchema, ...]:
    """A step and a child are checked when they end. The output of a map is not: where it is only a count, no schema
    foresees it.
    """
    last = manifest.nodes[-1]
    return () if isinstance(last, StepNode | ChildNode | MapNode) else _compiled(manifest.output_schema)


def broken_graph(hash_: bytes, why: str) -> Graph:
    """What stands for a definition that can't be had."""
    return Graph(None, hash_, (), (), False, {}, {}, broken=why)


@dataclass(slots=True)
class _Flat:
    node: Node
    parent: int | None
    previous: int | None = None
    next: int | None = None
    bodies: tuple[int, ...] = ()
    branch: str = ""


def _flatten(nodes: Sequence[Node]) -> list[_Flat]:
    """All nodes in preorder."""
    flat: list[_Flat] = []

    def walk(sequence: Sequence[Node], parent: int | None) -> int:
        previous: int | None = None
        first = len(flat)
        for node in sequence:
            index = len(flat)
            flat.append(_Flat(node, parent, previous))
            if previous is not None:
                flat[previous].next = index
            flat[index].bodies = tuple(walk(body, index) for body, _ in bodies(node, ""))
            previous = index
        flat[first].branch = sequence[-1].id
        return first

    walk(nodes, None)
    return flat


def _plain(node: Node) -> bool:
    """A step that brings nothing but a task."""
    return (
        isinstance(node, StepNode)
        and node.undo is None
        and node.input is None
        and node.queue_timeout_seconds is None
        and node.total_timeout_seconds is None
    )


def _mapping(node: Node) -> InputMapping | None:
    return node.input if isinstance(node, StepNode | ChildNode) else None


def _compile(
    index: int, place: _Flat, flat: Sequence[_Flat], manifest: Manifest | None, sources: set[str]
) -> GraphNode:
    node = place.node
    undo = node.undo if isinstance(node, StepNode | ChildNode) else None
    own = node.output_schema if isinstance(node, StepNode | ChildNode | SignalNode) else None
    return GraphNode(
        index,
        node.id,
        node,
        place.next,
        place.parent,
        place.bodies,
        place.branch,
        _work(node) if isinstance(node, StepNode) else None,
        None if undo is None else _work(undo),
        undo is not None and undo.unfinished,
        _mapping(node),
        _compiled(own, _following(index, flat, manifest)) if isinstance(node, StepNode | ChildNode) else (),
        _arrival(place, flat),
        node.id in sources,
        _timeouts(node),
    )


def _timeouts(node: Node) -> tuple[tuple[TimerKind, float], ...]:
    if not isinstance(node, StepNode):
        return ()
    both = (
        (TimerKind.QUEUE_TIMEOUT, node.queue_timeout_seconds),
        (TimerKind.TOTAL_TIMEOUT, node.total_timeout_seconds),
    )
    return tuple((kind, seconds) for kind, seconds in both if seconds is not None)


def _work(made_of: StepNode | Undo) -> Work:
    timeout = made_of.timeout_seconds
    return Work(
        made_of.handler,
        made_of.queue,
        round(made_of.lease_seconds * 1000),
        None if timeout is None else round(timeout * 1000),
        made_of.retry,
    )


def _following(index: int, flat: Sequence[_Flat], manifest: Manifest | None) -> object | None:
    """The schema of what takes the output of a node, where registration could not compare the two: the step that
    makes the output is told, and can do better.
    """
    place = flat[index]
    if place.next is not None:
        following = flat[place.next].node
        if isinstance(following, StepNode | ChildNode) and following.schema_check == "runtime":
            return following.input_schema
        return None
    if place.parent is None:
        return None if manifest is None else manifest.output_schema
    if isinstance(flat[place.parent].node, ChooseNode):
        return _following(place.parent, flat, manifest)
    return None


def _arrival(place: _Flat, flat: Sequence[_Flat]) -> tuple[CompiledSchema, ...]:
    """What to check of a node's input when it is entered: what a mapping builds, and what comes from where nobody
    checks it.
    """
    node = place.node
    if not isinstance(node, StepNode | ChildNode) or node.input_schema is None:
        return ()
    first = place.previous is None and place.parent is None
    from_step = place.previous is not None and isinstance(flat[place.previous].node, StepNode | ChildNode)
    if node.input is not None or (node.schema_check == "runtime" and not first and not from_step):
        return _compiled(node.input_schema)
    return ()


def _compiled(*schemas: object) -> tuple[CompiledSchema, ...]:
    """Each distinct schema once; told apart canonically, because Python's 1 == True."""
    distinct = {canonical_value(schema): schema for schema in schemas if schema is not None}
    return tuple(compile_schema(schema) for schema in distinct.values())
