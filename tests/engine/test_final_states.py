"""A final state absorbs (I4): also that of a child, which keeps more of what it was than other runs."""

from __future__ import annotations

import grpc
import pytest

from tests.engine.flows import ONCE, Scene, state_of, step, workflow
from tests.engine.rows import count
from tests.fixtures.refusals import refused

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


async def _terminated_child_whose_undo_failed(scene: Scene) -> str:
    undo = {"retry": ONCE}
    await scene.api.register(workflow(step("a", undo=undo), step("b"), workflow_id="child"))
    await scene.run({"id": "sub", "workflow": "child"})
    await scene.do("a")
    await scene.fail(await scene.task("b"))
    undoing = await scene.task("undo-a")
    await scene.fail(undoing)
    run_id = undoing.task.run_id
    await scene.until(run_id, "BLOCKED")
    assert state_of(await scene.call("Terminate", run_id)) == "TERMINATED"
    return run_id


async def test_a_terminated_child_takes_no_signal_although_an_undo_of_it_had_failed(scene: Scene) -> None:
    run_id = await _terminated_child_whose_undo_failed(scene)
    with refused("ILLEGAL_TRANSITION", PRECONDITION):
        await scene.signal(run_id)
    assert (await scene.kinds(run_id))[-1] == "run_terminated"
    assert await count(scene.dsn, "signal") == 0


@pytest.mark.parametrize("call", ["Cancel", "Pause", "Resume", "Retry"])
async def test_a_terminated_child_can_not_be_steered_although_an_undo_of_it_had_failed(scene: Scene, call: str) -> None:
    run_id = await _terminated_child_whose_undo_failed(scene)
    with refused("ILLEGAL_TRANSITION", PRECONDITION):
        await scene.call(call, run_id)
    assert (await scene.kinds(run_id))[-1] == "run_terminated"
