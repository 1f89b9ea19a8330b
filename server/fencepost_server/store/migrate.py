"""Brings the schema up to date.

Each file of ``migrations/`` runs once, in order, in a transaction of its own under an advisory lock, so that
any number of servers may try at the same time. What ran is recorded with its checksum: a changed file, a gap,
or a schema newer than this release is SCHEMA_VERSION_MISMATCH.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import psycopg

from fencepost_server.domain.errors import DatabaseUnavailable, SchemaVersionMismatch
from fencepost_server.store.errors import is_away

# Any constant of our own will do: it keeps two migrations of one database apart.
_LOCK = 0x46656E6365  # "Fence"

# Whoever waits for a table holds up all that come behind, and one that dumps the database may hold it for hours: so it
# waits for less than servers do for a row, steps back, and tries again.
_LIMITS = "set local lock_timeout = '500ms'; set local client_min_messages = warning"
_PATIENCE = 60.0
_PAUSE = 0.5

_CREATES = re.compile(r"^create (?:unlogged )?(?:unique )?(?:table|index) (\w+)", re.MULTILINE)
_OWN = "Fencepost needs a database of its own, or a schema of its own: the first in the search path of its connections"

_CREATE = """
create table if not exists schema_migration (
    version integer primary key,
    name text not null,
    checksum text not null,
    applied_at timestamptz not null default clock_timestamp()
)
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: its number, its name and its text."""

    version: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the text, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def migrations() -> list[Migration]:
    """All migrations of this release, in order."""
    found = [
        Migration(int(entry.name.split("_", 1)[0]), entry.name, entry.read_text(encoding="utf-8"))
        for entry in (files(__package__) / "migrations").iterdir()
        if entry.name.endswith(".sql")
    ]
    return sorted(found, key=lambda m: m.version)


async def _connect(dsn: str) -> psycopg.AsyncConnection[Any]:
    return await psycopg.AsyncConnection.connect(dsn, autocommit=True, connect_timeout=10, prepare_threshold=None)


async def _applied(connection: psycopg.AsyncConnection[Any]) -> dict[int, str]:
    cursor = await connection.execute("select to_regclass('schema_migration') is not null")
    row = await cursor.fetchone()
    if row is None or not row[0]:
        return {}
    try:
        cursor = await connection.execute("select version, checksum from schema_migration order by version")
    except psycopg.errors.UndefinedColumn:
        raise SchemaVersionMismatch(f"the database has a schema_migration that is not Fencepost's: {_OWN}") from None
    return dict(await cursor.fetchall())


def _compare(applied: dict[int, str], ours: list[Migration]) -> list[Migration]:
    """The migrations that are missing. Raises SchemaVersionMismatch when what was applied is not what this
    release has.
    """
    known = {m.version: m for m in ours}
    newer = sorted(set(applied) - set(known))
    if newer:
        raise SchemaVersionMismatch(
            f"the database's schema (version {max(applied)}) is newer than this release (version {max(known)}): "
            "run a newer fencepost-server"
        )
    changed = [known[v].name for v, checksum in applied.items() if known[v].checksum != checksum]
    if changed:
        raise SchemaVersionMismatch(f"applied migrations differ from this release's: {', '.join(changed)}")
    missing = [m for m in ours if m.version not in applied]
    if applied and missing and min(m.version for m in missing) < max(applied):
        raise SchemaVersionMismatch(f"the database lacks {missing[0].name} although later migrations were applied")
    return missing


async def migrate(dsn: str) -> list[str]:
    """Apply what is missing and return its names. Safe to run from several places at once, and while servers work.

    Raises SchemaVersionMismatch, also for a database that no server would start on or that has tables of others in the
    way, before anything is changed; psycopg.Error if the database can't be reached or refuses, or if others hold for a
    minute what it has to lock.
    """
    done: list[str] = []
    async with await _connect(dsn) as connection:
        await _check_database(connection)
        give_up = time.monotonic() + _PATIENCE
        while True:
            try:
                name = await _migrate_once(connection)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(_PAUSE)
                continue
            if name is None:
                return done
            done.append(name)
            give_up = time.monotonic() + _PATIENCE


async def _migrate_once(connection: psycopg.AsyncConnection[Any]) -> str | None:
    """Apply the first of what is missing. None: nothing is."""
    async with connection.transaction():
        await connection.execute(_LIMITS)
        await connection.execute("select pg_advisory_xact_lock(%s)", [_LOCK])
        await connection.execute(_CREATE)
        applied = await _applied(connection)
        missing = _compare(applied, migrations())
        if not missing:
            return None
        if not applied:
            await _check_room(connection, missing)
        first = missing[0]
        await connection.execute(first.text.encode())
        await connection.execute(
            "insert into schema_migration (version, name, checksum) values (%s, %s, %s)",
            [first.version, first.name, first.checksum],
        )
        return first.name


async def _check_room(connection: psycopg.AsyncConnection[Any], missing: list[Migration]) -> None:
    """Raise SchemaVersionMismatch if something has a name that a first migration, or one of those after it, will give.

    Found by the last of them it would leave the others' tables among those of somebody else.
    """
    ours = [name for migration in missing for name in _CREATES.findall(migration.text)]
    cursor = await connection.execute(
        "select relname from pg_class where relnamespace = current_schema()::regnamespace and relname = any(%s) "
        "order by relname",
        [ours],
    )
    taken = [name for (name,) in await cursor.fetchall()]
    if taken:
        raise SchemaVersionMismatch(f"the database has {', '.join(taken)} already, not made by Fencepost: {_OWN}")


async def _check_database(connection: psycopg.AsyncConnection[Any]) -> None:
    """Raise SchemaVersionMismatch for a database that servers can't work on, whatever its schema."""
    cursor = await connection.execute(
        "select current_setting('server_version_num')::int, current_setting('server_encoding')"
    )
    row = await cursor.fetchone()
    assert row is not None  # a select without from has one row
    version, encoding = row
    if version < 150000:
        raise SchemaVersionMismatch(f"Postgres {version // 10000} is too old: 15 or newer is needed")
    if encoding != "UTF8":
        raise SchemaVersionMismatch(f"the database's encoding is {encoding}: it must be UTF8")


async def check(dsn: str) -> None:
    """Raise SchemaVersionMismatch unless the database has exactly this release's schema, and is usable.

    Raises DatabaseUnavailable if it can't be reached or takes no writes, as a replica doesn't.
    """
    try:
        await _check(dsn)
    except (psycopg.Error, OSError) as error:
        if is_away(error):
            first = str(error).strip().splitlines() or [type(error).__name__]
            raise DatabaseUnavailable(f"the database can't be reached: {first[0]}") from error
        raise


async def _check(dsn: str) -> None:
    async with await _connect(dsn) as connection:
        await _check_database(connection)
        missing = _compare(await _applied(connection), migrations())
        if missing:
            raise SchemaVersionMismatch(
                f"the database's schema lacks {', '.join(m.name for m in missing)}: run `fencepost migrate`"
            )
        cursor = await connection.execute("select current_setting('transaction_read_only')")
        row = await cursor.fetchone()
        if row == ("on",):
            raise DatabaseUnavailable(
                "the database takes no writes: name its primary, or all hosts and target_session_attrs=read-write"
            )
