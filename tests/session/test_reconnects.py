"""A process that comes back: what it keeps, what is lost, what it is offered again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.store import tasks as stored_tasks
from tests.engine.rows import count, execute, fetch, holding
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

ConnectWorker = Callable[..., Awaitable[RawWorker]]
Connect = Callable[[str], Api]
LEFT = "select extract(epoch from lease_expires_at - clock_timestamp())::float8 from task order by run_id"


async def started(api: Api, n: int = 1, **overrides: Any) -> list[str]:
    """Runs of a workflow of one step."""
    await api.register(manifest(1, **overrides))
    return [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(n)])]


async def test_a_process_that_comes_back_keeps_what_it_holds_and_is_offered_again_what_it_never_got(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """To another server, at once, costing no attempt (rows 1 and 3 of the field's failures)."""
    servers = [await in_process_server(dsn) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    runs = await started(api, 4, retry={"max_attempts": 1})
    worker = await connect_worker(servers[0].grpc_address, capacity=4)
    tasks = await worker.tasks(4)
    moved = await connect_worker(
        servers[1].grpc_address, capacity=4, hello=False, process_nonce=worker.hello().process_nonce
    )
    await worker.drop()
    forged = pb.TaskRef(run_id=str(uuid.uuid4()), task_id=2, fencing_token=1)
    stale = pb.TaskRef(run_id=tasks[0].task.run_id, task_id=2, fencing_token=99)
    held = [tasks[0].task, tasks[1].task, forged, stale]
    await moved.drop()
    welcome = await moved.reconnect(held=held, previous_session_ids=worker.sessions)
    assert [result.kept for result in welcome.held] == [True, True, False, False]
    assert [result.task for result in welcome.held] == held
    assert all(55 < r.lease_duration.ToTimedelta().total_seconds() <= 60 for r in welcome.held[:2])
    again = await moved.tasks(2)
    assert {task.task.run_id for task in again} == {task.task.run_id for task in tasks[2:]}
    assert [task.attempt for task in again] == [1, 1]
    for task in (*tasks[:2], *again):
        assert (await moved.complete(task)).outcome == OK
    for run_id in runs:
        assert (await api.wait(run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def test_what_is_held_over_a_reconnect_takes_room(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await started(api, 5)
    worker = await connect_worker(server.grpc_address, capacity=2)
    tasks = await worker.tasks(2)
    await worker.reconnect()
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    await worker.complete(tasks[0])
    await worker.task()
    await worker.sync()
    assert worker.unread(pb.Tasks) == []


async def test_an_outcome_that_was_not_acknowledged_is_sent_again_on_the_next_stream(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Rows 5 and 49 of the field's failures: committed before the break or not, it counts once (I6)."""
    server = await in_process_server(dsn)
    api = connect_api(server.grpc_address)
    await api.register(manifest(2))
    for n, lost_after_commit in enumerate((True, False), 1):
        await api.start()
        worker = await connect_worker(server.grpc_address)
        task = await worker.task()
        if lost_after_commit:
            await worker.send(pb.Complete(items=[pb.CompleteItem(task=task.task)]))
            await eventually(lambda: count(dsn, "event", "type = 4"))
        welcome = await worker.reconnect(held=[task.task])
        assert [result.kept for result in welcome.held] == [not lost_after_commit]
        item = pb.Complete(items=[pb.CompleteItem(task=task.task)])
        [result] = await worker.results(await worker.send(item), 1)
        assert result.outcome == (ALREADY_DONE if lost_after_commit else OK)
        await worker.close()
        assert await count(dsn, "event", "type = 4") == n


async def test_somebody_elses_session_named_as_a_previous_one_keeps_its_leases(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """The process's nonce tells whose it was, not its word."""
    await started(api)
    owner = await connect_worker(server.grpc_address)
    task = await owner.task()
    thief = await connect_worker(server.grpc_address)
    await thief.reconnect(held=[], previous_session_ids=[*owner.sessions, str(uuid.uuid4())])
    await thief.sync()
    assert thief.unread(pb.Tasks) == []
    assert [r.outcome for r in await owner.heartbeat()] == [OK]
    assert (await owner.complete(task)).outcome == OK


async def test_a_newer_session_of_a_process_ends_its_older_one(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """As after a break that only one side has noticed."""
    await started(api)
    old = await connect_worker(server.grpc_address)
    task = await old.task()
    new = await connect_worker(server.grpc_address, hello=False, process_nonce=old.hello().process_nonce)
    await new.drop()
    welcome = await new.reconnect(held=[task.task], previous_session_ids=old.sessions)
    assert welcome.held[0].kept
    error = await old.ended()
    assert error is not None
    assert error.reason == "SESSION_TIMED_OUT"
    assert (await new.complete(task)).outcome == OK


async def test_a_held_lease_that_a_transaction_has_just_now_is_still_kept(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await started(api)
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    adopt, tried, freed = stored_tasks.adopt, asyncio.Event(), asyncio.Event()

    async def again_when_it_is_free(*arguments: Any) -> Any:
        if tried.is_set():
            await freed.wait()
        answer = await adopt(*arguments)
        tried.set()
        return answer

    monkeypatch.setattr(stored_tasks, "adopt", again_when_it_is_free)
    async with holding(dsn, "select from task for update"):
        back = asyncio.create_task(worker.reconnect())
        await asyncio.wait_for(tried.wait(), 30)
    freed.set()
    assert [result.kept for result in (await back).held] == [True]
    assert (await worker.complete(task)).outcome == OK


async def test_a_lease_that_was_kept_does_not_run_out_while_another_one_is_waited_for(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker can't renew it before the Welcome."""
    await started(api, 2)
    worker = await connect_worker(server.grpc_address, capacity=2)
    tasks = await worker.tasks(2)
    await execute(dsn, "update task set lease_ms = 1000")
    adopt, passes = stored_tasks.adopt, 0

    async def counted(*arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return await adopt(*arguments)

    monkeypatch.setattr(stored_tasks, "adopt", counted)
    async with holding(dsn, "select from task where run_id = %s for update", [tasks[0].task.run_id]):
        welcome = await worker.reconnect()
    assert {r.task.run_id: r.kept for r in welcome.held} == {t.task.run_id: t is not tasks[0] for t in tasks}
    assert passes <= 6, "half of its second is over"


async def test_the_leases_of_a_stream_that_ended_last_for_the_grace_then_cost_an_attempt(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Row 3 of the field's failures. Until somebody took over, the late result counts; after that it is lost."""
    server = await in_process_server(dsn, disconnect_grace=20, poll_interval=0.05)
    api = connect_api(server.grpc_address)
    await started(api, 2, retry={"initial_delay": "0s"})
    worker = await connect_worker(server.grpc_address, capacity=2)
    first, second = await worker.tasks(2)
    await worker.drop()
    await eventually(lambda: count(dsn, "task", "lease_expires_at < clock_timestamp() + interval '20 s'"))
    await worker.connect()
    assert (await worker.complete(first)).outcome == OK, "the lease of the former session lasts for the grace"
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    await execute(dsn, "update task set lease_expires_at = lease_expires_at - interval '20 s'")  # as time does
    again = await worker.task()
    assert (again.task.run_id, again.attempt) == (second.task.run_id, 2)
    assert (await worker.complete(second)).outcome == LEASE_LOST


async def test_a_session_that_moved_on_is_not_touched_by_the_late_end_of_its_former_stream(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """The grace is of the stream's session, not of the process."""
    servers = [await in_process_server(dsn, disconnect_grace=0.2, poll_interval=0.05) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    await started(api)
    old = await connect_worker(servers[0].grpc_address)
    task = await old.task()
    new = await connect_worker(servers[1].grpc_address, hello=False, process_nonce=old.hello().process_nonce)
    await new.drop()
    await new.reconnect(held=[task.task], previous_session_ids=old.sessions)
    await old.drop()
    await eventually(lambda: count(dsn, "session", "ended_at is not null"))
    [(left,)] = await fetch(dsn, LEFT)
    assert left > 50
    assert (await new.complete(task)).outcome == OK
