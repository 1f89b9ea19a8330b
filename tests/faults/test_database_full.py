"""The database has no room left, or no connections: callers are told, and all goes on when there are some again.

I1, I13.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from fencepost.v1 import run_service_pb2
from fencepost_server.store.migrate import migrate
from tests.faults.scene import STAYING, Scene, all_connections, fetch
from tests.faults.soak.disk import SETTINGS, fill, small_volume
from tests.fixtures.api import Api
from tests.fixtures.databases import programs_of, redirected
from tests.fixtures.manifests import manifest
from tests.fixtures.postgres_server import PostgresServer
from tests.fixtures.raw_worker import OK
from tests.fixtures.refusals import refused
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually

SIZE = 200 << 20
LARGE = 200_000
"""Bytes of an input that fits into no page that is there already."""
CONNECTIONS = 30
KEY = "refused"


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder with little room."""
    with small_volume(SIZE) as folder:
        if folder is None:
            pytest.skip("nothing may be mounted here")
        yield folder


async def assert_refused(api: Api, given: str) -> None:
    """A start is, and its caller is told to come again."""
    with refused("DATABASE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE) as refusal:
        await api.start(input=given, request_key=KEY)
    assert refusal.error.retry_after


async def repeated(api: Api, given: str) -> run_service_pb2.StartRunResponse:
    """The same start once more. Raises AssertionError while it is refused."""
    try:
        return await api.start(input=given, request_key=KEY)
    except grpc.aio.AioRpcError as error:
        raise AssertionError(error.details()) from error


async def test_nothing_is_acknowledged_while_the_disk_of_the_database_is_full(
    scene: Scene, server_process: StartServerProcess, volume: Path, pytestconfig: pytest.Config
) -> None:
    """What was refused is started by its repeat, once."""
    postgres = PostgresServer(volume / "postgres", SETTINGS, programs=programs_of(pytestconfig))
    try:
        postgres.start()
        dsn = postgres.dsn()
        await migrate(dsn)
        server = server_process(dsn, **STAYING | {"operation_timeout": 1.0})
        api = scene.api(server.grpc_address)
        await api.register(manifest())
        before = await api.start()
        filler = volume / "filler"
        large = f'"{secrets.token_hex(LARGE // 2)}"'
        await asyncio.to_thread(fill, filler)
        await assert_refused(api, large)
        assert "No space left on device" in postgres.log_tail()
        filler.unlink()
        if not postgres.running:
            await asyncio.to_thread(postgres.start)

        after = await eventually(lambda: repeated(api, large), 30)
        assert [row["run_id"] for row in await fetch(dsn, "select run_id::text from run order by created_at")] == [
            before.run_id,
            after.run_id,
        ]
        worker = await scene.raw(server.grpc_address)
        for task in await worker.tasks(2):
            assert (await worker.complete(task)).outcome == OK
    finally:
        postgres.remove()


async def test_a_server_waits_for_its_connections_while_the_database_gives_none(
    scene: Scene, server_process: StartServerProcess, new_postgres: Callable[..., PostgresServer]
) -> None:
    postgres = new_postgres(max_connections=str(CONNECTIONS))
    await migrate(postgres.dsn())
    link = scene.proxy(postgres.address)
    server = server_process(redirected(postgres.dsn(), link.address), **STAYING | {"operation_timeout": 1.0})
    api = scene.api(server.grpc_address)
    await api.register(manifest())
    worker = await scene.raw(server.grpc_address)
    await api.start()
    task = await worker.task()
    link.refuse()
    link.reset()
    async with all_connections(postgres.dsn(), CONNECTIONS, alone=True):
        link.heal()
        await assert_refused(api, "1")
    assert (await eventually(lambda: repeated(api, "1"), 30)).created
    assert (await worker.complete(task)).outcome == OK
    assert (await worker.complete(await worker.task())).outcome == OK
