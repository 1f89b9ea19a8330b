"""What every benchmark stands on: databases, servers and workers, all of it gone at the end.

::

    async with Stage({}, postgres) as stage:
        dsn = await stage.database()
        server = await stage.server(dsn)
        worker = await stage.worker(server.address)
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg

from benchmarks.database import Facts, NotDurable, Postgres
from benchmarks.processes import ProcessFailed, Server, Streams, Told, Worker
from fencepost import AsyncClient
from fencepost_server.config import Config, load
from fencepost_server.embedded import EmbeddedFailed
from fencepost_server.store.migrate import migrate

Process = TypeVar("Process", bound=Told)


class BenchmarkFailed(Exception):
    """Nothing was measured, or what was measured is wrong. The message is for people."""


@contextlib.contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A database server of one's own. Raises BenchmarkFailed in place of what it fails with."""
    try:
        with Postgres() as postgres:
            yield postgres
    except EmbeddedFailed as error:
        raise BenchmarkFailed(str(error)) from error


class Stage:
    """See the module. ``settings`` are variables of the servers' environment. Not reusable.

    Its databases are on ``postgres`` and are dropped in the end. Raises BenchmarkFailed, also in place of what a
    database or a process that failed raises within the block.
    """

    facts: Facts

    def __init__(self, settings: Mapping[str, str], postgres: Postgres) -> None:
        self.postgres = postgres
        self._settings = dict(settings)
        self._stack = contextlib.AsyncExitStack()
        self._processes = itertools.count(1)

    async def __aenter__(self) -> Self:
        try:
            self.facts = self.postgres.facts()
        except NotDurable as error:
            raise BenchmarkFailed(str(error)) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        if isinstance(error, ProcessFailed):
            raise BenchmarkFailed(str(error)) from error

    def note(self, text: str) -> None:
        """Tell on standard error how far it is."""
        print(text, file=sys.stderr, flush=True)

    def config(self, dsn: str) -> Config:
        """The settings that a server on ``dsn`` has."""
        return load(env=self._variables(dsn))

    def _variables(self, dsn: str) -> dict[str, str]:
        # The servers listen for each other's notifications, as in production.
        return {"FENCEPOST_LISTEN_DSN": dsn, "FENCEPOST_LOG_LEVEL": "warning"} | self._settings | {"FENCEPOST_DSN": dsn}

    async def database(self) -> str:
        """A new database with the current schema; returns its connection string."""
        dsn = self.empty_database()
        await migrate(dsn)
        return dsn

    def empty_database(self) -> str:
        """A new database without anything in it; returns its connection string."""
        name, dsn = self.postgres.create()
        self._stack.callback(self.postgres.drop, name)
        return dsn

    async def connection(self, dsn: str) -> psycopg.AsyncConnection[Any]:
        """A connection for the benchmark's own questions."""
        connection: psycopg.AsyncConnection[Any] = await psycopg.AsyncConnection.connect(
            dsn, autocommit=True, connect_timeout=10, application_name="benchmark"
        )
        self._stack.push_async_callback(connection.close)
        return connection

    async def server(self, dsn: str) -> Server:
        """A server that serves from ``dsn``, with default settings but those of the stage."""
        server = await Server.serving(f"server-{next(self._processes)}", self._variables(dsn), self.postgres.folder)
        self._stack.push_async_callback(server.end)
        return server

    async def client(self, address: str) -> AsyncClient:
        """A client of the server at ``address``."""
        return await self._stack.enter_async_context(AsyncClient(address))

    async def worker(self, address: str) -> Worker:
        """A worker process for the server at ``address`` that waits to be told to work."""
        return await self._told(Worker, address)

    async def streams(self, address: str) -> Streams:
        """A process of very many workers for the server at ``address`` that waits to be told to connect."""
        return await self._told(Streams, address)

    async def _told(self, kind: type[Process], address: str) -> Process:
        process = await kind.ready(f"{kind.__name__.lower()}-{next(self._processes)}", address, self.postgres.folder)
        self._stack.push_async_callback(process.end)
        return process
