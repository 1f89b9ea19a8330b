"""Tasks that come back without having been begun: free at first, then each costs an attempt, then parked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from fencepost_server.store import tasks as stored_tasks
from tests.engine.histories import check_run
from tests.engine.rows import execute
from tests.fixtures.api import Api, kinds
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

Connect = Callable[[str], Api]
ConnectWorker = Callable[..., Awaitable[RawWorker]]
OPERATIONAL, CORRECTIVE, PERMANENT = (
    run_pb2.FAILURE_KIND_OPERATIONAL,
    run_pb2.FAILURE_KIND_CORRECTIVE,
    run_pb2.FAILURE_KIND_PERMANENT,
)
AT_ONCE = {"initial_delay": "0s"}
FAILED, BLOCKED = run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_BLOCKED


@pytest.fixture
async def quick(in_process_server: StartInProcessServer, dsn: str) -> InProcessServer:
    """A server that looks for expired leases twenty times a second."""
    return await in_process_server(dsn, poll_interval=0.05)


@pytest.fixture
def api(quick: InProcessServer, connect_api: Connect) -> Api:
    return connect_api(quick.grpc_address)


async def expire(dsn: str) -> None:
    """Let the leases that are out now run out now."""
    await execute(dsn, "update task set lease_expires_at = clock_timestamp() where lease_session is not null")


def database_of(dsn: str) -> sql.Identifier:
    return sql.Identifier(str(conninfo_to_dict(dsn)["dbname"]))


async def released(worker: RawWorker, times: int) -> list[int]:
    """Release the next task so many times; the attempts that it had."""
    attempts = []
    for _ in range(times):
        task = await worker.task()
        attempts.append(task.attempt)
        [result] = await worker.release(task)
        assert result.outcome == OK
    return attempts


async def test_three_times_a_task_comes_back_free_then_each_time_costs_an_attempt_then_it_is_parked(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """The step is not to blame, so its run waits for a person, and says so: BLOCKED, NOT_DELIVERED."""
    await api.register(manifest(2, retry={"max_attempts": 3, **AT_ONCE}))
    run_id = (await api.start()).run_id
    worker = await connect_worker(quick.grpc_address, handlers=handler_names(2))
    assert await released(worker, 6) == [1, 1, 1, 1, 2, 3]
    run = await api.get(run_id)
    assert (run.state, run.failure.code, run.failure.node_id) == (BLOCKED, "NOT_DELIVERED", "n1")
    [step] = run.open_steps
    assert (step.operational_failures, step.last_failure.code) == (3, "NOT_DELIVERED")
    events = await check_run(api, dsn, run_id, ["n1", "n2"])
    assert kinds(events)[2:] == ["step_retrying", "run_blocked"]
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    assert [r.run_id for r in await api.list_all(states=[BLOCKED])] == [run_id]


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Pacific/Niue"])
async def test_the_time_zone_of_the_database_changes_nothing(
    new_database: Callable[..., str],
    in_process_server: StartInProcessServer,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    zone: str,
) -> None:
    """The time of a parked task is the last that there is, and must be one in every zone."""
    dsn = new_database(migrated=True)
    await execute(dsn, sql.SQL("alter database {} set timezone = {}").format(database_of(dsn), zone))
    await execute(dsn, "update cluster set last_pass_at = clock_timestamp()")
    server = await in_process_server(dsn, poll_interval=0.05)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1, retry={"max_attempts": 1}))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address)
    assert await released(worker, 4) == [1, 1, 1, 1]
    run = await api.get(run_id)
    assert run.state == BLOCKED
    assert abs(run.create_time.ToNanoseconds() - time.time_ns()) < 60e9
    assert run.open_steps[0].state == run_pb2.STEP_STATE_PARKED
    assert not run.open_steps[0].HasField("ready_time")
    await check_run(api, dsn, run_id, ["n1"])
    [result] = await worker.heartbeat([pb.TaskRef(run_id=run_id, task_id=2, fencing_token=1)], 0)
    assert result.outcome == LEASE_LOST
    [result] = await worker.release(pb.TaskRef(run_id=run_id, task_id=2, fencing_token=99))
    assert result.outcome == LEASE_LOST


async def test_a_task_that_came_back_free_may_fail_as_often_as_any_other(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(1, retry={"max_attempts": 2, **AT_ONCE}))
    run_id = (await api.start()).run_id
    worker = await connect_worker(quick.grpc_address)
    assert await released(worker, 2) == [1, 1]
    await worker.fail(await worker.task())
    assert await released(worker, 1) == [2]
    task = await worker.task()
    assert task.attempt == 2
    assert (await worker.complete(task)).outcome == OK
    await api.wait(run_id)


async def disconnect(worker: RawWorker, server: InProcessServer) -> None:
    """Drop a worker's stream; the server has noticed when this returns."""
    await worker.drop()
    await eventually(lambda: server.app.grpc.streams.count == 0)


async def test_a_task_that_was_leased_but_never_sent_keeps_its_only_attempt(
    in_process_server: StartInProcessServer,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row 48 of the field's failures: the stream ends between claim and write; max_attempts is 1."""
    quick = await in_process_server(dsn, poll_interval=0.05, eager_limit=0)
    api = connect_api(quick.grpc_address)
    await api.register(manifest(1, retry={"max_attempts": 1}))
    worker = await connect_worker(quick.grpc_address)
    claim, lost = stored_tasks.claim, asyncio.Event()

    async def losing(*arguments: Any) -> Any:
        claimed, histories = await claim(*arguments)
        if claimed and not lost.is_set():
            await disconnect(worker, quick)
            lost.set()
        return claimed, histories

    monkeypatch.setattr(stored_tasks, "claim", losing)
    run_id = (await api.start()).run_id
    await asyncio.wait_for(lost.wait(), 30)
    await worker.connect()
    task = await worker.task(timeout=30)
    assert task.attempt == 1
    assert (await worker.complete(task)).outcome == OK
    await api.wait(run_id)
    assert kinds(await check_run(api, dsn, run_id, ["n1"])).count("step_retrying") == 0


async def test_a_next_step_that_was_leased_at_once_but_never_sent_keeps_its_only_attempt(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """Row 48: the stream ends between the commit of a completion and the answer to it."""
    await api.register(manifest(2, retry={"max_attempts": 1}))
    run_id = (await api.start()).run_id
    worker = await connect_worker(quick.grpc_address, handlers=handler_names(2))
    task = await worker.task()

    async def lose() -> None:
        await disconnect(worker, quick)
        quick.app.engine.committer.after_commit = None

    quick.app.engine.committer.after_commit = lose
    await worker.send(pb.Complete(items=[pb.CompleteItem(task=task.task, output=Payload(json="null"))]))
    await eventually(lambda: quick.app.engine.committer.after_commit is None)
    await worker.connect()
    assert (await worker.complete(task)).outcome == ALREADY_DONE
    second = await worker.task(timeout=30)
    assert (second.node_id, second.attempt) == ("n2", 1)
    assert (await worker.complete(second)).outcome == OK
    await api.wait(run_id)
