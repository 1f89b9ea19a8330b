"""How a link ends while its stream is only being made."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from fencepost import link as link_module
from fencepost import session as session_module
from fencepost.channel import Backoff, Targets
from fencepost.ledger import Effects
from fencepost.link import Link
from fencepost.v1 import worker_service_pb2 as pb
from tests.fixtures.waiting import eventually
from tests.unit.sdk.answering import trailing
from tests.unit.sdk.building import OK, RUN, session_of, task
from tests.unit.test_raw_worker import Server, Stream, server

__all__ = ["server"]  # a fixture


def released(link: Link, effects: Effects) -> None:
    """As a worker that stops does with what it has not begun."""
    for lease in effects.start:
        link.session.release(lease)


async def test_a_worker_that_leaves_before_its_welcome_gives_back_the_tasks_behind_it(server: Server) -> None:
    """The server has read its Hello, and leases at once: what it sent would run out on a worker that is gone."""
    greeted, left, said = asyncio.Event(), asyncio.Event(), list[pb.SessionRequest]()

    async def script(stream: Stream) -> None:
        await stream.request()
        greeted.set()
        await left.wait()
        await stream.write(welcome=pb.Welcome(session_id="a"))
        await stream.write(tasks=pb.Tasks(tasks_number=1, tasks=[task(1)]))
        async for data in stream.frames:
            frame = pb.SessionRequest.FromString(data)
            said.append(frame)
            results = [pb.ItemResult(index=0, outcome=OK)] if frame.HasField("release") else []
            await stream.write(ack=pb.Ack(frame_id=frame.frame_id, results=results))

    server.scripts.append(script)
    link = Link(session_of(), Targets(server.address), Backoff(), released)
    life = asyncio.create_task(link.run())
    await greeted.wait()
    await eventually(lambda: link._greeted)  # the server may read it before gRPC says that it is written
    link.leave()
    left.set()
    await asyncio.wait_for(life, 10)
    assert [item.task.run_id for frame in said for item in frame.release.items] == [f"{RUN}1"]
    assert [frame.HasField("goodbye") for frame in said].count(True) == 1  # before the release, if the tasks came late


@pytest.mark.parametrize("left", ["before", "after"])
async def test_a_worker_whose_stream_breaks_as_it_leaves_comes_back_for_what_it_has_not_read(
    server: Server, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that the server wrote to the broken stream are on no worker, which nobody but this one can tell."""
    monkeypatch.setattr(link_module, "LAST_WORD_SECONDS", 60.0)  # a stall of the machine is no part of this
    breaks, hellos = asyncio.Event(), list[pb.Hello]()

    async def breaking(stream: Stream) -> None:
        hellos.append(await stream.welcome("a"))
        await breaks.wait()
        await stream.context.abort(grpc.StatusCode.UNAVAILABLE, "the way is cut")

    async def settling(stream: Stream) -> None:
        hellos.append(await stream.welcome("b"))
        async for data in stream.frames:
            await stream.write(ack=pb.Ack(frame_id=pb.SessionRequest.FromString(data).frame_id))

    server.scripts += [breaking, settling]
    link = Link(session_of(), Targets(server.address), Backoff(first=0.5, chance=lambda: 1.0), released)
    life = asyncio.create_task(link.run())
    await eventually(lambda: link.session.is_open)
    if left == "before":
        link.leave()
        breaks.set()
    else:
        breaks.set()
        await eventually(lambda: not link.session.is_open)
        link.leave()
    await asyncio.wait_for(life, 10)
    first, second = hellos
    assert (first.capacity, second.capacity) == (10, 0)
    assert list(second.previous_session_ids) == ["a"]


async def test_a_worker_that_leaves_does_not_wait_for_a_server_that_stays_away(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "LAST_WORD_SECONDS", 0.2)

    async def breaking(stream: Stream) -> None:
        await stream.welcome("a")
        await stream.context.abort(grpc.StatusCode.UNAVAILABLE, "the way is cut", trailing(retry=60.0))

    server.scripts.append(breaking)
    link = Link(session_of(), Targets(server.address), Backoff(), released)
    life = asyncio.create_task(link.run())
    await eventually(lambda: link.session.session_id and not link.session.is_open)
    link.leave()
    await asyncio.wait_for(life, 30)


async def test_a_worker_that_leaves_does_not_wait_for_a_server_that_has_refused_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that shuts down does, when all are told to end together: it has given it nothing."""
    monkeypatch.setattr(link_module, "LAST_WORD_SECONDS", 60.0)
    refused = asyncio.Event()

    async def refusing(stream: Stream) -> None:
        await stream.request()
        refused.set()
        await stream.context.abort(grpc.StatusCode.UNAVAILABLE, "it shuts down", trailing("SERVER_DRAINING", 60.0))

    server.scripts.append(refusing)
    link = Link(session_of(), Targets(server.address), Backoff(), released)
    life = asyncio.create_task(link.run())
    await refused.wait()
    await eventually(lambda: link.channel is None)
    link.leave()
    await asyncio.wait_for(life, 10)


async def test_a_worker_that_leaves_before_its_hello_is_out_does_not_wait_for_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody can have given it anything: the address takes connections and says nothing."""
    # Neither gRPC nor the session gives it up by itself in the time of this test.
    monkeypatch.setattr(link_module, "channel_options", lambda _size: [("grpc.min_reconnect_backoff_ms", 120_000)])
    monkeypatch.setattr(session_module, "WELCOME_TIMEOUT", 120.0)
    connected, over = asyncio.Event(), asyncio.Event()

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await over.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        link = Link(session_of(), Targets(f"127.0.0.1:{port}"), Backoff(), released)
        life = asyncio.create_task(link.run())
        await connected.wait()
        link.leave()
        await asyncio.wait_for(life, 30)
        over.set()


async def test_a_worker_that_leaves_does_not_wait_for_the_registration_of_its_workflows(server: Server) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def registering(_channel: grpc.aio.Channel) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    link = Link(session_of(), Targets(server.address), Backoff(), released, registering)
    life = asyncio.create_task(link.run())
    await begun.wait()
    link.leave()
    await asyncio.wait_for(life, 30)
    assert ended.is_set()
