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
    """One caller's interest in one run. ``changed`` is set when the run may have got events."""

    __slots__ = ("changed", "last_seq", "run_id")

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.changed = asyncio.Event()
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
    async def watching(self, run_id: str) -> AsyncIterator[Watch]:
        """Be told of a run's changes within the block. Raises Overloaded past max_waiters."""
        if self._count >= self._config.max_waiters:
            raise Overloaded("too many calls wait for runs")
        watch = Watch(run_id)
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
        if not self._by_run:
            return
        for run_id in run_ids:
            for watch in self._by_run.get(run_id, ()):
                watch.changed.set()

    async def run_once(self) -> float | None:
        """Look how far the watched runs are."""
        if not self._by_run:
            return None
        run_ids = self.run_ids
        for start in range(0, len(run_ids), 1000):
            for run_id, last_seq in await runs.progress(self._database, run_ids[start : start + 1000]):
                for watch in self._by_run.get(run_id, ()):
                    if watch.last_seq != last_seq:
                        watch.last_seq = last_seq
                        watch.changed.set()
        return self._config.poll_interval
