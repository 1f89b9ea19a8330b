"""Hints between servers: NOTIFY, coalesced and after the commit, never inside a batch's transaction.

A hint says where work became ready, which runs ended, that a lease of another server's session has ended or should,
that a run held there has new events, or that there is a question for workers of another server.
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


News = tuple[str, str, int, int, int, int]
"""session_id, run_id, task_id, token of a lease of a code run, whose events after the first number are new, up to the
second.
"""


class Notifier:
    """Gathers hints for a moment, then sends them in one statement."""

    def __init__(self, config: Config, database: Database, server_id: str) -> None:
        self._config = config
        self._database = database
        self._server_id = server_id
        self._places: set[tuple[str, str, str, int]] = set()
        self._runs: set[str] = set()
        self._stops: list[Stop] = []
        self._news: dict[str, News] = {}
        self._asked = False
        self.others = 0
        """How many other servers live, by the last probe."""
        self.loop = Loop("notify", self.run_once)

    def ask(self) -> None:
        """There is a question for the workers of other servers."""
        if self.others:
            self._asked = True
            self.loop.wake()

    def add(
        self, ready: Iterable[Ready], ended: Iterable[str], stops: Iterable[Stop] = (), news: Iterable[News] = ()
    ) -> None:
        """Something that another server may want to know."""
        if not self.others:
            return
        self._places.update((r.namespace, r.queue, r.handler, r.priority) for r in ready if r.delay <= 0)
        if len(self._runs) < _MAX_PENDING:
            self._runs.update(ended)
        if len(self._stops) < _MAX_PENDING:
            self._stops.extend(stops)
        if len(self._news) < _MAX_PENDING:
            for item in news:
                before = self._news.get(item[1])
                self._news[item[1]] = item if before is None else (*item[:4], min(before[4], item[4]), item[5])
        if self._places or self._runs or self._stops or self._news:
            self.loop.wake()

    async def run_once(self) -> float | None:
        """Send what was gathered."""
        if not (self._places or self._runs or self._stops or self._news or self._asked):
            return None
        await asyncio.sleep(self._config.notify_delay)
        places, self._places = list(self._places), set()
        runs, self._runs = list(self._runs), set()
        stops, self._stops = [{"stop": stop} for stop in self._stops], []
        news, self._news = [{"news": item} for item in self._news.values()], {}
        asked, self._asked = [{"asked": True}] if self._asked else [], False
        hints = [*places, *runs, *stops, *news, *asked]
        await cluster.notify(self._database, list(_payloads(self._server_id, hints)))
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
        news: Callable[[News], object],
    ) -> None:
        self._config = config
        self._server_id = server_id
        self._ready = ready
        self._ended = ended
        self._stop = stop
        self._news = news
        self.on_asked: Callable[[], None] | None = None
        """Called when another server has a question for workers."""
        self.loop = Loop("listen", self.run_once)

    async def run_once(self) -> float | None:
        """Listen until the connection is lost."""
        if not self._config.listen_dsn:
            late = self._config.poll_interval
            log.info("no listen_dsn is set: the work of other servers is noticed by polling, up to %g s late", late)
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
                if isinstance(item, dict) and "news" in item:
                    held, run, task, fence, after_seq, last_seq = item["news"]
                    self._news((held, run, task, fence, after_seq, last_seq))
                elif isinstance(item, dict) and "asked" in item:
                    if self.on_asked is not None:
                        self.on_asked()
                elif isinstance(item, dict):
                    session_id, run_id, task_id, token, reason, remaining = item["stop"]
                    self._stop((session_id, run_id, task_id, token, reason, remaining))
        except (ValueError, TypeError, KeyError):
            log.warning("a notification that is not ours was ignored")
