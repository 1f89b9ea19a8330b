"""A client and the test that is its server; an executor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from fencepost import Client
from tests.unit.sdk.answering import Server
from tests.unit.sdk.executing import Harness
from tests.unit.sdk.replaying import replays


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _evicted() -> Iterator[None]:
    """Runs that a test has left in memory go with it."""
    yield
    while replays:
        replays.pop().evict()


@pytest.fixture
def client(server: Server) -> Client:
    return Client(channel=server.channel, namespace="shop", timeout=60.0)


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness(threads=4)
    yield made
    made.close()
