"""Databases of tests, whose clock can be put forward (I11: one clock, the database's, also then).

All statements say ``clock_timestamp()``. In a database of the test kit a function of that name stands in a schema of
its own, and the kit's servers connect with a search path that has that schema first. A production database has no such
schema, and no setting leads there: what is here is called by the test kit alone, and refuses to touch a database that
is not named as the kit's are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fencepost_server.store.errors import RETRY_AT_ONCE
from fencepost_server.store.queries import query

PREFIX = "fencepost_test_"
"""What the names of the kit's databases begin with."""

_SEARCH_PATH = "-c search_path=fencepost_test,pg_catalog,public"
_CONNECT_TIMEOUT = 20
_TRIES = 20

Row = tuple[int, str, str, str, str, datetime | None, datetime | None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where tasks are: as many as that, or one run of them, wait for the same handler on the same queue."""

    namespace: str
    queue: str
    handler: str
    run_id: str


@dataclass(frozen=True, slots=True)
class View:
    """What was there at one moment."""

    now: datetime
    leased: list[Place]
    ready: list[Place]
    moving: list[Place]
    """What the server's loops are about to act on; ``handler`` says what it is."""
    due: datetime | None
    """When the first timer, retry or schedule falls due that is not due yet, or has been due since."""


def dsn_of(admin_dsn: str, database: str) -> str:
    """The connection string of a database of the kit, for a server: with the clock that can be put forward."""
    return make_conninfo(admin_dsn, dbname=database, options=_SEARCH_PATH)


def plain_dsn(admin_dsn: str, database: str) -> str:
    """The same as everybody else connects, with PostgreSQL's own clock."""
    return make_conninfo(admin_dsn, dbname=database)


async def _connect(dsn: str) -> psycopg.AsyncConnection[Any]:
    return await psycopg.AsyncConnection.connect(
        dsn, autocommit=True, connect_timeout=_CONNECT_TIMEOUT, application_name="fencepost test kit"
    )


async def install(admin_dsn: str, database: str) -> None:
    """Give a database of the kit that has just been migrated the clock. Raises ValueError for other databases."""
    _refuse_others(database)
    async with await _connect(plain_dsn(admin_dsn, database)) as connection:
        await connection.execute(query("shifted_clock", "install"))


async def create(admin_dsn: str, database: str, template: str = "") -> None:
    """Create a database of the kit: empty, or as ``template`` is. Raises ValueError for another name."""
    _refuse_others(database)
    names = {"database": sql.Identifier(database), "template": sql.Identifier(template or "template0")}
    async with await _connect(admin_dsn) as connection:
        await connection.execute(sql.SQL("create database {database} template {template}").format(**names))
    if template:
        async with await _connect(dsn_of(admin_dsn, database)) as connection:
            await connection.execute(query("shifted_clock", "begin_life"))


async def seal(admin_dsn: str, database: str) -> None:
    """Make a template of a database: nobody connects to it any more, so that it can always be copied."""
    _refuse_others(database)
    statement = sql.SQL("alter database {} is_template true allow_connections false")
    async with await _connect(admin_dsn) as connection:
        await connection.execute(statement.format(sql.Identifier(database)))


async def drop(admin_dsn: str, database: str) -> None:
    """Drop a database of the kit, with whoever is connected to it."""
    _refuse_others(database)
    name = sql.Identifier(database)
    async with await _connect(admin_dsn) as connection:
        await connection.execute(sql.SQL("alter database {} is_template false").format(name))
        await connection.execute(sql.SQL("drop database {} with (force)").format(name))


def _refuse_others(database: str) -> None:
    if not database.startswith(PREFIX):
        raise ValueError(f"{database} is no database of the test kit: their names begin with {PREFIX}")


class ShiftedClock:
    """The clock of one database of the kit, on a connection of its own. One call at a time."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()

    @classmethod
    async def connect(cls, dsn: str) -> ShiftedClock:
        """``dsn`` is what `dsn_of` gave."""
        return cls(await _connect(dsn))

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()

    async def look(self) -> View:
        """What is under way, and what comes next."""
        async with self._lock:
            return await self._look()

    async def put_forward(self, to: datetime, still: Callable[[View], bool]) -> bool:
        """Let it be ``to``, unless it is later already, if ``still(view)`` says that nothing is under way. Returns what
        that said.

        Every transaction that has read the clock has ended by then, and those that come see the new time: so no lease
        is older than its time says, and none can run out because of this.
        """
        async with self._lock:
            for _ in range(_TRIES):
                try:
                    return await self._put_forward(to, still)
                except RETRY_AT_ONCE:  # it met an autovacuum, or the probe
                    continue
            raise TimeoutError("the database does not let its clock be put forward")

    async def _put_forward(self, to: datetime, still: Callable[[View], bool]) -> bool:
        async with self._connection.transaction():
            await self._connection.execute("set local lock_timeout = '10s'")
            await self._connection.execute(query("shifted_clock", "stand_still"))
            if not still(await self._look()):
                return False
            await self._connection.execute(query("shifted_clock", "put_forward"), {"to": to})
            return True

    async def _look(self) -> View:
        cursor = await self._connection.execute(query("shifted_clock", "look"))
        rows: list[Row] = await cursor.fetchall()
        places: dict[int, list[Place]] = {1: [], 2: [], 3: []}
        now = due = None
        for what, namespace, queue, handler, run_id, at, first in rows:
            if what == 4:
                now, due = at, first
            else:
                places[what].append(Place(namespace, queue, handler, run_id))
        assert now is not None  # that part of the statement has one row
        return View(now, places[1], places[2], places[3], due)
