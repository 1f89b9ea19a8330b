"""Checkpoints on their way: the states of running steps that no Ack has answered yet. No I/O, no frames.

A lease has at most two of them: one in a frame whose Ack is awaited (``lease.saving``) and the newest of those that
came meanwhile (``lease.unsaved``), so a step that saves faster than the server commits costs memory for two states.
Invariants:

- A newer state takes the place of an older one that is not on the wire, and with it those who wait for the older: a
  state includes what came before it.
- Whoever waits is answered: when the state was saved, when it was refused, or, with LeaseLost, when the attempt ends
  first, however it ends.
- What was not answered when an attempt fails goes along with its failure (`Failed.checkpoint`); a number that the
  server has already is no harm.

`Saving` is made by the step's thread and handed over; everything else is used by the session's thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fencepost.errors import BY_REASON, FencepostError, LeaseLost, ServerFault
from fencepost.models import payload_size, violations_of
from fencepost.v1 import error_pb2, run_service_pb2

if TYPE_CHECKING:
    from fencepost.codec import Value
    from fencepost.lease import Lease

RESEND_DELAY = 1.0
_MAX_RESENDS = 5
TRANSIENT = frozenset(
    {
        error_pb2.ERROR_REASON_DATABASE_UNAVAILABLE,
        error_pb2.ERROR_REASON_OVERLOADED,
        error_pb2.ERROR_REASON_SERVER_DRAINING,
    }
)
"""Why an item is refused that is as good as before: the server could not do it now."""
AT_FAULT = frozenset(
    {
        error_pb2.ERROR_REASON_INVALID_FRAME,
        error_pb2.ERROR_REASON_INVALID_REQUEST,
        error_pb2.ERROR_REASON_INVALID_JSON,
        error_pb2.ERROR_REASON_PAYLOAD_TOO_LARGE,
        error_pb2.ERROR_REASON_FRAME_TOO_LARGE,
    }
)
"""Why an item is refused that is itself at fault: sent again it would be refused again."""


@dataclass(slots=True)
class Saving:
    """One state with its number, those who wait for it, and how often the server could not save it."""

    number: int
    state: Value
    waiters: list[Future[None]] = field(default_factory=list)
    resends: int = 0

    def wait(self) -> Future[None]:
        """A future that is done when the state was saved. It can't be cancelled: the answer belongs to others, too."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        self.waiters.append(future)
        return future

    def succeed(self) -> None:
        """It was saved."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.set_result(None)

    def fail(self, error: FencepostError) -> None:
        """It was not saved, and will not be."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.set_exception(error)


class Saved:
    """What a step may await to know that its state was saved. Nothing is said about it if nobody does."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, None]:
        """Wait on the running loop. Raises LeaseLost, or what the server refused the state with."""
        return asyncio.wrap_future(self._future).__await__()


class Checkpoints:
    """The states of one session's leases; see the module."""

    def __init__(self) -> None:
        # May name a lease that has nothing to send any more, or name it twice.
        self._waiting: deque[Lease] = deque()
        self._later: deque[tuple[float, Lease]] = deque()

    @property
    def due(self) -> float | None:
        """When `tick` has something to do."""
        return self._later[0][0] if self._later else None

    def save(self, lease: Lease, saving: Saving) -> None:
        """A running step has a new state; it takes the place of one that is not on its way yet."""
        older = lease.unsaved
        lease.unsaved = saving
        if older is not None:
            saving.waiters = older.waiters + saving.waiters
        elif lease.saving is None:
            self._waiting.append(lease)

    def take(self, max_items: int, max_bytes: int, overhead: int) -> list[Lease]:
        """Take what fits into one frame, at least one if there is any; its states are on their way now."""
        taken: list[Lease] = []
        room = max_bytes
        while self._waiting and len(taken) < max_items:
            lease = self._waiting[0]
            if lease.unsaved is not None and lease.saving is None:
                room -= payload_size(lease.unsaved.state) + overhead
                if room < 0 and taken:
                    break
                lease.saving, lease.unsaved = lease.unsaved, None
                taken.append(lease)
            self._waiting.popleft()
        return taken

    def saved(self, lease: Lease) -> None:
        """The state that was on its way is saved."""
        saving, lease.saving = lease.saving, None
        if saving is not None:
            saving.succeed()
        if lease.unsaved is not None:
            self._waiting.append(lease)

    def refused(
        self,
        lease: Lease,
        reason: error_pb2.ErrorReason.ValueType,
        message: str,
        violations: Iterable[run_service_pb2.Violation],
        now: float,
    ) -> None:
        """The state that was on its way was not saved: tried again if the server is at fault, given up if it is."""
        saving = lease.saving
        if saving is None:
            return
        if reason not in AT_FAULT:
            # A fault of the server that this state brings about each time must not be met for ever.
            saving.resends += reason not in TRANSIENT
            if saving.resends <= _MAX_RESENDS:
                self._back(lease)
                self._later.append((now + RESEND_DELAY, lease))
                return
        lease.saving = None
        name = error_pb2.ErrorReason.Name(reason) if reason in error_pb2.ErrorReason.values() else f"REASON_{reason}"
        name = name.removeprefix("ERROR_REASON_")
        kind = BY_REASON.get(name, ServerFault)
        saving.fail(kind(message, reason=name, violations=violations_of(violations)))
        if lease.unsaved is not None:
            self._waiting.append(lease)

    def unsent(self, lease: Lease) -> None:
        """The stream broke before the Ack came: the state waits again."""
        if lease.saving is not None:
            self._back(lease)
            self._waiting.append(lease)

    @staticmethod
    def _back(lease: Lease) -> None:
        """Let the state on its way be one that is not, or be forgotten for a newer one."""
        saving, lease.saving = lease.saving, None
        newer = lease.unsaved
        if saving is not None and newer is not None:
            newer.waiters = saving.waiters + newer.waiters
        else:
            lease.unsaved = saving

    def end(self, lease: Lease, why: str) -> tuple[int, Value] | None:
        """The attempt has ended: nothing of it is sent any more.

        Returns the newest state that was not answered, for its failure.
        """
        saving, unsaved = lease.saving, lease.unsaved
        if saving is None and unsaved is None:
            return None
        lease.saving = lease.unsaved = None
        for left in (saving, unsaved):
            if left is not None:
                left.fail(LeaseLost(why))
        newest = unsaved or saving
        return None if newest is None else (newest.number, newest.state)

    def tick(self, now: float) -> None:
        """Send again what was put off."""
        while self._later and self._later[0][0] <= now:
            self._waiting.append(self._later.popleft()[1])
