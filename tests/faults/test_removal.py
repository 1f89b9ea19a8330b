"""Definitions are removed while their runs are started, run, and are undone.

Row 51 of the field failures: a removal that races starts leaves no run alive under a removed definition, and a removal
does not fence off its own undo. I9, I13.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest

from fencepost.v1 import error_pb2, run_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as worker_pb
from fencepost_server.domain.model import EventType
from tests.api.deploying import registered, remove
from tests.engine.rows import holding
from tests.faults.scene import QUICK, STAYING, Scene, asleep, count, fetch, until_count
from tests.fixtures.api import DEADLINE, Api, kinds
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import LEASE_LOST, OK, RawWorker, StreamEnded
from tests.fixtures.refusals import decode, refused
from tests.fixtures.servers import PATIENT
from tests.fixtures.waiting import eventually, until_blocked

UNDO = worker_pb.TASK_KIND_UNDO
HANDLERS = ["s1", "s2", "u1"]
RACES = 300
AT_ONCE = 30


def undoable(compatibility_id: str = "1", workflow_id: str = "wf") -> str:
    """Two steps, of which the first can be undone."""
    undo = {"step": "u1", "retry": {"max_attempts": 1}}
    return manifest(2, workflow_id=workflow_id, compatibility_id=compatibility_id, nodes={"n1": {"undo": undo}})


async def serving(worker: RawWorker, begun: Counter[str]) -> None:
    """Complete first steps and undo them; keep second steps. Counts tasks by run and handler."""
    while True:
        try:
            task = await worker.task(timeout=60)
        except StreamEnded:
            return
        begun[f"{task.task.run_id} {task.handler}"] += 1
        if task.handler != "s2":
            await worker.complete(task)


async def test_starts_and_a_removal_at_once_leave_no_run_alive_and_what_was_done_is_undone(scene: Scene) -> None:
    """Row 51, 300 times, over two servers: whoever comes first, each start is refused or its run is ended."""
    servers = [await scene.serve(**STAYING | PATIENT) for _ in range(2)]
    apis = [scene.api(server.grpc_address) for server in servers]
    begun: Counter[str] = Counter()
    workers = [await scene.raw(s.grpc_address, handlers=HANDLERS, capacity=5000) for s in servers]
    answering = [asyncio.create_task(serving(worker, begun)) for worker in workers]
    places = asyncio.Semaphore(AT_ONCE)

    async def race(n: int) -> tuple[int, int]:
        async with places:
            workflow = f"wf{n % AT_ONCE}"
            hash_ = await registered(apis[n % 2], undoable(str(n), workflow))
            first = (await apis[n % 2].start(workflow, definition_hash=hash_)).run_id
            await eventually(lambda: begun[f"{first} s2"], 30)
            starts = [_start(apis[k % 2], workflow, hash_) for k in range(4)]
            started, removal = await asyncio.gather(asyncio.gather(*starts), remove(apis[n // 2 % 2], hash_, workflow))
            assert removal.definition.definition_hash == hash_

            await apis[1].wait(first, 30)

            async def all_ended() -> bool:
                return (await remove(apis[0], hash_, workflow)).remaining_runs == 0

            await eventually(all_ended, 30, interval=0.05)
            return sum(started), len(started)

    outcomes = await asyncio.gather(*(race(n) for n in range(RACES)))
    for task in answering:
        task.cancel()
    assert await count(scene.dsn, "run where ended_at is null") == 0
    assert await count(scene.dsn, "task") == 0
    runs = await fetch(scene.dsn, "select state, failure->>'code' as code from run")
    assert len(runs) == RACES + sum(accepted for accepted, _ in outcomes)
    assert {(row["state"], row["code"]) for row in runs} == {(run_pb2.RUN_STATE_FAILED, "DEFINITION_REMOVED")}
    assert 0 < sum(accepted for accepted, _ in outcomes) < sum(n for _, n in outcomes), "both orders were met"
    undone = await fetch(scene.dsn, UNDONE, completed=EventType.STEP_COMPLETED, undone=EventType.UNDO_COMPLETED)
    assert len(undone) >= RACES
    assert [row for row in undone if row["undone"] != 1] == []


UNDONE = """
select run_id::text, (select count(*) from event u where u.run_id = e.run_id and u.type = %(undone)s) as undone
from event e where type = %(completed)s
"""


async def _start(api: Api, workflow_id: str, hash_: str) -> bool:
    """Whether a start was accepted; it may be refused for one reason only."""
    try:
        await api.start(workflow_id, definition_hash=hash_)
    except grpc.aio.AioRpcError as error:
        if decode(error).reason != "DEFINITION_REMOVED":
            raise
        return False
    return True


async def test_starts_of_a_removed_definition_are_refused_also_when_it_is_the_active_one(scene: Scene) -> None:
    servers = [await scene.serve(**QUICK) for _ in range(2)]
    apis = [scene.api(server.grpc_address) for server in servers]
    old = await registered(apis[0], undoable())
    new = await registered(apis[0], undoable("2"))
    await apis[1].start(definition_hash=old)  # the other server has it in memory
    await remove(apis[0], old)
    for api in apis:
        with refused("DEFINITION_REMOVED", grpc.StatusCode.FAILED_PRECONDITION):
            await api.start(definition_hash=old)
        assert (await api.start()).definition_hash == new
    await remove(apis[1], new)
    for api in apis:
        with refused("DEFINITION_REMOVED", grpc.StatusCode.FAILED_PRECONDITION):
            await api.start()
    await registered(apis[0], undoable("3"))
    for api in apis:
        assert (await api.start()).created


async def test_a_repeat_of_a_start_finds_its_run_after_its_definition_was_removed(scene: Scene) -> None:
    """I6: memory is asked before state."""
    api = scene.api((await scene.serve(**QUICK)).grpc_address)
    hash_ = await registered(api, undoable())
    first = await api.start(request_key="k", request_id="r")
    await remove(api, hash_)
    assert (await api.start(request_key="k", request_id="r")).run_id == first.run_id
    assert (await api.start(request_key="k")).run_id == first.run_id


async def test_steps_of_a_removed_definition_can_write_nothing_any_more_and_undo_can(scene: Scene) -> None:
    """I9: not when they were leased before, and not after a retry."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    hash_ = await registered(api, undoable())
    worker = await scene.raw(server.grpc_address, handlers=["s1", "s2"])
    run_id = (await api.start()).run_id
    assert (await worker.complete(await worker.task(), '"done"')).outcome == OK
    second = await worker.task()
    assert second.handler == "s2"
    assert (await remove(api, hash_)).remaining_runs == 1, "it has something to undo"
    assert (await worker.next(worker_pb.Revoke)).reason == error_pb2.ERROR_REASON_RUN_ENDED
    assert (await worker.complete(second)).outcome == LEASE_LOST
    assert (await worker.fail(second)).outcome == LEASE_LOST
    assert (await worker.checkpoint(second, 1)).outcome == LEASE_LOST
    await worker.no_task()
    undoer = await scene.raw(server.grpc_address, handlers=["u1"])
    undo = await undoer.task()
    assert (undo.kind, undo.handler) == (UNDO, "u1")
    assert (await remove(api, hash_)).remaining_runs == 1, "removing it again does not fence its undo"
    assert (await undoer.complete(undo)).outcome == OK
    run = await api.wait(run_id)
    assert (run.state, run.failure.code) == (run_pb2.RUN_STATE_FAILED, "DEFINITION_REMOVED")
    assert (await remove(api, hash_)).remaining_runs == 0
    assert kinds(await api.history(run_id))[-1] == "run_failed"


async def test_runs_without_anything_to_undo_have_ended_when_a_removal_answers(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where ending them takes long it would answer before.
    monkeypatch.setattr("fencepost_server.engine.removal._PATIENCE", DEADLINE / 2)
    api = scene.api((await scene.serve(**QUICK)).grpc_address)
    hash_ = await registered(api, manifest())
    await api.start_many([api.start_request() for _ in range(500)])
    assert (await remove(api, hash_)).remaining_runs == 0
    assert await count(scene.dsn, "run where ended_at is null") == 0


@pytest.mark.parametrize("lost", ["caller", "server"])
async def test_runs_of_a_removed_definition_are_ended_although_who_removed_it_is_gone(scene: Scene, lost: str) -> None:
    """I13: the removal is committed, nobody has been told yet."""
    server, other = [await scene.serve(**QUICK) for _ in range(2)]
    api = scene.api(server.grpc_address)
    hash_ = await registered(api, manifest())
    await api.start_many([api.start_request() for _ in range(50)])
    await eventually(lambda: other.app.engine.remover.loop.last_good, what="its first look is over")
    async with asleep(server.app.engine.remover.loop):
        removing = asyncio.create_task(remove(api, hash_))
        await until_count(scene.dsn, "definition where removed_at is not null", 1)
        await eventually(lambda: server.app.engine.remover._walks, what="the first server knows of it")
        removing.cancel()
        await asyncio.gather(removing, return_exceptions=True)
        assert await count(scene.dsn, "run where ended_at is null") == 50
        if lost == "server":
            await server.stop()
            remover = other.app.engine.remover
            remover.look_interval = 0.0
            remover._next_look = 0.0
            remover.loop.wake()
            await until_count(scene.dsn, "run where ended_at is null", 0)
    await until_count(scene.dsn, "run where ended_at is null", 0)


async def test_a_failed_run_of_a_removed_definition_can_not_go_on(scene: Scene) -> None:
    """I9: nor while it is being removed; who comes first decides, and no run is left alive."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    hash_ = await registered(api, manifest())
    worker = await scene.raw(server.grpc_address)
    run_ids = [(await api.start()).run_id for _ in range(2)]
    for task in await worker.tasks(2):
        await worker.fail(task, run_pb2.FAILURE_KIND_PERMANENT)
    async with holding(scene.dsn, "select from deployment for update") as removing:
        retrying = asyncio.create_task(_retry(api, run_ids[0]))
        await until_blocked(scene.dsn)
        await removing.execute("update deployment set removed = array_append(removed, active_hash)")
        await removing.commit()
    with refused("DEFINITION_REMOVED", grpc.StatusCode.FAILED_PRECONDITION):
        await retrying
    await remove(api, hash_)
    with refused("DEFINITION_REMOVED"):
        await _retry(api, run_ids[1])
    assert await count(scene.dsn, "run where ended_at is null") == 0


async def _retry(api: Api, run_id: str) -> None:
    await api.runs.RetryRun(run_service_pb2.RetryRunRequest(run_id=run_id), timeout=DEADLINE)
