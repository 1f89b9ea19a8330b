"""Both clients of a server, and workers that the machine may hold up."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fencepost import AsyncClient, Client, Worker
from tests.fixtures.servers import InProcessServer
from tests.sdk.either import Either


@pytest.fixture(autouse=True)
def patient_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of a workflow amid which the machine stands still is none that has to be interrupted, and its local steps
    to be run again: unless a test says how long it may take, it may take long.
    """
    defaults = Worker.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "deadlock_timeout", 60.0)


@pytest_asyncio.fixture(params=["sync", "async"])
async def ask(server: InProcessServer, request: pytest.FixtureRequest) -> AsyncIterator[Either]:
    """A test that asks runs with each of the clients."""
    client = Client(server.grpc_address) if request.param == "sync" else AsyncClient(server.grpc_address)
    either = Either(client)
    yield either
    await either.close()
