"""Servers of the test kit, on the database server of the test session, and workers that the machine may hold up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

from fencepost import Worker
from fencepost.testing import AsyncEnvironment, TestServer
from fencepost.testing.kit import load
from fencepost.testing.server import Starting


@pytest.fixture(autouse=True)
def patient_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of a workflow amid which the machine stands still is none that has to be interrupted, and its function to
    be called again.
    """
    defaults = Worker.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "deadlock_timeout", 60.0)


@pytest.fixture(scope="session")
def kit_database(admin_dsn: str) -> Iterator[str]:
    """Where the kit makes its databases; what it has made is dropped at the end."""
    yield admin_dsn
    process = load()
    process.background.call(process.forget(admin_dsn), 30)


Start = Callable[..., Starting]


@pytest.fixture
def start(kit_database: str) -> Start:
    """`TestServer.start` on that database server."""

    def begin(**options: object) -> Starting:
        return TestServer.start(database=kit_database, **options)  # type: ignore[arg-type]  # passed on as they are

    return begin


@pytest_asyncio.fixture
async def env(start: Start) -> AsyncIterator[AsyncEnvironment]:
    """A server with time that skips."""
    async with start() as environment:
        yield environment
