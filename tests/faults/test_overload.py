"""More work than a server can do: it refuses what is too much and says when to come again, keeps what it took, cuts off
whoever does not read, and is as before when it is over, without help.

Row 30 of the field failures: very many streams, and their server is killed. I12, I13.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections import Counter
from typing import Any

import grpc
import psutil
import pytest

from fencepost.v1 import error_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.faults.scene import ENDED, ONE_ATTEMPT, SOON, STAYING, Scene, count, fetch, metrics, until_count
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import OK, RawWorker, StreamEnded
from tests.fixtures.refusals import DOMAIN, decode
from tests.fixtures.servers import ServerProcess, StartServerProcess
from tests.fixtures.waiting import eventually

MIB = 1 << 20
STREAMS = int(os.environ.get("FENCEPOST_TEST_STREAMS", "300"))
"""Streams of one server that is killed; there should be 1,000 now and then, which takes half a minute."""

CALLERS, CALLS, BATCH = 150, 4, 20


def resident(server: ServerProcess) -> int:
    """Bytes of memory that a server has."""
    size: int = psutil.Process(server.pid).memory_info().rss
    return size


def descriptors(server: ServerProcess) -> int:
    """Files and connections that a server has open."""
    number: int = psutil.Process(server.pid).num_fds()
    return number


async def sessions(server: ServerProcess) -> float:
    """Worker streams of a server."""
    return (await metrics(server.http_address))["fencepost_sessions"]


class Flood:
    """Very many callers at once, who care for no delay. ``accepted`` has the runs that they were told of."""

    def __init__(self, apis: list[Api]) -> None:
        self._apis = apis
        self.accepted: list[str] = []
        self.refusals: Counter[tuple[grpc.StatusCode, str, str, bool]] = Counter()
        self.refused_items: Counter[int] = Counter()

    async def come(self) -> None:
        """Let all of them call, each as often as it does, one call after the other."""
        await asyncio.gather(*(self._caller(number) for number in range(CALLERS)))

    async def _caller(self, number: int) -> None:
        api = self._apis[number % len(self._apis)]
        for call in range(CALLS):
            try:
                if call % CALLS:
                    self.accepted.append((await api.start()).run_id)
                else:
                    await self._batch(api)
            except grpc.aio.AioRpcError as failure:
                error = decode(failure)
                self.refusals[error.code, error.domain, error.reason, bool(error.retry_after)] += 1

    async def _batch(self, api: Api) -> None:
        for result in await api.start_many([api.start_request() for _ in range(BATCH)]):
            if result.HasField("error"):
                self.refused_items[result.error.reason] += 1
            else:
                self.accepted.append(result.started.run_id)


@pytest.mark.parametrize("limit", ["lane_queue", "max_concurrent_calls"])
async def test_more_starts_than_a_server_can_take_are_refused_with_a_delay_and_what_it_took_is_there(
    scene: Scene, server_process: StartServerProcess, limit: str
) -> None:
    """I12: by the lane's queue, or by the number of calls. Its memory is level, and then it is as before."""
    limits: dict[str, Any] = {"lanes": 1, limit: 10}
    server = server_process(scene.dsn, **limits)
    api = scene.api(server.grpc_address)
    await api.register(manifest(1, retry=ONE_ATTEMPT))
    flood = Flood([scene.api(server.grpc_address) for _ in range(5)])
    await flood.come()
    used = resident(server)
    for _ in range(2):
        await flood.come()
    assert resident(server) < used + 16 * MIB
    assert set(flood.refusals) == {(grpc.StatusCode.RESOURCE_EXHAUSTED, DOMAIN, "OVERLOADED", True)}, flood.refusals
    assert set(flood.refused_items) <= {error_pb2.ERROR_REASON_OVERLOADED}
    assert flood.refusals.total() + flood.refused_items.total() > 500
    assert flood.accepted
    there = {row["run_id"] for row in await fetch(scene.dsn, "select run_id::text from run")}
    assert (len(flood.accepted), set(flood.accepted)) == (len(there), there)
    for _ in range(20):
        assert (await api.start()).created
    runs = len(there) + 20
    worker = await scene.raw(server.grpc_address, capacity=runs)
    tasks = await worker.tasks(runs)
    for first in range(0, runs, 1000):
        results = await worker.complete_all([(task, "1") for task in tasks[first : first + 1000]])
        assert {result.outcome for result in results} == {OK}
    await until_count(scene.dsn, ENDED, runs)


async def until_sessions(server: ServerProcess, n: int) -> None:
    """Wait until a server has so many worker streams."""

    async def reached() -> bool:
        assert await sessions(server) == n
        return True

    await eventually(reached, interval=0.05)


async def test_a_worker_that_reads_nothing_costs_a_bounded_amount_of_memory_and_then_its_stream(
    scene: Scene, server_process: StartServerProcess
) -> None:
    """I12: neither tasks nor answers. Another one goes on meanwhile, and gets the tasks."""
    server = server_process(scene.dsn, write_timeout=1.5, outbox_bytes=MIB, disconnect_grace=0.5, poll_interval=0.1)
    api = scene.api(server.grpc_address)
    await api.register(manifest(1, queue="large", retry=SOON))
    await api.register(manifest(1, workflow_id="small"))
    quick = await scene.raw(server.grpc_address)
    large = '"' + "x" * 900_000 + '"'
    run_ids = []
    for _ in range(10):
        started = await api.start_many([api.start_request(input=large) for _ in range(3)])
        run_ids += [result.started.run_id for result in started]
    used = resident(server)
    slow = await scene.raw(server.grpc_address, handlers=[("s1", "large")], capacity=1000)
    slow.pause_reading()
    nobodys = [pb.TaskRef(run_id=run_id, task_id=99, fencing_token=1) for run_id in run_ids] * 30

    async def ask() -> None:
        """Much, if its stream lasts as long: a server that is quicker has enough of it, and takes no more."""
        with contextlib.suppress(StreamEnded):
            for _ in range(30):
                await slow.send(pb.Heartbeat(tasks=nobodys))

    asking = asyncio.create_task(ask())
    for _ in range(3):
        run_id = (await api.start("small")).run_id
        assert (await quick.complete(await quick.task())).outcome == OK
        await api.wait(run_id)
    await until_sessions(server, 1)
    assert resident(server) < used + 48 * MIB
    slow.resume_reading()
    error = await slow.ended()
    assert error is not None
    assert error.reason == "SESSION_TIMED_OUT"
    await asking
    other = await scene.raw(server.grpc_address, handlers=[("s1", "large")], capacity=10)
    for _ in run_ids:
        assert (await other.complete(await other.task())).outcome == OK
    for run_id in run_ids:
        await api.wait(run_id)


async def test_very_many_streams_move_to_another_server_with_all_that_they_hold_when_theirs_is_killed(
    scene: Scene, server_process: StartServerProcess
) -> None:
    """Row 30: no lease is lost and none is given twice; there is one attempt only. Descriptors are level."""
    doomed, other = (server_process(scene.dsn, wait=False, **STAYING) for _ in range(2))
    for server in (doomed, other):
        await asyncio.to_thread(server.wait_serving)
    api = scene.api(other.grpc_address)
    await api.register(manifest(1, retry=ONE_ATTEMPT))
    idle = descriptors(other)
    workers: list[RawWorker] = []
    while len(workers) < STREAMS:
        some = min(50, STREAMS - len(workers))
        workers += await asyncio.gather(*(scene.raw(doomed.grpc_address, capacity=2) for _ in range(some)))
    assert await sessions(doomed) == STREAMS
    for first in range(0, 2 * STREAMS, 200):
        some = min(200, 2 * STREAMS - first)
        await api.start_many([api.start_request() for _ in range(some)])
    tasks = {worker: await worker.tasks(2) for worker in workers}
    doomed.kill()
    await asyncio.gather(*(_move(worker, other) for worker in workers))
    assert await sessions(other) == STREAMS
    await eventually(lambda: descriptors(other) <= idle + STREAMS + 5)
    rows = await fetch(scene.dsn, "select lease_session::text as session, attempt from task")
    assert Counter(row["session"] for row in rows) == dict.fromkeys((worker.sessions[0] for worker in workers), 2)
    done = await asyncio.gather(*(worker.complete_all([(task, "1") for task in tasks[worker]]) for worker in workers))
    assert Counter(result.outcome for results in done for result in results) == {OK: 2 * STREAMS}
    await until_count(scene.dsn, ENDED, 2 * STREAMS)
    assert await count(scene.dsn, "task") == 0
    assert all(not worker.unread(pb.Tasks) for worker in workers)
    await asyncio.gather(*(worker.close() for worker in workers))
    await eventually(lambda: descriptors(other) <= idle + 5)


async def _move(worker: RawWorker, server: ServerProcess) -> None:
    """What a worker does: it comes again while the server has no time for it, with the ids of all that it tried."""
    await worker.ended()
    tried = list(worker.sessions)

    async def moved() -> pb.Welcome | None:
        tried.insert(0, str(uuid.uuid4()))
        try:
            return await worker.move(server.grpc_address, session_id=tried[0], previous_session_ids=tried[1:])
        except StreamEnded as end:
            if end.error is None or not end.error.retry_after:
                raise
            return None

    welcome = await eventually(moved, 60, interval=0.5)
    assert welcome is not None
    assert [result.kept for result in welcome.held] == [True, True], welcome
