"""A client and the test that is its server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fencepost import Client
from tests.unit.sdk.answering import Server
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
    return Client(channel=server.channel, namespace="shop", timeout=2.0)
