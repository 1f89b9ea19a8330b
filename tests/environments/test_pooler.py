"""pgbouncer in transaction mode between servers and PostgreSQL: transactions of one connection are served by different
processes, which keep nothing from one to the next.

Any tests run so, too, with `--through pgbouncer`; CI runs those of the store and some of the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import pytest

from fencepost_server.config import Config
from fencepost_server.store.connection import connect, transaction
from fencepost_server.store.migrate import check, migrate
from fencepost_server.store.pipeline import Connection
from tests.faults.conftest import StartWorker
from tests.faults.scene import COMPLETED, ENDED, ONE_ATTEMPT, STAYING, Scene, count, start_all, until_count
from tests.faults.sink import ONCE, Sink
from tests.fixtures.manifests import manifest
from tests.fixtures.pooler import PgBouncer, Program
from tests.fixtures.postgres_server import PostgresServer
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually

RUNS, STEPS = 100, 3
NewPooler = Callable[..., PgBouncer]


@pytest.fixture(params=["keeps statements apart", "mixes statements up"])
def pooler(request: pytest.FixtureRequest, pgbouncer: Program, new_pooler: NewPooler, fresh_dsn: str) -> PgBouncer:
    """With few connections to the database, in both of its ways where the version that is installed has both."""
    if request.param == "keeps statements apart":
        if not pgbouncer.tracks_statements:
            pytest.skip(f"pgbouncer {pgbouncer.version} can't keep prepared statements apart; 1.21 and newer can")
        return new_pooler(fresh_dsn, default_pool_size=3, max_prepared_statements=100)
    nothing_kept = {"max_prepared_statements": 0} if pgbouncer.tracks_statements else {}
    return new_pooler(fresh_dsn, default_pool_size=3, **nothing_kept)


async def test_two_servers_work_through_it_and_nothing_is_lost_doubled_or_an_error(
    scene: Scene,
    server_process: StartServerProcess,
    worker_process: StartWorker,
    sink: Sink,
    pooler: PgBouncer,
    fresh_dsn: str,
) -> None:
    """With the default settings, tables made through it included."""
    pooled = pooler.dsn(fresh_dsn)
    assert await migrate(pooled)
    assert await migrate(pooled) == []
    servers = [server_process(pooled, listen_dsn=fresh_dsn) for _ in range(2)]
    api = scene.api(servers[0].grpc_address)
    await api.register(manifest(STEPS, retry=ONE_ATTEMPT))
    worker_process(servers[1].grpc_address, steps=STEPS, slots=20)
    await start_all(api, RUNS)
    await until_count(fresh_dsn, ENDED, RUNS, 30)
    assert await count(fresh_dsn, COMPLETED + " and attempt = 1") == RUNS * STEPS
    assert Counter(sink.effects().values()) == {ONCE: RUNS * STEPS}
    troubles = [line for server in servers for line in server.events() if line.get("level") in {"warning", "error"}]
    assert troubles == []


async def answers(connection: Connection, config: Config, number: int) -> bool:
    """Whether a statement does what it says, several times over."""
    for _ in range(5):
        async with transaction(connection, config) as session:
            if await session.rows(f"select {number}".encode()) != [(number,)]:
                return False
    return True


async def test_statements_are_prepared_only_where_they_are_kept_apart(pooler: PgBouncer, fresh_dsn: str) -> None:
    """A statement that is another client's would be the worst: it does what nobody has asked for."""
    config = Config(dsn=pooler.dsn(fresh_dsn))
    connections = [await connect(config) for _ in range(6)]
    try:
        kept = "max_prepared_statements = 100" in pooler.configuration
        assert {connection.prepares for connection in connections} == {kept}
        checks = (answers(connection, config, number) for number, connection in enumerate(connections))
        assert await asyncio.gather(*checks) == [True] * 6
    finally:
        for connection in connections:
            await connection.close()


async def test_statements_are_prepared_without_a_pooler(fresh_dsn: str) -> None:
    connection = await connect(Config(dsn=fresh_dsn))
    assert connection.prepares
    await connection.close()


async def test_listening_through_it_is_warned_of_and_work_is_found_by_polling(
    scene: Scene, new_pooler: NewPooler, caplog: pytest.LogCaptureFixture
) -> None:
    pooled = new_pooler(scene.dsn).dsn(scene.dsn)
    with caplog.at_level(logging.WARNING):
        first, second = [await scene.serve(dsn=pooled, listen_dsn=pooled) for _ in range(2)]
        await eventually(lambda: "listen_dsn leads through a pooler" in caplog.text)
    api = scene.api(first.grpc_address)
    await api.register(manifest(1))
    worker = await scene.raw(second.grpc_address)
    run_id = (await api.start()).run_id
    await worker.complete(await worker.task())
    await api.wait(run_id)


@pytest.mark.parametrize("which", ["pooler", "database"])
async def test_either_may_die_and_come_back_under_load(
    scene: Scene,
    server_process: StartServerProcess,
    worker_process: StartWorker,
    sink: Sink,
    postgres_process: PostgresServer,
    new_pooler: NewPooler,
    which: str,
) -> None:
    """Row 7, I13: what the pooler says while the database is away is not taken for an answer of the database."""
    direct = postgres_process.dsn()
    pooler = new_pooler(direct, default_pool_size=5)
    await migrate(direct)
    await check(pooler.dsn(direct))
    server = server_process(pooler.dsn(direct), connect_timeout=60.0, **STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(STEPS, retry=ONE_ATTEMPT))
    worker = worker_process(server.grpc_address, steps=STEPS, slots=20)
    starting = asyncio.create_task(start_all(api, RUNS))
    await until_count(direct, COMPLETED, RUNS // 3, 30, more=True)
    if which == "pooler":
        pooler.stop()
        pooler.start()
    else:
        await asyncio.to_thread(postgres_process.kill)
        postgres_process.start()
    await starting
    await until_count(direct, ENDED, RUNS, 30)
    assert await count(direct, COMPLETED + " and attempt = 1") == RUNS * STEPS
    assert Counter(sink.effects().values()) == {ONCE: RUNS * STEPS}
    assert [line for line in server.events() if line.get("level") == "error"] == []
    assert not worker.events("ended")
