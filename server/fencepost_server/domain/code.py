"""Code workflows on the server's side: what their definition says, and the nodes that stand for their ops.

A code workflow has no nodes in its manifest. What a step, a child or an undo of it is made of comes with the command
that asks for it, as options in the words of a manifest's node; ``op_node`` makes a node of them, so that steps,
children and undoing are the same code for both kinds of workflows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fencepost_server.domain.graph import GraphNode, compile_nodes
from fencepost_server.domain.jsontext import JsonError, parse
from fencepost_server.domain.manifest import ManifestInvalid
from fencepost_server.domain.manifest_nodes import NodeReader
from fencepost_server.domain.manifest_reader import Faults, ObjectReader
from fencepost_server.domain.nodes import Node
from fencepost_server.domain.violation import Violation

_STEP_OPTIONS = frozenset(("queue", "timeout", "queue_timeout", "total_timeout", "lease", "retry", "undo"))
_LOCAL_OPTIONS = frozenset(("undo",))
_CHILD_OPTIONS = frozenset(("on_parent_end", "undo"))
_MAX_FAULTS = 20
_MAX_OPTIONS_CHARS = 10_000


Plan = tuple[str, str, str]
"""What the node of an op is made of, as kept with the op's rows: kind (step, local, child, decide), name, options."""


@lru_cache(maxsize=4000)
def op_node(kind: str, name: str, options: str) -> GraphNode:
    """The node that stands for an op. Raises ManifestInvalid with every fault of the name and the options."""
    allowed, base = _bases(kind, name)
    value = _options(options, allowed)
    faults = Faults(_MAX_FAULTS)
    reader = NodeReader("", 1, faults)
    nodes = reader.read(ObjectReader({"sequence": [{"id": "op", **base, **value}]}, "", faults))
    if faults.count:
        raise ManifestInvalid(tuple(_renamed(fault) for fault in faults.violations()))
    return replace(_compiled(nodes), id=name)


def _bases(kind: str, name: str) -> tuple[frozenset[str], dict[str, object]]:
    if kind == "step":
        return _STEP_OPTIONS, {"step": name}
    if kind == "decide":
        return frozenset(), {"step": "decide", "retry": {"max_attempts": 10, "max_delay": "30s"}}
    if kind == "local":
        return _LOCAL_OPTIONS, {"step": "local"}
    assert kind == "child"  # there is no other
    return _CHILD_OPTIONS, {"workflow": name}


def _options(text: str, allowed: frozenset[str]) -> dict[str, object]:
    if not text:
        return {}
    if len(text) > _MAX_OPTIONS_CHARS:
        raise ManifestInvalid((Violation("/options", f"more than {_MAX_OPTIONS_CHARS} characters"),))
    try:
        value = parse(text)
    except JsonError as error:
        raise ManifestInvalid((Violation("/options", error.message),)) from None
    if not isinstance(value, dict):
        raise ManifestInvalid((Violation("/options", "must be an object"),))
    unknown = sorted(key for key in value if key not in allowed)
    if unknown:
        raise ManifestInvalid(tuple(Violation(f"/options/{key}", "is no option of such an op") for key in unknown))
    return value


def _compiled(nodes: tuple[Node, ...]) -> GraphNode:
    return compile_nodes(nodes)[0]


def _renamed(fault: Violation) -> Violation:
    """The path as the sender of the command knows it."""
    path = fault.path.removeprefix("/sequence/0")
    return Violation("/name" if path in ("/step", "/workflow") else f"/options{path}", fault.message)
