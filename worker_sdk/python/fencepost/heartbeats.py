"""When a session renews its leases, and in how many frames. Pure but for its own state; used by the session.

A heartbeat names every lease that is held when it is planned, so leases of a server that is slow to answer are named
again and again: nothing of it is kept but what waits to be written.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.lease import Lease

RETRY_DELAY = 1.0
_MIN_INTERVAL = 0.05


class Heartbeats:
    """The heartbeats of one session; ``interval`` is the server's wish in seconds."""

    def __init__(self) -> None:
        self.interval = 20.0
        self.reset()

    def reset(self) -> None:
        """Forget everything that belongs to one stream."""
        self._waiting: deque[Sequence[Lease]] = deque()
        self.tasks_number = 0
        self.due = math.inf

    @property
    def waiting(self) -> bool:
        """Whether a frame of one waits to be written."""
        return bool(self._waiting)

    def next(self) -> Sequence[Lease]:
        """The leases of the next frame."""
        return self._waiting.popleft()

    def plan(self, shortest: float, sent_at: float) -> None:
        """Be in time for leases of which the shortest lasts so long from ``sent_at``; infinite if there are none."""
        if shortest < math.inf:
            self.due = min(self.due, sent_at + min(self.interval, shortest / 3))

    def again(self, now: float) -> None:
        """One was refused: try soon."""
        self.due = min(self.due, now + RETRY_DELAY)

    def beat(self, leases: Sequence[Lease], tasks_number: int, max_items: int, now: float) -> None:
        """Plan one of all ``leases``, in as many frames as it takes, as of Tasks frame ``tasks_number``."""
        if not leases:
            self.due = math.inf
            return
        if not self._waiting:
            # One that still waits for its turn to be written says the same.
            self._waiting.extend(leases[first : first + max_items] for first in range(0, len(leases), max_items))
            self.tasks_number = tasks_number
        shortest = min(lease.lease_seconds for lease in leases)
        self.due = now + max(min(self.interval, shortest / 3), _MIN_INTERVAL)
