"""The primary dies and its synchronous replica takes over: servers go there by themselves, and what was told is true.

Their connection strings name both, and ask for the one that takes writes. I1, I2, I5, I13.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import LiteralString

import grpc
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost_server.config import Config
from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.store.connection import Database, connect
from fencepost_server.store.migrate import check, migrate
from tests.faults.conftest import StartWorker
from tests.faults.scene import COMPLETED, ENDED, ONE_ATTEMPT, STAYING, Scene, count, fetch, until_count
from tests.faults.sink import ONCE, Sink
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.replicas import Pair, Replica, commit_on_both
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually

STEPS = 3
RESUMES_WITHIN = float(os.environ.get("RESUMES_WITHIN", "15"))
"""Seconds. It is 5 on a machine that does nothing else; here other tests have the processors, too."""
WAITING: LiteralString = "pg_stat_activity where wait_event = 'SyncRep'"
OURS: LiteralString = "datname = current_database() and application_name = 'fencepost'"
LISTENING: LiteralString = "pg_stat_activity where application_name = 'fencepost listener'"


async def start_until(api: Api, stop: asyncio.Event, started: dict[str, str]) -> None:
    """Start runs and wait for them, some at a time, each again until the server says that it has it. Notes their ids by
    their keys.
    """
    while not stop.is_set():
        todo = [api.start_request(request_key=str(uuid.uuid4())) for _ in range(10)]
        while todo:
            results = await api.start_many(todo)
            told = zip(todo, results, strict=True)
            started |= {start.request_key: got.started.run_id for start, got in told if got.HasField("started")}
            todo = [start for start in todo if start.request_key not in started]
        await eventually(partial(_ended, api, list(started.values())[-1]), 60)


async def _ended(api: Api, run_id: str) -> bool:
    try:
        await api.wait(run_id)
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:  # which says to ask again
            raise
        return False
    return True


async def assert_all_there(dsn: str, started: Collection[str]) -> None:
    rows = await fetch(dsn, "select run_id::text from run")
    assert len(rows) == len(started)
    assert {row["run_id"] for row in rows} == set(started)


async def test_nothing_that_was_told_is_lost_when_the_primary_dies_under_load_and_work_goes_on_at_the_replica(
    scene: Scene, server_process: StartServerProcess, worker_process: StartWorker, sink: Sink, pair: Pair
) -> None:
    """Runs are started all the while; a step whose report was acknowledged and lost would act again, and be seen."""
    await migrate(pair.dsn)
    servers = [server_process(pair.dsn, listen_dsn=pair.dsn, **STAYING) for _ in range(2)]
    api = scene.api(servers[0].grpc_address)
    await api.register(manifest(STEPS, retry=ONE_ATTEMPT))
    worker = worker_process(*(server.grpc_address for server in servers), steps=STEPS, slots=20)
    stop, started = asyncio.Event(), dict[str, str]()
    starting = asyncio.gather(*(start_until(api, stop, started) for _ in range(4)))
    await until_count(pair.primary.dsn(), COMPLETED, 100, 30, more=True)
    await asyncio.to_thread(pair.primary.kill)
    pair.replica.promote()
    promoted, told, done = time.monotonic(), len(started), await count(pair.replica.dsn(), COMPLETED)
    await eventually(lambda: len(started) > told + 20, RESUMES_WITHIN)
    await until_count(pair.replica.dsn(), COMPLETED, done + 60, RESUMES_WITHIN, more=True)
    assert time.monotonic() - promoted < RESUMES_WITHIN
    stop.set()
    await starting
    await until_count(pair.replica.dsn(), ENDED, len(started), 30)
    await assert_all_there(pair.replica.dsn(), started.values())
    assert await count(pair.replica.dsn(), COMPLETED + " and attempt = 1") == len(started) * STEPS
    assert Counter(sink.effects().values()) == {ONCE: len(started) * STEPS}
    await until_count(pair.replica.dsn(), LISTENING, 2)
    assert not worker.events("ended")


async def test_what_only_a_dying_primary_has_is_told_to_nobody(scene: Scene, pair: Pair) -> None:
    """A commit that waits for the replica is cut off: it is done here, and shows. Whoever tries it again finds it, and
    must not tell of it before the replica has it, too.
    """
    await migrate(pair.dsn)
    server = await scene.serve(dsn=pair.dsn, **STAYING | {"operation_timeout": 60.0})
    api = scene.api(server.grpc_address)
    await api.register(manifest(1))
    pair.replica.pause()
    starting = asyncio.create_task(api.start(request_key="one"))
    waiting: LiteralString = "select pid from " + WAITING + " and query = 'commit'"

    cut_off = set[int]()

    async def waits() -> set[int]:
        return {row["pid"] for row in await fetch(pair.primary.dsn(), waiting)} - cut_off

    cut_off |= await eventually(waits)
    await fetch(pair.primary.dsn(), "select pg_terminate_backend(pid) from " + WAITING)
    await eventually(lambda: count(pair.primary.dsn(), "run"), what="it shows on the primary")
    await eventually(waits, what="the next try waits, too")
    assert not starting.done()
    await asyncio.to_thread(pair.primary.kill)
    pair.replica.resume()
    pair.replica.promote()
    run_id = (await starting).run_id
    await assert_all_there(pair.replica.dsn(), [run_id])


async def test_a_former_primary_that_comes_back_as_a_replica_is_passed_over_until_it_is_the_primary_again(
    scene: Scene, pair: Pair, new_replica: Callable[..., Replica]
) -> None:
    """There and back: the connection string names it first, and it answers, but it takes no writes."""
    await migrate(pair.dsn)
    server = await scene.serve(dsn=pair.dsn, listen_dsn=pair.dsn, **STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(1))
    worker = await scene.raw(server.grpc_address)
    run_ids = [(await api.start()).run_id]
    await asyncio.to_thread(pair.primary.kill)
    pair.replica.promote()
    former = new_replica(pair.replica, port=pair.primary.port)
    commit_on_both(pair.replica)
    await check(pair.dsn)
    run_ids.append((await api.start()).run_id)
    await asyncio.to_thread(pair.replica.kill)
    former.promote()
    run_ids.append((await api.start()).run_id)
    for _ in run_ids:
        await worker.complete(await worker.task())
    for run_id in run_ids:
        await api.wait(run_id)
    await assert_all_there(former.dsn(), run_ids)


async def test_a_replica_is_refused_to_serve_on_with_what_to_do(pair: Pair) -> None:
    await migrate(pair.dsn)
    await check(pair.dsn)
    with pytest.raises(DatabaseUnavailable, match="target_session_attrs=read-write"):
        await check(pair.replica.dsn())


async def test_hosts_that_say_nothing_leave_time_for_the_next_one(dsn: str) -> None:
    """As machines without power do: each is given up after connect_timeout, and then comes the next."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = conninfo_to_dict(dsn)["host"], conninfo_to_dict(dsn)["port"]
        several = make_conninfo(dsn, host=f"127.0.0.1,{host}", port=f"{silent.getsockname()[1]},{port}")

        async def connected() -> bool:
            try:
                connection = await connect(Config(dsn=several, connect_timeout=1))
            except (psycopg.OperationalError, TimeoutError):
                return False  # the other one was too slow, too
            await connection.close()
            return True

        await eventually(connected)


async def test_connections_that_the_database_has_ended_meanwhile_are_replaced_before_anybody_uses_them(
    dsn: str,
) -> None:
    """Its last words arrive before the end of the connection, which they hid once: each such connection cost a caller
    an error.
    """
    database = Database(Config(dsn=dsn), "test", 3)
    await database.open()
    try:
        for _ in range(10):
            assert await database.rows(b"select 1") == [(1,)]
            await fetch(dsn, "select pg_terminate_backend(pid, 5000) from pg_stat_activity where " + OURS)
    finally:
        await database.close()


@pytest.fixture(autouse=True)
def _databases_outlive_servers(request: pytest.FixtureRequest) -> None:
    """Which end well with one."""
    if "pair" in request.fixturenames:
        request.getfixturevalue("pair")
