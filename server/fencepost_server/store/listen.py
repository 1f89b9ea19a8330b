"""LISTEN on a direct connection of its own: a pooler in transaction mode can't hold it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import psycopg

from fencepost_server.config import Config
from fencepost_server.store.connection import limited, opened, through_pooler
from fencepost_server.store.errors import unavailable

log = logging.getLogger("fencepost.listen")

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
    options = {
        "autocommit": True,
        "connect_timeout": max(2, round(config.connect_timeout)),
        "application_name": "fencepost listener",
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
    }
    async with await opened(config.listen_dsn, options) as connection:
        with limited(connection, config.batch_timeout):
            if await through_pooler(connection):
                log.warning("listen_dsn leads through a pooler: in transaction mode it loses all notifications")
            await connection.execute(b"listen " + CHANNEL.encode())
        while True:
            async for notification in connection.notifies(timeout=5.0):
                yield notification.payload
            with limited(connection, config.batch_timeout):
                await connection.execute(b"select 1")
