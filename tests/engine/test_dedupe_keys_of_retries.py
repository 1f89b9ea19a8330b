"""Runs with one dedupe key that are retried at the same moment: one of them goes on (semantics: starting a run)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

import grpc
import pytest

from fencepost_server.store import extras
from fencepost_server.store.extras import Need
from fencepost_server.store.pipeline import Session
from tests.engine.flows import OpenScene, Scene, state_of, step, workflow
from tests.engine.rows import count, fetch, holding
from tests.fixtures.refusals import decode
from tests.fixtures.waiting import eventually, until_blocked

RUNS = 6
HOLD = "select 1 from run where run_id = %s for update"
HELD_UP = {"lock_timeout": 20.0, "statement_timeout": 30.0, "batch_timeout": 40.0, "idle_in_transaction_timeout": 30.0}
"""A transaction waits as long as a test keeps it."""


async def test_of_failed_runs_with_one_key_that_are_retried_in_one_batch_one_goes_on(open_scene: OpenScene) -> None:
    """As when an operator retries all of a workflow that failed."""
    scene = await open_scene(lanes=1, **HELD_UP)
    await scene.api.register(workflow({"id": "wait", "wait_signal": "go"}, workflow_id="other"))
    other = await scene.start(workflow_id="other")
    runs = await _failed_runs(scene)
    lane = scene.server.app.engine.lanes[0]
    async with holding(scene.dsn, HOLD, [other]):
        signalling = asyncio.create_task(scene.signal(other, "x"))
        await until_blocked(scene.dsn)
        retries = [asyncio.create_task(_retry(scene, run_id)) for run_id in runs]
        await eventually(lambda: lane.depth == RUNS)
    await signalling
    answers = await asyncio.gather(*retries)
    assert sorted(answers) == [*["KEY_TAKEN"] * (RUNS - 1), "RUNNING"]
    [winner] = [run_id for run_id, answer in zip(runs, answers, strict=True) if answer == "RUNNING"]
    assert await count(scene.dsn, "run", "dedupe_key = 'k' and ended_at is null") == 1
    assert await fetch(scene.dsn, "select run_id::text from run_key where key = 'k'") == [(winner,)]
    assert await scene.start(dedupe_key="k") == winner, "it holds the key"
    await scene.do("a")
    await scene.output(winner)
    await scene.no_task()


async def test_a_run_that_is_retried_in_the_batch_in_which_it_fails_keeps_its_key(open_scene: OpenScene) -> None:
    """As when an operator asks again and again for one that fails again and again."""
    scene = await open_scene(lanes=1, **HELD_UP)
    await scene.api.register(workflow({"id": "wait", "wait_signal": "go"}, workflow_id="other"))
    await scene.api.register(workflow(step("a")))
    other = await scene.start(workflow_id="other")
    run_id = await scene.start(dedupe_key="k")
    a = await scene.task("a")
    lane = scene.server.app.engine.lanes[0]
    async with holding(scene.dsn, HOLD, [other]):
        signalling = asyncio.create_task(scene.signal(other, "x"))
        await until_blocked(scene.dsn)
        failing = asyncio.create_task(scene.fail(a))
        await eventually(lambda: lane.depth == 1)
        retrying = asyncio.create_task(_retry(scene, run_id))
        await eventually(lambda: lane.depth == 2)
    await asyncio.gather(signalling, failing)
    assert await retrying == "RUNNING"
    assert await scene.start(dedupe_key="k") == run_id, "it holds the key"
    await scene.do("a")
    await scene.output(run_id)


async def test_a_key_whose_run_ends_while_a_retry_asks_for_it_is_the_retried_runs(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held when it was to be taken, and free when it was asked by whom: no run is named that holds it."""
    scene, other = await open_scene(), await open_scene(**HELD_UP)
    await other.worker.capacity(0)
    await scene.api.register(workflow(step("a")))
    run_id = await scene.start(dedupe_key="k")
    await scene.fail(await scene.task("a"))
    await scene.failure(run_id)
    holder = await scene.start(dedupe_key="k")
    a = await scene.task("a")
    reached, go = asyncio.Event(), asyncio.Event()
    read = extras.read

    async def held(session: Session, needs: Sequence[Need], now: datetime) -> list[extras.Rows]:
        if any(need.statement == "key_holder" for need in needs) and not reached.is_set():
            reached.set()
            await go.wait()
        return await read(session, needs, now)

    monkeypatch.setattr(extras, "read", held)
    retrying = asyncio.create_task(_retry(other, run_id))
    await asyncio.wait_for(reached.wait(), 30)
    await scene.complete(a)
    await scene.output(holder)
    go.set()
    assert await retrying == "RUNNING"
    assert await fetch(scene.dsn, "select run_id::text from run_key where key = 'k'") == [(run_id,)]


async def _failed_runs(scene: Scene) -> list[str]:
    await scene.api.register(workflow(step("a")))
    runs = []
    for _ in range(RUNS):
        run_id = await scene.start(dedupe_key="k")
        await scene.fail(await scene.task("a"))
        await scene.failure(run_id)
        runs.append(run_id)
    return runs


async def _retry(scene: Scene, run_id: str) -> str:
    """The state that the answer names, or the reason of the refusal."""
    try:
        return state_of(await scene.call("Retry", run_id))
    except grpc.aio.AioRpcError as error:
        return decode(error).reason
