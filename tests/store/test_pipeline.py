"""What a transaction costs on the wire: whatever it says between two syncs travels in one go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost_server.config import Config
from fencepost_server.store.connection import connect, transaction


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
