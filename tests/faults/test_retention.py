"""Old runs go under load: what lives is neither touched nor held up, and nobody is told of a deadlock.

Rows 23 and 24 of the field failures, smaller. A million old runs with OLD_RUNS=1000000 (--log-cli-level=info tells the
figures).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Collection
from typing import Any

import grpc
import pytest

from fencepost.v1 import run_service_pb2 as pb
from fencepost.v1.worker_service_pb2 import Tasks
from fencepost_server.config import Config
from fencepost_server.engine.retention import TURN, Retention
from fencepost_server.store import retention as stored
from tests.faults.scene import QUICK, SOON, STAYING, Scene, count, fetch
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, RawWorker, seconds
from tests.fixtures.refusals import decode
from tests.fixtures.servers import InProcessServer, StartServerProcess
from tests.fixtures.waiting import eventually, paced

OLD = int(os.environ.get("OLD_RUNS", "4000"))
LIVE, LOAD, AT_ONCE, STEPS = 300, 300, 100, 3
EVENTS = STEPS * 2 + 2
KEPT = 30 * 86_400.0
ROWS = 50_000
"""So many old runs are made by one statement."""
log = logging.getLogger(__name__)


def loop_of(server: InProcessServer, **settings: Any) -> Retention:
    """The loop of this server with settings of the test's."""
    engine = server.app.engine
    return Retention(dataclasses.replace(engine.config, **settings), engine.database)


async def keep_deleting(loop: Retention, done: asyncio.Event) -> None:
    """Turn after turn without a rest, until told."""
    while not done.is_set():
        await loop.run_once()
        await paced(0)


class Load:
    """Runs of three steps that are started and done all the while, so many that there is always something to do."""

    def __init__(self, api: Api, worker: RawWorker) -> None:
        self.started: list[str] = []
        self.steps = 0
        self._api, self._worker = api, worker

    async def flow(self, done: Callable[[], bool]) -> float:
        """At least LOAD runs, and until it is done. Returns how many steps a second."""
        began, before, least = time.monotonic(), self.steps, len(self.started) + LOAD
        working = [asyncio.create_task(self._work()) for _ in range(4)]
        try:
            while len(self.started) < least or not done():
                requests = [self._api.start_request() for _ in range(AT_ONCE)]
                self.started += [result.started.run_id for result in await self._api.start_many(requests)]
                await self._until_left(AT_ONCE * STEPS)
            await self._until_left(0)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
        return (self.steps - before) / (time.monotonic() - began)

    async def _until_left(self, steps: int) -> None:
        await eventually(lambda: len(self.started) * STEPS - self.steps <= steps)

    async def _work(self) -> None:
        while True:
            tasks = (await self._worker.next(Tasks, 3600)).tasks
            results = await self._worker.complete_all([(task, "null") for task in tasks])
            assert {result.outcome for result in results} == {OK}
            self.steps += len(tasks)


async def test_thousands_of_old_runs_go_under_load_and_whatever_lives_stays(
    scene: Scene, server_process: StartServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 24: two servers delete, while a third has steps done and long timers wait."""
    keeping: dict[str, Any] = {**STAYING, "retention": 0.0}  # only the loops of this test delete
    busy = server_process(scene.dsn, **keeping)
    api = scene.api(busy.grpc_address)
    await api.register(manifest(STEPS))
    worker = await scene.raw(busy.grpc_address, handlers=handler_names(STEPS), capacity=200)
    for first in range(0, OLD, ROWS):
        await fetch(scene.dsn, runs("old", 3, "now() - interval '40 d'", EVENTS), n=min(ROWS, OLD - first))
    await fetch(scene.dsn, runs("long", 6, "null", 2), n=LIVE)
    await fetch(
        scene.dsn,
        """insert into timer (run_id, seq, kind, namespace, fire_at, place)
           select run_id, 2, 1, namespace, now() + interval '300 d', '{}' from run where user_id = 'long'""",
    )
    load = Load(api, worker)
    log.info("%.0f steps a second before", await load.flow(lambda: True))
    batches = _noted(monkeypatch)
    loops = [loop_of(await scene.serve(**keeping), retention=KEPT) for _ in range(2)]
    began = time.monotonic()
    deleting = asyncio.gather(*(turn(loop) for loop in loops))
    speed = await load.flow(deleting.done)
    await deleting
    log.info("%.0f steps a second meanwhile, %.1f s, %d batches", speed, time.monotonic() - began, len(batches))
    assert await count(scene.dsn, "run where user_id = 'old'") == 0
    assert sum(loop.deleted for loop in loops) == sum(batches) == OLD
    assert max(batches) <= Config(dsn=scene.dsn).retention_batch
    assert await count(scene.dsn, "run where user_id = 'long' and ended_at is null") == LIVE
    assert await count(scene.dsn, "timer") == LIVE
    for run_id in random.sample(load.started, LOAD):
        assert len(await api.history(run_id)) == EVENTS
    assert await count(scene.dsn, "event") == len(load.started) * EVENTS + LIVE * 2


def _noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each batch has, from now on."""
    found: list[int] = []
    plain = stored.delete

    async def noting(session: Any, run_ids: Collection[str], key_memory: float) -> None:
        found.append(len(run_ids))
        await plain(session, run_ids, key_memory)

    monkeypatch.setattr(stored, "delete", noting)
    return found


async def turn(loop: Retention) -> None:
    """One turn to its end, with the rests that a server takes."""
    rest = 0.0
    while rest != TURN:
        await paced(rest)
        rest = await loop.run_once()


def runs(user: str, state: int, ended_at: str, events: int) -> Any:
    """A statement that makes %(n)s runs of an old age, with so many events each."""
    return f"""
        with made as (
            insert into run (run_id, namespace, workflow_id, definition_hash, user_id, request_key, priority, state,
                             node_index, next_seq, last_event_at, created_at, ended_at)
            select gen_random_uuid(), namespace, workflow_id, hash, '{user}', '', 3, {state}, 0, {events} + 1, now(),
                   now() - interval '50 d' + n * interval '1 ms', {ended_at}
            from definition, generate_series(1, %(n)s) n
            returning run_id
        )
        insert into event (run_id, seq, type, at, payload)
        select run_id, seq, 1, now(), 'null' from made, generate_series(1, {events}) seq"""


async def test_runs_that_end_and_go_while_everybody_acts_on_them_deadlock_nobody(scene: Scene) -> None:
    """Row 23: results, repeats, expiries, cancels, starts by the same keys and reads, of runs that are deleted as
    soon as they have ended.
    """
    # No session ends in this test: a pong may be late.
    servers = [await scene.serve(**QUICK | {"ping_interval": 5.0, "lock_timeout": 0.5}, lanes=2) for _ in range(2)]
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
            await paced(0.02)

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
