"""What the function of a code workflow wants done: commands, and the Advance that carries them (semantics: code runs).

An op is a durable call of the function, numbered in the order of the calls. What is needed to match it at a replay
(number, kind, name, a digest of the input) is kept in the event that its command makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum

from fencepost_server.domain.model import Failure, Payload


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """Run a step on any worker. ``options``: JSON text of an object, as a step node has it; empty: the defaults."""

    op: int
    handler: str
    input: Payload
    input_hash: bytes
    options: str


@dataclass(slots=True)  # not frozen: as of model.LeasedTask, one is made for each step
class LocalStep:
    """A step that ran in the worker has ended: with an output, or with a failure. ``input``: for its undo."""

    op: int
    name: str
    input_hash: bytes
    output: Payload | None
    failure: Failure | None
    attempts: int
    options: str = ""
    input: Payload | None = None


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Wait for so many seconds from now."""

    op: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AwaitSignal:
    """Wait for a signal, for ever or for so many seconds."""

    op: int
    name: str
    seconds: float | None
    ended: bool = False
    """It has met its signal already, or was given up: it is only recorded."""


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start a child run. ``options``: as of a workflow node."""

    op: int
    workflow_id: str
    input: Payload
    input_hash: bytes
    options: str


@dataclass(frozen=True, slots=True)
class CancelOp:
    """Stop an op. ``of_seq``: the event that began it; 0 if that is of the same Advance."""

    op: int
    of_seq: int


@dataclass(frozen=True, slots=True)
class MarkPatch:
    """The function goes the way of a patch."""

    patch_id: str


@dataclass(frozen=True, slots=True)
class SetAttributes:
    """Label the run; an empty value takes a label away."""

    op: int
    attributes: Mapping[str, str]


OpCommand = ScheduleStep | LocalStep | StartTimer | AwaitSignal | StartChild | CancelOp | MarkPatch | SetAttributes


class AdvanceOutcome(IntEnum):
    """How a code run goes on. The numbers are the contract's."""

    CONTINUE = 1
    WAIT = 2
    COMPLETE = 3
    FAIL = 4
    CONTINUE_AS_NEW = 5
    BLOCK = 6


@dataclass(slots=True)  # not frozen: as of model.LeasedTask, one is made for each step
class Advance:
    """What the function has decided on the events up to ``seen_seq``. ``value``: the output, parsed, for its schema."""

    advance_no: int
    seen_seq: int
    commands: tuple[OpCommand, ...]
    outcome: AdvanceOutcome
    output: Payload | None = None
    value: object = None
    failure: Failure | None = None
    taken_signals: tuple[int, ...] = ()
    ended_waits: tuple[int, ...] = ()
    failed_seq: int = 0
    """Of FAIL: the event of the failure that the function let through."""

    @property
    def size(self) -> int:
        """About its payload bytes."""
        size = 0 if self.output is None else self.output.size
        for command in self.commands:
            size += 64
            if isinstance(command, LocalStep):
                size += 0 if command.output is None else command.output.size
                size += 0 if command.input is None else command.input.size
            elif isinstance(command, ScheduleStep | StartChild):
                size += command.input.size
        return size


@dataclass(slots=True)  # not frozen: as of model.LeasedTask, one is made for each step
class HistoryEvent:
    """An event of a code run on its way to a worker. ``detail``: JSON text, as stored."""

    seq: int
    type: int
    at: datetime
    task_id: int | None
    token: int | None
    attempt: int | None
    payload: Payload | None
    detail: str | None

    @property
    def size(self) -> int:
        """About its bytes."""
        return 64 + (0 if self.payload is None else self.payload.size) + len(self.detail or "")


@dataclass(slots=True)  # not frozen: as of model.LeasedTask, one is made for each step
class AdvanceAnswer:
    """What a worker is told of an Advance that was accepted; see AdvanceResult of the contract."""

    seqs: tuple[int, ...]
    at: datetime
    events: tuple[HistoryEvent, ...]
    last_seq: int
    kept: bool
    end_refused: bool = False


@dataclass(frozen=True, slots=True)
class Decide:
    """What a DECIDE task brings beside its lease; see Decide of the contract. ``events`` are as many as fit."""

    events: tuple[HistoryEvent, ...]
    after_seq: int
    last_seq: int
    advance_no: int
    seen_seq: int
    compatibility_id: str
