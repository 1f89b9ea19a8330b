"""Advances on their way: what code runs have decided and no Ack has answered yet. No I/O, no frames.

A DECIDE lease has at most one Advance (`Lease.advance`), which waits here, is on its way (`Lease.sent`) or is put off
for a moment, because the server could not take it just then. It stays the lease's until it was answered: sent again,
after a break of the stream too, it is known by its number.

The session tells the decider what it hears of code runs as news, in the order in which it came.

Used by one thread, that of the session's loop.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from fencepost.checkpoints import RESEND_DELAY

if TYPE_CHECKING:
    from fencepost.lease import DecideLease
    from fencepost.session import Session
    from fencepost.v1 import worker_service_pb2 as pb

_ITEM_OVERHEAD = 16


@dataclass(slots=True)
class Given:
    """A new lease: the run is to be decided."""

    lease: DecideLease


@dataclass(slots=True)
class Answered:
    """An Advance was accepted."""

    lease: DecideLease
    result: pb.AdvanceResult


@dataclass(slots=True)
class Repeated:
    """An Advance had been accepted before, with an answer that was lost."""

    lease: DecideLease


@dataclass(slots=True)
class Refused:
    """An Advance was not accepted, and the lease stands. ``at_fault``: it would be refused again, for ``code``."""

    lease: DecideLease
    code: str
    message: str
    at_fault: bool


@dataclass(slots=True)
class Lost:
    """The lease is gone: nothing of the run that is in memory counts."""

    lease: DecideLease


@dataclass(slots=True)
class Pushed:
    """New events of a run that is held."""

    lease: DecideLease
    pushed: pb.RunEvents


@dataclass(slots=True)
class Behind:
    """A heartbeat has told that the run has events up to ``last_seq``."""

    lease: DecideLease
    last_seq: int


@dataclass(slots=True)
class Asked:
    """A query came over ``session``, which takes its answer. ``max_payload_bytes``: as of the leases there."""

    session: Session
    query: pb.Query
    max_payload_bytes: int


class Leaving:
    """A session leaves: what it holds is brought to an end or given back."""


News: TypeAlias = Given | Answered | Repeated | Refused | Lost | Pushed | Behind | Asked | Leaving


class Advances:
    """The Advances of one session; see the module."""

    def __init__(self) -> None:
        self._waiting: deque[DecideLease] = deque()
        self._later: deque[tuple[float, DecideLease]] = deque()

    def send(self, lease: DecideLease, item: pb.AdvanceItem) -> None:
        """Let a new Advance of a lease that has none wait for its frame."""
        lease.advance = item
        lease.sent = False
        lease.resends = 0
        self._waiting.append(lease)

    def take(self, max_items: int, max_bytes: int) -> list[DecideLease]:
        """What fits into one frame, at least one; they are on their way from now on."""
        taken: list[DecideLease] = []
        waiting = self._waiting
        room = max_bytes
        while waiting and len(taken) < max_items:
            lease = waiting[0]
            # None: the lease was lost meanwhile. Sent: it was put off, and the stream broke.
            if lease.advance is not None and not lease.sent:
                room -= lease.advance.ByteSize() + _ITEM_OVERHEAD
                if room < 0 and taken:
                    break
                lease.sent = True
                taken.append(lease)
            waiting.popleft()
        return taken

    def unsent(self, lease: DecideLease) -> None:
        """The stream broke before the Ack came: it waits again."""
        if lease.advance is not None:
            lease.sent = False
            self._waiting.append(lease)

    def put_off(self, lease: DecideLease, now: float) -> None:
        """The server could not take it: it is sent again in a moment."""
        lease.sent = False
        self._later.append((now + RESEND_DELAY, lease))

    @property
    def due(self) -> float:
        """When `tick` has something to do."""
        return self._later[0][0] if self._later else math.inf

    def tick(self, now: float) -> None:
        """Send again what was put off."""
        while self._later and self._later[0][0] <= now:
            self._waiting.append(self._later.popleft()[1])
