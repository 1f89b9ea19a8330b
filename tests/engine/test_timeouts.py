"""What has a limit and passes it: attempts, waits in the queue, steps, runs (semantics: timeouts)."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.v1 import error_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.flows import AT_ONCE, LATER, OPERATIONAL, PERMANENT, OpenScene, Scene, step, workflow
from tests.engine.rows import count, fetch
from tests.fixtures.raw_worker import LEASE_LOST, OK, seconds
from tests.fixtures.waiting import eventually


async def test_three_attempts_that_all_hang_time_out_once_each_and_then_the_run_fails(scene: Scene) -> None:
    """Row 11 of the field's failures: the limit of one attempt hits no other."""
    run_id = await scene.run(step("a", timeout="300ms", retry={**AT_ONCE, "max_attempts": 3}))
    leases = []
    for attempt in (1, 2, 3):
        task = await scene.task("a")
        leases.append(task.task)
        assert task.attempt == attempt
        assert 0 < task.attempt_timeout.ToTimedelta().total_seconds() <= 0.3
        revoke = await scene.worker.next(pb.Revoke)
        assert [ref.fencing_token for ref in revoke.tasks] == [task.task.fencing_token]
        assert revoke.reason == error_pb2.ERROR_REASON_ATTEMPT_TIMEOUT
    failure = await scene.failure(run_id)
    assert (failure.code, failure.kind, failure.attempt) == ("ATTEMPT_TIMEOUT", OPERATIONAL, 3)
    [failed] = await scene.events(run_id, "step_failed")
    assert failed.operational_failures == 3
    for lease in leases:
        assert (await scene.worker.complete(lease)).outcome == LEASE_LOST


async def test_heartbeats_do_not_prolong_an_attempt(scene: Scene) -> None:
    run_id = await scene.run(step("a", timeout="600ms", lease="1s", retry={"max_attempts": 1}))
    task = await scene.task("a")
    while (await scene.worker.heartbeat([task]))[0].outcome == OK:
        pass
    assert (await scene.failure(run_id)).code == "ATTEMPT_TIMEOUT"


# In the queue


async def test_a_step_that_nobody_takes_in_its_queue_timeout_fails_for_good(scene: Scene) -> None:
    await scene.api.register(workflow(step("a", queue="nobody", queue_timeout="200ms")))
    run_id = await scene.start()
    failure = await scene.failure(run_id)
    assert (failure.code, failure.kind, failure.node_id) == ("QUEUE_TIMEOUT", PERMANENT, "a")
    assert await scene.kinds(run_id) == [
        "run_started",
        "step_scheduled",
        "timer_fired",
        "step_failed",
        "run_failed",
    ]
    assert await count(scene.dsn, "task") == await count(scene.dsn, "timer") == 0


@pytest.mark.parametrize("state", ["leased", "retrying"])
async def test_a_step_that_was_taken_once_has_no_queue_timeout_any_more(scene: Scene, state: str) -> None:
    run_id = await scene.run(step("a", queue_timeout="1h", retry=LATER))
    task = await scene.task("a")
    if state == "retrying":
        await scene.fail(task, OPERATIONAL)
    await scene.hurry(run_id, "QUEUE_TIMEOUT")

    async def gone() -> bool:
        return await count(scene.dsn, "timer") == 0

    await eventually(gone)
    assert (await scene.api.get(run_id)).open_steps
    assert "timer_fired" not in await scene.kinds(run_id)


# In total


async def test_a_step_that_takes_longer_than_its_total_timeout_is_revoked_and_fails_for_good(scene: Scene) -> None:
    run_id = await scene.run(step("a", total_timeout="300ms"), step("b"))
    task = await scene.task("a")
    revoke = await scene.worker.next(pb.Revoke)
    assert [ref.task_id for ref in revoke.tasks] == [task.task.task_id]
    assert revoke.reason == error_pb2.ERROR_REASON_TOTAL_TIMEOUT
    failure = await scene.failure(run_id)
    assert (failure.code, failure.kind, failure.attempt) == ("TOTAL_TIMEOUT", PERMANENT, 1)
    assert (await scene.worker.complete(task)).outcome == LEASE_LOST


async def test_the_total_timeout_counts_over_all_attempts_and_the_waits_between(scene: Scene) -> None:
    run_id = await scene.run(step("a", total_timeout="1h", retry=LATER))
    task = await scene.task("a")
    ends_at = await fetch(scene.dsn, "select fire_at from timer")
    await scene.fail(task, OPERATIONAL)
    assert await fetch(scene.dsn, "select fire_at from timer") == ends_at
    await scene.hurry(run_id, "TOTAL_TIMEOUT")
    failure = await scene.failure(run_id)
    assert failure.code == "TOTAL_TIMEOUT"
    [failed] = await scene.events(run_id, "step_failed")
    assert failed.operational_failures == 1


async def test_a_step_that_ended_in_time_leaves_no_timer_behind(scene: Scene) -> None:
    limits: dict[str, Any] = {"queue_timeout": "1h", "total_timeout": "1h"}
    run_id = await scene.run(step("a", **limits), step("b", **limits))
    await scene.do("a")
    task = await scene.task("b")
    timers = await fetch(scene.dsn, "select distinct seq from timer")
    assert timers == [(task.task.task_id,)]
    await scene.complete(task)
    await scene.output(run_id)
    assert await count(scene.dsn, "timer") == 0


# Of the run


async def test_a_run_that_passes_its_timeout_fails_and_undoes_what_it_did(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo=True), {"id": "nap", "sleep": "1h"}, run_timeout=seconds(3600))
    await scene.do("a")
    await scene.hurry(run_id, "RUN_TIMEOUT")
    await scene.do("undo-a")
    failure = await scene.failure(run_id)
    assert (failure.code, failure.kind, failure.node_id) == ("RUN_TIMEOUT", PERMANENT, "")
    assert "3600 s" in failure.message
    assert "timer_fired" in await scene.kinds(run_id)
    assert await count(scene.dsn, "timer") == 0


async def test_a_step_under_way_has_its_grace_when_its_run_times_out(open_scene: OpenScene) -> None:
    scene = await open_scene(cancel_grace=0.5)
    run_id = await scene.run(step("a"), run_timeout=seconds(0.3))
    task = await scene.task("a")
    cancel = await scene.worker.next(pb.Cancel)
    assert [ref.task_id for ref in cancel.tasks] == [task.task.task_id]
    revoke = await scene.worker.next(pb.Revoke)
    assert [ref.task_id for ref in revoke.tasks] == [task.task.task_id]
    assert (await scene.failure(run_id)).code == "RUN_TIMEOUT"


async def test_the_timeout_of_a_run_counts_from_its_start_delay_included(scene: Scene) -> None:
    run_id = await scene.run(step("a"), start_delay=seconds(3600), run_timeout=seconds(0.2))
    assert (await scene.failure(run_id)).code == "RUN_TIMEOUT"


async def test_a_run_that_ends_in_time_does_not_time_out(scene: Scene) -> None:
    run_id = await scene.run(step("a"), run_timeout=seconds(3600))
    await scene.do("a")
    await scene.output(run_id)
    assert await count(scene.dsn, "timer") == 0


async def test_an_attempt_may_take_as_long_as_a_manifest_may_say(scene: Scene) -> None:
    """A year: more milliseconds than 32 bits hold."""
    year = {"timeout": "365d"}
    run_id = await scene.run(step("a", retry=AT_ONCE, undo=year, **year), step("b"))
    await scene.fail(await scene.task("a"), OPERATIONAL)
    a = await scene.task("a")
    assert a.attempt_timeout.seconds == 365 * 86_400
    assert [result.outcome for result in await scene.worker.heartbeat([a])] == [OK]
    await scene.complete(a)
    await scene.fail(await scene.task("b"))
    await scene.do("undo-a")
    await scene.failure(run_id)
