"""Whatever an attempt that lost its lease says is LEASE_LOST and changes nothing: of steps, of branches, of undo tasks,
while another attempt runs and after it has ended, and from a new stream too (row 10 of the field's failures; I2).

tests/faults/test_sweeps.py has the worker that was frozen, and what its code hears of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.flows import AT_ONCE, HANDLERS, OPERATIONAL, PERMANENT, Scene, step
from tests.engine.rows import fetch
from tests.faults.crashing import SETTINGS
from tests.faults.scene import Scene as Stage
from tests.fixtures.raw_worker import LEASE_LOST, OK, RawWorker

RETRY = {**AT_ONCE, "max_attempts": 3}


async def everything(s: Scene, run_id: str) -> list[Any]:
    """The history of a run, and all rows that a worker could touch."""
    return [
        await s.api.history(run_id),
        await fetch(s.dsn, "select row_to_json(t)::text from task t order by run_id, task_id"),
        await fetch(s.dsn, "select row_to_json(c)::text from checkpoint c order by run_id, task_id"),
        await fetch(s.dsn, "select row_to_json(u)::text from undo u order by run_id, of_seq"),
    ]


async def assert_powerless(s: Scene, zombie: RawWorker, stale: pb.Task, run_id: str) -> None:
    """Every kind of report is refused, and nothing has changed after all of them."""
    before = await everything(s, run_id)
    results = [
        *await zombie.heartbeat([stale], progress=[(stale, '"still here"')]),
        await zombie.checkpoint(stale, 99, '"late"'),
        await zombie.complete(stale, '"late"'),
        await zombie.fail(stale, OPERATIONAL),
        await zombie.fail(stale, OPERATIONAL, checkpoint=(100, '"last"')),
        await zombie.fail(stale, PERMANENT),
        *await zombie.release(stale),
    ]
    assert {result.outcome for result in results} == {LEASE_LOST}
    assert await everything(s, run_id) == before


@pytest.mark.parametrize("kind", ["step", "branch", "undo"])
async def test_an_attempt_without_its_lease_can_change_nothing_whatever_it_says(scene: Stage, kind: str) -> None:
    server = await scene.serve(**SETTINGS)
    zombie = await scene.raw(server.grpc_address, handlers=HANDLERS, capacity=10)
    s = Scene(server, scene.api(server.grpc_address), zombie, scene.dsn)
    if kind == "branch":
        run_id = await s.run({"id": "both", "parallel": [[step("a", retry=RETRY)], [{"id": "w", "wait_signal": "go"}]]})
        stale = await s.task("a")
    elif kind == "step":
        run_id = await s.run(step("a", retry=RETRY), step("b"))
        stale = await s.task("a")
    else:
        run_id = await s.run(step("a", undo={"retry": RETRY}), step("b"))
        await s.do("a")
        await s.fail(await s.task("b"))
        stale = await s.task("undo-a")
    assert (await zombie.checkpoint(stale, 1, '"early"')).outcome == OK
    await zombie.capacity(0)
    await s.expire(stale)
    worker = await scene.raw(server.grpc_address, handlers=HANDLERS, capacity=10)
    task = await worker.task()
    assert (task.task.task_id, task.attempt, task.checkpoint.number) == (stale.task.task_id, 2, 1)
    assert task.task.fencing_token > stale.task.fencing_token
    await assert_powerless(s, zombie, stale, run_id)
    welcome = await zombie.reconnect(held=[stale.task])
    assert [result.kept for result in welcome.held] == [False]
    await assert_powerless(s, zombie, stale, run_id)
    assert (await worker.checkpoint(task, 2, '"mine"')).outcome == OK
    assert (await worker.complete(task, '"done"')).outcome == OK
    await assert_powerless(s, zombie, stale, run_id)
