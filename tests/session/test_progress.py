"""What heartbeats carry beside leases: how far steps are, and that they should stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.engine.rows import execute, fetch, holding
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import LEASE_LOST, OK, RawWorker
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually

ConnectWorker = Callable[..., Awaitable[RawWorker]]
LEFT = "select extract(epoch from lease_expires_at - clock_timestamp())::float8 from task"


async def leased_tasks(api: Api, worker: RawWorker, n: int = 1) -> list[pb.Task]:
    """Tasks of as many runs of one step."""
    await api.register(manifest(1))
    await api.start_many([api.start_request() for _ in range(n)])
    return await worker.tasks(n)


async def shown(api: Api, task: pb.Task) -> Payload:
    """What a run shows of its step's progress."""
    [step] = (await api.get(task.task.run_id)).open_steps
    return step.progress


async def test_what_workers_tell_of_their_steps_is_shown_until_they_tell_something_else(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    worker = await connect_worker(server.grpc_address)
    first, second = await leased_tasks(api, worker, 2)
    assert await shown(api, first) == Payload()
    results = await worker.heartbeat(progress=[(second, '{"done": 1.10}')])
    assert [(result.outcome, result.message) for result in results] == [(OK, "")] * 2
    assert await shown(api, first) == Payload()
    assert await shown(api, second) == Payload(json='{"done": 1.10}')
    await worker.heartbeat(progress=[(first, '"\\u0000"')])
    assert await shown(api, second) == Payload(json='{"done": 1.10}'), "no news is no change"
    assert await shown(api, first) == Payload(json='"\\u0000"')
    await worker.heartbeat(progress=[(second, "2"), (first, "1")])
    assert [(await shown(api, task)).json for task in (first, second)] == ["1", "2"]


async def test_progress_may_be_bytes_of_which_only_its_reader_knows_what_they_say(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    worker = await connect_worker(server.grpc_address)
    [task] = await leased_tasks(api, worker)
    secret = Payload(binary=b"\0\xff", metadata={"codec": "aes"})
    told = pb.Progress(task=task.task, progress=secret)
    await worker.results(await worker.send(pb.Heartbeat(tasks=[task.task], last_tasks_number=1, progress=[told])), 1)
    assert await shown(api, task) == secret


async def test_progress_has_four_kib_and_more_of_it_costs_no_lease(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    worker = await connect_worker(server.grpc_address)
    [task] = await leased_tasks(api, worker)
    most = '"' + "x" * 4094 + '"'
    await worker.heartbeat(progress=[(task, most)])
    [result] = await worker.heartbeat(progress=[(task, most + " ")])
    assert result.outcome == OK
    assert "4096" in result.message
    assert await shown(api, task) == Payload(json=most)


async def test_a_worker_that_lost_its_lease_tells_nothing_of_the_step_any_more(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """I2, row 10 of the field's failures."""
    worker = await connect_worker(server.grpc_address)
    [task] = await leased_tasks(api, worker)
    await worker.heartbeat(progress=[(task, "1")])
    await execute(dsn, "update task set token = token + 1")  # as another lease would
    [result] = await worker.heartbeat([task], progress=[(task, "2")])
    assert result.outcome == LEASE_LOST
    assert await shown(api, task) == Payload(json="1")


async def test_progress_of_a_lease_that_is_locked_just_now_is_kept_with_it(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    worker = await connect_worker(server.grpc_address)
    task, other = await leased_tasks(api, worker, 2)
    async with holding(dsn, "select from task where run_id = %s for update", [task.task.run_id]):
        told = [pb.Progress(task=task.task, progress=Payload(json="1"))]
        heartbeat = pb.Heartbeat(tasks=[task.task, other.task], last_tasks_number=2, progress=told)
        frame_id = await worker.send(heartbeat)
        await eventually(lambda: bool(worker.unread(pb.Ack)), what="the other lease is answered")
        assert await shown(api, task) == Payload()
    assert [result.outcome for result in await worker.results(frame_id, 2)] == [OK, OK]
    assert await shown(api, task) == Payload(json="1")


async def test_a_heartbeat_tells_a_step_to_stop_and_never_goes_past_its_grace(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """Row 33 of the field's failures: who does not listen has the grace, and no more."""
    worker = await connect_worker(server.grpc_address)
    task, other = await leased_tasks(api, worker, 2)
    await execute(
        dsn,
        "update task set cancel_reason = 'RUN_CANCELLED', attempt_deadline_at = clock_timestamp() + interval '20 s', "
        "lease_expires_at = clock_timestamp() + interval '20 s' where run_id = %s",
        [task.task.run_id],
    )  # as a cancel does
    stopping, going_on = await worker.heartbeat([task, other])
    assert [(r.outcome, r.cancel_wanted) for r in (stopping, going_on)] == [(OK, True), (OK, False)]
    assert 0 < stopping.lease_duration.ToTimedelta().total_seconds() <= 20
    assert sorted(left > 20 for (left,) in await fetch(dsn, LEFT)) == [False, True]


async def test_a_step_that_came_back_over_a_reconnect_is_told_to_stop_with_the_next_heartbeat(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    worker = await connect_worker(server.grpc_address)
    [task] = await leased_tasks(api, worker)
    await execute(dsn, "update task set cancel_reason = 'RUN_ENDED'")
    welcome = await worker.reconnect()
    assert [held.kept for held in welcome.held] == [True]
    [result] = await worker.heartbeat([task])
    assert result.cancel_wanted
