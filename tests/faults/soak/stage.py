"""Everything that a soak plays on: two PostgreSQL servers (one that faults reach, one for the sink), two Fencepost
servers, workers, and a proxy between each pair of them.

All are real processes. Start and stop them from the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fencepost_server.store.migrate import migrate
from tests.faults.soak.conditional_sink import ConditionalSink
from tests.fixtures.databases import redirected
from tests.fixtures.postgres_server import PostgresServer, install
from tests.fixtures.processes import Process
from tests.fixtures.proxy import Proxy
from tests.fixtures.servers import ServerProcess, Setting

SHIFTED_CLOCK = Path(__file__).parents[1] / "shifted_clock"
GRACE = 2.5
SETTINGS: Mapping[str, Setting] = {
    "heartbeat_interval": 2.0,
    "disconnect_grace": GRACE,
    "shutdown_grace": 4.0,
    "schedule_retry": 2.0,
}
"""Defaults but for what makes faults end sooner than the next one begins."""
POSTGRES = {"max_connections": "60"}
SERVERS = 2
START_LIMIT = 120.0
WORKERS = (("graph", "-"), ("graph", "-"), ("code", "1000"), ("code", "2"), ("code", "replay"))
"""What each worker does, and how many code runs it keeps in memory."""


class WorkerProcess(Process):
    """One of the soak's workers; a restart may give it another clock."""

    def clock(self, *offsets: float) -> None:
        """Let it believe in another time from its next start on: offsets in seconds, one after the other."""
        self._variables = shifted(offsets)


class SoakServer(ServerProcess):
    """A server whose clock may be wrong."""

    def __init__(self, dsn: str, log: Path, settings: dict[str, Setting]) -> None:
        super().__init__(dsn, log, settings)
        self.offsets: tuple[float, ...] = ()

    def start(self) -> None:
        """Start it, with the clock that it was given."""
        with _variables(shifted(self.offsets)):
            super().start()


def shifted(offsets: tuple[float, ...]) -> dict[str, str]:
    """The variables that shift a process's clock; none for the right time."""
    if not offsets:
        return {}
    return {"PYTHONPATH": str(SHIFTED_CLOCK), "CLOCK_OFFSETS": ",".join(map(str, offsets)), "CLOCK_STEP": "1.5"}


@contextlib.contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Stage:
    """Make one with `stage`. ``links`` has the proxy of each worker (by number) or client (-1) to each server."""

    folder: Path
    postgres: PostgresServer
    outside: PostgresServer
    sink: ConditionalSink
    dsn: str
    servers: list[SoakServer] = field(default_factory=list)
    workers: list[WorkerProcess] = field(default_factory=list)
    database_links: list[Proxy] = field(default_factory=list)
    links: dict[tuple[int, int], Proxy] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    """Of the processes that have ended by themselves, how."""

    @property
    def target(self) -> str:
        """The servers' addresses for a client, through proxies."""
        return self._target(-1)

    def _target(self, who: int) -> str:
        order = range(SERVERS) if who % 2 == 0 else reversed(range(SERVERS))
        return ",".join(self.links[who, server].address for server in order)

    def at(self, worker: int) -> list[int]:
        """The servers that a worker has connections to."""
        return [server for server in range(SERVERS) if self.links[worker, server].connections]

    def note_end(self, process: Process) -> None:
        """Keep how a process has ended, if it has. To be called before a fault ends it: its next start hides that."""
        if not process.running:
            self.ended.append(
                f"{process.log_path.name}: it has ended with {process.returncode}:\n{process.logs[-2000:]}"
            )

    def proxies(self) -> list[Proxy]:
        """All of them."""
        return [*self.database_links, *self.links.values()]

    async def serve(self, workers: int, settings: Mapping[str, Setting]) -> None:
        """Start servers and workers; returns when the servers serve."""
        for number in range(SERVERS):
            proxy = Proxy(self.postgres.address).start()
            self.database_links.append(proxy)
            dsn = redirected(self.dsn, proxy.address)
            given = {**SETTINGS, "listen_dsn": dsn, **settings}
            self.servers.append(SoakServer(dsn, self.folder / f"server-{number}.log", given))
            self.servers[-1].start()
        for number, server in enumerate(self.servers):
            await asyncio.to_thread(server.wait_serving, START_LIMIT)
            for who in range(-1, workers):
                self.links[who, number] = Proxy(server.grpc_address).start()
        for number, (kind, cache) in enumerate(WORKERS[:workers]):
            arguments = (self._target(number), self.sink.dsn, f"worker-{number}", kind, cache)
            argv = [sys.executable, "-m", "tests.faults.soak.worker", *arguments]
            self.workers.append(WorkerProcess(argv, self.folder / f"worker-{number}.log"))
            self.workers[-1].start()

    def close(self) -> None:
        """End everything that was started, whatever its state."""
        for process in (*self.workers, *self.servers):
            if process.running:
                process.kill()
        for proxy in self.proxies():
            proxy.stop()
        self.sink.close()
        for server in (self.postgres, self.outside):
            server.remove()


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fencepost-soak-"))
    folder.chmod(0o711)
    return folder


@contextlib.asynccontextmanager
async def stage(
    workers: int = len(WORKERS),
    *,
    data: Path | None = None,
    postgres: Mapping[str, str] | None = None,
    **settings: Setting,
) -> AsyncIterator[Stage]:
    """A stage that plays. ``data`` is the folder of the database, if it has to be a certain one, ``postgres`` has
    settings of it; the others are those of the servers.
    """
    folder = _folder()
    programs = install(folder)
    database = PostgresServer(data or folder / "postgres", {**POSTGRES, **(postgres or {})}, programs=programs)
    outside = PostgresServer(folder / "outside", programs=programs)
    try:
        database.start()
        outside.start()
        await migrate(database.dsn())
        sink = ConditionalSink(outside.dsn())
        sink.create()
        made = Stage(folder, database, outside, sink, database.dsn())
        try:
            await made.serve(workers, settings)
            yield made
        finally:
            made.close()
    finally:
        for server in (database, outside):
            if server.running:
                server.remove()
        shutil.rmtree(folder, ignore_errors=True)
