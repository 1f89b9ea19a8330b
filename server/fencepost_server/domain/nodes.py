"""The nodes of a graph workflow: what a manifest's sequence is made of, as `manifest.parse_manifest` reads it.

Durations are in seconds. Schemas are JSON Schemas as values of `jsontext.parse`, or None where the manifest
has none: anything may be taken, and nothing is known of what is given. The ids of all nodes of a manifest
differ, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from fencepost_server.domain.conditions import Condition
from fencepost_server.domain.input_mapping import InputMapping
from fencepost_server.domain.policy import RetryPolicy


@dataclass(frozen=True, slots=True)
class Undo:
    """How a completed node is undone: by a task of its own, with its own retries.

    With `unfinished`, a step that may have acted without completing is undone too.
    """

    handler: str
    queue: str
    timeout_seconds: float | None
    lease_seconds: float
    retry: RetryPolicy
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class StepNode:
    """A node that runs a step.

    `timeout_seconds` and `lease_seconds` are for one attempt, `queue_timeout_seconds` for the time until a worker
    takes it, `total_timeout_seconds` for all of it. Where `schema_check` is `runtime`, nobody has proved that
    what arrives is what the node takes; on the node that gives the output of the workflow the same holds for
    what the workflow returns. With an `input`, nobody has either.
    """

    id: str
    handler: str
    queue: str
    input_schema: object | None
    output_schema: object | None
    timeout_seconds: float | None
    lease_seconds: float
    retry: RetryPolicy
    schema_check: str = "strict"
    queue_timeout_seconds: float | None = None
    total_timeout_seconds: float | None = None
    undo: Undo | None = None
    input: InputMapping | None = None


@dataclass(frozen=True, slots=True)
class SleepNode:
    """A node that waits. Its output is its input."""

    id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SignalNode:
    """A node that waits for a signal named `signal`, for ever or for so long. Its output is the signal's payload."""

    id: str
    signal: str
    output_schema: object | None
    timeout_seconds: float | None


@dataclass(frozen=True, slots=True)
class ParallelNode:
    """Branches that run at the same time, each with the node's input.

    The output is an object with one member for each branch, named by the id of the branch's last node.
    """

    id: str
    branches: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class MapNode:
    """A body that runs once for each item of the array that is at `over`, a JSON Pointer into the node's input.

    At most `max_parallel` items are under way at the same time. The output is the array of what the body gives
    for each item, in their order; where that would be larger than a payload may be, it is `{"count": n}`
    instead, which no schema of the manifest foresees.
    """

    id: str
    over: str
    body: tuple[Node, ...]
    max_parallel: int


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a choice: `body` runs if `when` holds for the node's input, or, without one, otherwise."""

    when: Condition | None
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ChooseNode:
    """A choice: the first case that fits runs, with the node's input, and gives the output.

    A case without a condition is the last one. Where no case fits the output is the input.
    """

    id: str
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class ChildNode:
    """A node that runs another workflow as a child and gives its output.

    `on_parent_end` is what becomes of a child that has not ended when its parent does: `cancel`, `terminate` or
    `abandon`.
    """

    id: str
    workflow: str
    input_schema: object | None
    output_schema: object | None
    schema_check: str
    input: InputMapping | None
    undo: Undo | None
    on_parent_end: str


Node: TypeAlias = StepNode | SleepNode | SignalNode | ParallelNode | MapNode | ChooseNode | ChildNode


def iter_nodes(nodes: tuple[Node, ...], path: str = "/sequence") -> Iterator[tuple[Node, str]]:
    """Yield all nodes of a sequence and of what is inside them, each with its JSON Pointer into the manifest.

    A container comes before the nodes in it, and these in the order in which they are written: the position in
    this order is the index of a node in stored rows.
    """
    for index, node in enumerate(nodes):
        place = f"{path}/{index}"
        yield node, place
        for body, where in bodies(node, place):
            yield from iter_nodes(body, where)


def bodies(node: Node, path: str) -> Iterator[tuple[tuple[Node, ...], str]]:
    """Yield the sequences directly inside a node at `path`, each with its JSON Pointer."""
    match node:
        case ParallelNode():
            for index, branch in enumerate(node.branches):
                yield branch, f"{path}/parallel/{index}"
        case MapNode():
            yield node.body, f"{path}/map/do"
        case ChooseNode():
            for index, case in enumerate(node.cases):
                yield case.body, f"{path}/choose/{index}/{'otherwise' if case.when is None else 'do'}"
        case _:
            return
