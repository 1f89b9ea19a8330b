"""A connection to the database breaks at a commit, before it arrives or before its answer does, or a stream ends
between the lease of a task and its frame: within seconds all is as if nothing had happened, and no attempt is burnt.

Row 48 of the field failures. I1, I6. Statements are recognised by their text, so they are not prepared here.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

import pytest

from fencepost.v1 import worker_service_pb2 as pb
from tests.faults.conftest import StartWorker
from tests.faults.scene import (
    COMPLETED,
    ENDED,
    ONE_ATTEMPT,
    SOON,
    STAYING,
    WRITING,
    Scene,
    attempts,
    count,
    fetch,
    leased_to,
    task_states,
    until_count,
    until_printed,
)
from tests.faults.sink import ONCE, Sink
from tests.fixtures.databases import database_address, redirected
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.proxy import HowToBreak, Proxy
from tests.fixtures.raw_worker import ALREADY_DONE, OK
from tests.fixtures.servers import InProcessServer, StartServerProcess
from tests.fixtures.waiting import eventually

RUNS, STEPS = 400, 3
CLAIM, WRITE_TASK, WRITE_RUN, REWRITE_TASK, RENEW, ADOPT = (
    b"numbered as (",
    b"insert into task (run_id",
    b"insert into run (run_id",
    b"update task t\nset visible_at",
    b"least(clock.now + t.lease_ms",
    b"set lease_session = $",
)
"""Each of these is in one statement only."""

at_commit = pytest.mark.parametrize("committed", [False, True], ids=["commit-lost", "answer-lost"])


async def serve(scene: Scene, **settings: float) -> tuple[InProcessServer, Proxy]:
    """A server with a proxy between it and its database."""
    proxy = scene.proxy(database_address(scene.dsn))
    dsn = redirected(scene.dsn, proxy.address)
    return await scene.serve(dsn=dsn, prepared="off", **STAYING | settings), proxy


def break_at_commit_of(statement: bytes, database: Proxy, how: HowToBreak, *, committed: bool) -> None:
    """Break all connections when the next transaction with that statement commits: just before, or just after."""
    database.break_on(b"commit", "up", how, after=statement, forward=committed)


@at_commit
@pytest.mark.parametrize("how", ["reset", "blackhole"])
async def test_a_claim_whose_commit_or_answer_is_lost_costs_no_attempt(
    scene: Scene, committed: bool, how: HowToBreak
) -> None:
    """Row 48: the task is on lease, and on no stream. A black hole ends when the transaction's time is up."""
    server, database = await serve(scene)
    api = scene.api(server.grpc_address)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = await scene.raw(server.grpc_address, capacity=0)
    run_id = (await api.start()).run_id
    if how == "blackhole":  # only this claim has so little time
        loops = server.app.engine.dispatcher._database
        loops.config = dataclasses.replace(loops.config, batch_timeout=1.0)
    break_at_commit_of(CLAIM, database, how, committed=committed)
    await worker.capacity(1)
    await eventually(lambda: database.breaks)
    if how == "blackhole":
        if committed:
            await eventually(lambda: leased_to(scene.dsn, worker.sessions[0]))
        await eventually(lambda: server.app.engine.dispatcher.loop.errors, what="its time is up")
        database.heal()
    task = await worker.task()
    assert (task.task.run_id, task.attempt) == (run_id, 1)
    if how == "reset":
        assert (task.task.fencing_token > 1) == committed
    assert (await worker.complete(task)).outcome == OK
    assert attempts(await api.history(run_id)) == [1]


@at_commit
async def test_a_completion_whose_commit_or_answer_is_lost_counts_once_and_its_next_step_costs_no_attempt(
    scene: Scene, committed: bool
) -> None:
    """Row 48: the next step was leased to the same stream in that transaction."""
    server, database = await serve(scene)
    api = scene.api(server.grpc_address)
    await api.register(manifest(2, retry=ONE_ATTEMPT))
    worker = await scene.raw(server.grpc_address, handlers=handler_names(2))
    run_id = (await api.start()).run_id
    first = await worker.task()
    break_at_commit_of(WRITE_TASK, database, "reset", committed=committed)
    assert (await worker.complete(first)).outcome == (ALREADY_DONE if committed else OK)
    assert database.breaks == 1
    second = await worker.task()
    assert (second.node_id, second.attempt) == ("n2", 1)
    assert (second.task.fencing_token > 1) == committed
    assert (await worker.complete(second)).outcome == OK
    assert attempts(await api.history(run_id)) == [1, 1]


@at_commit
@pytest.mark.parametrize("keys", [{}, {"request_id": "r"}, {"request_key": "k"}], ids=["no-key", "id", "key"])
async def test_a_start_whose_commit_or_answer_is_lost_makes_one_run_and_says_so(
    scene: Scene, committed: bool, keys: dict[str, str]
) -> None:
    """Row 48, I1."""
    server, database = await serve(scene)
    api = scene.api(server.grpc_address)
    await api.register(manifest())
    break_at_commit_of(WRITE_RUN, database, "reset", committed=committed)
    started = await api.start(**{"request_id": "", **keys})
    assert database.breaks == 1
    assert started.created
    assert [run.run_id for run in await api.list_all()] == [started.run_id]
    if keys:
        again = await api.start(**{"request_id": "", **keys})
        assert (again.run_id, again.created) == (started.run_id, "request_id" in keys)


@at_commit
async def test_a_failure_whose_commit_or_answer_is_lost_counts_once(scene: Scene, committed: bool) -> None:
    """Row 48."""
    server, database = await serve(scene)
    api = scene.api(server.grpc_address)
    await api.register(manifest(retry=SOON))
    worker = await scene.raw(server.grpc_address)
    run_id = (await api.start()).run_id
    task = await worker.task()
    break_at_commit_of(REWRITE_TASK, database, "reset", committed=committed)
    assert (await worker.fail(task)).outcome == (ALREADY_DONE if committed else OK)
    assert database.breaks == 1
    again = await worker.task()
    assert (again.task.run_id, again.attempt) == (run_id, 2)
    (step,) = (await api.get(run_id)).open_steps
    assert step.operational_failures == 1


@at_commit
async def test_a_heartbeat_whose_commit_or_answer_is_lost_is_answered_all_the_same(
    scene: Scene, committed: bool
) -> None:
    """Rows 5 and 48."""
    server, database = await serve(scene)
    api = scene.api(server.grpc_address)
    await api.register(manifest())
    worker = await scene.raw(server.grpc_address)
    await api.start()
    task = await worker.task()
    break_at_commit_of(RENEW, database, "reset", committed=committed)
    assert [result.outcome for result in await worker.heartbeat()] == [OK]
    assert database.breaks == 1
    assert (await worker.complete(task)).outcome == OK


@at_commit
async def test_a_reconnect_that_fails_at_its_commit_loses_nothing_that_was_held_or_sent(
    scene: Scene, committed: bool
) -> None:
    """Row 48: leases may have moved to a session that its worker never heard of."""
    server, database = await serve(scene)
    api = scene.api(server.grpc_address)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = await scene.raw(server.grpc_address)
    for _ in range(2):
        await api.start()
    held, lost = await worker.tasks(2)
    await worker.drop()
    break_at_commit_of(ADOPT, database, "reset", committed=committed)
    hello = worker.hello(previous_session_ids=worker.sessions, held=[held.task])
    await worker.open()
    await worker.send(hello)
    refusal = await worker.ended()
    assert refusal is not None
    assert refusal.reason == "DATABASE_UNAVAILABLE"
    await until_count(scene.dsn, WRITING, 0)  # nobody takes over a lease that is locked
    await worker.reconnect(held=[held.task])
    assert worker.welcome is not None
    assert worker.welcome.held[0].kept
    again = await worker.task()
    assert (again.task.run_id, again.attempt) == (lost.task.run_id, 1)
    assert [(await worker.complete(task)).outcome for task in (held, again)] == [OK, OK]


async def test_a_task_whose_stream_ends_between_its_claim_and_its_frame_costs_no_attempt(scene: Scene) -> None:
    """Row 48. The grace is a minute: it is not waited for."""
    server, database = await serve(scene)
    api = scene.api(server.grpc_address)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = await scene.raw(server.grpc_address, capacity=0)
    run_id = (await api.start()).run_id
    break_at_commit_of(CLAIM, database, "blackhole", committed=True)
    await worker.capacity(1)
    await eventually(lambda: leased_to(scene.dsn, worker.sessions[0]))
    await worker.drop()
    await eventually(lambda: not server.app.engine.dispatcher.sessions)
    other = await scene.raw((await scene.serve(**STAYING)).grpc_address)
    database.heal()
    task = await other.task()
    assert (task.task.run_id, task.attempt) == (run_id, 1)
    assert (await other.complete(task)).outcome == OK


async def test_a_claim_that_is_under_way_when_its_server_is_told_to_end_costs_no_attempt(scene: Scene) -> None:
    """Row 31. The answer to its commit comes when its worker has been sent away already."""
    server, database = await serve(scene, shutdown_grace=30.0)
    api, other = scene.api(server.grpc_address), await scene.serve(**STAYING)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = await scene.raw(server.grpc_address, capacity=0)
    run_id = (await api.start()).run_id
    break_at_commit_of(CLAIM, database, "blackhole", committed=True)
    await worker.capacity(1)
    await eventually(lambda: leased_to(scene.dsn, worker.sessions[0]))
    stopping = asyncio.create_task(server.stop())
    await worker.ended()
    await asyncio.wait({stopping}, timeout=0.3)
    database.heal()
    await stopping
    task = await (await scene.raw(other.grpc_address)).task()
    assert (task.task.run_id, task.attempt) == (run_id, 1)


async def test_a_next_step_whose_stream_ends_between_its_lease_and_its_frame_costs_no_attempt(scene: Scene) -> None:
    """Row 48: leased together with the completion of the step before."""
    server, database = await serve(scene)
    api = scene.api(server.grpc_address)
    await api.register(manifest(2, retry=ONE_ATTEMPT))
    worker = await scene.raw(server.grpc_address, handlers=handler_names(2))
    run_id = (await api.start()).run_id
    first = await worker.task()
    break_at_commit_of(WRITE_TASK, database, "blackhole", committed=True)
    await worker.send(pb.Complete(items=[pb.CompleteItem(task=first.task)]))
    await eventually(lambda: _second_leased(scene))
    await worker.drop()
    await eventually(lambda: not server.app.engine.dispatcher.sessions)
    other = await scene.raw((await scene.serve(**STAYING)).grpc_address, handlers=handler_names(2))
    database.heal()
    task = await other.task()
    assert (task.task.run_id, task.node_id, task.attempt) == (run_id, "n2", 1)
    assert (await other.complete(task)).outcome == OK
    assert attempts(await api.history(run_id)) == [1, 1]


async def test_connections_that_break_again_and_again_under_load_lose_nothing_and_repeat_nothing(
    scene: Scene, server_process: StartServerProcess, worker_process: StartWorker, sink: Sink
) -> None:
    """Rows 1, 5 and 48 all at once: the server's connections and the worker's stream, in turn, at any moment."""
    database = scene.proxy(database_address(scene.dsn))
    settings = {"free_redeliveries": 100, "operation_timeout": 30.0}
    server = server_process(redirected(scene.dsn, database.address), **STAYING | settings)
    stream = scene.proxy(server.grpc_address)
    api = scene.api(server.grpc_address)
    await api.register(manifest(STEPS, retry=ONE_ATTEMPT))
    worker = worker_process(stream.address, steps=STEPS)
    await until_printed(worker, "connected")
    await api.start_many([api.start_request() for _ in range(RUNS)])
    for number in range(1, 11):
        await until_count(scene.dsn, COMPLETED, RUNS * STEPS * number // 12, 30, more=True)
        if number % 2:
            await _reset_and_end(scene.dsn, database)
        else:
            stream.reset()
    await until_count(scene.dsn, ENDED, RUNS, 30)
    assert await count(scene.dsn, COMPLETED + " and attempt = 1") == RUNS * STEPS
    assert Counter(sink.effects().values()) == {ONCE: RUNS * STEPS}
    assert await asyncio.to_thread(worker.terminate) == 0
    assert worker.events("ended")[0]["lost"] == 0


async def _reset_and_end(dsn: str, database: Proxy) -> None:
    """Break the connections to the database, and wait until it has noticed: leases that are locked till then can't go
    over to the next session of a worker whose stream breaks, too.
    """
    [row] = await fetch(dsn, "select clock_timestamp() as now")
    database.reset()

    async def ended() -> bool:
        return await fetch(dsn, f"select pid from {WRITING} and xact_start < %(now)s", now=row["now"]) == []

    await eventually(ended)


async def _second_leased(scene: Scene) -> bool:
    return any(state.session and state.task_id > 2 for state in await task_states(scene.dsn))
