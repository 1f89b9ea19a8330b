"""Migrations: each runs once, in order, whoever tries; what does not fit is refused before anything is changed."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable

import psycopg
import pytest

from fencepost_server.domain.errors import SchemaVersionMismatch
from fencepost_server.store import migrate as module
from fencepost_server.store.migrate import Migration, check, migrate, migrations
from tests.engine.rows import count, execute, fetch, holding
from tests.fixtures.waiting import until_blocked

FIRST = Migration(1, "0001_first.sql", "create table a (id int primary key); insert into a values (1);")
SECOND = Migration(2, "0002_second.sql", "alter table a add column b text collate \"C\" default 'x'")
THIRD = Migration(3, "0003_third.sql", "create index a_b on a (b) where b is not null")


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Chooses the migrations that this release has: ``release(FIRST, SECOND)``."""

    def choose(*chosen: Migration) -> None:
        monkeypatch.setattr(module, "migrations", lambda: list(chosen))

    return choose


def test_the_migrations_of_this_release_are_numbered_without_gaps() -> None:
    ours = migrations()
    assert [migration.version for migration in ours] == list(range(1, len(ours) + 1))
    assert all(migration.name.startswith(f"{migration.version:04}_") for migration in ours)
    assert len({migration.checksum for migration in ours}) == len(ours)


async def test_what_is_missing_is_applied_once_and_in_order(fresh_dsn: str, release: Callable[..., None]) -> None:
    release(FIRST, SECOND)
    assert await migrate(fresh_dsn) == [FIRST.name, SECOND.name]
    await check(fresh_dsn)
    assert await migrate(fresh_dsn) == []
    release(FIRST, SECOND, THIRD)
    assert await migrate(fresh_dsn) == [THIRD.name]
    rows = await fetch(fresh_dsn, "select version, name, checksum from schema_migration order by version")
    assert rows == [(m.version, m.name, m.checksum) for m in (FIRST, SECOND, THIRD)]
    assert await fetch(fresh_dsn, "select * from a") == [(1, "x")]


async def test_two_that_migrate_at_once_apply_each_migration_once(
    fresh_dsn: str, release: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # They would wait in turns, with rests between: those that began at other times never all at once.
    monkeypatch.setattr(module, "_LIMITS", "set local lock_timeout = '60s'")
    release(FIRST, SECOND, THIRD)
    async with holding(fresh_dsn, "select pg_advisory_xact_lock(%s)", [module._LOCK]):
        migrating = [asyncio.create_task(migrate(fresh_dsn)) for _ in range(5)]
        await until_blocked(fresh_dsn, 5)
    done = [name for names in await asyncio.gather(*migrating) for name in names]
    assert sorted(done) == [FIRST.name, SECOND.name, THIRD.name]


async def test_two_that_migrate_at_once_apply_the_real_ones_once(fresh_dsn: str) -> None:
    done = await asyncio.gather(*(migrate(fresh_dsn) for _ in range(3)))
    assert sorted(itertools.chain(*done)) == [migration.name for migration in migrations()]
    await check(fresh_dsn)


async def test_a_migration_that_fails_leaves_nothing_of_itself_and_keeps_what_was_before(
    fresh_dsn: str, release: Callable[..., None]
) -> None:
    broken = Migration(2, "0002_broken.sql", "create table b (); select 1 / 0; create table c ()")
    release(FIRST, broken)
    with pytest.raises(psycopg.errors.DivisionByZero):
        await migrate(fresh_dsn)
    assert await fetch(fresh_dsn, "select version from schema_migration") == [(1,)]
    assert await fetch(fresh_dsn, "select to_regclass('b'), to_regclass('c')") == [(None, None)]
    release(FIRST, SECOND)
    assert await migrate(fresh_dsn) == [SECOND.name]


async def refused_by_both(dsn: str) -> str:
    """The message with which the schema is refused, to serve on and to migrate."""
    with pytest.raises(SchemaVersionMismatch) as refusal:
        await check(dsn)
    with pytest.raises(SchemaVersionMismatch) as second:
        await migrate(dsn)
    assert refusal.value.reason == "SCHEMA_VERSION_MISMATCH"
    assert refusal.value.message == second.value.message
    return refusal.value.message


async def test_a_schema_that_is_newer_than_this_release_is_refused(
    fresh_dsn: str, release: Callable[..., None]
) -> None:
    release(FIRST, SECOND, THIRD)
    await migrate(fresh_dsn)
    release(FIRST, SECOND)
    message = await refused_by_both(fresh_dsn)
    assert "version 3" in message
    assert "version 2" in message
    assert await count(fresh_dsn, "schema_migration") == 3


async def test_an_applied_migration_that_was_changed_since_is_refused(
    fresh_dsn: str, release: Callable[..., None]
) -> None:
    release(FIRST, SECOND)
    await migrate(fresh_dsn)
    release(FIRST, Migration(2, SECOND.name, SECOND.text + " "), THIRD)
    assert SECOND.name in await refused_by_both(fresh_dsn)
    assert await count(fresh_dsn, "schema_migration") == 2


async def test_a_gap_among_the_applied_migrations_is_refused(fresh_dsn: str, release: Callable[..., None]) -> None:
    release(FIRST, SECOND, THIRD)
    await migrate(fresh_dsn)
    await execute(fresh_dsn, "delete from schema_migration where version = 2")
    assert SECOND.name in await refused_by_both(fresh_dsn)


async def test_an_old_or_empty_schema_is_refused_to_serve_on_with_the_way_out(
    fresh_dsn: str, release: Callable[..., None]
) -> None:
    release(FIRST, SECOND)
    for missing in (FIRST.name, SECOND.name):
        with pytest.raises(SchemaVersionMismatch) as refusal:
            await check(fresh_dsn)
        assert missing in refusal.value.message
        assert "fencepost migrate" in refusal.value.message
        release(FIRST)
        await migrate(fresh_dsn)
        release(FIRST, SECOND)
    assert await count(fresh_dsn, "schema_migration") == 1, "looking changes nothing"


SHAPE = """
select c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attcollation::regcollation::text,
       pg_get_expr(d.adbin, d.adrelid), c.reloptions
from pg_class c join pg_attribute a on a.attrelid = c.oid
left join pg_attrdef d on (d.adrelid, d.adnum) = (c.oid, a.attnum)
where c.relnamespace = 'public'::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped
union all
select tablename, indexname, indexdef, null, null, null, null from pg_indexes where schemaname = 'public'
union all
select conrelid::regclass::text, conname, pg_get_constraintdef(oid), null, null, null, null from pg_constraint
where connamespace = 'public'::regnamespace
order by 1, 2, 3
"""


async def test_migrations_replayed_one_by_one_equal_those_applied_together(
    new_database: Callable[..., str], release: Callable[..., None]
) -> None:
    together, one_by_one = new_database(), new_database()
    ours = migrations()
    await migrate(together)
    for n in range(1, len(ours) + 1):
        release(*ours[:n])
        assert await migrate(one_by_one) == [ours[n - 1].name]
    assert await fetch(one_by_one, SHAPE) == await fetch(together, SHAPE)


async def test_names_compare_by_byte_on_every_machine(dsn: str) -> None:
    """A key that sorts differently on two machines would break the one order of locks."""
    linguistic = await fetch(
        dsn,
        """select c.relname, a.attname from pg_class c
           join pg_attribute a on a.attrelid = c.oid
           join pg_index i on i.indrelid = c.oid and a.attnum = any(i.indkey)
           where c.relnamespace = 'public'::regnamespace and c.relname <> 'schema_migration'
             and a.atttypid = 'text'::regtype and a.attcollation <> '"C"'::regcollation""",
    )
    assert linguistic == []


async def test_a_database_in_another_encoding_is_refused(
    cluster: object, new_database: Callable[..., str], release: Callable[..., None]
) -> None:
    dsn = new_database()
    name = (await fetch(dsn, "select current_database()"))[0][0]
    latin = f"{name}_latin"
    admin = dsn.replace(name, "postgres")
    async with await psycopg.AsyncConnection.connect(admin, autocommit=True) as connection:
        identifier = psycopg.sql.Identifier(latin)
        create = psycopg.sql.SQL("create database {} template template0 encoding 'LATIN1' locale 'C'")
        await connection.execute(create.format(identifier))
    try:
        release(FIRST)
        assert "encoding is LATIN1" in await refused_by_both(dsn.replace(name, latin))
        assert await fetch(dsn.replace(name, latin), TABLES) == []
    finally:
        async with await psycopg.AsyncConnection.connect(admin, autocommit=True) as connection:
            await connection.execute(psycopg.sql.SQL("drop database {} with (force)").format(identifier))


TABLES = "select relname from pg_class where relnamespace = 'public'::regnamespace order by relname"


async def test_a_database_with_tables_of_others_by_the_same_names_is_left_as_it_was(fresh_dsn: str) -> None:
    await execute(fresh_dsn, "create table query (n int)")
    await execute(fresh_dsn, "create table event (n int)")
    with pytest.raises(SchemaVersionMismatch, match=r"has event, query already, .* a database of its own, or a schema"):
        await migrate(fresh_dsn)
    assert await fetch(fresh_dsn, TABLES) == [("event",), ("query",)]
    await execute(fresh_dsn, "create schema fencepost")
    own = psycopg.conninfo.make_conninfo(fresh_dsn, options="-c search_path=fencepost")
    assert await migrate(own) == [migration.name for migration in migrations()]
    await check(own)


async def test_a_table_of_migrations_that_is_of_somebody_else_is_refused(fresh_dsn: str) -> None:
    await execute(fresh_dsn, "create table schema_migration (version text)")
    assert "a schema_migration that is not Fencepost's" in await refused_by_both(fresh_dsn)


def test_the_names_that_migrations_give_are_found_in_their_text() -> None:
    text = "".join(migration.text for migration in migrations())
    assert len(module._CREATES.findall(text)) == len(re.findall(r"^\s*create\b", text, re.MULTILINE | re.IGNORECASE))
