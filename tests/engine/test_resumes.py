"""What fell due or came in during a pause acts at its end once, in its order, and none of it is lost (semantics:
pause).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.flows import Scene, step
from tests.engine.rows import count
from tests.fixtures.raw_worker import seconds
from tests.fixtures.waiting import eventually

NAP = {"id": "nap", "sleep": "1h"}
WAIT = {"id": "wait", "wait_signal": "go", "timeout": "1h"}


def _both(*branches: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": "both", "parallel": branches}


async def _until_parked(scene: Scene, timers: int) -> None:
    async def parked() -> bool:
        return await count(scene.dsn, "timer", "parked") == timers

    await eventually(parked)


async def _pause_over(scene: Scene, run_id: str, *kinds: str) -> None:
    """Pause a run, and let timers of these kinds fall due, one after the other."""
    await scene.call("Pause", run_id)
    for number, kind in enumerate(kinds, 1):
        await scene.hurry(run_id, kind)
        await _until_parked(scene, number)


@pytest.mark.parametrize("order", [("SIGNAL_TIMEOUT", "SLEEP"), ("SLEEP", "SIGNAL_TIMEOUT")])
async def test_a_sleep_that_ended_in_a_pause_goes_on_although_the_run_fails_at_its_end(
    scene: Scene, order: tuple[str, str]
) -> None:
    """After the retry; and that it fired is said once."""
    run_id = await scene.run(_both([WAIT], [NAP, step("a")]))
    await _pause_over(scene, run_id, *order)
    await scene.call("Resume", run_id)
    assert (await scene.failure(run_id)).code == "SIGNAL_TIMEOUT"
    await scene.call("Retry", run_id)
    await scene.signal(run_id, data="s")
    await scene.do("a", output="A")
    assert await scene.output(run_id) == {"wait": "s", "a": "A"}
    assert [event.node_id for event in await scene.events(run_id, "timer_fired")].count("nap") == 1


async def test_a_sleep_that_ended_in_a_pause_goes_on_although_a_step_times_out_at_its_end(scene: Scene) -> None:
    await scene.worker.capacity(0)
    run_id = await scene.run(_both([step("a", total_timeout="1h")], [NAP]))
    await _pause_over(scene, run_id, "TOTAL_TIMEOUT", "SLEEP")
    await scene.call("Resume", run_id)
    assert (await scene.failure(run_id)).code == "TOTAL_TIMEOUT"
    await scene.call("Retry", run_id)
    await scene.worker.capacity(10)
    await scene.do("a", output="A")
    await scene.output(run_id)


async def test_a_sleep_that_ended_in_a_pause_in_which_the_run_failed_fires_once(scene: Scene) -> None:
    run_id = await scene.run(_both([NAP, step("b")], [step("a")]))
    a = await scene.task("a")
    await _pause_over(scene, run_id, "SLEEP")
    await scene.fail(a)
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    for task in await scene.tasks("a", "b"):
        await scene.complete(task)
    await scene.output(run_id)
    assert (await scene.kinds(run_id)).count("timer_fired") == 1


@pytest.mark.parametrize("first", ["SLEEP", "RUN_TIMEOUT"])
async def test_timers_act_in_the_order_of_their_time_and_the_first_end_counts(scene: Scene, first: str) -> None:
    """I4: a run that completes at a resume is not failed by what fell due after that."""
    second = {"SLEEP": "RUN_TIMEOUT", "RUN_TIMEOUT": "SLEEP"}[first]
    run_id = await scene.run(NAP, data="in", run_timeout=seconds(7200))
    await _pause_over(scene, run_id, first, second)
    await scene.call("Resume", run_id)
    if first == "SLEEP":
        assert await scene.output(run_id) == "in"
    else:
        assert (await scene.failure(run_id)).code == "RUN_TIMEOUT"
    kinds = await scene.kinds(run_id)
    assert [kind for kind in kinds if kind in ("run_completed", "run_failed")] == kinds[-1:]
    assert await count(scene.dsn, "timer") == 0


async def test_signals_act_before_timers_at_the_end_of_a_pause(scene: Scene) -> None:
    """Even one that came after the wait's timeout."""
    run_id = await scene.run(WAIT)
    await _pause_over(scene, run_id, "SIGNAL_TIMEOUT")
    await scene.signal(run_id, data="s")
    await scene.call("Resume", run_id)
    assert await scene.output(run_id) == "s"
    assert await count(scene.dsn, "timer") == 0


async def test_a_run_that_completes_by_a_signal_at_its_resume_has_completed(scene: Scene) -> None:
    """I4: with its run timeout fallen due as well."""
    run_id = await scene.run({"id": "wait", "wait_signal": "go"}, run_timeout=seconds(7200))
    await _pause_over(scene, run_id, "RUN_TIMEOUT")
    await scene.signal(run_id, data="s")
    await scene.call("Resume", run_id)
    assert await scene.output(run_id) == "s"
    assert (await scene.kinds(run_id))[-1] == "run_completed"
