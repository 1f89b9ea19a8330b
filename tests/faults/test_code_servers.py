"""Servers die, or stop without dying, while code runs are decided: the other server goes on, each local step counts
once, and nobody else's runs are held up.

Rows 4 and 46 of the field failures. I13.
"""

from __future__ import annotations

import asyncio

import pytest

from fencepost.v1 import run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.code import CODE, CONTINUE, MANIFEST, held, local
from tests.faults.conftest import StartCodeWorker
from tests.faults.scene import QUICK, STAYING, Scene, until_accepted, until_printed
from tests.faults.sink import ONCE, Sink
from tests.fixtures.api import DEADLINE, kinds
from tests.fixtures.databases import database_address, redirected
from tests.fixtures.servers import Setting, StartServerProcess
from tests.fixtures.waiting import eventually, until_in_transaction


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_runs_whose_server_is_gone_amid_a_local_step_go_on_with_another_one(
    scene: Scene, server_process: StartServerProcess, code_process: StartCodeWorker, sink: Sink, how: str
) -> None:
    """Row 4: the step is not run again, its result counts once, and so does the signal that comes meanwhile.

    No heartbeat is due: a server that freezes amid one keeps the leases locked, and nobody else can take them over.
    """
    settings: dict[str, Setting] = QUICK | {"disconnect_grace": 20.0, "heartbeat_interval": 60.0}
    gone, other = (server_process(scene.dsn, wait=False, **settings) for _ in range(2))
    for server in (gone, other):
        await asyncio.to_thread(server.wait_serving)
    worker = code_process(gone.grpc_address, other.grpc_address, name="same")
    await until_printed(worker, "connected")
    api = scene.api(other.grpc_address)
    run_ids = [(await api.start("held", '["one", "two"]')).run_id for _ in range(3)]
    await until_printed(worker, "begun", 3)
    gone.kill() if how == "killed" else gone.pause()
    for run_id in run_ids:
        request = run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go")
        await api.runs.SignalRun(request, timeout=DEADLINE)
    sink.open("one")
    sink.open("two")
    for run_id in run_ids:
        assert (await api.wait(run_id)).output.json == '["same","same"]'
    histories = [await api.history(run_id) for run_id in run_ids]
    if how == "frozen":
        gone.resume()
    for run_id, events in zip(run_ids, histories, strict=True):
        assert await api.history(run_id) == events
        told = kinds(events)
        assert [told.count(kind) for kind in ("local_step_ended", "signal_received")] == [2, 1]
    assert len(worker.events("begun")) == 6
    assert len(worker.events("called")) == 3, "never replayed: the lease was kept"
    assert list(sink.effects().values()) == [ONCE] * 6
    assert await asyncio.to_thread(worker.terminate) == 0
    assert worker.events("ended")[0]["lost"] == 0


async def test_a_server_that_stops_amid_an_advance_holds_up_only_the_run_that_it_has_locked(
    scene: Scene, server_process: StartServerProcess
) -> None:
    """Row 46: the Advances of the other runs in the very same frame are answered by the other server while the lock is
    held, which is as long as the test says: the database would wait for minutes, and so would a statement.
    """
    database = scene.proxy(database_address(scene.dsn))
    times: dict[str, Setting] = {"lanes": 1, "idle_in_transaction_timeout": 300.0}
    times |= {"statement_timeout": 120.0, "batch_timeout": 150.0}
    stopped = server_process(redirected(scene.dsn, database.address), prepared="off", **STAYING | times)
    other = await scene.serve(**STAYING | times)
    api = scene.api(other.grpc_address)
    await api.register(MANIFEST)
    worker = await scene.raw(stopped.grpc_address, handlers=(), capacity=0, workflows=[CODE], workflow_capacity=20)
    for _ in range(20):
        await api.start("code")
    items = [held(worker, task).item(local(1), outcome=CONTINUE) for task in await worker.tasks(20)]
    database.break_on(b"update run r", "up", "blackhole")
    sending = asyncio.create_task(worker.send(pb.Advance(items=items[:1])))
    await eventually(lambda: database.breaks)
    await until_in_transaction(scene.dsn)
    stopped.pause()
    await worker.drop()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)

    nonce = worker.hello().process_nonce
    again = await scene.raw(other.grpc_address, handlers=(), capacity=0, process_nonce=nonce, hello=False)
    claimed = [item.task for item in items]
    await again.send(again.hello(previous_session_ids=worker.sessions, held=claimed, workflows=[CODE]))
    kept = (await again.next(pb.Welcome, 30)).held
    assert all(result.kept for result in kept if result.task != items[0].task)
    frame = await again.send(pb.Advance(items=items))
    assert sorted(await until_accepted(again, frame, 19)) == list(range(1, 20))
    database.reset()
    assert await until_accepted(again, frame, 1) == [0]
    database.heal()
    stopped.resume()
    for item in items:
        assert kinds(await api.history(item.task.run_id)) == ["run_started", "local_step_ended"]
