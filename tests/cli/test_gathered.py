"""What is gathered from several processes when some of them hang, dawdle or say too much. They are sockets here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from fencepost_server.web import gathered
from fencepost_server.web.gathered import ProcessState, ToldByProcesses
from tests.fixtures.waiting import paced

LIMIT = 20
"""Seconds that a gathering may take here: many times what it takes, and less than what it would take in turn."""
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def hang(_writer: asyncio.StreamWriter) -> None:
    """Accept and say nothing."""
    await asyncio.Event().wait()


async def dawdle(writer: asyncio.StreamWriter) -> None:
    """Never be silent for as long as the limit, and never end."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        writer.write(b"#")
        await writer.drain()
        await paced(0.1)


def tell(body: str) -> Answer:
    """Answer with ``body``."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()

    return answer


@asynccontextmanager
async def processes(*answers: Answer) -> AsyncIterator[ToldByProcesses]:
    """Processes that answer so, numbered from 1."""
    lives: set[asyncio.Task[None]] = set()

    def serving(answer: Answer) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        async def live(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
                await answer(writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass  # whoever asked has gone
            finally:
                writer.close()

        return lambda reader, writer: lives.add(asyncio.create_task(live(reader, writer)))

    servers = [await asyncio.start_server(serving(answer), "127.0.0.1") for answer in answers]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    try:
        yield ToldByProcesses(lambda: {n: ProcessState(port, 0) for n, port in enumerate(ports, 1)})
    finally:
        for server in servers:
            server.close()
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)


async def test_ready_waits_for_none_that_hangs_when_another_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_TIMEOUT", 10 * LIMIT)
    async with processes(hang, tell("ready"), hang) as told, asyncio.timeout(LIMIT):
        assert await told.ready()


@pytest.mark.parametrize("late", [hang, dawdle])
async def test_those_that_are_late_are_left_out_all_after_the_one_limit(
    late: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [late] * 120
    found: list[str] = []
    async with processes(*others, tell("# TYPE a gauge\na 1\n")) as told:
        for limit in (1.0, 5.0, 10.0):  # the first is enough, unless the machine is busy
            monkeypatch.setattr(gathered, "_TIMEOUT", limit)
            async with asyncio.timeout(limit + LIMIT):
                lines = (await told.metrics()).decode().splitlines()
            if found := [line for line in lines if line.startswith("a{")]:
                break
    assert found == ['a{process="121"} 1.0']
    monkeypatch.setattr(gathered, "_TIMEOUT", 1.0)
    async with processes(late) as told, asyncio.timeout(LIMIT):
        assert not await told.ready()


async def test_a_body_over_the_limit_is_left_out_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_TIMEOUT", LIMIT)
    monkeypatch.setattr(gathered, "_MAX_BYTES", 30)
    long = "# TYPE a gauge\na 1000000000000000000\n"
    async with processes(tell(long), tell("# TYPE a gauge\na 1\n")) as told:
        lines = (await told.metrics()).decode().splitlines()
    assert [line for line in lines if line.startswith("a{")] == ['a{process="2"} 1.0']
