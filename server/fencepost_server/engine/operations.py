"""What waits in the lanes to be committed, and the answers to it.

An operation is made at an edge (a call, a frame, a loop), waits in the lane of its run, is folded into a batch,
and is settled once: after the commit, or when it is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from fencepost_server.domain.errors import FencepostError
from fencepost_server.domain.model import Failure, LeasedTask, Outcome, Payload
from fencepost_server.domain.violation import Violation


class ReportKind(IntEnum):
    """What is reported of a task."""

    COMPLETE = 1
    FAIL = 2
    RELEASE = 3  # by the worker: not begun
    UNDELIVERED = 4  # by this server: leased, but never on its stream
    EXPIRE = 5  # by the sweeper


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one report."""

    outcome: Outcome
    reason: str = ""
    message: str = ""
    violations: tuple[Violation, ...] = ()


OK = Answer(Outcome.OK)
ALREADY_DONE = Answer(Outcome.ALREADY_DONE)
LEASE_LOST = Answer(Outcome.LEASE_LOST, "LEASE_LOST", "the fencing token is not the current one")


class WorkerSession(Protocol):
    """What the engine knows of a worker's stream."""

    session_id: str
    namespace: str
    handlers: frozenset[tuple[str, str]]
    """(queue, handler) pairs."""

    @property
    def open(self) -> bool:
        """False once the stream has ended."""

    def room(self) -> int:
        """How many further tasks it can take now. Claims under way are reserved and do not count."""

    def reserve(self, tasks: int) -> None:
        """Keep room for tasks of a claim under way; negative to give it back."""

    def last_frame(self) -> int:
        """The id of the last frame received."""

    def eager_depth(self, run_id: str, task_id: int) -> int | None:
        """How many tasks in a row the slot of this task got without a claim; None if the slot may not get the
        next one.
        """

    def settle(self, answers: Sequence[tuple[Report, Answer]], tasks: Sequence[LeasedTask]) -> Sequence[LeasedTask]:
        """Send answers, then tasks. Returns the tasks that could not be put on the stream."""

    def give_up(self, report: Report, error: FencepostError) -> None:
        """A report could not be committed."""

    def end(self, error: FencepostError) -> None:
        """The stream has to end."""

    def revoke(self, ref: tuple[str, int, int], reason: str) -> None:
        """A lease (run_id, task_id, token) of this session was ended by a loop."""

    def knows(self, ref: tuple[str, int, int]) -> bool:
        """Whether the lease is on its stream, or on its way there."""


@dataclass(slots=True, eq=False)
class Report:
    """What became of a task, by whoever holds or misses it."""

    kind: ReportKind
    run_id: str
    task_id: int
    token: int
    namespace: str
    digest: bytes = b""
    output: Payload | None = None
    value: object = None
    """The output, parsed, for its schema."""
    failure: Failure | None = None
    retry_after: float | None = None
    session: WorkerSession | None = None
    frame_id: int = 0
    index: int = 0
    done: asyncio.Future[FencepostError | None] | None = None
    """For a loop that waits: set to None after the commit, to an error if there was none."""
    again: bool = False
    deadline: float = 0.0

    @property
    def size(self) -> int:
        """About its payload bytes."""
        size = 0 if self.output is None else self.output.size
        if self.failure is not None:
            size += len(self.failure.message) + (self.failure.feedback.size if self.failure.feedback else 0)
        return size

    @property
    def wanted(self) -> bool:
        """Somebody still waits for it, beyond its deadline."""
        return self.session is not None and self.session.open

    def give_up(self, error: FencepostError) -> None:
        """Not committed. Loops find their work again by themselves."""
        if self.session is not None:
            self.session.give_up(self, error)
        if self.done is not None and not self.done.done():
            self.done.set_result(error)


@dataclass(frozen=True, slots=True)
class Started:
    """The answer to a start."""

    run_id: str
    created: bool
    definition_hash: bytes
    input_differs: bool = False
    """Bound by a dedupe key to a run that was started with another input."""


@dataclass(slots=True, eq=False)
class Start:
    """A run to start. ``run_id`` is chosen before the first try, so that every further try is the same run."""

    run_id: str
    namespace: str
    workflow_id: str
    definition_hash: bytes | None
    input: Payload
    value: object
    fingerprint: bytes
    request_fingerprint: bytes
    user_id: str
    request_key: str
    request_id: str
    priority: int
    dedupe_key: str = ""
    bind_duplicate: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Labels for lists: names of up to 100 characters, values of up to 200."""
    start_delay: float = 0.0
    """Seconds until the first node begins."""
    run_timeout: float | None = None
    """Seconds from the start until the run fails if it has not ended."""
    result: asyncio.Future[Started | FencepostError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    again: bool = False
    deadline: float = 0.0

    @property
    def size(self) -> int:
        """About its payload bytes, and those of its labels."""
        return self.input.size + sum(len(key) + len(value) for key, value in self.attributes.items())

    @property
    def wanted(self) -> bool:
        """A start is not tried beyond its deadline: its caller is told, and repeats it."""
        return False

    def settle(self, outcome: Started | FencepostError) -> None:
        """Answer the caller, unless it is gone."""
        if not self.result.done():
            self.result.set_result(outcome)

    def give_up(self, error: FencepostError) -> None:
        """Not committed, or not known to be."""
        self.settle(error)


Operation = Report | Start
