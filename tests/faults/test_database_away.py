"""The database goes away and comes back, or its notifications do: callers are told, workers keep what they have, and
everything goes on by itself.

Rows 7 and 47 of the field failures. I10, I13.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from datetime import datetime
from itertools import pairwise
from typing import Any, LiteralString

import grpc
import psycopg
import pytest
from grpc_health.v1 import health_pb2

from fencepost_server.store.migrate import migrate
from tests.faults.conftest import StartWorker
from tests.faults.scene import (
    COMPLETED,
    ENDED,
    ONE_ATTEMPT,
    STAYING,
    Scene,
    attempts,
    count,
    fetch,
    start_all,
    task_states,
    until_count,
    until_printed,
)
from tests.faults.sink import ONCE, Sink
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.postgres_server import PostgresServer
from tests.fixtures.processes import Process
from tests.fixtures.raw_worker import OK
from tests.fixtures.refusals import refused
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually, until_blocked, until_connected

RUNS, STEPS = 600, 3
_RUN_OUT: LiteralString = "update task set lease_expires_at = clock_timestamp() - interval '1 minute'"
_NOBODY_LOOKED: LiteralString = "update cluster set last_pass_at = clock_timestamp() - interval '1 minute'"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def assert_quiet(server: Process) -> None:
    """What a server has logged of its trouble was at most a line a second."""
    troubles = [line for line in server.events() if line.get("level") in {"warning", "error"}]
    times = [datetime.fromisoformat(line["time"].replace(",", ".")) for line in troubles]
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
    assert min(gaps, default=1) > 0.9, troubles


async def until_health(api: Api, expected: int) -> None:
    """Wait until the health of the whole server and of its services is that."""
    check = api.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )

    async def reached() -> bool:
        for service in ("", "fencepost.v1.RunService", "fencepost.v1.WorkerService"):
            found = await check(health_pb2.HealthCheckRequest(service=service), timeout=30)
            assert found.status == expected, (service, found)
        return True

    await eventually(reached, 30, interval=0.05)


@pytest.mark.parametrize("how", ["fast", "kill"])
async def test_a_restart_of_the_database_under_load_loses_nothing_and_costs_no_attempt(
    scene: Scene,
    server_process: StartServerProcess,
    worker_process: StartWorker,
    sink: Sink,
    postgres_process: PostgresServer,
    how: str,
) -> None:
    """Row 7, I13: a restart by the book, and a crash with recovery. Runs are started all the while, with keys. What is
    meant by a timeout for connecting is not waited for.
    """
    dsn = postgres_process.dsn()
    await migrate(dsn)
    server = server_process(dsn, listen_dsn=dsn, connect_timeout=60.0, **STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(STEPS, retry=ONE_ATTEMPT))
    worker = worker_process(server.grpc_address, steps=STEPS, slots=20)
    starting = asyncio.create_task(start_all(api, RUNS))
    await until_count(dsn, COMPLETED, RUNS // 3, 60, more=True)
    await asyncio.to_thread(postgres_process.kill if how == "kill" else postgres_process.stop)
    postgres_process.start()
    assert await starting == RUNS
    await until_count(dsn, ENDED, RUNS, 60)
    assert await count(dsn, "run") == RUNS
    assert await count(dsn, COMPLETED + " and attempt = 1") == RUNS * STEPS
    assert Counter(sink.effects().values()) == {ONCE: RUNS * STEPS}
    assert_quiet(server)
    assert not worker.events("ended")


async def test_while_the_database_is_away_callers_are_told_to_come_again_and_health_is_red_until_it_is_back(
    scene: Scene,
    server_process: StartServerProcess,
    worker_process: StartWorker,
    sink: Sink,
    postgres_process: PostgresServer,
) -> None:
    """Rows 7 and 47: away for so long that every lease has run out. The steps end meanwhile; each counts with its only
    attempt, and nobody had to do anything but to start the database.
    """
    dsn = postgres_process.dsn()
    await migrate(dsn)
    times = {"outage_gap": 2.0, "operation_timeout": 5.0, "connect_timeout": 5.0}
    server = server_process(dsn, listen_dsn=dsn, **STAYING | times)
    api = scene.api(server.grpc_address)
    await api.register(manifest(2, retry=ONE_ATTEMPT))
    await until_health(api, SERVING)
    worker = worker_process(server.grpc_address, steps=2, gate="held")
    run_ids = [(await api.start()).run_id for _ in range(5)]
    await until_printed(worker, "begun", 5)
    await asyncio.to_thread(postgres_process.stop)
    await assert_unavailable(api, run_ids[0])
    sink.open("held")
    await eventually(lambda: len(worker.events("acted")) == 5, what="steps go on without the database")
    await until_health(api, NOT_SERVING)
    # The leases are over when the server comes to the database, but not while it is there, however slow anybody is.
    server.pause()
    postgres_process.start()
    await fetch(dsn, _RUN_OUT)
    server.resume()
    await until_health(api, SERVING)
    for run_id in run_ids:
        await api.wait(run_id)
    assert await count(dsn, COMPLETED + " and attempt = 1") == 10
    assert Counter(sink.effects().values()) == {ONCE: 10}
    await api.start()
    assert_quiet(server)


async def assert_unavailable(api: Api, run_id: str) -> None:
    async def told(call: Awaitable[Any]) -> None:
        with refused("DATABASE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE) as refusal:
            await call
        assert refusal.error.retry_after

    calls = (api.start(), api.get(run_id), api.list_all(), api.history(run_id), api.register(manifest(1)))
    await asyncio.gather(*map(told, calls))


async def test_leases_outlive_an_absence_of_the_only_server(
    scene: Scene, server_process: StartServerProcess, worker_process: StartWorker, sink: Sink
) -> None:
    """Row 47: every lease has run out when the server is back, after what looks like a minute, and there is one
    attempt. The first thing that a server does must not be to sweep.
    """
    server = server_process(scene.dsn, **STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(2, retry=ONE_ATTEMPT))
    worker = worker_process(server.grpc_address, steps=2, slots=50, gate="held")
    run_ids = [(await api.start()).run_id for _ in range(50)]
    await until_printed(worker, "begun", 50)
    server.kill()
    await until_connected(scene.dsn, 0)
    await fetch(scene.dsn, _RUN_OUT)
    await fetch(scene.dsn, _NOBODY_LOOKED)
    server.start()
    await asyncio.to_thread(server.wait_serving)
    sink.open("held")
    for run_id in run_ids:
        await api.wait(run_id)
    assert await count(scene.dsn, COMPLETED + " and attempt = 1") == 100
    assert Counter(sink.effects().values()) == {ONCE: 100}


async def test_nothing_expires_before_the_end_of_an_outage_was_noticed(scene: Scene) -> None:
    """Row 47: whoever sweeps first, or has reports of expired leases from before, finds the outage by itself: here the
    statement that notes its end can't get through for a while.
    """
    first = await scene.serve(**STAYING)
    api = scene.api(first.grpc_address)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = await scene.raw(first.grpc_address)
    run_id = (await api.start()).run_id
    task = await worker.task()
    await first.stop()
    await fetch(scene.dsn, _RUN_OUT)
    await fetch(scene.dsn, _NOBODY_LOOKED)
    async with await psycopg.AsyncConnection.connect(scene.dsn) as holding:
        await holding.execute("select from cluster for update")
        second = await scene.serve(**STAYING)
        await until_blocked(scene.dsn)
        await eventually(lambda: second.app.engine.sweeper.loop.last_good and not second.app.engine.lanes[0].depth)
        await second.app.engine.flush(2)
        assert [state.token for state in await task_states(scene.dsn)] == [task.task.fencing_token]
    again = await scene.raw(second.grpc_address, process_nonce=worker.hello().process_nonce, hello=False)
    await again.send(again.hello(previous_session_ids=worker.sessions, held=[task.task]))
    assert (await again.complete(task)).outcome == OK
    assert attempts(await scene.api(second.grpc_address).history(run_id)) == [1]
