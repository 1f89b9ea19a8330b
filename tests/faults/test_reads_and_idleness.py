"""Reads see what was written, and a server with nothing to do does next to nothing.

Rows 32 and 34 of the field failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import LiteralString

from fencepost.v1.run_service_pb2 import ListRunsRequest
from fencepost_server.store.migrate import migrate
from tests.faults.conftest import StartWorker
from tests.faults.scene import Scene, fetch, until_printed
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.postgres_server import PostgresServer
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually

SINGLE, BATCHES, BATCH = 1_000, 90, 100
WINDOW, LONG_WINDOW = 3, 12
CALLS: LiteralString = """
    select coalesce(sum(calls), 0)::int as calls, extract(epoch from clock_timestamp() - %(since)s)::float as seconds
    from pg_stat_statements where query !~ 'pg_stat'
"""


async def test_a_run_is_found_as_soon_as_its_start_has_returned(scene: Scene) -> None:
    """Row 32: 10,000 runs, by id and in lists, at the server that started them and at another one."""
    here, there = [scene.api((await scene.serve()).grpc_address) for _ in range(2)]
    await here.register(manifest())

    async def start_and_look(number: int, api: Api, other: Api) -> None:
        workflow_id = f"wf-{number}"
        await api.register(manifest(workflow_id=workflow_id))
        for _ in range(SINGLE // 20):
            run_id = (await api.start(workflow_id)).run_id
            assert (await other.get(run_id)).run_id == run_id
            newest = await other.runs.ListRuns(ListRunsRequest(workflow_id=workflow_id, page_size=1))
            assert [run.run_id for run in newest.runs] == [run_id]

    pairs = [(here, there), (there, here), (here, here), (there, there)]
    await asyncio.gather(*(start_and_look(number, *pairs[number % 4]) for number in range(20)))
    for number in range(BATCHES):
        api, other = pairs[number % 4]
        results = await api.start_many([api.start_request(request_id="") for _ in range(BATCH)])
        newest = await other.runs.ListRuns(ListRunsRequest(page_size=BATCH))
        assert {run.run_id for run in newest.runs} == {result.started.run_id for result in results}


async def test_a_server_without_work_makes_five_statements_a_second_at_most(
    scene: Scene,
    server_process: StartServerProcess,
    worker_process: StartWorker,
    new_postgres: Callable[..., PostgresServer],
) -> None:
    """Row 34: every statement counts, begin and commit as well; with and without workers, and after some work."""
    dsn = new_postgres(shared_preload_libraries="pg_stat_statements").dsn()
    await migrate(dsn)
    await fetch(dsn, "create extension pg_stat_statements")
    server = server_process(dsn, listen_dsn=dsn)
    await until_idle(dsn)
    workers = [worker_process(server.grpc_address, slots=50) for _ in range(2)]
    for worker in workers:
        await until_printed(worker, "connected")
    api = scene.api(server.grpc_address)
    await api.register(manifest())
    for _ in range(10):
        await api.wait((await api.start()).run_id)
    await until_idle(dsn)
    assert await statements_a_second(dsn, LONG_WINDOW) <= 5


async def until_idle(dsn: str) -> None:
    """Wait until so few are made: each loop looks once when it starts, and what is done last may come late."""

    async def idle() -> bool:
        assert await statements_a_second(dsn) <= 5
        return True

    await eventually(idle)


async def statements_a_second(dsn: str, window: int = WINDOW) -> float:
    """Over as long as it takes to ask, and until the probe is among them."""
    [begin] = await fetch(dsn, "select pg_stat_statements_reset(), clock_timestamp() as at")

    async def told() -> float:
        [row] = await fetch(dsn, CALLS, since=begin["at"])
        assert row["seconds"] >= window
        assert row["calls"] > window, "the probe is among them"
        rate: float = row["calls"] / row["seconds"]
        return rate

    return await eventually(told, interval=0.5)
