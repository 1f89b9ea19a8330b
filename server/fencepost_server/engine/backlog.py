"""Work that waits for workers, by namespace and queue, for those who watch over a server.

Where there is any, the probe has found; how much is counted when somebody asks, in these places only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fencepost_server.domain.errors import Unavailable
from fencepost_server.store import cluster
from fencepost_server.store.cluster import ReadyWork
from fencepost_server.store.connection import Database

_MOST_QUEUES, _MOST_PLACES = 100, 200
_TIMEOUT = 1.0
"""Seconds for a count: whoever asks has other numbers to get, too."""


@dataclass(slots=True)
class Waiting:
    """The READY tasks of a queue of a namespace, and for how many seconds the oldest has been one."""

    count: int
    oldest: float


class Backlog:
    """See the module."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ready: Sequence[ReadyWork] = ()
        self._seen_at = 0.0
        self.waiting: dict[tuple[str, str], Waiting] = {}
        """What was counted last, by namespace and queue; nothing if it could not be."""

    def saw(self, ready: Sequence[ReadyWork]) -> None:
        """What the probe has found."""
        self._ready, self._seen_at = ready, time.monotonic()

    async def count(self) -> None:
        """Count anew: of the 100 queues that have waited for longest, and 200 places in them."""
        self.waiting = {}
        places = _chosen(self._ready, time.monotonic() - self._seen_at)
        if not places:
            return
        try:
            async with asyncio.timeout(_TIMEOUT):
                found = await cluster.count_ready(self._database, places)
        except (TimeoutError, Unavailable):
            return  # that the database does not answer is told elsewhere
        counted: dict[tuple[str, str], Waiting] = {}
        for namespace, queue, count, oldest in found:
            waiting = counted.setdefault((namespace, queue), Waiting(0, 0.0))
            waiting.count += count
            waiting.oldest = max(waiting.oldest, oldest)
        self.waiting = counted


def _chosen(ready: Iterable[ReadyWork], elapsed: float) -> list[ReadyWork]:
    """The places to count in, those that have waited for longest first."""
    due = sorted((work for work in ready if work.due_in <= elapsed), key=lambda work: work.due_in)
    queues = list(dict.fromkeys((work.namespace, work.queue) for work in due))[:_MOST_QUEUES]
    return [work for work in due if (work.namespace, work.queue) in queues][:_MOST_PLACES]
