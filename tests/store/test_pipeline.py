"""What a transaction costs on the wire: whatever it says between two syncs travels in one go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost_server.config import Config
from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.store.connection import Database, connect, slam, transaction
from fencepost_server.store.pipeline import Connection
from tests.engine.rows import execute


@dataclass(slots=True)
class Wire:
    """Counts what the client writes: short texts come as they were written."""

    writes: int = 0
    links: set[asyncio.Task[None]] = field(default_factory=set)

    async def pump(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until it ends."""
        try:
            while data := await reader.read(1 << 20):
                self.writes += name == "up"
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the other direction has ended
        finally:
            writer.close()


@pytest.fixture
async def wire(dsn: str) -> AsyncIterator[tuple[Wire, str]]:
    """A forwarder in front of the database, and the way through it."""
    info = conninfo_to_dict(dsn)
    found = Wire()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(str(info["host"]), int(info["port"] or 0))
        for pump in (found.pump("up", reader, up_writer), found.pump("down", up_reader, writer)):
            task = asyncio.create_task(pump)
            found.links.add(task)
            task.add_done_callback(found.links.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield found, make_conninfo(dsn, host="127.0.0.1", port=port, hostaddr=None)
    server.close()
    for task in list(found.links):
        task.cancel()
    await asyncio.gather(*found.links, return_exceptions=True)


async def test_a_transaction_writes_once_for_each_sync_and_once_for_its_end(
    wire: tuple[Wire, str],
) -> None:
    """Each statement was a write of its own once, and the end of a transaction two round trips."""
    counted, dsn = wire
    config = Config(dsn=dsn)
    connection = await connect(config)
    try:
        for _ in range(5):  # until everything is prepared
            before = counted.writes
            async with transaction(connection, config) as session:
                for number in range(8):
                    session.send(f"select {number}".encode())
                await session.sync()
                for number in range(8):
                    session.send(f"select -{number}".encode())
            assert counted.writes - before == 2
    finally:
        await connection.close()


async def test_a_transaction_that_is_more_than_the_socket_takes_at_once_goes_through(dsn: str) -> None:
    """A batch has up to 16 MiB of payloads: once, what the socket did not take at once was sent by nobody."""
    config = Config(dsn=dsn)
    connection = await connect(config)
    try:
        async with transaction(connection, config) as session:
            answers = [session.send(b"select length(%(text)s::text)", {"text": "x" * 1_000_000}) for _ in range(24)]
            await session.sync()
            assert [answer.rows() for answer in answers] == [[(1_000_000,)]] * 24
            session.send(b"select length(%(text)s::text)", {"text": "x" * 24_000_000})  # with the commit
    finally:
        await connection.close()


async def test_what_was_prepared_and_is_of_no_use_any_more_is_prepared_anew(dsn: str) -> None:
    """Once such a connection failed for as long as it lived, and a server dispatched nothing."""
    database = Database(Config(dsn=dsn), "test", 1)
    await database.open()
    try:
        await execute(dsn, "create table changing (a int)")
        assert await database.rows(b"select * from changing") == []
        await execute(dsn, "alter table changing add b int")
        with suppress(DatabaseUnavailable):  # where it was prepared
            await database.rows(b"select * from changing")
        assert await database.rows(b"select * from changing") == []
        async with database._connection() as connection:
            await connection.execute("deallocate all")  # as a pooler does that forgets
        with suppress(DatabaseUnavailable):
            await database.rows(b"select * from changing")
        assert await database.rows(b"select * from changing") == []
    finally:
        await database.close()
        await execute(dsn, "drop table changing")


async def test_a_transaction_that_is_cancelled_leaves_no_answer_to_the_next_one(dsn: str) -> None:
    config = Config(dsn=dsn)
    connection = await connect(config)
    began = asyncio.Event()

    async def ask() -> None:
        async with transaction(connection, config) as session:
            session.send(b"select 'old'")
            began.set()
            await session.rows(b"select pg_sleep(30)")

    asking = asyncio.create_task(ask())
    await began.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert connection.closed


async def lose(connection: Connection, config: Config) -> None:
    """Shut a connection's socket while it sends."""
    async with transaction(connection, config) as session:
        await session.rows(b"select 1")
        session.send(b"select pg_sleep(1)")
        session.send(b"select length(%(text)s::text)", {"text": "x" * 8_000_000})
        asyncio.get_running_loop().call_later(0.03, slam, connection)
        await session.sync()


async def test_a_connection_that_is_lost_amid_a_large_statement_harms_no_other_socket(dsn: str) -> None:
    """libpq closes its socket when it reads the end; the loop may not know that number any more by then."""
    config, loop = Config(dsn=dsn), asyncio.get_running_loop()
    harmed: list[Exception] = []
    ended = asyncio.Event()

    async def innocent() -> None:
        while not ended.is_set():
            pair = socket.socketpair()
            for side in pair:
                try:
                    loop.add_reader(side.fileno(), int)
                except OSError as error:
                    harmed.append(error)
            await asyncio.sleep(0)
            for side in pair:
                loop.remove_reader(side.fileno())
                side.close()

    churning = asyncio.create_task(innocent())
    for _ in range(15):
        connection = await connect(config)
        with pytest.raises(psycopg.OperationalError):
            await lose(connection, config)
        await connection.close()
    ended.set()
    await churning
    assert harmed == []
