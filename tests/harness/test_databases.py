"""Each test gets the databases that it asks for, clean and its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg
import pytest
from psycopg import sql

from tests.fixtures.databases import Cluster, database_address, redirected
from tests.fixtures.proxy import Proxy
from tests.fixtures.tables import DELETE_UP_TO, Tables
from tests.fixtures.waiting import eventually, until_blocked, until_connected, until_in_transaction


def connect(dsn: str) -> psycopg.Connection:
    return psycopg.connect(dsn, autocommit=True, connect_timeout=30)


@pytest.fixture
def seeded(new_database: Callable[..., str]) -> str:
    """A database with a seed row, foreign keys, an identity, and a history that can't be deleted."""
    dsn = new_database()
    with connect(dsn) as connection:
        connection.execute("create table setting (id bigint generated always as identity primary key, v text)")
        connection.execute("insert into setting (v) values ('as \\ migrated\t')")
        connection.execute("create table parent (id bigint generated always as identity primary key)")
        connection.execute("create table child (parent bigint not null references parent, filler text)")
        connection.execute("create function refuse() returns trigger language plpgsql as $$begin raise 'no'; end$$")
        connection.execute("create trigger keep before delete on child execute function refuse()")
    return dsn


def contents(dsn: str) -> tuple[list[tuple[object, ...]], int, int]:
    with connect(dsn) as connection:
        settings = connection.execute("select id, v from setting order by id").fetchall()
        counts = connection.execute("select (select count(*) from parent), (select count(*) from child)").fetchone()
        assert counts is not None
        return settings, *counts


@pytest.mark.parametrize("filler", [1, 2 * DELETE_UP_TO], ids=["few rows", "many bytes"])
def test_a_reset_brings_back_the_state_after_the_migrations(seeded: str, filler: int) -> None:
    tables = Tables(seeded)
    try:
        tables.reset()
        with connect(seeded) as connection:
            connection.execute("update setting set v = 'changed'")
            connection.execute("insert into setting (v) values ('added')")
            connection.execute("insert into parent default values")
            connection.execute("alter table child alter filler set storage external")
            connection.execute(
                "insert into child select 1, repeat('x', 1000) from generate_series(1, %s)",
                [max(1, filler // 1000)],
            )
        tables.reset()
        assert contents(seeded) == ([(1, "as \\ migrated\t")], 0, 0)
        with connect(seeded) as connection:
            row = connection.execute("insert into parent default values returning id").fetchone()
            assert row == (1,)
    finally:
        tables.close()


def test_a_reset_disconnects_whoever_is_left(seeded: str) -> None:
    tables = Tables(seeded)
    tables.reset()
    with connect(seeded) as connection:
        connection.execute("begin")
        connection.execute("insert into parent default values")
        tables.reset()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    tables.close()
    assert contents(seeded)[1] == 0


def test_a_fresh_database_is_empty(fresh_dsn: str) -> None:
    with connect(fresh_dsn) as connection:
        tables = connection.execute("select count(*) from pg_tables where schemaname = 'public'").fetchone()
        assert tables == (0,)


def test_new_databases_are_apart(new_database: Callable[..., str]) -> None:
    first, second = new_database(), new_database()
    with connect(first) as connection:
        connection.execute("create table t ()")
    with connect(second) as connection:
        assert connection.execute("select to_regclass('t')").fetchone() == (None,)


def test_a_proxy_can_stand_before_a_database(fresh_dsn: str, new_proxy: Callable[[str], Proxy]) -> None:
    proxy = new_proxy(database_address(fresh_dsn))
    with connect(redirected(fresh_dsn, proxy.address)) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
        proxy.reset()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")


def test_a_commit_can_be_lost_before_or_after_it_was_made(fresh_dsn: str, new_proxy: Callable[[str], Proxy]) -> None:
    proxy = new_proxy(database_address(fresh_dsn))
    with connect(fresh_dsn) as witness:
        witness.execute("create table t (made boolean)")
        for made in (False, True):
            with psycopg.connect(redirected(fresh_dsn, proxy.address)) as connection:
                connection.execute("insert into t values (%s)", [made])
                proxy.break_on(b"COMMIT", "up", forward=made)
                with pytest.raises(psycopg.OperationalError):
                    connection.commit()
        asyncio.run(until_connected(fresh_dsn, 1))
        assert witness.execute("select made from t").fetchall() == [(True,)]


async def test_a_blocked_session_is_noticed(fresh_dsn: str) -> None:
    async with (
        await psycopg.AsyncConnection.connect(fresh_dsn) as holder,
        await psycopg.AsyncConnection.connect(fresh_dsn) as waiter,
    ):
        await holder.execute("select pg_advisory_xact_lock(1)")
        await until_in_transaction(fresh_dsn)
        with pytest.raises(AssertionError, match=r"not within 0.05 s: 1 session\(s\) wait for a lock"):
            await until_blocked(fresh_dsn, timeout=0.05)
        waiting = asyncio.create_task(waiter.execute("select pg_advisory_xact_lock(1)"))
        await until_blocked(fresh_dsn)
        await holder.commit()
        await waiting
    await until_connected(fresh_dsn, 0)


async def test_an_event_is_awaited_and_its_absence_explained() -> None:
    seen: list[int] = []

    async def third() -> int:
        seen.append(len(seen))
        assert len(seen) >= 3, f"only {len(seen)}"
        return len(seen)

    assert await eventually(third) == 3
    with pytest.raises(AssertionError, match=r"not within 0.05 s: .*len\(seen\) > 5.*; seen last: False"):
        await eventually(lambda: len(seen) > 5, timeout=0.05)
    with pytest.raises(AssertionError, match="the predicate did not return"):
        await eventually(lambda: asyncio.get_running_loop().create_future(), timeout=0.05)


def test_the_cluster_knows_its_databases(cluster: Cluster, admin_dsn: str, fresh_dsn: str) -> None:
    with connect(admin_dsn) as connection:
        names = connection.execute("select datname from pg_database where starts_with(datname, %s)", [cluster.prefix])
        assert any(name in fresh_dsn for (name,) in names)
    name = sql.Identifier(cluster.prefix).as_string()
    assert name == f'"{cluster.prefix}"'
