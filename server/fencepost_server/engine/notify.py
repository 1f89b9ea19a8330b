"""Hints between servers: NOTIFY, coalesced and after the commit, never inside a batch's transaction.

A hint says where work became ready, which runs ended, or that a lease of another server's session has ended or should.
Losing one costs a poll interval, or the time until the next heartbeat, whose answer says the same (I10). A server that
knows of no other one sends none.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable

from fencepost_server.config import Config
from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.engine.changes import Ready
from fencepost_server.engine.loops import Loop
from fencepost_server.store import cluster
from fencepost_server.store.connection import Database
from fencepost_server.store.listen import listen
from fencepost_server.store.outage import note_outage

log = logging.getLogger("fencepost.notify")

_PAYLOAD_LIMIT = 7000  # Postgres takes payloads under 8,000 bytes
_MAX_PENDING = 20_000


Stop = tuple[str, str, int, int, str, float | None]
"""session_id, run_id, task_id, token, reason of a lease; in how many seconds it ends, None: it has."""


class Notifier:
    """Gathers hints for a moment, then sends them in one statement."""

    def __init__(self, config: Config, database: Database, server_id: str) -> None:
        self._config = config
        self._database = database
        self._server_id = server_id
        self._places: set[tuple[str, str, str, int]] = set()
        self._runs: set[str] = set()
        self._stops: list[Stop] = []
        self.others = 0
        """How many other servers live, by the last probe."""
        self.loop = Loop("notify", self.run_once)

    def add(self, ready: Iterable[Ready], ended: Iterable[str], stops: Iterable[Stop] = ()) -> None:
        """Something that another server may want to know."""
        if not self.others:
            return
        self._places.update((r.namespace, r.queue, r.handler, r.priority) for r in ready if r.delay <= 0)
        if len(self._runs) < _MAX_PENDING:
            self._runs.update(ended)
        if len(self._stops) < _MAX_PENDING:
            self._stops.extend(stops)
        if self._places or self._runs or self._stops:
            self.loop.wake()

    async def run_once(self) -> float | None:
        """Send what was gathered."""
        if not self._places and not self._runs and not self._stops:
            return None
        await asyncio.sleep(self._config.notify_delay)
        places, self._places = list(self._places), set()
        runs, self._runs = list(self._runs), set()
        stops, self._stops = [{"stop": stop} for stop in self._stops], []
        await cluster.notify(self._database, list(_payloads(self._server_id, [*places, *runs, *stops])))
        return None


def _payloads(server_id: str, items: Iterable[object]) -> Iterable[str]:
    """JSON texts, each below the limit of a payload."""
    chunk: list[object] = []
    size = 0
    for item in items:
        length = len(json.dumps(item)) + 2
        if chunk and size + length > _PAYLOAD_LIMIT:
            yield json.dumps([server_id, chunk])
            chunk, size = [], 0
        chunk.append(item)
        size += length
    if chunk:
        yield json.dumps([server_id, chunk])


class Listener:
    """Receives the hints of other servers on a direct connection, and comes back whenever that connection is lost."""

    def __init__(
        self,
        config: Config,
        server_id: str,
        ready: Callable[[list[Ready]], None],
        ended: Callable[[list[str]], None],
        stop: Callable[[Stop], object],
    ) -> None:
        self._config = config
        self._server_id = server_id
        self._ready = ready
        self._ended = ended
        self._stop = stop
        self.loop = Loop("listen", self.run_once)

    async def run_once(self) -> float | None:
        """Listen until the connection is lost."""
        if not self._config.listen_dsn:
            return None
        try:
            async for payload in listen(self._config):
                self._take(payload)
        except DatabaseUnavailable as error:
            note_outage(self.loop.name, error)  # and polling goes on
        return 1.0

    def _take(self, payload: str) -> None:
        try:
            origin, items = json.loads(payload)
            if origin == self._server_id:
                return
            self._ready([Ready(*item) for item in items if isinstance(item, list)])
            self._ended([item for item in items if isinstance(item, str)])
            for item in items:
                if isinstance(item, dict):
                    session_id, run_id, task_id, token, reason, remaining = item["stop"]
                    self._stop((session_id, run_id, task_id, token, reason, remaining))
        except (ValueError, TypeError, KeyError):
            log.warning("a notification that is not ours was ignored")
