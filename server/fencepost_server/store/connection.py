"""Opens connections and runs transactions with their limits.

Everything works behind a pooler in transaction mode: no session state, settings by ``set_config(…, true)`` inside the
transaction. At a time limit the socket itself is closed, because cancelling a statement needs a server that answers.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import lru_cache, partial
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from fencepost_server.config import Config
from fencepost_server.store import arrays
from fencepost_server.store.errors import is_away, unavailable
from fencepost_server.store.pipeline import Connection, Params, Session, pipelined
from fencepost_server.store.queries import query

_BEGIN, _COMMIT = query("batch", "begin"), query("batch", "commit")
_ROLLBACK, _PRELUDE = query("batch", "rollback"), query("batch", "prelude")
_BACKEND, _PREPARED = query("cluster", "backend"), query("cluster", "prepared")
_ASK_AGAIN = 0.25


def _options(config: Config) -> dict[str, Any]:
    return {
        "autocommit": True,
        "prepare_threshold": None,  # the driver prepares nothing by itself: store/pipeline.py does
        "connect_timeout": max(2, round(config.connect_timeout)),
        "application_name": "fencepost",
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": round(config.batch_timeout * 1000),
    }


async def _configure(connection: Connection, config: Config) -> None:
    """Make a new connection ready. Closes it if that fails, or takes too long."""
    arrays.register(connection)
    if config.prepared != "auto":
        connection.prepares = False
        return
    try:
        with limited(connection, config.batch_timeout):
            if await through_pooler(connection) and not await _keeps_statements(connection):
                connection.prepares = False
    except BaseException:
        await connection.close()
        raise


async def through_pooler(connection: psycopg.AsyncConnection[Any]) -> bool:
    """Whether something else than Postgres has answered: it has named a process that serves nobody."""
    row = await (await connection.execute(_BACKEND, prepare=False)).fetchone()
    assert row is not None  # a select without from has one row
    return bool(row[0] != connection.info.backend_pid)


async def _keeps_statements(connection: Connection) -> bool:
    """Whether a pooler knows what each of its clients has prepared, which shows in names of its own for it.

    One that passes our names on mixes up what they stand for: a transaction in which a statement is unknown fails, and
    one in which it is another client's does what nobody has asked for.
    """
    try:
        async with pipelined(connection) as session:
            answer = session.send(_PREPARED)
    except (psycopg.errors.DuplicatePreparedStatement, psycopg.errors.InvalidSqlStatementName):
        return False
    return not answer.rows()[0][0]


async def _check(connection: Connection) -> None:
    """Raise if the other side has hung up meanwhile, as it does when the database restarts: whoever was about to use
    the connection gets another one instead of an error. Asks the kernel only; there is no round trip.
    """
    connection.pgconn.consume_input()
    connection.pgconn.is_busy()  # takes in what has come: its last words, perhaps, behind which is the end
    connection.pgconn.consume_input()


async def connect(config: Config) -> Connection:
    """A connection of the caller's own. Raises what ``is_away`` knows when the database can't be reached."""
    connection = await opened(config.dsn, _options(config))
    await _configure(connection, config)
    return connection


async def opened(dsn: str, options: dict[str, Any]) -> Connection:
    """A connection as it comes, within the options' ``connect_timeout`` for each server that the string names."""
    async with asyncio.timeout(options["connect_timeout"] * _hosts(dsn) + 1):
        return await Connection.connect(dsn, **options)


def _hosts(dsn: str) -> int:
    """How many servers a connection string names, each of which is given its time."""
    info = conninfo_to_dict(dsn)
    return max(str(info.get(name) or "").count(",") for name in ("host", "hostaddr")) + 1


def slam(connection: Connection) -> None:
    """Shut the socket down at once, whatever is under way on it: who waits on it gets an error now, even if the
    other side is silent. (Cancelling a statement would need a server that answers.)
    """
    try:
        descriptor = os.dup(connection.pgconn.socket)
    except (psycopg.OperationalError, OSError):
        return  # closed already
    with socket.socket(fileno=descriptor) as duplicate, suppress(OSError):
        duplicate.shutdown(socket.SHUT_RDWR)


@contextmanager
def limited(connection: Connection, limit: float) -> Iterator[None]:
    """Shut the socket down if the block takes longer than ``limit`` seconds."""
    timer = asyncio.get_running_loop().call_later(limit, slam, connection)
    try:
        yield
    finally:
        timer.cancel()


def make_pool(config: Config, name: str, size: int) -> AsyncConnectionPool[Connection]:
    """A pool. Opens even when the database is away."""
    return AsyncConnectionPool(
        config.dsn,
        connection_class=Connection,
        kwargs=_options(config),
        configure=partial(_configure, config=config),
        check=_check,
        min_size=1,
        max_size=size,
        timeout=config.connect_timeout,
        reconnect_timeout=0,
        open=False,
        name=name,
    )


@asynccontextmanager
async def transaction(connection: Connection, config: Config) -> AsyncIterator[Session]:
    """A transaction in pipeline mode, with its time limits set. Commits at the end of the block, rolls back on
    an error.

    Begin, limits and the first statements travel together. A transaction that takes longer than batch_timeout
    in all has its socket shut down, and raises the driver's OperationalError.
    """
    timer = asyncio.get_running_loop().call_later(config.batch_timeout, slam, connection)
    try:
        async with pipelined(connection) as session:
            session.send(_BEGIN)
            session.send(_PRELUDE, _limits(config))
            yield session
            session.send(_COMMIT)  # the end of the block waits for it
    except asyncio.CancelledError:
        slam(connection)
        raise
    except BaseException:
        await _roll_back(connection)
        raise
    finally:
        timer.cancel()


async def _roll_back(connection: Connection) -> None:
    """Leave no transaction open; a connection that can't even do that is shut."""
    if connection.closed or connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        return
    try:
        await connection.execute(_ROLLBACK)
    except psycopg.Error:
        slam(connection)


class Database:
    """A pool, with its errors mapped.

    There is one for calls and one for loops, so that no number of readers can keep a heartbeat waiting; the lanes have
    connections of their own.
    """

    def __init__(self, config: Config, name: str, size: int) -> None:
        self.config = config
        self._pool = make_pool(config, name, size)
        self._turns = asyncio.Semaphore(size)

    async def open(self) -> None:
        """Start the pool; does not wait for the database."""
        await self._pool.open(wait=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close(timeout=2)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """A pooled connection. Raises PoolTimeout or TimeoutError after connect_timeout.

        The pool tries to connect once for who begins to wait, then no more: who waits begins anew every moment, so
        that it is served as soon as an outage ends, and not when its time is up. Only as many do as there are
        connections; those behind them wait their turn, which costs nothing, however many they are.
        """
        async with AsyncExitStack() as stack:
            yield await self._acquire(stack)

    async def _acquire(self, stack: AsyncExitStack) -> Connection:
        deadline = asyncio.get_running_loop().time() + self.config.connect_timeout
        async with asyncio.timeout_at(deadline):
            await stack.enter_async_context(self._turns)
        while True:
            try:
                return await stack.enter_async_context(self._pool.connection(_ASK_AGAIN))
            except PoolTimeout:
                if asyncio.get_running_loop().time() >= deadline:
                    raise

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        """A transaction on a pooled connection. Raises DatabaseUnavailable when the database is away or too slow."""
        try:
            async with self._connection() as connection, transaction(connection, self.config) as session:
                yield session
        except (PoolTimeout, psycopg.Error, OSError, TimeoutError) as error:
            if is_away(error):
                raise unavailable() from error
            raise

    async def rows(self, statement: bytes, params: Params | None = None) -> list[Any]:
        """One statement in a transaction of its own: one round trip for all of it."""
        async with self.transaction() as session:
            answer = session.send(statement, params)
        return answer.rows()

    async def single(self, statement: bytes, params: Params | None = None) -> list[Any]:
        """One statement and nothing else, for loops that run while the server is idle: the only limit is
        batch_timeout, by closing the socket.
        """
        try:
            async with self._connection() as connection:
                with limited(connection, self.config.batch_timeout):
                    async with pipelined(connection) as session:
                        answer = session.send(statement, params)
                    return answer.rows()
        except (PoolTimeout, psycopg.Error, OSError, TimeoutError) as error:
            if is_away(error):
                raise unavailable() from error
            raise


@lru_cache(maxsize=4)
def _limits(config: Config) -> dict[str, str]:
    return {
        "lock_timeout": f"{config.lock_timeout * 1000:.0f}",
        "statement_timeout": f"{config.statement_timeout * 1000:.0f}",
        "idle_timeout": f"{config.idle_in_transaction_timeout * 1000:.0f}",
    }
