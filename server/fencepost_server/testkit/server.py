"""One server of the kit: a whole `app.running` on a loopback port, on a new database with a clock that skips."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fencepost_server.app import Running, running
from fencepost_server.config import Config, load
from fencepost_server.store.shifted_clock import ShiftedClock
from fencepost_server.testkit.databases import Databases
from fencepost_server.testkit.pilot import Pilot

_SETTINGS: Mapping[str, Any] = {
    "grpc_port": 0,
    "http_port": 0,
    "retention": 0.0,  # a test that has skipped a year still wants to read what was
    "shutdown_grace": 2.0,
}
_OURS = frozenset({"dsn", "listen_dsn", "grpc_host", "http_host"})


class SkippingServer:
    """A server that serves. ``plain_dsn`` is its database as people connect to it."""

    def __init__(self, server: Running, pilot: Pilot, plain_dsn: str) -> None:
        self.server = server
        self.pilot = pilot
        self.plain_dsn = plain_dsn
        self._stop = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port of gRPC."""
        return self.server.grpc_address

    @classmethod
    async def start(cls, databases: Databases, settings: Mapping[str, Any]) -> SkippingServer:
        """Start one. ``settings`` are those of the server's Config, but for where it is.

        Raises ConfigError for wrong ones, EmbeddedFailed if there can be no database.
        """
        config = _config(settings)
        started: asyncio.Future[SkippingServer] = asyncio.get_running_loop().create_future()

        async def live() -> None:
            try:
                async with _serving(databases, config) as server:
                    started.set_result(server)
                    await server._stop.wait()
            except BaseException as error:
                if started.done():
                    raise
                started.set_exception(error)

        # In one task from its beginning to its end, whoever asks for either.
        life = asyncio.create_task(live(), name="testkit-server")
        server = await started
        server._life = life
        return server

    async def stop(self) -> None:
        """Shut it down in order and drop its database. A second call does nothing."""
        self._stop.set()
        if self._life is not None:
            life, self._life = self._life, None
            await life


def _config(settings: Mapping[str, Any]) -> Config:
    taken = sorted(_OURS & settings.keys())
    if taken:
        raise ValueError(f"the test kit chooses {', '.join(taken)} itself")
    # Not from the environment: a test means what it says, wherever it runs.
    return load({**_SETTINGS, **settings}, env={})


@asynccontextmanager
async def _serving(databases: Databases, config: Config) -> AsyncIterator[SkippingServer]:
    name, dsn = await databases.make()
    try:
        async with running(dataclasses.replace(config, dsn=dsn)) as server:
            clock = await ShiftedClock.connect(dsn)
            try:
                yield SkippingServer(server, Pilot(server.engine, clock), databases.plain_dsn(name))
            finally:
                await clock.close()
    finally:
        await databases.drop(name)
