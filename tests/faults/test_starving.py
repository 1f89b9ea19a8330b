"""A sweep, the timers and the outbox go past what they can't change: a thousand rows that come first in order and whose
runs somebody has locked do not keep those behind them waiting (row 19 of the field's failures).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.flows import step, workflow
from tests.engine.rows import execute, fetch, holding
from tests.faults.scene import STAYING, Scene, asleep, until_count
from tests.fixtures.api import Api

STUCK, FREE = 1000, 10
SETTINGS: dict[str, Any] = {**STAYING, "sweep_batch": 100, "timer_batch": 100, "lane_batch": 100}
LOCK = "select 1 from run where run_id = any(%s) for update"


async def _started(api: Api, n: int) -> list[str]:
    run_ids: list[str] = []
    while len(run_ids) < n:
        some = await api.start_many([api.start_request() for _ in range(min(500, n - len(run_ids)))])
        run_ids += [result.started.run_id for result in some]
    return run_ids


async def test_leases_that_cannot_be_ended_do_not_hide_those_behind_them(scene: Scene) -> None:
    server = await scene.serve(**SETTINGS)
    api = scene.api(server.grpc_address)
    await api.register(workflow(step("a", retry={"max_attempts": 2, "initial_delay": "1h", "max_delay": "1h"})))
    run_ids = await _started(api, STUCK + FREE)
    worker = await scene.raw(server.grpc_address, handlers=["a"], capacity=STUCK + FREE)
    await worker.tasks(STUCK + FREE, 30)
    stuck, free = run_ids[:STUCK], run_ids[STUCK:]
    async with holding(scene.dsn, LOCK, [stuck]):
        async with asleep(server.app.engine.sweeper.loop):
            await _expire(scene.dsn, stuck, 20)
            await _expire(scene.dsn, free, 10)
        await until_count(scene.dsn, "task where operational_failures = 1", FREE, 30)
        failed = await fetch(scene.dsn, "select run_id::text from task where operational_failures = 1")
        assert {run_id for (run_id,) in failed} == set(free)
    await until_count(scene.dsn, "task where operational_failures = 1", STUCK + FREE, 30)


async def _expire(dsn: str, run_ids: list[str], ago: int) -> None:
    statement = "update task set lease_expires_at = clock_timestamp() - %s * interval '1 s' where run_id = any(%s)"
    assert await execute(dsn, statement, [ago, run_ids]) == len(run_ids)


@pytest.mark.parametrize("behind", ["timers", "messages"])
async def test_timers_and_messages_of_locked_runs_do_not_hide_those_behind_them(scene: Scene, behind: str) -> None:
    """Messages are those of the parents whose children the timers let end."""
    server = await scene.serve(**SETTINGS)
    api = scene.api(server.grpc_address)
    nap = {"id": "nap", "sleep": "1h"}
    await api.register(workflow(nap, workflow_id="kid"))
    await api.register(workflow({"id": "kid", "workflow": "kid"} if behind == "messages" else nap))
    run_ids = await _started(api, STUCK + FREE)
    await until_count(scene.dsn, "timer", STUCK + FREE, 30)
    stuck, free = run_ids[:STUCK], run_ids[STUCK:]
    async with holding(scene.dsn, LOCK, [stuck]):
        async with asleep(server.app.engine.timers.loop):
            await _due(scene.dsn, stuck, 20)
            await _due(scene.dsn, free, 10)
        await until_count(scene.dsn, "run where ended_at is not null and parent_run_id is null", FREE, 30)
        ended = await fetch(
            scene.dsn, "select run_id::text from run where ended_at is not null and parent_run_id is null"
        )
        assert {run_id for (run_id,) in ended} == set(free)
    await until_count(scene.dsn, "run where ended_at is not null and parent_run_id is null", STUCK + FREE, 30)


async def _due(dsn: str, run_ids: list[str], ago: int) -> None:
    """Let the timers of runs, and of their children, be due for so many seconds."""
    statement = """
        update timer t set fire_at = clock_timestamp() - %s * interval '1 s' from run r
        where r.run_id = t.run_id and coalesce(r.parent_run_id, r.run_id) = any(%s)
    """
    assert await execute(dsn, statement, [ago, run_ids]) == len(run_ids)
