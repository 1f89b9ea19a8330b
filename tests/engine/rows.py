"""Looks into the database behind the servers' backs: what a test says of rows, it says of these."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, LiteralString

import psycopg
from psycopg.sql import Composed

from tests.fixtures.waiting import eventually

Connection = psycopg.AsyncConnection[Any]


async def fetch(dsn: str, statement: LiteralString, params: Any = None) -> list[tuple[Any, ...]]:
    """The rows of one statement."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, connect_timeout=30) as connection:
        return await (await connection.execute(statement, params)).fetchall()


async def count(dsn: str, table: LiteralString, where: LiteralString = "true", params: Any = None) -> int:
    """How many rows of a table satisfy a condition."""
    rows = await fetch(dsn, f"select count(*)::int from {table} where {where}", params)
    return int(rows[0][0])


async def execute(dsn: str, statement: LiteralString | Composed, params: Any = None) -> int:
    """Change rows; returns how many."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, connect_timeout=30) as connection:
        return (await connection.execute(statement, params)).rowcount


async def until_listening(dsn: str, servers: int) -> None:
    """Wait until so many servers hear notifications; what is told before that is lost to them."""
    listening: LiteralString = """datname = current_database() and application_name = 'fencepost listener'
        and state = 'idle' and query in ('listen fencepost', 'select 1')"""

    async def all_listen() -> bool:
        return await count(dsn, "pg_stat_activity", listening) == servers

    await eventually(all_listen)


@asynccontextmanager
async def holding(dsn: str, statement: LiteralString, params: Any = None) -> AsyncIterator[Connection]:
    """A transaction that has run one statement, and keeps its locks until the block ends."""
    async with await psycopg.AsyncConnection.connect(dsn, connect_timeout=30) as connection:
        await connection.execute(statement, params)
        yield connection
        await connection.rollback()
