"""What every benchmark stands on: a database server, servers and workers, all of it gone at the end.

::

    async with Stage() as stage:
        dsn = await stage.database("bench")
        server = await stage.server(dsn)
        worker = await stage.worker(server.address)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import psycopg

from benchmarks.database import Facts, NotDurable, Postgres
from benchmarks.processes import ProcessFailed, Server, Worker
from fencepost_server.config import Config, load
from fencepost_server.embedded import EmbeddedFailed
from fencepost_server.store.migrate import migrate


class BenchmarkFailed(Exception):
    """Nothing was measured, or what was measured is wrong. The message is for people."""


_EXPECTED = (NotDurable, EmbeddedFailed, ProcessFailed)


class Stage:
    """See the module. ``settings`` are variables of the servers' environment. Not reusable.

    Raises BenchmarkFailed, also in place of what a database or a process that failed raises within the block.
    """

    facts: Facts
    postgres: Postgres

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = dict(settings or {})
        self._stack = contextlib.AsyncExitStack()
        self._workers = 0

    async def __aenter__(self) -> Self:
        try:
            self.postgres = self._stack.enter_context(Postgres())
            self.facts = self.postgres.facts()
        except BaseException as error:
            await self._stack.aclose()
            if isinstance(error, _EXPECTED):
                raise BenchmarkFailed(str(error)) from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        if isinstance(error, _EXPECTED):
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

    async def database(self, name: str) -> str:
        """A new database with the current schema; returns its connection string."""
        dsn = self.postgres.create(name)
        await migrate(dsn)
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
        server = await Server.serving(self._variables(dsn), self.postgres.folder)
        self._stack.push_async_callback(server.end)
        return server

    async def worker(self, address: str) -> Worker:
        """A worker process for the server at ``address`` that waits to be told to work."""
        self._workers += 1
        worker = await Worker.ready(f"worker-{self._workers}", address, self.postgres.folder)
        self._stack.push_async_callback(worker.end)
        return worker
