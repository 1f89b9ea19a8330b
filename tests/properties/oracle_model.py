"""The nouns of the oracle: what a run consists of, in plain Python.

Nothing here knows the server. Times are seconds on whatever clock the caller has; JSON values are Python's.
A node is the object that stands in the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Node = Mapping[str, Any]
FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TERMINATED"})

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """What a duration of a manifest means: ``1h30m`` is 5400."""
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)(ms|s|m|h|d)", text))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something failed: kind, code, and which attempt at which node."""

    kind: str
    code: str
    node_id: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a caller or a worker is told. ``code`` is OK, an outcome or an error reason; the others come with OK."""

    code: str
    state: str = ""
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of a history; ``fields`` are those of the contract's message that the oracle knows."""

    kind: str
    fields: dict[str, object]


@dataclass(frozen=True, slots=True)
class Value:
    """A JSON value and the event that holds it."""

    data: Any
    seq: int


@dataclass(slots=True)
class Scope:
    """An open parallel or map node: the outputs of its branches or items so far; of a map also the items' events."""

    scope_id: int
    place: Place
    items: list[Any]
    outputs: dict[int, Any] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    next_item: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node is: in which sequence; of which scope's branch or item; inside of which choose node."""

    nodes: tuple[Node, ...]
    index: int = 0
    scope: Scope | None = None
    item: int = 0
    choice: Place | None = None

    @property
    def node(self) -> Node:
        """The node itself."""
        return self.nodes[self.index]

    @property
    def scope_id(self) -> int:
        """The innermost scope, 0 for none."""
        return self.scope.scope_id if self.scope else 0


@dataclass(frozen=True, slots=True)
class Policy:
    """When a failed attempt is followed by another."""

    max_attempts: int
    max_corrective: int
    initial_delay: float
    multiplier: float
    max_delay: float

    @staticmethod
    def of(retry: Mapping[str, Any]) -> Policy:
        """From the ``retry`` of a node, with the defaults of the language."""
        return Policy(
            retry.get("max_attempts", 5),
            retry.get("max_corrective_attempts", 3),
            seconds(retry.get("initial_delay", "1s")),
            retry.get("multiplier", 2),
            seconds(retry.get("max_delay", "1m")),
        )

    def delay(self, kind: str, failures: int, retry_after: float | None) -> float | None:
        """Seconds to the next attempt after the ``failures``-th failure of this kind; None: there is none."""
        if kind == "PERMANENT":
            return None
        if kind == "CORRECTIVE":
            return 0.0 if failures < self.max_corrective else None
        if failures >= self.max_attempts:
            return None
        backoff = min(self.max_delay, self.initial_delay * self.multiplier ** (failures - 1))
        return backoff if retry_after is None else retry_after


@dataclass(slots=True)
class Undoable:
    """A row of the undo log: a step that has completed, or (``unfinished``) may have acted without completing."""

    of_seq: int
    place: Place
    token: int
    unfinished: bool
    input: Value
    output: Any = None

    @property
    def node(self) -> Node:
        """Of the step."""
        return self.place.node


@dataclass(slots=True)
class Task:
    """Work that is ready, leased, or waiting: a step, or the undoing of one (``undoes``)."""

    task_id: int
    node: Node
    place: Place
    input: Value
    handler: str
    policy: Policy
    lease: float
    token: int = 0
    attempt: int = 0
    operational: int = 0
    corrective: int = 0
    redeliveries: int = 0
    holder: str | None = None
    lease_until: float = 0.0
    ready_at: float = 0.0
    stuck: bool = False
    cancelled: bool = False
    leased_once: bool = False
    undoes: Undoable | None = None
    checkpoint: tuple[int, Any] | None = None
    feedback: Any = None
    last_failure: Failure | None = None
    told: set[str] = field(default_factory=set)

    @property
    def node_id(self) -> str:
        """Of the step, also if this undoes it."""
        return str(self.node["id"])

    @property
    def corrects(self) -> bool:
        """Whether the next attempt is told what was wrong with the one before."""
        return self.last_failure is not None and self.last_failure.kind == "CORRECTIVE"


@dataclass(slots=True)
class Timer:
    """Something that happens at a time. ``seq`` is the event that began it; ``value`` goes on after a sleep."""

    seq: int
    kind: str
    fire_at: float
    place: Place | None = None
    value: Value | None = None
    fired: bool = False


@dataclass(slots=True)
class Wait:
    """A node that waits for a signal."""

    seq: int
    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class Complete:
    """The outcome of a step that has returned."""

    output: Any


@dataclass(frozen=True, slots=True)
class Fail:
    """The outcome of an attempt that has failed; ``checkpoint``: its last one, number and state."""

    kind: str
    code: str = "TEST"
    feedback: Any = None
    retry_after: float | None = None
    checkpoint: tuple[int, Any] | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """A task that comes back unbegun."""


Outcome = Complete | Fail | Release
