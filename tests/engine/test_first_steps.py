"""A task that nobody's report brings about, such as the first one of a run, is leased in the transaction that makes it,
if a worker waits for it and nothing else waits for that worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.store import tasks as stored_tasks
from tests.engine.code import COMPLETE, CONTINUE, Code, cancel, child
from tests.engine.flows import OpenScene, Scene, state_of, step, workflow
from tests.engine.rows import fetch
from tests.faults.scene import asleep
from tests.fixtures.api import Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import OK, RawWorker, seconds
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

ConnectWorker = Callable[..., Awaitable[RawWorker]]
FAILS = {"id": "each", "map": {"over": "/items", "do": [step("c")]}}
"""A node that fails as soon as it begins: there are no items."""


@pytest.fixture
def no_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim fails the test: the dispatcher's loop would try it again for ever."""

    async def refused(*_: Any) -> Any:
        raise AssertionError("a claim was made")

    monkeypatch.setattr(stored_tasks, "claim", refused)


@pytest.mark.usefixtures("no_claims")
async def test_runs_start_and_end_without_a_claim_while_there_is_room(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(2))
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2), capacity=3)
    for _ in range(4):
        results = await api.start_many([api.start_request() for _ in range(3)])
        for _ in range(2):
            tasks = await worker.tasks(3)
            assert {task.attempt for task in tasks} == {1}
            assert {each.outcome for each in await worker.complete_all([(task, "1") for task in tasks])} == {OK}
        for result in results:
            await api.wait(result.started.run_id)


async def test_of_many_starts_as_many_are_leased_as_there_is_room_and_workers_take_turns(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    await api.register(manifest())
    workers = [await connect_worker(server.grpc_address, capacity=3) for _ in range(2)]
    async with asleep(server.app.engine.dispatcher.loop):
        runs = [each.started.run_id for each in await api.start_many([api.start_request() for _ in range(10)])]
        leased = await fetch(dsn, "select lease_session::text from task where lease_session is not null")
        assert Counter(session for (session,) in leased) == {worker.sessions[0]: 3 for worker in workers}
    working = [asyncio.create_task(_work(worker)) for worker in workers]
    for run_id in runs:
        await api.wait(run_id)
    for each in working:
        each.cancel()
    await asyncio.gather(*working, return_exceptions=True)


async def _work(worker: RawWorker) -> None:
    while True:
        await worker.complete(await worker.task())


async def test_what_waits_comes_before_what_starts(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """Also what waits for another handler of the worker's, and of a lower priority: it was there before."""
    await api.register(manifest())
    await api.register(manifest(workflow_id="other", nodes={"n1": {"step": "s2"}}))
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2), capacity=1)
    await api.start()
    held = await worker.task()
    waits: list[dict[str, Any]] = [{"workflow_id": "other", "priority": 5}, {}]
    for waiting in waits:
        async with asleep(server.app.engine.dispatcher.loop):
            first = (await api.start(**waiting)).run_id
            await worker.capacity(2)
            second = (await api.start(priority=5)).run_id
            assert await fetch(dsn, "select count(*) from task where lease_session is not null") == [(1,)]
        order = []
        for _ in range(2):
            task = await worker.task()
            order.append(task.task.run_id)
            await worker.complete(task)
        assert order == [first, second]
        await worker.capacity(1)
    await worker.complete(held)


async def test_of_runs_that_start_together_those_of_a_higher_priority_are_leased_first(open_scene: OpenScene) -> None:
    scene = await open_scene(lanes=1)
    await scene.api.register(manifest(nodes={"n1": {"step": "a"}}))
    await scene.worker.capacity(1)
    starts = [scene.api.start_request(priority=priority) for priority in (5, 4, 1, 4)]
    runs = [each.started.run_id for each in await scene.api.start_many(starts)]
    order = []
    for _ in runs:
        task = await scene.task("a")
        order.append(runs.index(task.task.run_id))
        await scene.complete(task)
    assert order == [2, 1, 3, 0]


async def test_a_server_that_drains_hands_no_run_on(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    worker = await connect_worker(server.grpc_address)
    server.app.engine.dispatcher.draining = True
    await api.start()
    await worker.no_task()


@pytest.mark.usefixtures("no_claims")
async def test_the_function_of_a_code_run_begins_without_a_claim_and_with_all_that_has_happened(code: Code) -> None:
    run_id = await code.start(7)
    run = await code.take()
    assert run.task.task.run_id == run_id
    assert run.task.attempt == 1
    assert run.kinds() == ["run_started"]
    await run.advance(outcome=COMPLETE)
    await code.scene.api.wait(run_id)


async def test_a_function_that_begins_after_a_delay_is_told_how_its_run_started(code: Code) -> None:
    """Its first event is not of the transaction in which it begins."""
    await code.start(7, start_delay=seconds(0.05))
    run = await code.take()
    assert run.kinds()[0] == "run_started"


@pytest.mark.parametrize("before", [[], [step("b")]], ids=["waiting", "reporting"])
async def test_a_step_that_is_stopped_in_the_transaction_that_makes_it_is_given_to_nobody(
    open_scene: OpenScene, before: list[dict[str, Any]]
) -> None:
    """Neither to a worker that waits nor to one that has reported: its run ends at once, nothing of it is to be undone
    and all of it can be retried.
    """
    scene = await open_scene(cancel_grace=3600.0)
    both = {"id": "both", "parallel": [[step("a", undo={"undo_unfinished": True}, queue_timeout="1h")], [FAILS]]}
    run_id = await scene.run(*before, both)
    await scene.do(*(each["step"] for each in before))
    assert (await scene.failure(run_id)).code == "INVALID_NODE_INPUT"
    await scene.worker.sync()
    assert scene.worker.unread(pb.Tasks) == scene.worker.unread(pb.Cancel) == []
    kept = "select row #>> '{task,token}', row #>> '{task,attempt}' from stopped_task where task_id > 0"
    assert await fetch(scene.dsn, kept) == [("0", "0")], "as if it had waited"
    await scene.call("Retry", run_id)
    assert (await scene.failure(run_id)).code == "INVALID_NODE_INPUT"


async def test_room_that_a_start_kept_and_did_not_take_is_offered_when_its_batch_is_over(
    open_scene: OpenScene, in_process_server: StartInProcessServer, connect_api: Callable[[str], Api], dsn: str
) -> None:
    """Who looked meanwhile found none. The server polls so rarely that nothing else can make it look again."""
    scene = await open_scene(poll_interval=60, outage_gap=120, cancel_grace=3600.0)
    engine = scene.server.app.engine
    await eventually(lambda: engine.last_probe)
    await scene.worker.capacity(1)
    elsewhere = connect_api((await in_process_server(dsn)).grpc_address)
    await scene.api.register(workflow(step("b"), workflow_id="other"))
    found: list[str] = []

    async def look() -> None:
        engine.committer.after_commit = None
        found.append((await elsewhere.start("other")).run_id)
        await engine.probe_once()
        begin = time.monotonic()
        await eventually(lambda: engine.dispatcher.loop.last_good > begin)

    engine.committer.after_commit = look
    await scene.run({"id": "both", "parallel": [[step("a")], [FAILS]]})
    assert (await scene.task("b")).task.run_id == found[0]


async def test_a_child_that_is_told_to_end_with_the_word_to_begin_is_given_to_nobody(code: Code) -> None:
    scene = code.scene
    await scene.api.register(workflow(step("a"), workflow_id="child"))
    async with asleep(scene.server.app.engine.outbox.loop):
        run = await code.begin(child(1, "child"), outcome=CONTINUE)
        await run.advance(cancel(1, run.seq), outcome=CONTINUE)
    run_id = run.task.task.run_id
    await eventually(lambda: ended(scene, run_id), 30)
    assert scene.worker.unread(pb.Tasks) == []


async def test_a_function_that_is_told_to_end_with_the_word_to_begin_hears_of_its_run_first(
    code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may clean up, and so it is called."""
    received, told = RawWorker._received, []

    async def listening(worker: RawWorker, call: Any, response: pb.SessionResponse) -> None:
        told.append(response.WhichOneof("frame"))
        await received(worker, call, response)

    monkeypatch.setattr(RawWorker, "_received", listening)
    async with asleep(code.scene.server.app.engine.outbox.loop):
        run = await code.begin(child(1, "code"), outcome=CONTINUE)
        await run.advance(cancel(1, run.seq), outcome=CONTINUE)
        told.clear()
    called = await code.take()
    events = await code.decider.next(pb.Events)
    assert [each.task for each in events.runs] == [called.task.task]
    assert [kind for kind in told if kind in ("tasks", "events")] == ["tasks", "events"]


async def ended(scene: Scene, run_id: str) -> bool:
    """The child of a run has."""
    assert [state_of(run) for run in await scene.api.list_all(parent_run_id=run_id)] == ["CANCELLED"]
    return True
