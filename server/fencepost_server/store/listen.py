"""LISTEN on a direct connection of its own: a pooler in transaction mode can't hold it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg

from fencepost_server.config import Config
from fencepost_server.store.connection import slam
from fencepost_server.store.errors import unavailable
from fencepost_server.store.pipeline import Connection

CHANNEL = "fencepost"


async def listen(config: Config) -> AsyncIterator[str]:
    """Yield payloads until the connection is lost, which raises DatabaseUnavailable.

    Now and then a trivial statement checks that the other side is there: a connection that only listens would
    not notice. It has to answer within batch_timeout.
    """
    try:
        async for payload in _listen(config):
            yield payload
    except (psycopg.Error, OSError, TimeoutError) as error:
        raise unavailable() from error


async def _listen(config: Config) -> AsyncIterator[str]:
    connection = await Connection.connect(
        config.listen_dsn,
        autocommit=True,
        connect_timeout=max(2, round(config.connect_timeout)),
        application_name="fencepost listener",
        keepalives_idle=5,
        keepalives_interval=2,
        keepalives_count=3,
        tcp_user_timeout=10_000,
    )
    async with connection:
        await _execute(connection, b"listen " + CHANNEL.encode(), config.batch_timeout)
        while True:
            async for notification in connection.notifies(timeout=5.0):
                yield notification.payload
            await _execute(connection, b"select 1", config.batch_timeout)


async def _execute(connection: Connection, statement: bytes, limit: float) -> None:
    timer = asyncio.get_running_loop().call_later(limit, slam, connection)
    try:
        await connection.execute(statement)
    finally:
        timer.cancel()
