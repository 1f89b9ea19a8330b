"""Old runs go under load: what lives is neither touched nor held up, and nobody is told of a deadlock.

Rows 23 and 24 of the field failures, smaller.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from typing import Any

import grpc

from fencepost.v1 import run_service_pb2 as pb
from fencepost_server.engine.retention import TURN, Retention
from tests.faults.scene import QUICK, SOON, STAYING, Scene, count, fetch
from tests.fixtures.api import DEADLINE
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, seconds
from tests.fixtures.refusals import decode
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually

OLD, LIVE, LOAD = 4000, 300, 300


def loop_of(server: InProcessServer, **settings: Any) -> Retention:
    """The loop of this server with settings of the test's."""
    engine = server.app.engine
    return Retention(dataclasses.replace(engine.config, **settings), engine.database)


async def keep_deleting(loop: Retention, done: asyncio.Event) -> None:
    """Turn after turn without a rest, until told."""
    while not done.is_set():
        await loop.run_once()
        await asyncio.sleep(0)


async def test_thousands_of_old_runs_go_under_load_and_whatever_lives_stays(scene: Scene) -> None:
    """Row 24: two servers delete, while others' steps are done and long timers wait."""
    servers = [await scene.serve(**STAYING) for _ in range(2)]
    api = scene.api(servers[0].grpc_address)
    await api.register(manifest(3))
    worker = await scene.raw(servers[1].grpc_address, handlers=handler_names(3), capacity=50)
    await fetch(scene.dsn, runs("old", 3, "now() - interval '40 d'"), n=OLD)
    await fetch(scene.dsn, runs("long", 6, "null"), n=LIVE)
    await fetch(
        scene.dsn,
        """insert into timer (run_id, seq, kind, namespace, fire_at, place)
           select run_id, 2, 1, namespace, now() + interval '300 d', '{}' from run where user_id = 'long'""",
    )
    loops = [loop_of(server) for server in servers]
    deleting = asyncio.gather(*(turn(loop) for loop in loops))
    started = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(LOAD)])]
    for _ in range(LOAD * 3):
        assert (await worker.complete(await worker.task())).outcome == OK
    await asyncio.wait_for(deleting, 60)
    assert await count(scene.dsn, "run where user_id = 'old'") == 0
    assert sum(loop.deleted for loop in loops) == OLD
    assert await count(scene.dsn, "run where user_id = 'long' and ended_at is null") == LIVE
    assert await count(scene.dsn, "timer") == LIVE
    for run_id in started:
        assert len(await api.history(run_id)) == 8
    assert await count(scene.dsn, "event") == LOAD * 8 + LIVE * 2


async def turn(loop: Retention) -> None:
    """One turn to its end, without a rest."""
    while await loop.run_once() != TURN:
        pass


def runs(user: str, state: int, ended_at: str) -> Any:
    """A statement that makes %(n)s runs of an old age, with two events each."""
    return f"""
        with made as (
            insert into run (run_id, namespace, workflow_id, definition_hash, user_id, request_key, priority, state,
                             node_index, next_seq, last_event_at, created_at, ended_at)
            select gen_random_uuid(), namespace, workflow_id, hash, '{user}', '', 3, {state}, 0, 3, now(),
                   now() - interval '50 d', {ended_at}
            from definition, generate_series(1, %(n)s)
            returning run_id
        )
        insert into event (run_id, seq, type, at, payload)
        select run_id, seq, 1, now(), 'null' from made, generate_series(1, 2) seq"""


async def test_runs_that_end_and_go_while_everybody_acts_on_them_deadlock_nobody(scene: Scene) -> None:
    """Row 23: results, repeats, expiries, cancels, starts by the same keys and reads, of runs that are deleted as
    soon as they have ended.
    """
    servers = [await scene.serve(**QUICK, lock_timeout=0.5, lanes=2) for _ in range(2)]
    apis = [scene.api(server.grpc_address) for server in servers]
    await apis[0].register(manifest(lease="1s", retry=SOON))
    done = asyncio.Event()
    loops = [loop_of(server, retention=0.001, retention_batch=7) for server in servers]
    deleting = [asyncio.create_task(keep_deleting(loop, done)) for loop in loops]
    workers = [await scene.raw(server.grpc_address, capacity=30) for server in servers]
    requests = [apis[0].start_request(request_key=f"k{n}", dedupe_key=f"d{n}") for n in range(100)]

    async def start(number: int) -> None:
        """The same keys, before, while and after their runs are there."""
        for _ in range(8):
            fresh = [apis[number].start_request(request_key=f"k{n}", dedupe_key=f"d{n}") for n in range(100)]
            for result in await apis[number].start_many(fresh):
                assert result.HasField("started"), result
            await asyncio.gather(*(read(number, result.started.run_id) for result in await start_again(number)))

    async def start_again(number: int) -> list[pb.BatchStartRunsResult]:
        return (await apis[number].start_many(requests))[::20]

    async def read(number: int, run_id: str) -> None:
        """It ends, and is gone at once: a caller is told one or the other."""
        try:
            await apis[number].runs.WaitRun(pb.WaitRunRequest(run_id=run_id), timeout=DEADLINE)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise

    async def work(number: int) -> None:
        """Each result twice, but for some, whose lease runs out."""
        while not done.is_set():
            try:
                task = await workers[number].task(timeout=0.3)
            except TimeoutError:
                continue
            if task.attempt == 1 and uuid.UUID(task.task.run_id).int % 5 == 0:
                continue
            assert (await workers[number].complete(task)).outcome in (OK, LEASE_LOST)
            assert (await workers[number].complete(task)).outcome in (ALREADY_DONE, LEASE_LOST)

    async def cancel(number: int) -> None:
        """Now and then the oldest run, at both servers; it may have ended or be gone already."""
        while not done.is_set():
            for run in (await apis[number].list_all())[-1:]:
                request = pb.CancelRunRequest(run_id=run.run_id, grace=seconds(0))
                try:
                    await apis[number].runs.CancelRun(request, timeout=DEADLINE)
                except grpc.aio.AioRpcError as error:
                    if decode(error).reason not in {"RUN_NOT_FOUND", "ILLEGAL_TRANSITION"}:
                        raise
            await asyncio.sleep(0.02)

    working = [asyncio.create_task(act(number)) for number in range(2) for act in (work, cancel)]
    await asyncio.wait_for(asyncio.gather(start(0), start(1)), 60)

    async def all_gone() -> bool:
        return not await count(scene.dsn, "run")

    await eventually(all_gone, 30)
    done.set()
    await asyncio.gather(*deleting, *working)
    assert await count(scene.dsn, "event") == await count(scene.dsn, "task") == 0
    assert sum(loop.deleted for loop in loops) == 100
    for server in servers:
        assert {loop.name: loop.errors for loop in server.app.engine.loops if loop.errors} == {}
