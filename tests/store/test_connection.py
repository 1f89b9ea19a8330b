"""Transactions in pipeline mode: their limits, and that a failed one harms no later one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import LiteralString

import psycopg
import pytest
import pytest_asyncio
from psycopg_pool import AsyncConnectionPool

from fencepost_server.config import Config
from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.store import connection as store_connection
from fencepost_server.store.connection import Database, connect, transaction
from fencepost_server.store.errors import LOCK_TIMEOUT
from fencepost_server.store.pipeline import Connection
from tests.engine.rows import count, execute, holding
from tests.fixtures.waiting import eventually

IDLE: LiteralString = "datname = current_database() and state = 'idle in transaction'"
TERMINATE: LiteralString = """
select pg_terminate_backend(pid) from pg_stat_activity
where datname = current_database() and application_name = 'fencepost'
"""


def config_of(dsn: str, **settings: float) -> Config:
    return Config(dsn=dsn, **settings)  # type: ignore[arg-type]  # numbers of some setting


@pytest_asyncio.fixture
async def connection(dsn: str) -> AsyncIterator[Connection]:
    connection = await connect(config_of(dsn))
    yield connection
    await connection.close()


@pytest_asyncio.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    database = Database(config_of(dsn, lock_timeout=0.1), "test", 1)
    await database.open()
    yield database
    await database.close()


async def test_a_transaction_commits_at_the_end_of_its_block_and_rolls_back_on_an_error(
    connection: Connection, dsn: str
) -> None:
    for fails in (False, True, False):
        try:
            async with transaction(connection, config_of(dsn)) as session:
                session.send(b"insert into deployment values ('n', gen_random_uuid()::text, '')")
                if fails:
                    raise KeyError("of the block's own")
        except KeyError:
            assert fails
    assert await count(dsn, "deployment") == 2
    assert not connection.closed, "nothing was wrong with it"


async def test_statements_of_a_failed_transaction_are_usable_in_the_next_one(database: Database) -> None:
    """What a pipeline holds behind a failure is never prepared; the driver sometimes takes it for prepared."""
    chance = random.Random(5)
    statements = [f"select {n}, %(a)s::int".encode() for n in range(6)]
    failures = 0
    for _ in range(60):
        fails = chance.random() < 0.5
        try:
            async with database.transaction() as session:
                for n in chance.sample(range(6), 3):
                    session.send(statements[n], {"a": n})
                    if fails and chance.random() < 0.5:
                        session.send(b"select 1 / 0")
                assert await session.rows(statements[0], {"a": 7}) == [(0, 7)]
        except psycopg.errors.DivisionByZero:
            failures += 1
            assert fails
    assert failures > 10
    known = await database.rows(b"select count(*) from pg_prepared_statements")
    assert known[0][0] < 20, "what was prepared before a failure is used again, not prepared once more"


async def both(database: Database, first: bytes, second: bytes) -> None:
    """Two statements in one round trip."""
    async with database.transaction() as session:
        session.send(first)
        await session.rows(second)


async def test_two_lock_timeouts_on_a_young_connection_do_not_spoil_it(database: Database, dsn: str) -> None:
    """Found with deadlocks: the statement behind the one that failed was unknown to the server for ever after."""
    await execute(dsn, "insert into deployment values ('n', 'w', '')")
    lock, read = b"select from deployment where namespace = 'n' for update", b"select clock_timestamp()"
    await database.rows(read)
    async with holding(dsn, "select from deployment for update"):
        for _ in range(3):
            with pytest.raises(DatabaseUnavailable):
                await both(database, lock, read)
    for _ in range(3):
        await both(database, lock, read)


async def test_a_transaction_has_its_own_limits_and_leaves_the_connection_as_it_was(
    connection: Connection, dsn: str
) -> None:
    """Behind a pooler in transaction mode nothing may stay."""
    names = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout", "enable_seqscan")
    show = ("select " + ", ".join(f"current_setting('{name}')" for name in names)).encode()
    before = await (await connection.execute(show)).fetchone()
    config = config_of(dsn, lock_timeout=0.25, statement_timeout=33, idle_in_transaction_timeout=44)
    async with transaction(connection, config) as session:
        assert await session.rows(show) == [("250ms", "33s", "44s", "off")]
        assert await session.rows(b"show transaction_isolation") == [("read committed",)]
    assert await (await connection.execute(show)).fetchone() == before


async def test_a_transaction_is_read_committed_whatever_the_database_says(connection: Connection, dsn: str) -> None:
    await connection.execute("set default_transaction_isolation = 'serializable'")
    async with transaction(connection, config_of(dsn)) as session:
        assert await session.rows(b"show transaction_isolation") == [("read committed",)]


async def test_a_transaction_that_takes_too_long_has_its_socket_shut(dsn: str) -> None:
    """I12: whatever the server does, or does not."""
    connection = await connect(config_of(dsn))
    began = time.monotonic()
    with pytest.raises(psycopg.OperationalError):
        async with transaction(connection, config_of(dsn, batch_timeout=0.5, statement_timeout=60)) as session:
            await session.rows(b"select pg_sleep(60)")
    assert time.monotonic() - began < 7, "before the default"
    assert connection.closed


async def test_a_cancelled_transaction_leaves_nothing_behind(dsn: str) -> None:
    connection = await connect(config_of(dsn))

    async def insert() -> None:
        async with transaction(connection, config_of(dsn)) as session:
            await session.rows(b"insert into deployment values ('n', 'w', '') returning 1")
            await asyncio.Event().wait()

    task = asyncio.create_task(insert())
    await eventually(lambda: count(dsn, "pg_stat_activity", IDLE))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await connection.close()
    await eventually(lambda: execute(dsn, "insert into deployment values ('n', 'w', '') on conflict do nothing"))


async def test_a_database_that_is_away_is_told_as_such_and_found_again(database: Database, dsn: str) -> None:
    """Its backends are ended under it; nothing of the driver's words comes out."""
    assert await database.rows(b"select 1") == [(1,)]
    await execute(dsn, TERMINATE)

    told: list[str] = []

    async def answers() -> bool:
        try:
            return await database.rows(b"select 1") == [(1,)]
        except DatabaseUnavailable as error:
            told.append(error.message)
            return False

    await eventually(answers)
    assert not any("terminat" in message for message in told)


async def test_many_who_wait_for_a_connection_are_served_in_their_order_and_ask_the_pool_once_each(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each asked again every moment: on a slow machine two hundred of them left no time to serve any."""
    asked, served = 0, list[int]()
    connection = AsyncConnectionPool.connection

    def counted(pool: AsyncConnectionPool[Connection], _timeout: float) -> AbstractAsyncContextManager[Connection]:
        nonlocal asked
        asked += 1
        return connection(pool, 60)

    async def read(number: int) -> None:
        await patient.rows(b"select 1")
        served.append(number)

    monkeypatch.setattr(AsyncConnectionPool, "connection", counted)
    patient = Database(config_of(dsn, connect_timeout=60), "test", 1)
    await patient.open()
    async with patient.transaction() as session:
        waiting = [asyncio.create_task(read(number)) for number in range(200)]
        await session.rows(b"select 1")
        assert asked == 1
    await asyncio.gather(*waiting)
    await patient.close()
    assert served == list(range(200))
    assert asked == 201


async def test_a_connection_that_is_not_made_in_time_is_given_up_at_once(
    without_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the collector comes by: meanwhile the other side would keep up what nobody has any more."""
    # The driver's limit is looked at here. A second after it comes another one, which on a slow machine may be due too.
    monkeypatch.setattr(store_connection, "_hosts", lambda _dsn: 20)
    begun = ended = 0

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun, ended
        begun += 1
        await reader.read()
        ended += 1
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        host, port = silent.sockets[0].getsockname()
        config = config_of(f"host={host} port={port} user=nobody sslmode=disable", connect_timeout=2)
        database = Database(config, "test", 1)
        await database.open()
        with pytest.raises(DatabaseUnavailable):
            await database.rows(b"select 1")
        await database.close()
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            await connect(config)
        assert begun >= 2
        await eventually(lambda: ended == begun, what="the sockets of both are closed")


async def test_a_statement_alone_is_stopped_at_the_time_limit(database: Database, dsn: str) -> None:
    began = time.monotonic()
    database.config = config_of(dsn, batch_timeout=1)
    with pytest.raises(DatabaseUnavailable):
        await database.single(b"select pg_sleep(60)")
    assert time.monotonic() - began < 7, "before the default"
    database.config = config_of(dsn)
    assert await database.rows(b"select 2") == [(2,)]


async def test_a_lock_that_is_not_had_in_time_is_told_apart(connection: Connection, dsn: str) -> None:
    await execute(dsn, "insert into deployment values ('n', 'w', '')")

    async def lock() -> None:
        async with transaction(connection, config_of(dsn, lock_timeout=0.1)) as session:
            await session.rows(b"select 1 from deployment for update")

    async with holding(dsn, "select from deployment for update"):
        with pytest.raises(LOCK_TIMEOUT):
            await lock()
    await lock()  # on the same connection
