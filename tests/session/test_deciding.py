"""Leases of DECIDE tasks over everything that happens to a stream: as leases of steps, but counted apart."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from fencepost.v1 import run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.code import AS_NEW, CODE, CONTINUE, MANIFEST, held, local, payload, send
from tests.engine.rows import fetch
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.raw_worker import ALREADY_DONE, OK, RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer

ConnectDecider = Callable[..., Awaitable[RawWorker]]


@pytest.fixture
def connect_decider(
    server: InProcessServer, api: Api, connect_worker: Callable[..., Awaitable[RawWorker]]
) -> ConnectDecider:
    """Connects a worker that takes nothing but DECIDE tasks of the workflow `code`."""

    async def connect(**hello: object) -> RawWorker:
        await api.register(MANIFEST)
        fields = {"handlers": (), "capacity": 0, "workflows": [CODE], "workflow_capacity": 10, **hello}
        return await connect_worker(server.grpc_address, **fields)

    return connect


async def test_hello_is_told_what_is_wrong_with_its_workflows(
    server: InProcessServer, connect_worker: Callable[..., Awaitable[RawWorker]]
) -> None:
    bad = [
        pb.WorkflowHandler(),
        pb.WorkflowHandler(workflow_id="a#b", compatibility_id="1"),
        pb.WorkflowHandler(workflow_id="a", compatibility_id="1#2", queue="q" * 201),
        pb.WorkflowHandler(workflow_id="a", compatibility_id="1", queue="\0"),
    ]
    worker = await connect_worker(server.grpc_address, hello=False, handlers=())
    await worker.send(worker.hello(workflows=bad, workflow_capacity=-1))
    error = await worker.ended()
    assert error is not None
    assert error.reason == "INVALID_HELLO"
    assert sorted(error.paths) == [
        "",
        "workflow_capacity",
        "workflows[0].compatibility_id",
        "workflows[0].workflow_id",
        "workflows[1].workflow_id",
        "workflows[2].compatibility_id",
        "workflows[2].queue",
    ]
    idle = await connect_worker(server.grpc_address, hello=False, handlers=())
    await idle.send(idle.hello())
    error = await idle.ended()
    assert error is not None
    assert error.violations == (("handlers", "one of these or of workflows is required"),)


async def test_a_worker_gets_no_more_code_runs_than_it_decides_at_a_time(
    api: Api, connect_decider: ConnectDecider
) -> None:
    """I12: by the capacity of Hello, and by that of each Capacity."""
    worker = await connect_decider(workflow_capacity=2)
    for _ in range(5):
        await api.start("code")
    runs = [held(worker, await worker.task()) for _ in range(2)]
    await worker.sync()
    await worker.no_task(0.2)
    await runs[0].complete()
    runs.append(held(worker, await worker.task()))
    worker.workflow_capacity_now = 4
    await worker.sync()
    assert len(await worker.tasks(2)) == 2


async def test_a_code_run_that_a_process_holds_stays_with_it_over_a_reconnect(
    api: Api, connect_decider: ConnectDecider
) -> None:
    """And an Advance whose answer was lost is told to have been done."""
    worker = await connect_decider()
    await api.start("code")
    run = held(worker, await worker.task())
    item = run.item(local(1, "a"), outcome=CONTINUE)
    [result] = await send(worker, item)
    assert result.outcome == OK
    welcome = await worker.reconnect()
    assert [answer.kept for answer in welcome.held] == [True]
    [again] = await send(worker, item)
    assert again.outcome == ALREADY_DONE
    run.advance_no, run.seq = 1, 2
    assert not (await run.complete("b")).advance.kept
    assert (await api.wait(run.task.task.run_id)).output.json == '"b"'


async def test_a_run_that_continues_as_new_after_a_reconnect_takes_the_definition_that_is_active_then(
    api: Api, connect_decider: ConnectDecider
) -> None:
    """I9: the run itself stays on its own; what is begun anew is begun as everything is."""
    worker = await connect_decider()
    run_id = (await api.start("code")).run_id
    run = held(worker, await worker.task())
    await worker.reconnect()
    active = (await api.register('{"id": "code", "compatibility_id": "2", "code": {}}')).definition.definition_hash
    assert (await run.advance(outcome=AS_NEW, output=payload(1))).outcome == OK
    first = await api.get(run_id)
    following = await api.get(first.next_run_id)
    assert first.definition_hash != following.definition_hash == active


async def test_a_code_run_that_never_reached_its_worker_is_offered_again_at_once(
    api: Api, connect_decider: ConnectDecider
) -> None:
    worker = await connect_decider()
    await api.start("code")
    task = await worker.task()
    await worker.reconnect(held=())
    again = await worker.task()
    assert again.task.run_id == task.task.run_id
    assert again.task.fencing_token > task.task.fencing_token
    assert (again.attempt, again.decide.after_seq) == (task.attempt, 0)


async def test_a_heartbeat_that_lacks_a_code_run_gives_it_back(api: Api, connect_decider: ConnectDecider) -> None:
    worker = await connect_decider()
    await api.start("code")
    task = await worker.task()
    await worker.heartbeat(())
    again = await worker.task()
    assert again.task.run_id == task.task.run_id


async def test_a_heartbeat_renews_a_code_run_and_tells_its_last_event(
    api: Api, connect_decider: ConnectDecider
) -> None:
    """So that a worker hears of events although what told of them was lost."""
    worker = await connect_decider()
    run_id = (await api.start("code")).run_id
    await worker.task()
    [first] = await worker.heartbeat()
    assert (first.outcome, first.last_seq) == (OK, 1)
    assert first.lease_duration.seconds > 30
    request = run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go")
    await api.runs.SignalRun(request, timeout=DEADLINE)
    [second] = await worker.heartbeat()
    assert second.last_seq == 2
    events = await worker.next(pb.Events)
    assert [event.seq for told in events.runs for event in told.events] == [2]


async def test_steps_and_code_runs_of_one_worker_do_not_take_each_others_room(
    api: Api, connect_decider: ConnectDecider
) -> None:
    worker = await connect_decider(handlers=("s1",), capacity=1, workflow_capacity=1)
    sequence = '[{"id": "n1", "step": "s1"}]'
    await api.register(f'{{"id": "wf", "compatibility_id": "1", "sequence": {sequence}}}')
    for _ in range(2):
        await api.start("code")
        await api.start("wf")
    kinds = sorted(task.kind for task in await worker.tasks(2))
    assert kinds == [pb.TASK_KIND_STEP, pb.TASK_KIND_DECIDE]
    await worker.sync()
    await worker.no_task(0.2)


async def test_a_worker_that_leaves_gets_no_more_code_runs_and_finishes_those_that_it_has(
    api: Api, connect_decider: ConnectDecider, dsn: str
) -> None:
    worker = await connect_decider()
    await api.start("code")
    run = held(worker, await worker.task())
    await worker.goodbye()
    await api.start("code")
    await worker.no_task(0.2)
    assert (await run.complete()).outcome == OK
    assert await fetch(dsn, "select count(*) from task where lease_session is not null") == [(0,)]


async def test_a_frame_of_many_advances_is_answered_in_full(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Callable[[str], Api], connect_worker: ConnectDecider
) -> None:
    """Each by itself, in whatever Acks."""
    server = await in_process_server(dsn)
    api = connect_api(server.grpc_address)
    await api.register(MANIFEST)
    worker = await connect_worker(server.grpc_address, handlers=(), capacity=0, workflows=[CODE], workflow_capacity=300)
    await api.start_many([api.start_request("code") for _ in range(300)])
    runs = [held(worker, task) for task in await worker.tasks(300)]
    results = await send(worker, *[run.item(local(1, n), outcome=CONTINUE) for n, run in enumerate(runs)])
    assert [list(result.advance.seqs) for result in results] == [[2]] * 300
