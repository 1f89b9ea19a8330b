"""Starts servers for tests."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from fencepost.testing.async_environment import AsyncEnvironment
from fencepost.testing.environment import Environment
from fencepost.testing.kit import START_TIMEOUT, Kit, load


class TestServer:
    """A server in this process, with a database of its own and time that skips."""

    __test__ = False  # for pytest, which takes the name for that of tests

    @staticmethod
    def start(*, auto_skip: bool = True, patience: float = 5.0, database: str = "", **settings: Any) -> Starting:
        """For a block: ``async with TestServer.start() as env`` gives an `AsyncEnvironment`, ``with`` an `Environment`.

        ``auto_skip=False`` leaves all skipping to `skip`. ``patience`` is for how many seconds `result` goes on when
        there is nothing to do nor to skip to. ``database`` is the connection string of a PostgreSQL server on which
        databases may be made; by default an embedded one is started, once a process. ``settings`` are those of a
        server, by their names in its Config.

        The block raises KitMissing if it needs what is not installed.
        """
        return Starting(auto_skip=auto_skip, patience=patience, database=database, settings=settings)


class Starting:
    """A server about to start."""

    def __init__(self, *, auto_skip: bool, patience: float, database: str, settings: dict[str, Any]) -> None:
        self._auto_skip = auto_skip
        self._patience = patience
        self._database = database
        self._settings = settings
        self._kit: Kit | None = None
        self._environment: Environment | None = None

    async def __aenter__(self) -> AsyncEnvironment:
        process = load()
        self._kit = await process.background.await_(self._start())
        return AsyncEnvironment(self._kit)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._kit is not None:
            kit, self._kit = self._kit, None
            await kit.await_(kit.stop())

    def __enter__(self) -> Environment:
        self._environment = Environment(self._begin())
        return self._environment

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._environment is not None:
            environment, self._environment = self._environment, None
            environment.client.close()
        self.end()

    def begin_async(self) -> AsyncEnvironment:
        """As ``async with``, for who has no loop yet; `end` ends it."""
        return AsyncEnvironment(self._begin())

    def end(self) -> None:
        """Stop the server, from a thread without a loop or with one."""
        if self._kit is not None:
            kit, self._kit = self._kit, None
            kit.call(kit.stop())

    def _begin(self) -> Kit:
        process = load()
        self._kit = process.background.call(self._start(), START_TIMEOUT)
        return self._kit

    async def _start(self) -> Kit:
        return await Kit.start(
            load(), self._database, self._settings, auto_skip=self._auto_skip, patience=self._patience
        )
