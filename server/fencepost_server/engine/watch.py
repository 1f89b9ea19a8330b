"""Waiting for runs: who waits is woken by this server's commits at once, and by a poll for what other servers commit.

All waiters together cost one statement a poll, and none when nobody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from fencepost_server.config import Config
from fencepost_server.domain.errors import Overloaded
from fencepost_server.engine.loops import Loop
from fencepost_server.store import runs
from fencepost_server.store.connection import Database


class Watch:
    """One caller's interest in one run: in every event, or in the end only. ``woken`` is set when there may be
    something new.
    """

    __slots__ = ("end_only", "last_seq", "run_id", "woken")

    def __init__(self, run_id: str, *, end_only: bool) -> None:
        self.run_id = run_id
        self.end_only = end_only
        self.woken = asyncio.Event()
        self.last_seq = 0


class Watches:
    """All interests on this server."""

    def __init__(self, config: Config, database: Database) -> None:
        self._config = config
        self._database = database
        self._by_run: dict[str, set[Watch]] = {}
        self._count = 0
        self.loop = Loop("watch", self.run_once)

    @asynccontextmanager
    async def watching(self, run_id: str, *, end_only: bool = False) -> AsyncIterator[Watch]:
        """Be told of a run's changes within the block. Raises Overloaded past max_waiters."""
        if self._count >= self._config.max_waiters:
            raise Overloaded("too many calls wait for runs")
        watch = Watch(run_id, end_only=end_only)
        self._count += 1
        self._by_run.setdefault(run_id, set()).add(watch)
        self.loop.wake()
        try:
            yield watch
        finally:
            self._count -= 1
            watches = self._by_run[run_id]
            watches.discard(watch)
            if not watches:
                del self._by_run[run_id]

    @property
    def run_ids(self) -> list[str]:
        """The runs that somebody waits for here."""
        return list(self._by_run)

    def changed(self, run_ids: Iterable[str]) -> None:
        """Events were committed."""
        if self._by_run:
            for run_id in run_ids:
                for watch in self._by_run.get(run_id, ()):
                    if not watch.end_only:
                        watch.woken.set()

    def ended(self, run_ids: Iterable[str]) -> None:
        """Runs have ended."""
        if self._by_run:
            for run_id in run_ids:
                for watch in self._by_run.get(run_id, ()):
                    watch.woken.set()

    async def run_once(self) -> float | None:
        """Look how far the watched runs are."""
        if not self._by_run:
            return None
        run_ids = self.run_ids
        for start in range(0, len(run_ids), 1000):
            gone = set(run_ids[start : start + 1000])
            for run_id, last_seq, ended in await runs.progress(self._database, list(gone)):
                gone.discard(run_id)
                for watch in self._by_run.get(run_id, ()):
                    if ended if watch.end_only else watch.last_seq != last_seq:
                        watch.woken.set()
            self.ended(gone)  # they ended and were deleted since the last look: whoever waits is to be told
        return self._config.poll_interval
