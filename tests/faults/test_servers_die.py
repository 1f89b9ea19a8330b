"""Servers are killed, or stop without dying, while workers have steps on lease from them: another server or the next
life of the same one goes on, no step acts twice, none is lost.

Rows 4 and 46 of the field failures. I13.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from fencepost.v1 import worker_service_pb2 as pb
from tests.faults.conftest import StartWorker
from tests.faults.scene import (
    COMPLETED,
    ENDED,
    ONE_ATTEMPT,
    QUICK,
    STAYING,
    Scene,
    attempts,
    count,
    metrics,
    until_accepted,
    until_count,
    until_printed,
)
from tests.faults.sink import ONCE, Sink
from tests.fixtures.api import kinds
from tests.fixtures.databases import database_address, redirected
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.servers import ServerProcess, Setting, StartServerProcess
from tests.fixtures.waiting import eventually, until_in_transaction

RUNS, STEPS = 400, 4


async def test_a_step_that_runs_while_its_server_is_killed_and_restarted_counts_once(
    scene: Scene, server_process: StartServerProcess, worker_process: StartWorker, sink: Sink
) -> None:
    """Row 4: kill -9 amid the step. It has one attempt only, so running it again would fail the run."""
    server = server_process(scene.dsn, **STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(2, retry=ONE_ATTEMPT))
    worker = worker_process(server.grpc_address, steps=2, gate="held")
    run_ids = [(await api.start()).run_id for _ in range(3)]
    await until_printed(worker, "begun", 3)
    server.kill()
    sink.open("held")
    server.start()
    await asyncio.to_thread(server.wait_serving)
    for run_id in run_ids:
        await api.wait(run_id, 30)
        assert attempts(await api.history(run_id)) == [1, 1]
    assert Counter(sink.effects().values()) == {ONCE: 6}
    assert len(worker.events("begun")) == 6


async def test_workers_go_on_with_another_server_when_theirs_is_killed(
    scene: Scene, server_process: StartServerProcess, worker_process: StartWorker, sink: Sink
) -> None:
    """I13: neither steps that run nor tasks on their way cost an attempt, and there is only one."""
    doomed, other = server_process(scene.dsn, wait=False, **STAYING), server_process(scene.dsn, wait=False, **STAYING)
    for server in (doomed, other):
        await asyncio.to_thread(server.wait_serving)
    api = scene.api(other.grpc_address)
    await api.register(manifest(STEPS, retry=ONE_ATTEMPT))
    # One works, the other one holds two steps until that server is dead, however quick the first is.
    workers = [
        worker_process(doomed.grpc_address, other.grpc_address, steps=STEPS),
        worker_process(doomed.grpc_address, other.grpc_address, steps=STEPS, slots=2, gate="held"),
    ]
    for worker in workers:
        await until_printed(worker, "connected")
    doomed_api = scene.api(doomed.grpc_address)
    await doomed_api.start_many([doomed_api.start_request() for _ in range(RUNS)])
    await until_count(scene.dsn, COMPLETED, RUNS * STEPS // 4, more=True)
    doomed.kill()
    assert await count(scene.dsn, ENDED) < RUNS
    sink.open("held")
    await until_count(scene.dsn, ENDED, RUNS, 60)
    assert await count(scene.dsn, COMPLETED + " and attempt = 1") == RUNS * STEPS
    assert Counter(sink.effects().values()) == {ONCE: RUNS * STEPS}


async def test_workers_leave_a_server_that_is_frozen_and_it_changes_nothing_when_it_wakes(
    scene: Scene, server_process: StartServerProcess, worker_process: StartWorker, sink: Sink
) -> None:
    """I13: it stops without dying, so no connection breaks and nobody is told."""
    frozen, other = (server_process(scene.dsn, wait=False, **QUICK | {"disconnect_grace": 10.0}) for _ in range(2))
    for server in (frozen, other):
        await asyncio.to_thread(server.wait_serving)
    api = scene.api(other.grpc_address)
    await api.register(manifest(2, retry=ONE_ATTEMPT))
    worker = worker_process(frozen.grpc_address, other.grpc_address, steps=2, gate="held")
    await until_printed(worker, "connected")
    run_ids = [(await api.start()).run_id for _ in range(3)]
    await until_printed(worker, "begun", 3)
    frozen.pause()
    sink.open("held")
    for run_id in run_ids:
        await api.wait(run_id, 30)
    histories = [await api.history(run_id) for run_id in run_ids]
    frozen.resume()
    await eventually(lambda: _sessions_of(frozen, 0))
    assert [await api.history(run_id) for run_id in run_ids] == histories
    assert [attempts(events) for events in histories] == [[1, 1]] * 3
    assert Counter(sink.effects().values()) == {ONCE: 6}


async def _sessions_of(server: ServerProcess, n: int) -> bool:
    return (await metrics(server.http_address))["fencepost_sessions"] == n


async def test_a_server_that_stops_amid_a_transaction_holds_up_only_the_runs_that_it_has_locked(
    scene: Scene, server_process: StartServerProcess
) -> None:
    """Row 46: the lanes of the other server go on, with the other runs of the very same batch, while the lock is held,
    which is as long as the test says: the database would wait for minutes, and so would a statement. The locked run
    goes on when its transaction has ended. That the database ends it in time is shown in test_schedules.
    """
    database = scene.proxy(database_address(scene.dsn))
    times: dict[str, Setting] = {"lanes": 1, "idle_in_transaction_timeout": 300.0}
    times |= {"statement_timeout": 120.0, "batch_timeout": 150.0}
    stopped = server_process(redirected(scene.dsn, database.address), prepared="off", **STAYING | times)
    other = await scene.serve(**STAYING | times)
    api = scene.api(other.grpc_address)
    await api.register(manifest(2))
    worker = await scene.raw(stopped.grpc_address, capacity=20, handlers=handler_names(2))
    for _ in range(20):
        await api.start()
    locked, *free = await worker.tasks(20)
    database.break_on(b"update run r", "up", "blackhole")
    sending = asyncio.create_task(worker.complete(locked))
    await until_in_transaction(scene.dsn)
    stopped.pause()
    await worker.drop()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)

    nonce = worker.hello().process_nonce
    again = await scene.raw(other.grpc_address, capacity=0, process_nonce=nonce, hello=False)
    held = [task.task for task in (locked, *free)]
    await again.send(again.hello(previous_session_ids=worker.sessions, held=held))
    assert all(result.kept for result in (await again.next(pb.Welcome, 30)).held if result.task != locked.task)
    frame = await again.send(pb.Complete(items=[pb.CompleteItem(task=task) for task in held]))
    assert sorted(await until_accepted(again, frame, 19)) == list(range(1, 20))
    database.reset()
    assert await until_accepted(again, frame, 1) == [0]
    database.heal()
    stopped.resume()
    await eventually(lambda: _sessions_of(stopped, 0))
    events = await api.history(locked.task.run_id)
    assert kinds(events) == ["run_started", "step_scheduled", "step_completed", "step_scheduled"]
