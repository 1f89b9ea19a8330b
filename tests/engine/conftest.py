"""Scenes for tests of the step engine; see tests.engine.flows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.engine.code import Code, open_code
from tests.engine.flows import HANDLERS, OpenScene, Scene
from tests.fixtures.api import Api
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import StartInProcessServer


@pytest.fixture
def open_scene(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Callable[[str], Api],
    connect_worker: Callable[..., Awaitable[RawWorker]],
) -> OpenScene:
    """Opens a scene on a server with these settings: ``await open_scene(cancel_grace=1.0)``.

    It does not take a slow machine for an outage, after which no lease would run out for half a minute, nor for a
    database that is away.
    """

    async def open_(**settings: Any) -> Scene:
        patient = {"poll_interval": 0.05, "outage_gap": 60.0, "connect_timeout": 30.0}
        server = await in_process_server(dsn, **{**patient, **settings})
        worker = await connect_worker(server.grpc_address, handlers=HANDLERS, capacity=100)
        return Scene(server, connect_api(server.grpc_address), worker, dsn)

    return open_


@pytest.fixture
async def scene(open_scene: OpenScene) -> Scene:
    """A scene with the default settings."""
    return await open_scene()


@pytest.fixture
async def code(open_scene: OpenScene) -> AsyncIterator[Code]:
    """A server with a worker that decides."""
    code = await open_code(open_scene)
    yield code
    await code.decider.close()
