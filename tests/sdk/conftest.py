"""Both clients of a server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fencepost import AsyncClient, Client
from tests.fixtures.servers import InProcessServer
from tests.sdk.either import Either


@pytest_asyncio.fixture(params=["sync", "async"])
async def ask(server: InProcessServer, request: pytest.FixtureRequest) -> AsyncIterator[Either]:
    """A test that asks runs with each of the clients."""
    client = Client(server.grpc_address) if request.param == "sync" else AsyncClient(server.grpc_address)
    either = Either(client)
    yield either
    await either.close()
