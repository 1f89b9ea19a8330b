"""RetryRun: a FAILED run that was not undone, or a BLOCKED one, goes on from where it stopped (semantics: ends)."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from fencepost.v1 import run_pb2
from tests.engine.flows import (
    AT_ONCE,
    CORRECTIVE,
    ONCE,
    OPERATIONAL,
    PERMANENT,
    OpenScene,
    Scene,
    given,
    state_of,
    step,
    workflow,
)
from tests.engine.rows import count, execute, fetch
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, seconds
from tests.fixtures.refusals import refused
from tests.fixtures.waiting import eventually

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


async def test_a_failed_run_goes_on_from_the_failed_step_with_fresh_attempts(scene: Scene) -> None:
    run_id = await scene.run(step("a"), step("b", retry={**AT_ONCE, "max_attempts": 2}), step("c"))
    await scene.do("a", output="A")
    tokens = []
    for attempt in (1, 2):
        task = await scene.task("b")
        assert task.attempt == attempt
        tokens.append(task.task.fencing_token)
        await scene.fail(task, OPERATIONAL)
    await scene.failure(run_id)
    assert state_of(await scene.call("Retry", run_id, reason="provider is back")) == "RUNNING"
    for attempt in (1, 2):
        task = await scene.task("b")
        assert (task.attempt, given(task)) == (attempt, "A")
        tokens.append(task.task.fencing_token)
        if attempt == 1:
            await scene.fail(task, OPERATIONAL)
        else:
            await scene.complete(task)
    assert tokens == sorted(set(tokens)), "an operator's retry goes on from the step's last token (I3)"
    await scene.do("c", output="C")
    assert await scene.output(run_id) == "C"
    [retried] = await scene.events(run_id, "run_retried")
    assert retried.reason == "provider is back"
    run = await scene.api.get(run_id)
    assert not run.HasField("failure")
    assert await count(scene.dsn, "stopped_task") == 0


async def test_what_was_reported_before_the_retry_is_still_known(scene: Scene) -> None:
    """I2, I6."""
    run_id = await scene.run(step("a"))
    old = await scene.task("a")
    await scene.fail(old)
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    new = await scene.task("a")
    assert new.idempotency_key == old.idempotency_key
    assert (await scene.worker.complete(old)).outcome == LEASE_LOST
    assert (await scene.worker.fail(old, PERMANENT)).outcome == ALREADY_DONE
    await scene.complete(new)
    await scene.output(run_id)


async def test_a_run_may_be_retried_again_and_again(scene: Scene) -> None:
    run_id = await scene.run(step("a", retry=ONCE))
    for _ in range(3):
        await scene.fail(await scene.task("a"))
        await scene.failure(run_id)
        await scene.call("Retry", run_id)
    await scene.do("a", output=1)
    assert await scene.output(run_id) == 1
    assert (await scene.kinds(run_id)).count("run_retried") == 3


async def test_a_step_is_told_again_what_was_wrong_with_it(scene: Scene) -> None:
    run_id = await scene.run(step("a"))
    await scene.fail(await scene.task("a"), CORRECTIVE, feedback='"too short"')
    task = await scene.task("a")
    assert task.feedback.feedback.json == '"too short"'
    await scene.fail(task)
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    assert (await scene.task("a")).feedback.feedback.json == '"too short"'


# Siblings


async def test_siblings_that_were_stopped_run_again_and_completed_ones_do_not(scene: Scene) -> None:
    """I5: what completed in the grace keeps its result, and what follows it is run."""
    names = ("a", "b", "c", "d")
    fork = {"id": "all", "parallel": [[step("a"), step("e")], *([step(name)] for name in names[1:])]}
    run_id = await scene.run(fork, step("f"))
    a, b, c, d = await scene.tasks(*names)
    await scene.complete(d, "D")
    await scene.fail(b)
    await scene.complete(a, "A")
    await scene.worker.release(c)
    await scene.failure(run_id)
    await scene.no_task()
    await scene.call("Retry", run_id)
    again_b, again_c, e = await scene.tasks("b", "c", "e")
    assert given(e) == "A"
    for task, old in ((again_b, b), (again_c, c)):
        assert task.attempt == 1
        assert task.task.task_id == old.task.task_id
        assert task.task.fencing_token > old.task.fencing_token
    for task in (e, again_b, again_c):
        await scene.complete(task, task.handler.upper())
    f = await scene.task("f")
    assert given(f) == {"e": "E", "b": "B", "c": "C", "d": "D"}
    await scene.complete(f)
    await scene.output(run_id)
    completed = [event.node_id for event in await scene.events(run_id, "step_completed")]
    assert sorted(completed) == sorted("abcdef")


async def test_items_of_a_map_go_on_where_they_were(scene: Scene) -> None:
    each = {"id": "each", "map": {"over": "", "do": [step("a"), step("b")], "max_parallel": 3}}
    run_id = await scene.run(each, data=[0, 1, 2, 3, 4])
    first = sorted(await scene.worker.tasks(3), key=lambda task: int(given(task)))
    await scene.fail(first[1])
    await scene.complete(first[0], "a0")
    await scene.worker.release(first[2])
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    done = {"a": 0, "b": 0}
    while done["b"] < 5:
        task = await scene.worker.task()
        done[task.handler] += 1
        await scene.complete(task, f"a{given(task)}" if task.handler == "a" else f"b-{given(task)}")
    assert await scene.output(run_id) == [f"b-a{n}" for n in range(5)]
    assert done == {"a": 4, "b": 5}


async def test_a_join_that_was_stopped_at_its_last_branch_is_joined_once(scene: Scene) -> None:
    run_id = await scene.run({"id": "both", "parallel": [[step("a")], [step("b")]]}, step("c"))
    a, b = await scene.tasks("a", "b")
    await scene.fail(a)
    await scene.complete(b, "B")
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    await scene.do("a", output="A")
    c = await scene.task("c")
    assert given(c) == {"a": "A", "b": "B"}
    await scene.complete(c)
    await scene.output(run_id)
    assert (await scene.kinds(run_id)).count("scope_closed") == 1


async def test_a_sleep_and_a_wait_beside_the_failed_step_go_on(scene: Scene) -> None:
    fork = {
        "id": "all",
        "parallel": [
            [step("a")],
            [{"id": "nap", "sleep": "1h"}, step("b")],
            [{"id": "ask", "wait_signal": "go"}, step("c")],
        ],
    }
    run_id = await scene.run(fork)
    await scene.fail(await scene.task("a"))
    await scene.failure(run_id)
    await scene.hurry(run_id, "SLEEP")
    await scene.no_task()
    await scene.call("Retry", run_id)
    a, b = await scene.tasks("a", "b")
    await scene.signal(run_id, data=3)
    c = await scene.task("c")
    assert given(c) == 3
    for task in (a, b, c):
        await scene.complete(task, 0)
    assert await scene.output(run_id) == {"a": 0, "b": 0, "c": 0}


async def test_a_signal_that_came_while_the_run_ended_is_taken_after_the_retry(scene: Scene) -> None:
    run_id = await scene.run(
        {"id": "all", "parallel": [[step("a")], [step("b")], [{"id": "ask", "wait_signal": "go"}]]}
    )
    a, b = await scene.tasks("a", "b")
    await scene.fail(a)
    await scene.signal(run_id, data="early")
    await scene.complete(b)
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    await scene.do("a")
    assert (await scene.output(run_id))["ask"] == "early"


async def test_the_timeouts_of_a_step_begin_anew(scene: Scene) -> None:
    run_id = await scene.run(step("a", total_timeout="1h"))
    await scene.fail(await scene.task("a"))
    await scene.failure(run_id)
    assert await count(scene.dsn, "timer") == 0
    await scene.call("Retry", run_id)
    await scene.task("a")
    await scene.hurry(run_id, "TOTAL_TIMEOUT")
    assert (await scene.failure(run_id)).code == "TOTAL_TIMEOUT"


# Nodes that are no steps


async def test_a_wait_that_timed_out_waits_again(scene: Scene) -> None:
    run_id = await scene.run({"id": "ask", "wait_signal": "go", "timeout": "1h"})
    await scene.hurry(run_id, "SIGNAL_TIMEOUT")
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    assert await scene.state(run_id) == "WAITING"
    await scene.signal(run_id, data=1)
    assert await scene.output(run_id) == 1


async def test_a_node_that_could_not_take_its_input_fails_again(scene: Scene) -> None:
    run_id = await scene.run({"id": "each", "map": {"over": "/x", "do": [step("a")]}})
    for _ in range(2):
        assert (await scene.failure(run_id)).code == "INVALID_NODE_INPUT"
        await scene.call("Retry", run_id)
    assert len(await scene.events(run_id, "node_failed")) == 3


# Blocked


async def test_a_step_that_nobody_could_begin_gets_fresh_attempts(open_scene: OpenScene) -> None:
    scene = await open_scene(free_redeliveries=0)
    run_id = await scene.run(step("a", retry=ONCE))
    task = await scene.task("a")
    await scene.worker.release(task)
    run = await scene.until(run_id, "BLOCKED")
    assert (run.failure.code, run.open_steps[0].state) == ("NOT_DELIVERED", run_pb2.STEP_STATE_PARKED)
    await scene.no_task()
    assert state_of(await scene.call("Retry", run_id)) in ("PENDING", "RUNNING")
    again = await scene.task("a")
    assert again.attempt == 1
    assert again.task.fencing_token > task.task.fencing_token
    await scene.complete(again)
    await scene.output(run_id)
    assert "run_retried" in await scene.kinds(run_id)


async def test_a_blocked_run_can_be_cancelled(open_scene: OpenScene) -> None:
    scene = await open_scene(free_redeliveries=0)
    run_id = await scene.run(step("b", undo=True), step("a", retry=ONCE))
    await scene.do("b")
    await scene.worker.release(await scene.task("a"))
    await scene.until(run_id, "BLOCKED")
    await scene.call("Cancel", run_id)
    await scene.do("undo-b")
    await scene.failure(run_id, "CANCELLED")


# Refused


async def test_a_run_that_was_undone_can_not_be_retried(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo=True), step("b"))
    await scene.do("a")
    await scene.fail(await scene.task("b"))
    await scene.do("undo-a")
    await scene.failure(run_id)
    with refused("ALREADY_UNDONE", PRECONDITION):
        await scene.call("Retry", run_id)


@pytest.mark.parametrize("call", ["Cancel", "Terminate"])
async def test_a_run_that_was_ended_by_somebody_can_not_be_retried(scene: Scene, call: str) -> None:
    run_id = await scene.run({"id": "nap", "sleep": "1d"})
    await scene.call(call, run_id)
    with refused("ILLEGAL_TRANSITION", PRECONDITION) as refusal:
        await scene.call("Retry", run_id)
    assert refusal.error.metadata == {"state": await scene.state(run_id), "event": "RETRY"}


async def test_a_run_that_timed_out_can_not_be_retried(scene: Scene) -> None:
    run_id = await scene.run({"id": "nap", "sleep": "1d"}, run_timeout=seconds(3600))
    await scene.hurry(run_id, "RUN_TIMEOUT")
    await scene.failure(run_id)
    with refused("ILLEGAL_TRANSITION", PRECONDITION):
        await scene.call("Retry", run_id)
    assert await count(scene.dsn, "timer") == 0


async def test_the_run_that_has_the_dedupe_key_now_is_in_the_way(scene: Scene) -> None:
    run_id = await scene.run(step("a"), dedupe_key="k")
    await scene.fail(await scene.task("a"))
    await scene.failure(run_id)
    other = await scene.start(dedupe_key="k")
    assert other != run_id
    with refused("KEY_TAKEN", PRECONDITION) as refusal:
        await scene.call("Retry", run_id)
    assert refusal.error.metadata["existing_run_id"] == other
    await scene.do("a")
    await scene.output(other)
    await scene.call("Retry", run_id)
    assert await scene.start(dedupe_key="k") == run_id, "it holds its key again"
    await scene.do("a")
    await scene.output(run_id)
    assert await scene.start(dedupe_key="k") not in (run_id, other)


async def test_a_retry_and_a_start_that_want_the_same_key_at_once_have_one_winner(open_scene: OpenScene) -> None:
    scene, other = await open_scene(), await open_scene()
    await other.worker.capacity(0)
    await scene.api.register(workflow(step("a")))
    for round_ in range(10):
        run_id = await scene.start(dedupe_key=f"k{round_}")
        await scene.fail(await scene.task("a"))
        await scene.failure(run_id)
        starting = asyncio.create_task(other.start(dedupe_key=f"k{round_}"))
        try:
            await scene.call("Retry", run_id)
            retried = True
        except grpc.aio.AioRpcError:
            retried = False
        started = await starting
        assert retried == (started == run_id)
        await scene.do("a")
        await scene.output(started)
        assert await count(scene.dsn, "task") == 0


async def test_a_retry_that_is_repeated_retries_once(scene: Scene) -> None:
    run_id = await scene.run(step("a"))
    await scene.fail(await scene.task("a"))
    await scene.failure(run_id)
    for _ in range(2):
        assert state_of(await scene.call("Retry", run_id, request_id="r")) == "RUNNING"
    assert (await scene.kinds(run_id)).count("run_retried") == 1
    await scene.do("a")
    await scene.output(run_id)
    assert state_of(await scene.call("Retry", run_id, request_id="r")) == "RUNNING"


async def test_a_retried_run_can_be_paused_cancelled_and_waited_for_as_any_other(scene: Scene) -> None:
    run_id = await scene.run(step("a"))
    await scene.fail(await scene.task("a"))
    await scene.failure(run_id)
    await scene.worker.capacity(0)
    await scene.call("Retry", run_id)
    run = await scene.api.get(run_id)
    assert not run.HasField("end_time")
    await scene.call("Pause", run_id)
    await scene.call("Resume", run_id)
    await scene.worker.capacity(1)
    task = await scene.task("a")
    await scene.call("Cancel", run_id)
    assert (await scene.worker.complete(task)).outcome == OK
    await scene.failure(run_id, "CANCELLED")


# Children


async def test_a_child_that_was_cancelled_with_its_parent_is_started_anew(scene: Scene) -> None:
    """Row 45 of the field's failures: one more child, by one more event; the old one is never heard of again."""
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    run_id = await scene.run({"id": "both", "parallel": [[step("a")], [{"id": "sub", "workflow": "child"}]]})
    a, b = await scene.tasks("a", "b")
    await scene.fail(a)
    await scene.until(b.task.run_id, "ENDING")
    await scene.complete(b)
    await scene.failure(b.task.run_id, "CANCELLED")
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    again_a, again_b = await scene.tasks("a", "b")
    assert again_b.task.run_id != b.task.run_id
    await scene.complete(again_a, 1)
    await scene.complete(again_b, 2)
    assert await scene.output(run_id) == {"a": 1, "sub": 2}
    assert len(await scene.events(run_id, "child_scheduled")) == 2


async def test_a_child_that_completed_while_its_parent_ended_is_not_run_again(scene: Scene) -> None:
    """I5, of children: one that its parent terminates may have completed before it hears of that."""
    await scene.api.register(workflow(step("b"), {"id": "nap", "sleep": "1ms"}, workflow_id="child"))
    node = {"id": "sub", "workflow": "child", "on_parent_end": "abandon"}
    run_id = await scene.run({"id": "both", "parallel": [[step("a")], [node]]})
    a, b = await scene.tasks("a", "b")
    await scene.complete(b, 2)
    await scene.until(b.task.run_id, "COMPLETED")

    async def heard() -> bool:
        return "child_ended" in await scene.kinds(run_id)

    await eventually(heard)
    await scene.fail(a)
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    await scene.do("a", output=1)
    assert await scene.output(run_id) == {"a": 1, "sub": 2}
    assert len(await scene.events(run_id, "child_scheduled")) == 1


async def none_waits(scene: Scene) -> bool:
    """No message is on its way."""
    return await count(scene.dsn, "message") == 0


@pytest.mark.parametrize("when", ["before", "after", "failed before", "gone"])
async def test_a_retry_takes_up_the_child_that_was_left_alone(scene: Scene, when: str) -> None:
    """It waits for it again, or finds what has become of it; one that is not kept any more is started anew."""
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    node = {"id": "sub", "workflow": "child", "on_parent_end": "abandon"}
    run_id = await scene.run({"id": "both", "parallel": [[step("a")], [node]]})
    a, b = await scene.tasks("a", "b")
    await scene.fail(a)
    await scene.failure(run_id)
    if when == "before":
        await scene.complete(b, 2)
        await scene.output(b.task.run_id)
    elif when == "failed before":
        await scene.fail(b, code="SAD")
        await scene.failure(b.task.run_id)
    elif when == "gone":
        await scene.call("Terminate", b.task.run_id)
        await eventually(lambda: none_waits(scene))  # no run goes before what it has to tell was told
        await execute(scene.dsn, "delete from run where run_id = %s", [b.task.run_id])
    await scene.call("Retry", run_id)
    if when == "after":
        await scene.complete(b, 2)
    if when == "gone":
        again_a, again_b = await scene.tasks("a", "b")
        await scene.complete(again_a, 1)
        await scene.complete(again_b, 2)
    elif when != "failed before":
        await scene.do("a", output=1)
    if when == "failed before":  # and so the run fails again at once
        failure = await scene.failure(run_id)
        assert failure.code == "CHILD_FAILED"
        assert "SAD" in failure.message
    else:
        assert await scene.output(run_id) == {"a": 1, "sub": 2}
    assert len(await scene.events(run_id, "child_scheduled")) == (2 if when == "gone" else 1)


async def test_the_history_of_a_retried_run_says_where_its_timeouts_belong(scene: Scene) -> None:
    each = {"id": "each", "map": {"over": "", "do": [step("a", total_timeout="1h")]}}
    run_id = await scene.run(each, data=[0, 1])
    for task in await scene.worker.tasks(2):
        await scene.fail(task)
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    await scene.worker.tasks(2)
    places = await fetch(scene.dsn, "select place->>'item' from timer where place->>'scope' <> '0' order by 1")
    assert places == [("0",), ("1",)]
