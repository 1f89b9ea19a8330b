"""Whoever has let a lease run out gets no other task until it has answered a ping: it may be frozen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import LiteralString

import pytest

from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.rows import execute, fetch
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import OK, RawWorker
from tests.fixtures.servers import StartInProcessServer

EXPIRE = "update task set lease_expires_at = clock_timestamp() where lease_session is not null"
TIME_OUT = EXPIRE.replace("set", "set attempt_deadline_at = clock_timestamp(),")
TWO = {"max_attempts": 2, "initial_delay": "10ms", "jitter": 0}


@pytest.mark.parametrize("run_out", [EXPIRE, TIME_OUT], ids=["lease", "timeout"])
async def test_a_worker_that_does_not_answer_burns_no_second_attempt(
    in_process_server: StartInProcessServer,
    connect_api: Callable[[str], Api],
    connect_worker: Callable[..., Awaitable[RawWorker]],
    dsn: str,
    run_out: LiteralString,
) -> None:
    """Nor if its lease ends with the time of the attempt, of which a worker tells by itself if it can."""
    server = await in_process_server(dsn, poll_interval=0.05, ping_interval=60.0)
    api = connect_api(server.grpc_address)
    await api.register(manifest(retry=TWO))
    frozen = await connect_worker(server.grpc_address, auto_pong=False)
    first, second = [(await api.start()).run_id for _ in range(2)]
    await frozen.tasks(2)
    await execute(dsn, run_out)
    for _ in range(2):
        await frozen.next(pb.Revoke)
    pings = [frame.number for frame in [await frozen.next(pb.Ping)]]
    await frozen.no_task()
    assert frozen.unread(pb.Ping) == [], "one ping, however many leases"
    assert await fetch(dsn, "select attempt from task where lease_session is not null") == []
    other = await connect_worker(server.grpc_address, capacity=1)
    task = await other.task()
    assert task.attempt == 2
    await other.capacity(0)  # the other task is left for the first worker
    assert (await other.complete(task)).outcome == OK
    await other.close()
    await frozen.send(pb.Pong(number=pings[0]))
    task = await frozen.task()
    assert (await frozen.complete(task)).outcome == OK
    for run_id in (first, second):
        await api.wait(run_id)
