"""Leases run out while the connection of the sweeper breaks, the sweeper sleeps between its look and its write, or the
worker sleeps: every step that is lost is recovered once, and none that is not.

Rows 8, 9 and 10 of the field failures. I2.
"""

from __future__ import annotations

import asyncio

import pytest

from fencepost.v1 import run_pb2
from tests.faults.conftest import StartWorker
from tests.faults.scene import SOON, STAYING, Scene, asleep, attempts, count, fetch, task_states, until_count
from tests.faults.sink import Effect, Sink
from tests.fixtures.databases import database_address, redirected
from tests.fixtures.manifests import manifest
from tests.fixtures.proxy import Proxy
from tests.fixtures.raw_worker import LEASE_LOST, OK
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually

N = 250
EXPIRED = "task where lease_expires_at < clock_timestamp()"


async def test_a_sweep_whose_connections_break_again_and_again_recovers_every_lease_once(scene: Scene) -> None:
    """Row 8: 250 leases, in several pages and batches; each break comes a little later than the one before."""
    database = scene.proxy(database_address(scene.dsn))
    settings = {"sweep_batch": 60, "lane_batch": 50, "disconnect_grace": 0.1}
    server = await scene.serve(dsn=redirected(scene.dsn, database.address), **STAYING | settings)
    api = scene.api(server.grpc_address)
    await api.register(manifest(retry=SOON))
    gone = await scene.raw(server.grpc_address, capacity=N)
    await api.start_many([api.start_request() for _ in range(N)])
    await gone.tasks(N)
    async with asleep(server.app.engine.sweeper.loop):
        await gone.close()
        await until_count(scene.dsn, EXPIRED, N)
    recovered = "task where lease_session is null and attempt = 1"
    for breaks, break_after in enumerate((1_000, 3_000, 6_000, 10_000, 20_000)):
        database.break_after(break_after, "up")
        await _until_broken(database, breaks + 1)
    assert await count(scene.dsn, recovered) < N
    await until_count(scene.dsn, recovered, N, 30)
    assert {row["operational_failures"] for row in await fetch(scene.dsn, "select operational_failures from task")} == {
        1
    }
    healthy = await scene.raw(server.grpc_address, capacity=N)
    assert {task.attempt for task in await healthy.tasks(N)} == {2}


async def _until_broken(database: Proxy, times: int) -> None:
    await eventually(lambda: database.breaks == times)


async def _expire(dsn: str) -> None:
    """Let the only lease run out, again if a heartbeat that was on its way has renewed it."""

    async def expired() -> bool:
        await fetch(dsn, "update task set lease_expires_at = clock_timestamp() where lease_session is not null")
        return await count(dsn, "task where lease_session is not null") == 0

    await eventually(expired)


@pytest.mark.parametrize("meanwhile", ["completed", "renewed", "failed"])
async def test_a_sweeper_that_slept_between_its_look_and_its_write_changes_nothing(
    scene: Scene, server_process: StartServerProcess, meanwhile: str
) -> None:
    """Row 9: its server is frozen with the expired lease in its hand; the worker goes on with another server."""
    database = scene.proxy(database_address(scene.dsn))
    alone = {"outage_gap": 120.0}  # no absence of servers holds the lease, be it before the first has started
    behind = redirected(scene.dsn, database.address)
    sleeper = server_process(behind, prepared="off", lanes=1, **STAYING | alone)
    other = await scene.serve(**STAYING | alone | {"poll_interval": 60.0})
    api = scene.api(other.grpc_address)
    await api.register(manifest(retry={"max_attempts": 3, "initial_delay": "1h", "max_delay": "1h"}))
    worker = await scene.raw(other.grpc_address)
    run_id = (await api.start()).run_id
    task = await worker.task()
    database.break_on(b"for no key update", "up", "blackhole")  # what locks the run before the write
    await fetch(scene.dsn, "update task set lease_expires_at = clock_timestamp()")
    await eventually(lambda: database.breaks)
    sleeper.pause()
    if meanwhile == "completed":
        assert (await worker.complete(task)).outcome == OK
    elif meanwhile == "failed":
        assert (await worker.fail(task)).outcome == OK
    else:
        assert [result.outcome for result in await worker.heartbeat()] == [OK]
    before = await api.history(run_id), await task_states(scene.dsn)
    sleeper.resume()
    database.heal()
    await scene.api(sleeper.grpc_address).start()  # behind the sweeper's report, in the same lane
    found = await api.history(run_id), [state for state in await task_states(scene.dsn) if state.run_id == run_id]
    assert found == before
    if meanwhile == "renewed":
        assert (await worker.complete(task)).outcome == OK


async def test_an_attempt_that_lost_its_lease_can_write_nothing_any_more(scene: Scene) -> None:
    """Row 10, I2: not while another attempt runs, and not after it has ended; on the stream that had the lease."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(retry=SOON))
    zombie = await scene.raw(server.grpc_address, capacity=1)
    run_id = (await api.start()).run_id
    stale = await zombie.task()
    await zombie.capacity(0)
    await _expire(scene.dsn)
    worker = await scene.raw(server.grpc_address)
    task = await worker.task()
    assert (task.task.run_id, task.attempt) == (run_id, 2)

    async def assert_powerless() -> None:
        before = await api.history(run_id), await task_states(scene.dsn)
        results = [
            *await zombie.heartbeat([stale]),
            await zombie.complete(stale, '"late"'),
            await zombie.fail(stale),
            await zombie.fail(stale, run_pb2.FAILURE_KIND_PERMANENT),
            *await zombie.release(stale),
        ]
        assert [result.outcome for result in results] == [LEASE_LOST] * 5
        assert (await api.history(run_id), await task_states(scene.dsn)) == before

    await assert_powerless()
    assert (await worker.complete(task, '"done"')).outcome == OK
    await assert_powerless()
    assert (await api.get(run_id)).output.json == '"done"'


async def test_a_worker_that_was_frozen_past_its_lease_hears_of_it_within_a_second_and_has_no_effect(
    scene: Scene, worker_process: StartWorker, sink: Sink
) -> None:
    """Row 10: SIGSTOP, another worker finishes the step, SIGCONT. Its code acts all the same; its token is stale."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(retry=SOON))
    frozen = worker_process(server.grpc_address, gate="never")
    run_id = (await api.start()).run_id
    await eventually(lambda: frozen.events("begun"), 30)
    frozen.pause()
    await _expire(scene.dsn)
    other = worker_process(server.grpc_address)
    await api.wait(run_id, 60)
    before = await api.history(run_id)
    frozen.resume()
    (cancelled,) = await eventually(lambda: frozen.events("cancelled"))  # long before its own clock would tell it
    assert cancelled["reason"] == "LEASE_LOST"
    await eventually(lambda: frozen.events("acted"))
    assert await asyncio.to_thread(other.terminate) == 0
    assert await asyncio.to_thread(frozen.terminate) == 0
    assert frozen.events("ended")[0]["completed"] == 0
    assert await api.history(run_id) == before
    assert attempts(before) == [2]
    assert list(sink.effects().values()) == [Effect(accepted=1, refused=1)]
