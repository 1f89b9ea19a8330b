"""Pauses: no new leases; what happens meanwhile is recorded, and acts at the end of the pause (semantics: ends)."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.v1 import run_pb2
from tests.engine.flows import AT_ONCE, OPERATIONAL, OpenScene, Scene, given, state_of, step
from tests.engine.rows import count, fetch
from tests.fixtures.raw_worker import OK, seconds
from tests.fixtures.waiting import eventually

ASK = {"id": "ask", "wait_signal": "go"}


async def fired(scene: Scene, n: int = 1) -> None:
    """Wait until timers were found to be due while their run is paused."""

    async def parked() -> bool:
        return await count(scene.dsn, "timer", "parked") == n

    await eventually(parked)


async def test_no_step_is_leased_while_its_run_is_paused(scene: Scene) -> None:
    await scene.worker.capacity(0)
    run_id = await scene.run(step("a"))
    assert state_of(await scene.call("Pause", run_id, reason="look into it")) == "PAUSED"
    await scene.worker.capacity(10)
    await scene.no_task()
    [parked] = (await scene.api.get(run_id)).open_steps
    assert parked.state == run_pb2.STEP_STATE_PARKED
    assert state_of(await scene.call("Resume", run_id, reason="fine")) == "PENDING"
    await scene.do("a")
    await scene.output(run_id)
    [paused], [resumed] = await scene.events(run_id, "run_paused"), await scene.events(run_id, "run_resumed")
    assert (paused.reason, resumed.reason) == ("look into it", "fine")


async def test_a_step_that_is_leased_goes_on_and_what_follows_waits(scene: Scene) -> None:
    run_id = await scene.run(step("a"), step("b"))
    a = await scene.task("a")
    await scene.call("Pause", run_id)
    assert (await scene.worker.heartbeat([a]))[0].outcome == OK
    await scene.complete(a, 5)
    assert await scene.state(run_id) == "PAUSED"
    await scene.no_task()
    await scene.call("Resume", run_id)
    b = await scene.task("b")
    assert (given(b), b.attempt) == (5, 1)
    await scene.complete(b)
    await scene.output(run_id)


async def test_a_run_whose_last_step_completes_during_a_pause_has_completed(scene: Scene) -> None:
    run_id = await scene.run(step("a"))
    a = await scene.task("a")
    await scene.call("Pause", run_id)
    await scene.complete(a, 5)
    assert await scene.output(run_id) == 5


@pytest.mark.parametrize("how", ["fail", "release", "expire"])
async def test_an_attempt_that_ends_during_a_pause_is_tried_again_after_it(scene: Scene, how: str) -> None:
    run_id = await scene.run(step("a", retry=AT_ONCE))
    a = await scene.task("a")
    await scene.call("Pause", run_id)
    if how == "fail":
        await scene.fail(a, OPERATIONAL)
    elif how == "release":
        await scene.worker.release(a)
    else:
        await scene.expire(a)

        async def taken_back() -> bool:
            return await count(scene.dsn, "task", "lease_session is null") == 1

        await eventually(taken_back)
    await scene.no_task()
    await scene.call("Resume", run_id)
    assert (await scene.task("a")).attempt == (1 if how == "release" else 2)


async def test_the_wait_before_a_retry_is_kept_over_a_pause(scene: Scene) -> None:
    run_id = await scene.run(step("a", retry={"initial_delay": "1m", "jitter": 0}))
    await scene.fail(await scene.task("a"), OPERATIONAL)
    [(before,)] = await fetch(scene.dsn, "select visible_at from task")
    await scene.call("Pause", run_id)
    await scene.call("Resume", run_id)
    assert await fetch(scene.dsn, "select visible_at, resume_at from task") == [(before, None)]
    await scene.no_task()


async def test_a_step_that_fails_for_good_during_a_pause_ends_the_run(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo=True), step("b"))
    await scene.do("a")
    b = await scene.task("b")
    await scene.call("Pause", run_id)
    await scene.fail(b)
    await scene.do("undo-a")
    await scene.failure(run_id)


# Signals and timers


async def test_a_signal_during_a_pause_is_recorded_and_taken_after_it(scene: Scene) -> None:
    run_id = await scene.run(ASK, step("a"))
    await scene.until(run_id, "WAITING")
    await scene.call("Pause", run_id)
    await scene.signal(run_id, data=1)
    assert (await scene.kinds(run_id))[-1] == "signal_received"
    assert await scene.state(run_id) == "PAUSED"
    await scene.call("Resume", run_id)
    assert given(await scene.task("a")) == 1


async def test_signals_during_a_pause_meet_their_waits_in_order(scene: Scene) -> None:
    waits = [[{"id": f"w{n}", "wait_signal": name}, step("abc"[n])] for n, name in enumerate(("x", "y", "x"))]
    run_id = await scene.run({"id": "all", "parallel": waits})
    await scene.call("Pause", run_id)
    for n, name in enumerate(("y", "x", "x", "x")):
        await scene.signal(run_id, name, n)
    await scene.call("Resume", run_id)
    assert [given(task) for task in await scene.tasks("a", "b", "c")] == [1, 0, 2]
    assert await count(scene.dsn, "signal") == 1


async def test_a_wait_that_begins_during_a_pause_takes_its_signal_after_it(scene: Scene) -> None:
    run_id = await scene.run(step("a"), ASK, {"id": "again", "wait_signal": "go"}, step("b"))
    a = await scene.task("a")
    await scene.call("Pause", run_id)
    await scene.signal(run_id, data=1)
    await scene.signal(run_id, data=2)
    await scene.complete(a)
    assert "signal_taken" not in await scene.kinds(run_id)
    await scene.call("Resume", run_id)
    assert given(await scene.task("b")) == 2


async def test_a_sleep_that_ends_during_a_pause_is_recorded_then_and_goes_on_after_it(scene: Scene) -> None:
    run_id = await scene.run({"id": "nap", "sleep": "1h"}, step("a"))
    await scene.call("Pause", run_id)
    await scene.hurry(run_id, "SLEEP")
    await fired(scene)
    assert (await scene.kinds(run_id))[-1] == "timer_fired"
    assert await scene.state(run_id) == "PAUSED"
    await scene.call("Resume", run_id)
    await scene.task("a")
    assert (await scene.kinds(run_id)).count("timer_fired") == 1
    assert await count(scene.dsn, "timer") == 0


async def test_a_start_delay_that_passes_during_a_pause_begins_the_run_after_it(scene: Scene) -> None:
    run_id = await scene.run(step("a"), start_delay=seconds(3600))
    await scene.call("Pause", run_id)
    await scene.hurry(run_id, "START_DELAY")
    await fired(scene)
    await scene.no_task()
    await scene.call("Resume", run_id)
    await scene.task("a")


@pytest.mark.parametrize("signalled", [False, True])
async def test_a_wait_that_times_out_during_a_pause_fails_after_it_unless_its_signal_came(
    scene: Scene, signalled: bool
) -> None:
    run_id = await scene.run({"id": "ask", "wait_signal": "go", "timeout": "1h"}, step("a"))
    await scene.call("Pause", run_id)
    if signalled:
        await scene.signal(run_id)
    await scene.hurry(run_id, "SIGNAL_TIMEOUT")
    await fired(scene)
    assert await scene.state(run_id) == "PAUSED"
    await scene.call("Resume", run_id)
    if signalled:
        await scene.do("a")
        await scene.output(run_id)
    else:
        assert (await scene.failure(run_id)).code == "SIGNAL_TIMEOUT"


# Timeouts never act during a pause


@pytest.mark.parametrize("kind", ["QUEUE_TIMEOUT", "TOTAL_TIMEOUT"])
async def test_the_timeouts_of_a_step_act_at_the_end_of_a_pause(scene: Scene, kind: str) -> None:
    await scene.worker.capacity(0)
    limit: dict[str, Any] = {kind.lower(): "1h"}
    run_id = await scene.run(step("a", **limit))
    await scene.call("Pause", run_id)
    await scene.hurry(run_id, kind)
    await fired(scene)
    assert (await scene.kinds(run_id))[-1] == "run_paused"
    assert await scene.state(run_id) == "PAUSED"
    await scene.call("Resume", run_id)
    assert (await scene.failure(run_id)).code == kind
    assert (await scene.kinds(run_id)).count("timer_fired") == 1


async def test_the_timeout_of_a_run_acts_at_the_end_of_a_pause(scene: Scene) -> None:
    run_id = await scene.run(step("a"), run_timeout=seconds(3600))
    a = await scene.task("a")
    await scene.call("Pause", run_id)
    await scene.hurry(run_id, "RUN_TIMEOUT")
    await fired(scene)
    assert await scene.state(run_id) == "PAUSED"
    await scene.call("Resume", run_id)
    assert await scene.state(run_id) == "ENDING"
    await scene.complete(a)
    assert (await scene.failure(run_id)).code == "RUN_TIMEOUT"


async def test_a_step_that_completes_during_a_pause_after_its_total_timeout_has_completed(scene: Scene) -> None:
    run_id = await scene.run(step("a", total_timeout="1h"), step("b"))
    a = await scene.task("a")
    await scene.call("Pause", run_id)
    await scene.hurry(run_id, "TOTAL_TIMEOUT")
    await fired(scene)
    await scene.complete(a)
    await scene.call("Resume", run_id)
    await scene.do("b")
    await scene.output(run_id)


# Pauses and ends


@pytest.mark.parametrize("leased", [False, True])
async def test_a_paused_run_can_be_cancelled_and_is_undone(scene: Scene, leased: bool) -> None:
    run_id = await scene.run(step("a", undo=True), step("b"))
    a = await scene.task("a")
    if not leased:
        await scene.worker.capacity(0)
    await scene.complete(a)
    task = await scene.task("b") if leased else None
    await scene.call("Pause", run_id)
    await scene.call("Cancel", run_id)
    await scene.worker.capacity(100)
    if task is not None:
        assert await scene.state(run_id) == "ENDING"
        await scene.complete(task)
    await scene.do("undo-a")
    await scene.failure(run_id, "CANCELLED")


async def test_a_pause_of_a_map_holds_every_item_back(open_scene: OpenScene) -> None:
    scene = await open_scene()
    run_id = await scene.run(
        {"id": "each", "map": {"over": "", "do": [step("a")], "max_parallel": 2}}, data=[1, 2, 3, 4]
    )
    one, other = await scene.worker.tasks(2)
    await scene.call("Pause", run_id)
    await scene.complete(one, given(one))
    await scene.complete(other, given(other))
    await scene.no_task()
    assert len((await scene.api.get(run_id)).open_steps) == 2
    await scene.call("Resume", run_id)
    for task in await scene.worker.tasks(2):
        await scene.complete(task, given(task))
    assert await scene.output(run_id) == [1, 2, 3, 4]


async def test_a_pause_of_a_paused_run_and_a_resume_of_one_that_goes_on_change_nothing(scene: Scene) -> None:
    run_id = await scene.run(step("a"))
    assert state_of(await scene.call("Resume", run_id)) == "PENDING"
    await scene.call("Pause", run_id)
    assert state_of(await scene.call("Pause", run_id)) == "PAUSED"
    assert (await scene.kinds(run_id)).count("run_paused") == 1
