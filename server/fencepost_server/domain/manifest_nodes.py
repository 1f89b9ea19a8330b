"""Reads the nodes of a manifest, of every kind and however deep: the reading side of `nodes`.

Each kind has a reader in `_KINDS`, found by the key that names it. A node with faults is read on, so that the
other faults are found too; the paths of those that tell nothing of what they give are in `unread`.

An `input:` may take from what has run where its node stands: what stands before the node in its own sequence,
and before each container that the node is in, and the item of each map that it is in. What is inside another
container has not run for certain, or has run many times: only the container has an output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fencepost_server.domain.durations import format_duration
from fencepost_server.domain.input_mapping import FROM, InputMapping
from fencepost_server.domain.manifest_reader import Faults, ObjectReader, read_items
from fencepost_server.domain.nodes import (
    Case,
    ChildNode,
    ChooseNode,
    MapNode,
    Node,
    ParallelNode,
    SignalNode,
    SleepNode,
    StepNode,
    Undo,
)
from fencepost_server.domain.policy import RetryPolicy
from fencepost_server.domain.violation import shown

MAX_NESTING = 20
"""Containers inside each other."""
MAX_BRANCHES = 100
"""Branches of one `parallel`, and cases of one `choose`."""
MAX_PARALLEL_ITEMS = 1_000
DEFAULT_PARALLEL_ITEMS = 10

_DEFAULTS = RetryPolicy()
_LONGEST_WAIT = "3650d"
_UNREAD = SleepNode("", 0.0)
"""Stands where there is no node to be read."""

_Scopes = tuple[set[str], ...]
"""The ids that may be taken from: of the sequence that is being read, last, and of all that it stands in."""
_Body = tuple[tuple[Node, ...], list[object]]
"""A sequence, and its canonical spelling."""


@dataclass(slots=True)
class NodeReader:
    """Reads all nodes of one manifest, of the workflow `workflow_id`."""

    workflow_id: str
    max_nodes: int
    faults: Faults
    unread: set[str] = field(default_factory=set)
    children: set[str] = field(default_factory=set)
    _places: dict[str, str] = field(default_factory=dict)
    _count: int = 0
    _not_run: list[tuple[str, str]] = field(default_factory=list)

    def read(self, top: ObjectReader) -> tuple[Node, ...]:
        """Read the sequence of a manifest, with all that is in it."""
        nodes, spelled = self._sequence(top.items("sequence", self.max_nodes), (), 0)
        top.canonical["sequence"] = spelled
        for path, source in self._not_run:
            if source in self._places:
                self.faults.add(path, f"{source} ({self._places[source]}) has not run where this node stands")
            else:
                self.faults.add(path, f"no node is called {shown(source)}")
        return nodes

    def _sequence(self, items: list[tuple[object, str]], scopes: _Scopes, nesting: int) -> _Body:
        nodes: list[Node] = []
        spelled: list[object] = []
        before: set[str] = set()
        for value, path in items:
            self._count += 1
            if self._count > self.max_nodes:
                if self._count == self.max_nodes + 1:
                    self.faults.add(path, f"is one node too many; at most {self.max_nodes} are accepted in all")
                self.unread.add(path)
                nodes.append(_UNREAD)
                continue
            reader = ObjectReader(value, path, self.faults)
            node = self._node(reader, (*scopes, before), nesting) if reader.is_object else None
            if node is None:
                self.unread.add(path)
            else:
                before.add(node.id)
            nodes.append(node or _UNREAD)
            spelled.append(reader.canonical)
        return tuple(nodes), spelled

    def _node(self, reader: ObjectReader, scopes: _Scopes, nesting: int) -> Node | None:
        node_id = reader.name("id")
        if node_id in self._places:
            reader.fault("id", f"{node_id} is already the id of {self._places[node_id]}")
        elif node_id:
            self._places[node_id] = reader.path
        kinds = [kind for kind in _KINDS if kind in reader]
        if len(kinds) > 1:
            for kind in kinds[1:]:
                reader.fault(kind, f"a node is of one kind, and this one has {kinds[0]}")
            return None
        kind = kinds[0] if kinds else "step"
        if kind in _CONTAINERS and nesting >= MAX_NESTING:
            reader.fault(kind, f"nodes are nested more than {MAX_NESTING} deep")
            return None
        node = _KINDS[kind](self, reader, node_id, scopes, nesting)
        reader.finish(() if kinds else _KINDS)
        return node

    def _step(self, reader: ObjectReader, node_id: str, scopes: _Scopes, _nesting: int) -> Node:
        timeout, lease = reader.seconds("timeout", "1ms", "365d"), _read_lease(reader)
        queue = reader.name("queue", "default")
        return StepNode(
            id=node_id,
            handler=reader.name("step"),
            queue=queue,
            input_schema=reader.schema("input_schema"),
            output_schema=reader.schema("output_schema"),
            timeout_seconds=timeout,
            lease_seconds=lease,
            retry=_read_retry(reader),
            schema_check=reader.choice("schema_check", ("strict", "runtime")),
            queue_timeout_seconds=reader.seconds("queue_timeout", "1ms", "365d"),
            total_timeout_seconds=reader.seconds("total_timeout", "1ms", "365d"),
            undo=_read_undo(reader, queue),
            input=self._input(reader, scopes),
        )

    def _sleep(self, reader: ObjectReader, node_id: str, _scopes: _Scopes, _nesting: int) -> Node:
        return SleepNode(node_id, reader.seconds("sleep", "1ms", _LONGEST_WAIT, required=True) or 0.0)

    def _wait_signal(self, reader: ObjectReader, node_id: str, _scopes: _Scopes, _nesting: int) -> Node:
        return SignalNode(
            id=node_id,
            signal=reader.name("wait_signal"),
            output_schema=reader.schema("output_schema"),
            timeout_seconds=reader.seconds("timeout", "1ms", _LONGEST_WAIT),
        )

    def _parallel(self, reader: ObjectReader, node_id: str, scopes: _Scopes, nesting: int) -> Node:
        branches = []
        spelled: list[object] = []
        for value, path in reader.items("parallel", MAX_BRANCHES):
            body, canonical = self._sequence(self._items(value, path), scopes, nesting + 1)
            branches.append(body)
            spelled.append(canonical)
        reader.canonical["parallel"] = spelled
        return ParallelNode(node_id, tuple(branches))

    def _map(self, reader: ObjectReader, node_id: str, scopes: _Scopes, nesting: int) -> Node:
        inner = reader.inner("map")
        over = inner.pointer("over")
        if over is None:
            self.unread.add(f"{inner.path}/over")
        most = inner.integer("max_parallel", 1, MAX_PARALLEL_ITEMS, DEFAULT_PARALLEL_ITEMS)
        body = self._body(inner, "do", (*scopes, {node_id}), nesting + 1)
        inner.finish()
        reader.canonical["map"] = inner.canonical
        return MapNode(node_id, over or "", body, most)

    def _choose(self, reader: ObjectReader, node_id: str, scopes: _Scopes, nesting: int) -> Node:
        cases = []
        spelled: list[object] = []
        items = reader.items("choose", MAX_BRANCHES)
        for index, (value, path) in enumerate(items):
            inner = ObjectReader(value, path, self.faults)
            if "otherwise" in inner:
                if index < len(items) - 1:
                    inner.fault("otherwise", "must be the last case")
                cases.append(Case(None, self._body(inner, "otherwise", scopes, nesting + 1)))
            else:
                when = inner.condition("when")
                body = self._body(inner, "do", scopes, nesting + 1)
                cases.append(Case(when, body))
            inner.finish()
            spelled.append(inner.canonical)
        reader.canonical["choose"] = spelled
        return ChooseNode(node_id, tuple(cases))

    def _workflow(self, reader: ObjectReader, node_id: str, scopes: _Scopes, _nesting: int) -> Node:
        workflow = reader.name("workflow")
        if workflow and workflow == self.workflow_id:
            reader.fault("workflow", f"{workflow} is this workflow itself")
        elif workflow:
            self.children.add(workflow)
        return ChildNode(
            id=node_id,
            workflow=workflow,
            input_schema=reader.schema("input_schema"),
            output_schema=reader.schema("output_schema"),
            schema_check=reader.choice("schema_check", ("strict", "runtime")),
            input=self._input(reader, scopes),
            undo=_read_undo(reader, "default"),
            on_parent_end=reader.choice("on_parent_end", ("cancel", "terminate", "abandon")),
        )

    def _body(self, reader: ObjectReader, key: str, scopes: _Scopes, nesting: int) -> tuple[Node, ...]:
        body, spelled = self._sequence(reader.items(key, self.max_nodes), scopes, nesting)
        reader.canonical[key] = spelled
        return body

    def _items(self, value: object, path: str) -> list[tuple[object, str]]:
        return read_items(value, path, self.max_nodes, self.faults)

    def _input(self, reader: ObjectReader, scopes: _Scopes) -> InputMapping | None:
        mapping = reader.mapping("input")
        if mapping is None:
            if "input" in reader:
                # What it would have been is not known, and so there is nothing to compare.
                self.faults.bad_schemas.add(f"{reader.path}/input_schema")
            return None
        for reference in mapping.references():
            if reference.source and not any(reference.source in scope for scope in scopes):
                self._not_run.append((f"{reader.path}/input{reference.place}/{FROM}", reference.source))
        return mapping


def _read_lease(reader: ObjectReader) -> float:
    return (reader.duration("lease", "1s", "1d", "1m") or 0) / 1000


def _read_retry(node: ObjectReader) -> RetryPolicy:
    reader = node.inner("retry")
    initial_delay = reader.duration("initial_delay", "0s", "7d", "1s") or 0
    max_delay = reader.duration("max_delay", "0s", "7d", "1m") or 0
    if initial_delay > max_delay:
        longest = format_duration(max_delay)
        reader.fault("initial_delay", f"{format_duration(initial_delay)} is longer than max_delay ({longest})")
    policy = RetryPolicy(
        max_attempts=reader.integer("max_attempts", 1, 1_000_000, _DEFAULTS.max_attempts),
        initial_delay_seconds=initial_delay / 1000,
        multiplier=reader.number("multiplier", 1, 1_000, _DEFAULTS.multiplier),
        max_delay_seconds=max_delay / 1000,
        jitter=reader.number("jitter", 0, 1, _DEFAULTS.jitter),
        max_corrective_attempts=reader.integer("max_corrective_attempts", 0, 1_000, _DEFAULTS.max_corrective_attempts),
    )
    reader.finish()
    if reader.canonical:
        node.canonical["retry"] = reader.canonical
    return policy


def _read_undo(node: ObjectReader, queue: str) -> Undo | None:
    """Read how a node is undone, in the node's `queue` unless it has one of its own."""
    missing = "undo" not in node
    reader = node.inner("undo")
    if missing:
        return None
    undo = Undo(
        handler=reader.name("step"),
        queue=reader.name("queue", queue),
        timeout_seconds=reader.seconds("timeout", "1ms", "365d"),
        lease_seconds=_read_lease(reader),
        retry=_read_retry(reader),
        unfinished=reader.boolean("undo_unfinished"),
    )
    if undo.unfinished and "workflow" in node:
        reader.fault("undo_unfinished", "is for steps: a child run that does not complete undoes its own steps")
    reader.finish()
    node.canonical["undo"] = reader.canonical
    return undo


_KINDS: dict[str, Callable[[NodeReader, ObjectReader, str, _Scopes, int], Node]] = {
    "step": NodeReader._step,
    "sleep": NodeReader._sleep,
    "wait_signal": NodeReader._wait_signal,
    "parallel": NodeReader._parallel,
    "map": NodeReader._map,
    "choose": NodeReader._choose,
    "workflow": NodeReader._workflow,
}
_CONTAINERS = ("parallel", "map", "choose")
