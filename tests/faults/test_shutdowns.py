"""SIGTERM to workers and servers: no new work, what runs is finished, and the end comes, at the latest when the time
that was given for it is over. Deploys cost no attempt.

Row 31 of the field failures.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter

import grpc
from grpc_health.v1 import health_pb2

from fencepost.v1 import worker_service_pb2 as pb
from tests.faults.conftest import StartWorker
from tests.faults.scene import (
    COMPLETED,
    ENDED,
    ONE_ATTEMPT,
    STAYING,
    Scene,
    attempts,
    count,
    task_states,
    until_count,
    until_printed,
)
from tests.faults.sink import ONCE, Sink
from tests.fixtures.api import Api
from tests.fixtures.databases import database_address, redirected
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import OK
from tests.fixtures.refusals import refused
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually

RUNS, STEPS = 400, 4


async def test_a_worker_that_is_told_to_end_takes_nothing_new_and_finishes_its_step(
    scene: Scene, worker_process: StartWorker, sink: Sink
) -> None:
    """Row 31. The step takes until its gate is opened, a minute if need be."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(2, retry=ONE_ATTEMPT))
    worker = worker_process(server.grpc_address, steps=2, gate="held", drain_timeout=60)
    run_id = (await api.start()).run_id
    await until_printed(worker, "begun")
    worker.signal(signal.SIGTERM)
    await eventually(lambda: "the worker stops" in worker.logs)
    await eventually(lambda: not any(session.room() > 0 for session in server.app.engine.dispatcher.sessions))
    await api.start()
    sink.open("held")
    assert await asyncio.to_thread(worker.wait, 15) == 0
    (ended,) = worker.events("ended")
    assert (ended["started"], ended["completed"], ended["held"]) == (1, 1, 0)
    assert attempts(await api.history(run_id)) == [1]
    assert {(state.attempt, state.session) for state in await task_states(scene.dsn)} == {(0, "")}
    assert list(sink.effects().values()) == [ONCE]


async def test_a_worker_that_is_told_to_end_ends_at_its_own_limit_and_the_rest_goes_on_elsewhere(
    scene: Scene, worker_process: StartWorker, sink: Sink
) -> None:
    """Row 31: what runs is reported as cut off, so another worker has it at once; the lease is a minute."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(retry={"max_attempts": 2, "initial_delay": "0s"}))
    worker = worker_process(server.grpc_address, slots=2, gate="never", drain_timeout=0.5)
    run_ids = [(await api.start()).run_id for _ in range(2)]
    await until_printed(worker, "begun", 2)
    assert await asyncio.to_thread(worker.terminate, 15) == 0
    # Its process does not wait for a step that is slow to hear of it.
    assert {event["reason"] for event in worker.events("cancelled")} <= {"WORKER_SHUTDOWN"}
    other = worker_process(server.grpc_address)
    for run_id in run_ids:
        events = await api.history((await api.wait(run_id, 30)).run_id)
        cut_off = [event.step_retrying.failure.code for event in events if event.HasField("step_retrying")]
        assert (cut_off, attempts(events)) == (["WORKER_SHUTDOWN"], [2])
    assert await asyncio.to_thread(other.terminate, 15) == 0


async def test_a_server_that_is_told_to_end_lets_steps_finish_and_sends_workers_and_callers_elsewhere(
    scene: Scene, server_process: StartServerProcess, worker_process: StartWorker, sink: Sink
) -> None:
    """Row 31: its health is red at once, it leases nothing more, and it ends when the last step has."""
    ending = server_process(scene.dsn, shutdown_grace=60.0, **STAYING)
    api, other = scene.api(ending.grpc_address), await scene.serve(**STAYING)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = worker_process(ending.grpc_address, other.grpc_address, gate="held")
    held = (await api.start()).run_id
    await until_printed(worker, "begun")
    ending.signal(signal.SIGTERM)
    await eventually(lambda: other.app.engine.dispatcher.sessions, 30, what="its worker has another server, too")
    await assert_draining(api)
    later = (await scene.api(other.grpc_address).start()).run_id
    await until_printed(worker, "begun", 2)
    assert ending.running
    sink.open("held")
    assert await asyncio.to_thread(ending.wait, 15) == 0
    for run_id in (held, later):
        await scene.api(other.grpc_address).wait(run_id)
    assert Counter(sink.effects().values()) == {ONCE: 2}


async def assert_draining(api: Api) -> None:
    with refused("SERVER_DRAINING", grpc.StatusCode.UNAVAILABLE) as refusal:
        await api.start()
    assert refusal.error.retry_after
    check = api.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    response = await check(health_pb2.HealthCheckRequest(), timeout=30)
    assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_server_that_is_told_to_end_ends_at_its_own_limit_and_its_workers_keep_their_steps(
    scene: Scene, server_process: StartServerProcess, worker_process: StartWorker, sink: Sink
) -> None:
    """Row 31: a step that takes longer is taken along to another server, with its only attempt."""
    ending = server_process(scene.dsn, shutdown_grace=0.5, **STAYING)
    api, other = scene.api(ending.grpc_address), await scene.serve(**STAYING)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = worker_process(ending.grpc_address, other.grpc_address, gate="held")
    run_id = (await api.start()).run_id
    await until_printed(worker, "begun")
    # Not after the default, nor with the step, but as docs/operations.md tells supervisors.
    assert await asyncio.to_thread(ending.terminate, 0.5 + 10) == 0
    sink.open("held")
    await scene.api(other.grpc_address).wait(run_id)
    assert attempts(await scene.api(other.grpc_address).history(run_id)) == [1]
    assert list(sink.effects().values()) == [ONCE]


async def test_servers_and_workers_that_are_replaced_one_after_the_other_under_load_cost_no_attempt(
    scene: Scene, server_process: StartServerProcess, worker_process: StartWorker, sink: Sink
) -> None:
    """Row 31, I13: a deploy of everything, amid runs whose steps have one attempt."""
    servers = [server_process(scene.dsn, wait=False, **STAYING) for _ in range(2)]
    for server in servers:
        await asyncio.to_thread(server.wait_serving)
    addresses = [server.grpc_address for server in servers]
    api = scene.api(addresses[1])
    await api.register(manifest(STEPS, retry=ONE_ATTEMPT))
    workers = [worker_process(*addresses, steps=STEPS, slots=5)]
    await until_printed(workers[0], "connected")
    await api.start_many([api.start_request() for _ in range(RUNS)])
    await until_count(scene.dsn, COMPLETED, RUNS // 4, more=True)
    assert await asyncio.to_thread(servers[0].terminate) == 0
    servers[0].start()
    workers.append(worker_process(*addresses, steps=STEPS, slots=5))
    await asyncio.to_thread(servers[0].wait_serving)
    await until_printed(workers[1], "connected")
    assert await asyncio.to_thread(workers[0].terminate) == 0
    assert await asyncio.to_thread(servers[1].terminate) == 0
    await until_count(scene.dsn, ENDED, RUNS, 30)
    assert await count(scene.dsn, COMPLETED + " and attempt = 1") == RUNS * STEPS
    assert Counter(sink.effects().values()) == {ONCE: RUNS * STEPS}
    assert await asyncio.to_thread(workers[1].terminate) == 0


async def test_a_worker_that_comes_while_its_server_is_told_to_end_is_sent_away_at_once(scene: Scene) -> None:
    """Row 31: not only when the steps of others have ended."""
    database = scene.proxy(database_address(scene.dsn))
    dsn = redirected(scene.dsn, database.address)
    server = await scene.serve(dsn=dsn, prepared="off", **{**STAYING, "shutdown_grace": 30.0})
    api = scene.api(server.grpc_address)
    await api.register(manifest())
    busy = await scene.raw(server.grpc_address)
    await api.start()
    task = await busy.task()
    database.break_on(b"insert into session (", "up", "blackhole")
    coming = await scene.raw(server.grpc_address, hello=False)
    await coming.send(coming.hello())
    await eventually(lambda: database.breaks)
    stopping = asyncio.create_task(server.stop())
    await busy.next(pb.Drain)
    database.heal()
    await coming.next(pb.Drain)
    await coming.ended()
    assert not stopping.done()
    assert (await busy.complete(task)).outcome == OK
    await stopping
