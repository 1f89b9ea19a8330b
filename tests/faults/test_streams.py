"""A worker's stream breaks, in one way or both, for a moment or for good: no task is lost and no step acts twice.

Rows 1, 2 and 3 of the field failures.
"""

from __future__ import annotations

import asyncio
from typing import LiteralString

import pytest

from fencepost import Worker
from fencepost.v1.worker_service_pb2 import Heartbeat, Welcome
from tests.faults.held_step import HeldStep
from tests.faults.scene import (
    ONE_ATTEMPT,
    QUICK,
    SOON,
    STAYING,
    Scene,
    asleep,
    attempts,
    fetch,
    leased_to,
    metrics,
    task_states,
    until_count,
)
from tests.faults.sink import ONCE, Effect, Sink
from tests.fixtures.manifests import manifest
from tests.fixtures.proxy import HowToBreak
from tests.fixtures.raw_worker import LEASE_LOST, OK
from tests.fixtures.waiting import eventually
from tests.sdk.running import running

# Row 1: a delivered task is lost


@pytest.mark.parametrize("arrived", [False, True], ids=["lost-on-the-way", "unread-by-the-worker"])
@pytest.mark.parametrize("how", ["cut", "reset"])
async def test_a_task_whose_stream_breaks_right_after_it_was_sent_is_offered_again_and_costs_no_attempt(
    scene: Scene, how: HowToBreak, arrived: bool
) -> None:
    """Row 1, I10. The grace is a minute: it is the reconnect that brings the task back."""
    server = await scene.serve(**STAYING)
    proxy, api = scene.proxy(server.grpc_address), scene.api(server.grpc_address)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = await scene.raw(proxy.address)
    proxy.break_on(b"a task on its way", "down", how, forward=arrived)
    run_id = (await api.start(input='"a task on its way"')).run_id
    await worker.ended()
    (lost,) = await leased_to(scene.dsn, worker.sessions[0])
    await worker.reconnect(held=())
    task = await worker.task(timeout=30)
    assert (task.task.run_id, task.attempt) == (run_id, 1)
    assert task.task.fencing_token > lost.token
    assert (await worker.complete(task)).outcome == OK
    await api.wait(run_id)
    assert attempts(await api.history(run_id)) == [1]


async def test_a_task_that_never_arrived_is_offered_again_by_whichever_server_its_worker_comes_to(
    scene: Scene,
) -> None:
    """Row 1, I13. The first server still believes in its stream: it is a black hole, nobody has told it."""
    first, second = await scene.serve(**STAYING), await scene.serve(**STAYING)
    proxy, api = scene.proxy(first.grpc_address), scene.api(second.grpc_address)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = await scene.raw(proxy.address, capacity=1)
    proxy.blackhole()
    run_id = (await scene.api(first.grpc_address).start()).run_id
    await eventually(lambda: leased_to(scene.dsn, worker.sessions[0]))
    again = await scene.raw(second.grpc_address, process_nonce=worker.hello().process_nonce, hello=False)
    await again.send(again.hello(previous_session_ids=worker.sessions))
    task = await again.task(timeout=30)
    assert (task.task.run_id, task.attempt) == (run_id, 1)
    assert (await again.complete(task)).outcome == OK
    assert attempts(await api.history(run_id)) == [1]


async def test_what_a_server_leases_to_a_stream_that_its_worker_has_left_comes_back_and_costs_no_attempt(
    scene: Scene,
) -> None:
    """Rows 1 and 2, I13: the worker is at another server; the stream to the first one is a black hole in which that
    one would believe for 15 s, with a grace of a minute.
    """
    first, second = await scene.serve(**STAYING), await scene.serve(**STAYING)
    proxy, api = scene.proxy(first.grpc_address), scene.api(first.grpc_address)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = await scene.raw(proxy.address)
    proxy.blackhole()
    again = await scene.raw(second.grpc_address, capacity=0, process_nonce=worker.hello().process_nonce, hello=False)
    (probe,) = (loop for loop in first.app.engine.loops if loop.name == "probe")
    # Nor does the second one look for what the first leases meanwhile, which nobody would lease again.
    async with asleep(probe), asleep(second.app.engine.reconciler.loop):
        await again.send(again.hello(previous_session_ids=worker.sessions))
        await again.next(Welcome)
        run_ids = [(await api.start()).run_id for _ in range(5)]
        await until_count(scene.dsn, "task where lease_session is not null", 5)
    await eventually(lambda: not first.app.engine.dispatcher.sessions, 10, what="the first server has heard of it")
    other = await scene.raw(first.grpc_address)
    tasks = await other.tasks(5)
    assert {(task.task.run_id, task.attempt) for task in tasks} == {(run_id, 1) for run_id in run_ids}


async def test_the_tasks_of_a_worker_that_never_comes_back_go_to_another_after_the_grace(scene: Scene) -> None:
    """Row 1. The lease is a minute, the grace 0.3 s. That worker may have acted, so it costs an attempt."""
    server = await scene.serve(**QUICK | {"disconnect_grace": 0.3})
    proxy, api = scene.proxy(server.grpc_address), scene.api(server.grpc_address)
    await api.register(manifest(retry=SOON))
    gone = await scene.raw(proxy.address, capacity=3)
    runs = [(await api.start()).run_id for _ in range(3)]
    await gone.tasks(3)
    proxy.reset()
    other = await scene.raw(server.grpc_address)
    tasks = await other.tasks(3)
    assert {(task.task.run_id, task.attempt) for task in tasks} == {(run_id, 2) for run_id in runs}


# Row 2: a zombie worker


async def test_nothing_is_assigned_to_a_worker_whose_stream_is_dead_one_way(scene: Scene) -> None:
    """Row 2: its heartbeats pass, so its lease lives on; it hears nothing, so it gets nothing and its stream ends."""
    server = await scene.serve(**STAYING | {"ping_interval": 0.3})
    proxy, api = scene.proxy(server.grpc_address), scene.api(server.grpc_address)
    await api.register(manifest())
    zombie = await scene.raw(proxy.address, capacity=10)
    await api.start()
    held = await zombie.task()
    [given] = await fetch(scene.dsn, "select lease_expires_at as until from task")
    (session,) = server.app.engine.dispatcher.sessions
    proxy.blackhole("down")
    last_heard = session._pulse._ping  # at most

    async def beat() -> bool:
        await zombie.send(Heartbeat(tasks=zombie.held.values(), last_tasks_number=zombie.last_tasks_number))
        return not session.open

    silent = asyncio.create_task(eventually(beat, interval=0.1))
    await eventually(lambda: session._pulse._ping >= last_heard + 2, what="two pings are lost")
    assert session.room() == 0
    others = [(await api.start()).run_id for _ in range(5)]
    await silent
    states = {state.run_id: state for state in await task_states(scene.dsn)}
    assert [states[run_id].session for run_id in others] == [""] * 5
    assert states[held.task.run_id].token == held.task.fencing_token
    longer: LiteralString = "select 1 from task where run_id = %(id)s and lease_expires_at > %(until)s"
    await eventually(lambda: fetch(scene.dsn, longer, id=held.task.run_id, until=given["until"]))
    assert (await metrics(f"127.0.0.1:{server.app.http.port}"))["fencepost_sessions"] == 0
    healthy = await scene.raw(server.grpc_address, capacity=10)
    assert {task.task.run_id for task in await healthy.tasks(5)} == set(others)


async def test_a_worker_whose_stream_is_dead_one_way_rebuilds_it_and_loses_nothing(scene: Scene, sink: Sink) -> None:
    """Row 2. It notices by itself, within four ping intervals, and finds the server by its other address."""
    server = await scene.serve(**STAYING | {"ping_interval": 0.3})
    dead, api, held = scene.proxy(server.grpc_address), scene.api(server.grpc_address), HeldStep(sink)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = Worker(f"{dead.address},{server.grpc_address}", [held.step])
    async with running(worker):
        run_id = (await api.start()).run_id
        await eventually(held.begun.is_set)
        dead.blackhole("down")
        await eventually(lambda: worker.stats().reconnects >= 1)
        held.go_on.set()
        await api.wait(run_id)
        await eventually(lambda: worker.stats().completed == 1)
        dead.heal()
    assert worker.stats().lost == 0
    assert list(sink.effects().values()) == [ONCE]
    assert attempts(await api.history(run_id)) == [1]


# Row 3: false reassignment


@pytest.mark.parametrize("how", ["cut", "reset"])
async def test_a_stream_that_is_away_for_less_than_the_grace_costs_nothing(
    scene: Scene, sink: Sink, how: HowToBreak
) -> None:
    """Row 3: the late result counts, because the lease was kept."""
    server = await scene.serve(**STAYING)
    proxy, api = scene.proxy(server.grpc_address), scene.api(server.grpc_address)
    held, idle = HeldStep(sink), HeldStep(sink)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = Worker(proxy.address, [held.step])
    async with running(worker):
        run_id = (await api.start()).run_id
        await eventually(held.begun.is_set)
        async with running(Worker(server.grpc_address, [idle.step])):
            proxy.refuse()
            getattr(proxy, how)()
            held.go_on.set()
            await eventually(sink.effects, what="it has acted, and can't say so")
            proxy.heal()
            await api.wait(run_id)
            await eventually(lambda: worker.stats().completed == 1)
    assert not idle.begun.is_set()
    assert list(sink.effects().values()) == [ONCE]
    assert attempts(await api.history(run_id)) == [1]


async def test_a_stream_that_is_away_for_more_than_the_grace_loses_its_step_and_its_late_result_changes_nothing(
    scene: Scene, sink: Sink
) -> None:
    """Row 3, I2: the other worker acts; what the first one does with its old token is refused, inside and outside."""
    # No ping is missed before its stream is cut.
    server = await scene.serve(**STAYING | {"disconnect_grace": 0.3})
    proxy, api = scene.proxy(server.grpc_address), scene.api(server.grpc_address)
    first, second = HeldStep(sink), HeldStep(sink)
    await api.register(manifest(retry=SOON))
    late = Worker(proxy.address, [first.step])
    async with running(late):
        run_id = (await api.start()).run_id
        await eventually(first.begun.is_set)
        proxy.refuse()
        proxy.cut()
        second.go_on.set()
        async with running(Worker(server.grpc_address, [second.step])):
            await api.wait(run_id)
        before = await api.history(run_id)
        first.go_on.set()
        await eventually(lambda: list(sink.effects().values()) == [Effect(accepted=1, refused=1)])
        proxy.heal()
        await eventually(lambda: late.stats().lost == 1)
    assert late.stats().completed == 0
    assert await api.history(run_id) == before
    assert attempts(before) == [2]


async def test_the_result_of_an_expired_lease_counts_until_somebody_else_has_the_task(scene: Scene) -> None:
    """Row 3: the token decides, not the time. The sweeper does not look for a while, as when its server hangs."""
    server = await scene.serve(**QUICK)
    api = scene.api(server.grpc_address)
    await api.register(manifest(retry=SOON))
    worker = await scene.raw(server.grpc_address)
    async with asleep(server.app.engine.sweeper.loop):
        run_ids = [(await api.start()).run_id for _ in range(2)]
        kept, lost = await worker.tasks(2)
        await fetch(scene.dsn, "update task set lease_expires_at = clock_timestamp()")
        assert (await worker.complete(kept)).outcome == OK
    again = await worker.task()
    assert (again.task.run_id, again.attempt) == (lost.task.run_id, 2)
    assert (await worker.complete(lost)).outcome == LEASE_LOST
    assert (await worker.complete(again)).outcome == OK
    assert sorted([*attempts(await api.history(run_ids[0])), *attempts(await api.history(run_ids[1]))]) == [1, 2]
