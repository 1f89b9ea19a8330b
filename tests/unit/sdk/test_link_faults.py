"""What a fault of the SDK leaves of a link: all but what it was about."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration

from fencepost import link as link_module
from fencepost.channel import Backoff, Targets
from fencepost.ledger import Effects
from fencepost.link import Link
from fencepost.v1 import worker_service_pb2 as pb
from tests.unit.sdk.building import OK, session_of, task
from tests.unit.test_raw_worker import Server, Stream, server

__all__ = ["server"]  # a fixture


async def test_leases_are_renewed_after_a_fault_at_a_tick(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "FAULT_PAUSE", 0.01)
    faults, renewed = list[Effects](), asyncio.Event()

    def apply(_link: Link, effects: Effects) -> None:
        """Of a tick nothing comes here, nor of a frame but the two that the server sends."""
        if link.session.held_count and not effects.start and not faults:
            faults.append(effects)
            raise KeyError("a fault")

    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.write(welcome=pb.Welcome(session_id="a", heartbeat_interval=Duration(nanos=100_000_000)))
        await stream.write(tasks=pb.Tasks(tasks_number=1, tasks=[task(1)]))
        async for data in stream.frames:
            frame = pb.SessionRequest.FromString(data)
            if frame.HasField("heartbeat") and faults:
                renewed.set()
            await stream.write(ack=pb.Ack(frame_id=frame.frame_id, results=[pb.ItemResult(index=0, outcome=OK)]))

    server.scripts.append(script)
    link = Link(session_of(), Targets(server.address), Backoff(), apply)
    life = asyncio.create_task(link.run())
    await asyncio.wait_for(renewed.wait(), 10)
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
