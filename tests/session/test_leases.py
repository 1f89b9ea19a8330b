"""Leases while a session lasts: heartbeats and room."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.rows import execute, fetch, holding
from tests.engine.tasks import end
from tests.fixtures.api import Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import LEASE_LOST, OK, RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer

ConnectWorker = Callable[..., Awaitable[RawWorker]]
Connect = Callable[[str], Api]
LEFT = "select extract(epoch from lease_expires_at - clock_timestamp())::float8 from task order by run_id"


async def started(api: Api, n: int = 1, **overrides: Any) -> list[str]:
    """Runs of a workflow of one step."""
    await api.register(manifest(1, **overrides))
    return [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(n)])]


# Heartbeats


async def test_a_heartbeat_renews_what_is_held_and_tells_what_is_lost(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    await started(api, 3)
    worker = await connect_worker(server.grpc_address)
    first, second, third = await worker.tasks(3)
    await execute(dsn, "update task set lease_expires_at = clock_timestamp() + interval '20 s'")
    await worker.complete(first)
    await execute(
        dsn, "update task set token = token + 1 where run_id = %s", [second.task.run_id]
    )  # as another lease would
    renewed, lost, kept = await worker.heartbeat([first, second, third])
    assert [renewed.outcome, lost.outcome, kept.outcome] == [LEASE_LOST, LEASE_LOST, OK]
    assert {renewed.reason, lost.reason} == {error_pb2.ERROR_REASON_LEASE_LOST}
    assert 30 < kept.lease_duration.ToTimedelta().total_seconds() <= 60
    assert sum(left > 30 for (left,) in await fetch(dsn, LEFT)) == 1


async def test_a_stale_token_beside_the_current_one_is_told_apart_in_one_heartbeat_and_in_one_hello(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """I2: answers are by the whole reference, not by the task."""
    await started(api, retry={"initial_delay": "0s"})
    worker = await connect_worker(server.grpc_address)
    stale = await worker.task()
    await worker.fail(stale)
    current = await worker.task()
    results = await worker.heartbeat([stale, current, stale, current])
    assert [r.outcome for r in results] == [LEASE_LOST, OK, LEASE_LOST, OK]
    zombie = await connect_worker(server.grpc_address, handlers=["none"])
    both = await asyncio.gather(zombie.heartbeat([stale]), worker.heartbeat([current]))
    assert [result.outcome for [result] in both] == [LEASE_LOST, OK]
    welcome = await worker.reconnect(held=[stale.task, current.task])
    assert [held.kept for held in welcome.held] == [False, True]


async def test_a_lease_that_a_heartbeat_should_list_and_does_not_is_offered_again_free(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """It was sent in a Tasks frame up to the number that the worker has seen, so it was lost on the way."""
    runs = await started(api, 3, retry={"max_attempts": 1})
    worker = await connect_worker(server.grpc_address, capacity=3)
    tasks = await worker.tasks(3)
    lost, kept = tasks[0], tasks[1:]
    assert [r.outcome for r in await worker.heartbeat(kept)] == [OK, OK]
    again = await worker.task()
    assert (again.task.run_id, again.attempt) == (lost.task.run_id, 1)
    assert again.task.fencing_token > lost.task.fencing_token
    assert (await worker.complete(lost)).outcome == LEASE_LOST
    for task in (again, *kept):
        assert (await worker.complete(task)).outcome == OK
    for run_id in runs:
        assert (await api.wait(run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def test_a_lease_that_the_worker_cannot_have_seen_yet_is_not_taken_back(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    runs = await started(api)
    worker = await connect_worker(server.grpc_address)
    first = await worker.task()
    await api.start()
    second = await worker.task()
    assert await worker.heartbeat([first], last_tasks_number=1)
    assert await worker.heartbeat([], last_tasks_number=0) == []
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    assert (await worker.complete(second)).outcome == OK
    assert (await worker.complete(first)).outcome == OK
    await api.wait(runs[0])


async def test_a_heartbeat_in_several_frames_is_compared_after_its_last(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await started(api, 3)
    worker = await connect_worker(server.grpc_address)
    tasks = await worker.tasks(3)
    number = worker.last_tasks_number
    for task, more in zip(tasks[:2], (True, False), strict=True):
        frame = pb.Heartbeat(tasks=[task.task], last_tasks_number=number, more=more)
        [result] = await worker.results(await worker.send(frame), 1)
        assert result.outcome == OK
    again = await worker.task()
    assert again.task.run_id == tasks[2].task.run_id
    assert [r.outcome for r in await worker.heartbeat([tasks[0], tasks[1], again])] == [OK] * 3
    await worker.sync()
    assert worker.unread(pb.Tasks) == []


async def test_a_completion_under_way_is_not_taken_for_a_lost_lease(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    server = await in_process_server(dsn, lock_timeout=30, statement_timeout=60, batch_timeout=60)
    api = connect_api(server.grpc_address)
    runs = await started(api, retry={"max_attempts": 1})
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    async with holding(dsn, "select from run for update"):
        completing = asyncio.create_task(worker.complete(task))
        await worker.sync()
        assert await worker.heartbeat([]) == []
        await worker.sync()
    assert (await completing).outcome == OK
    assert (await api.wait(runs[0])).state == run_pb2.RUN_STATE_COMPLETED


async def test_a_lease_that_is_locked_just_now_is_renewed_as_soon_as_it_is_free(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """A skipped item is tried again, neither lost nor waited for: the other items are answered meanwhile."""
    await started(api, 2)
    worker = await connect_worker(server.grpc_address)
    first, second = await worker.tasks(2)
    async with holding(dsn, "select from task where run_id = %s for update", [first.task.run_id]):
        frame = await worker.send(pb.Heartbeat(tasks=[first.task, second.task], last_tasks_number=9))
        ack = await worker.next(pb.Ack)
        assert [(r.index, r.outcome) for r in ack.results] == [(1, OK)]
        assert ack.frame_id == frame
        await worker.sync()
    ack = await worker.next(pb.Ack)
    assert [(r.index, r.outcome) for r in ack.results] == [(0, OK)]
    assert ack.frame_id == frame


# Room


async def test_a_worker_never_has_more_out_than_its_capacity_said(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """Random capacities, several workers, steps handed on at once and claimed."""
    chance = random.Random(7)
    await api.register(manifest(3))
    runs = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(60)])]

    async def says(worker: RawWorker, capacity: int) -> int:
        """The most that it may have out from now on: what was given to it before has a room of its own, and may be on
        its way for as long as a claim or a commit takes.
        """
        await worker.capacity(capacity)
        session = server.app.engine.dispatcher.session(worker.sessions[0])
        given: int = session._leases.steps.out + session._leases.steps.reserved
        return max(capacity, given)

    async def work(worker: RawWorker) -> None:
        allowed = worker.capacity_now
        while True:
            try:
                task = await worker.task(timeout=0.2)
            except (AssertionError, TimeoutError):
                allowed = await says(worker, chance.randint(1, 5))
                continue
            assert len(worker.held) <= allowed
            await worker.complete(task)
            if chance.random() < 0.2:
                allowed = await says(worker, chance.randint(0, 5))

    workers = [await connect_worker(server.grpc_address, handlers=handler_names(3), capacity=n) for n in (0, 1, 2, 3)]
    working = [asyncio.create_task(work(worker)) for worker in workers]
    ending = asyncio.gather(*(api.wait(run_id, 120) for run_id in runs))
    watched: list[asyncio.Future[Any]] = [ending, *working]
    done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    await end(working)
    assert done == {ending}, done


async def test_capacity_0_pauses_and_more_goes_on(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    worker = await connect_worker(server.grpc_address, capacity=0)
    await started(api, 5)
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    await worker.capacity(2)
    tasks = await worker.tasks(2)
    await worker.capacity(0)
    assert [r.outcome for r in await worker.complete_all([(task, "1") for task in tasks])] == [OK, OK]
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    await worker.capacity(10)
    assert len(await worker.tasks(3)) == 3


async def test_after_goodbye_nothing_new_comes_and_what_is_held_may_be_finished(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """Also no next step at once."""
    await api.register(manifest(2))
    await api.start()
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    task = await worker.task()
    await worker.goodbye()
    await api.start()
    assert (await worker.complete(task)).outcome == OK
    await worker.capacity(10)
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    other = await connect_worker(server.grpc_address, handlers=handler_names(2))
    assert {task.node_id for task in await other.tasks(2)} == {"n1", "n2"}
