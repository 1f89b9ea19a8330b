"""The frames of one stream: their numbers, when each was sent, and which of them still await an Ack. Pure.

Used by the session, which begins anew (`Flights.reset`) with each stream.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fencepost.v1 import worker_service_pb2 as pb

if TYPE_CHECKING:
    from fencepost.lease import Lease

MAX_UNANSWERED_HEARTBEATS = 64
_MAX_SENT_TIMES = 4096


class Cargo(enum.Enum):
    """What the items of a frame are."""

    HEARTBEAT = enum.auto()
    CHECKPOINT = enum.auto()
    OUTCOME = enum.auto()
    ADVANCE = enum.auto()


@dataclass(slots=True)
class Flight:
    """A frame whose Ack is awaited: its leases by index, None for what was answered."""

    cargo: Cargo
    leases: list[Lease | None]
    sent_at: float
    left: int


class Flights:
    """The frames of one stream; see the module. Times are readings of `lease.clock`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """A new stream: nothing was sent on it."""
        self._frame_id = 0
        self._first_sent = 1
        self._sent_at: deque[float] = deque()
        self._flights: dict[int, Flight] = {}
        self._unanswered_heartbeats: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights.values())

    @property
    def known_times(self) -> int:
        """Of how many frames it is known when they were sent."""
        return len(self._sent_at)

    @property
    def hello_sent_at(self) -> float:
        """When the first frame was sent, as long as that is remembered; a later time afterwards."""
        return self._sent_at[0]

    def numbered(self, now: float) -> pb.SessionRequest:
        """The next frame, still empty, sent at ``now``."""
        self._frame_id += 1
        self._sent_at.append(now)
        if len(self._sent_at) > _MAX_SENT_TIMES:
            # Pongs alone would gather for ever. The oldest that is kept takes the time of what was before it: too
            # early a time only makes a lease seem shorter than it is.
            oldest = self._sent_at.popleft()
            self._first_sent += 1
            self._sent_at[0] = oldest
        return pb.SessionRequest(frame_id=self._frame_id)

    def time_of(self, frame_id: int) -> float:
        """When a frame was sent, or a time before it.

        Older ones are forgotten: the server only goes forward.
        """
        while self._first_sent < frame_id and len(self._sent_at) > 1:
            self._sent_at.popleft()
            self._first_sent += 1
        return self._sent_at[0]

    def fly(self, frame: pb.SessionRequest, cargo: Cargo, leases: Sequence[Lease], now: float) -> None:
        """Await the Ack of a frame with items of these leases."""
        self._flights[frame.frame_id] = Flight(cargo, list(leases), now, len(leases))
        if cargo is not Cargo.HEARTBEAT:
            return
        self._unanswered_heartbeats.append(frame.frame_id)
        if len(self._unanswered_heartbeats) > MAX_UNANSWERED_HEARTBEATS:
            # A server without its database answers none; what the oldest ones asked is asked again by the
            # newest.
            self._flights.pop(self._unanswered_heartbeats.popleft(), None)

    def of(self, frame_id: int) -> Flight | None:
        """The flight of a frame; None if no Ack of it is awaited."""
        return self._flights.get(frame_id)

    def landed(self, frame_id: int) -> None:
        """All items of a frame were answered."""
        del self._flights[frame_id]
