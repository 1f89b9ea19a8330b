"""What waits in the lanes to be committed, and the answers to it.

An operation is made at an edge (a call, a frame, a loop), waits in the lane of its run, is folded into a batch,
and is settled once: after the commit, or when it is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from fencepost_server.domain.errors import FencepostError
from fencepost_server.domain.model import (
    DECIDE_TASK,
    NULL,
    Checkpoint,
    Failure,
    LeasedTask,
    Outcome,
    Payload,
    RunState,
    TimerKind,
)
from fencepost_server.domain.ops import Advance, AdvanceAnswer, AdvanceOutcome, HistoryEvent
from fencepost_server.domain.violation import Violation


class ReportKind(IntEnum):
    """What is reported of a task."""

    COMPLETE = 1
    FAIL = 2
    RELEASE = 3  # by the worker: not begun
    UNDELIVERED = 4  # by this server: leased, but never on its stream
    EXPIRE = 5  # by the sweeper
    CHECKPOINT = 6  # a state of the step, which goes on
    ADVANCE = 7  # of a code run


@dataclass(slots=True)  # not frozen: as of model.LeasedTask, one is made for each step
class Answer:
    """The answer to one report."""

    outcome: Outcome
    reason: str = ""
    message: str = ""
    violations: tuple[Violation, ...] = ()
    advance: AdvanceAnswer | None = None
    """Of an ADVANCE that is OK."""


OK = Answer(Outcome.OK)
ALREADY_DONE = Answer(Outcome.ALREADY_DONE)
LEASE_LOST = Answer(Outcome.LEASE_LOST, "LEASE_LOST", "the fencing token is not the current one")


# A member of an enum looked up by its class takes ten times as long as a name of the module (Python 3.11).
_CONTINUE = AdvanceOutcome.CONTINUE


class WorkerSession(Protocol):
    """What the engine knows of a worker's stream."""

    session_id: str
    key: str
    """The session's id; of its side for DECIDE tasks, with engine.dispatch.DECIDE_SIDE behind it."""
    namespace: str
    nonce: str
    """The identity of the worker's process."""
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
        """A lease (run_id, task_id, token) of this session was ended by somebody else."""

    def cancel(self, ref: tuple[str, int, int], reason: str, remaining: float) -> None:
        """A step should stop: its lease is revoked after so many seconds."""

    def knows(self, ref: tuple[str, int, int]) -> bool:
        """Whether the lease is on its stream, or on its way there."""

    def push_events(
        self, ref: tuple[str, int, int], after_seq: int, events: Sequence[HistoryEvent], last_seq: int = 0
    ) -> None:
        """New events of a code run that this session holds, from ``after_seq`` on, without gaps. ``last_seq``: of those
        that are not here.
        """


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
    checkpoint: Checkpoint | None = None
    """Of a CHECKPOINT; of a FAIL, the last one, applied before it."""
    advance: Advance | None = None
    """Of an ADVANCE."""
    workflow_id: str = ""
    """Of an ADVANCE that continues as new: the workflow, as the session was told with the task."""
    session: WorkerSession | None = None
    frame_id: int = 0
    index: int = 0
    done: asyncio.Future[FencepostError | None] | None = None
    """For a loop that waits: set to None after the commit, to an error if there was none."""
    again: bool = False
    deadline: float = 0.0
    _size: int = -1

    @property
    def size(self) -> int:
        """About its payload bytes. Counted once: the session asks twice, and the lane."""
        if self._size < 0:
            self._size = self._count()
        return self._size

    def _count(self) -> int:
        size = 0 if self.output is None else self.output.size
        if self.failure is not None:
            size += len(self.failure.message) + (self.failure.feedback.size if self.failure.feedback else 0)
        if self.checkpoint is not None:
            size += self.checkpoint.state.size
        if self.advance is not None:
            size += self.advance.size
        return size

    @property
    def keeps_lease(self) -> bool:
        """An Advance whose worker goes on: its task stays as it is, so that nobody locks it."""
        advance = self.advance
        return advance is not None and advance.outcome is _CONTINUE and self.task_id == DECIDE_TASK

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
    schedule_key: str = ""
    """A fire time of a schedule, or a call that triggered it: one run each, whatever its input."""
    schedule_origin: str = ""
    """What a schedule's run is started by: remembered with the key."""
    parent: tuple[str, int] | None = None
    """Of a child: the run that waits for it, and the event there that scheduled it."""
    depth: int = 0
    """How many runs are above it."""
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


class CommandKind(IntEnum):
    """What is asked of a run."""

    SIGNAL = 1
    CANCEL = 2
    TERMINATE = 3
    PAUSE = 4
    RESUME = 5
    RETRY = 6
    REMOVE = 7  # by the removal of its definition
    OFFER = 8  # there is a worker that may be able to go on with a code run that is blocked


@dataclass(frozen=True, slots=True)
class Commanded:
    """The answer to a command: the run's state after it, and of a signal the number of its event."""

    state: RunState
    seq: int = 0
    next_run: str = ""
    """The run has continued as this one: it is to be asked instead."""


@dataclass(slots=True, eq=False)
class Command:
    """Something asked of one run, by a call. A ``request_id`` is remembered with the run; ``fingerprint`` is of all
    that was asked under it.
    """

    kind: CommandKind
    run_id: str
    namespace: str
    request_id: str = ""
    fingerprint: bytes = b""
    reason: str = ""
    name: str = ""
    """Of a SIGNAL."""
    payload: Payload = NULL
    """Of a SIGNAL."""
    grace: float | None = None
    """Of a CANCEL, in seconds; None: as configured."""
    skip_undo: bool = False
    """Of a RETRY."""
    unnamed: bool = False
    """The caller gave no request id: it is this server's own, for its repeats."""
    result: asyncio.Future[Commanded | FencepostError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    again: bool = False
    deadline: float = 0.0

    @property
    def size(self) -> int:
        """About its payload bytes."""
        return self.payload.size

    @property
    def wanted(self) -> bool:
        """Not tried beyond its deadline: its caller is told, and repeats it."""
        return False

    def settle(self, outcome: Commanded | FencepostError) -> None:
        """Answer the caller, unless it is gone."""
        if not self.result.done():
            self.result.set_result(outcome)

    def give_up(self, error: FencepostError) -> None:
        """Not committed, or not known to be."""
        self.settle(error)


@dataclass(slots=True, eq=False)
class Fire:
    """A timer that is due. ``done`` is called when it was committed or given up."""

    run_id: str
    namespace: str
    seq: int
    kind: TimerKind
    done: Callable[[Fire], None]
    again: bool = False
    deadline: float = 0.0
    size: int = 0
    wanted: bool = False

    def give_up(self, error: FencepostError) -> None:
        """Not committed: the loop finds it again."""
        self.done(self)


class MessageKind(IntEnum):
    """What one run tells another."""

    START_CHILD = 1
    CANCEL_CHILD = 2
    TERMINATE_CHILD = 3
    CHILD_ENDED = 4


@dataclass(slots=True, eq=False)
class Deliver:
    """A message of the outbox, for its target. ``done`` is called when it was committed or given up."""

    message_id: int
    run_id: str
    """The target."""
    kind: MessageKind
    source_run: str
    source_seq: int
    namespace: str
    body: str
    done: Callable[[Deliver], None]
    size: int = 0
    """About its bytes, with the input or output that it stands for."""
    again: bool = False
    deadline: float = 0.0
    wanted: bool = False

    def give_up(self, error: FencepostError) -> None:
        """Not committed: the loop finds it again."""
        self.done(self)


Operation = Report | Start | Command | Fire | Deliver
