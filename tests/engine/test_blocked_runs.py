"""Operators are told of runs that wait for a person: a warning in the log, at most one a second, and a counter."""

from __future__ import annotations

import logging

import pytest

from fencepost_server.engine.blocked import BlockedRuns
from tests.engine.flows import ONCE, OpenScene, Scene, step, workflow
from tests.engine.rows import execute
from tests.fixtures.waiting import eventually


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was told of blocked runs."""
    return [record.getMessage() for record in caplog.records if "is BLOCKED" in record.getMessage()]


async def until_counted(scene: Scene, count: int) -> None:
    """The run is told of a moment after others can see it."""

    async def counted() -> bool:
        found: int = scene.server.app.engine.blocked.count
        return found == count

    await eventually(counted)


async def test_a_run_whose_undo_has_failed_is_warned_of(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    run_id = await scene.run(step("a", undo={"retry": ONCE}), step("b"))
    await scene.do("a")
    await scene.fail(await scene.task("b"))
    assert scene.server.app.engine.blocked.count == 0
    await scene.fail(await scene.task("undo-a"))
    await scene.until(run_id, "BLOCKED")
    await until_counted(scene, 1)
    assert lines(caplog) == [f"run {run_id} of workflow wf is BLOCKED and waits for a person: UNDO_FAILED"]


async def test_a_run_whose_step_nobody_can_begin_is_warned_of(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    run_id = await scene.run(step("a", retry=ONCE))
    for _ in range(4):
        await scene.worker.release(await scene.task("a"))
    await scene.until(run_id, "BLOCKED")
    await until_counted(scene, 1)
    assert lines(caplog) == [f"run {run_id} of workflow wf is BLOCKED and waits for a person: NOT_DELIVERED"]


async def test_a_run_that_waits_and_whose_definition_can_not_be_read_is_warned_of_once(
    open_scene: OpenScene, caplog: pytest.LogCaptureFixture
) -> None:
    scene = await open_scene()
    await scene.api.register(workflow({"id": "nap", "sleep": "1h"}))
    run_id = await scene.start()
    await scene.server.stop()
    await execute(scene.dsn, "update definition set manifest = '{\"newer\": 1}'")
    scene = await open_scene()
    await scene.hurry(run_id, "SLEEP")
    await scene.until(run_id, "BLOCKED")
    await scene.no_task()  # the timer is found again meanwhile
    await until_counted(scene, 1)
    assert lines(caplog) == [f"run {run_id} of workflow wf is BLOCKED and waits for a person: UNKNOWN_DEFINITION"]


async def test_many_runs_are_told_in_one_line_a_second_and_none_is_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost_server.engine.blocked._PAUSE", 0.2)
    runs = BlockedRuns()
    with caplog.at_level(logging.WARNING, "fencepost.engine"):
        runs.add([])
        runs.add([("r1", "wf", "C"), ("r2", "wf", "C")])
        runs.add([("r3", "wf", "C")])
        runs.add([("r4", "wf", "C"), ("r5", "wf", "C")])
        assert [line.removesuffix(" more)").split(" (and ")[1:] for line in lines(caplog)] == [["1"]]

        async def rest_told() -> bool:
            return len(lines(caplog)) == 2

        await eventually(rest_told)
        assert lines(caplog)[1].startswith("run r3 of workflow wf ")
        assert lines(caplog)[1].endswith(": C (and 2 more)")
        assert runs.count == 5
        runs.add([("r6", "wf", "C")])
        runs.flush()
        assert lines(caplog)[-1].startswith("run r6 ")
        runs.flush()
        assert len(lines(caplog)) == 3, "flushed, there is nothing more to tell"
