"""How runs end: causes, grace, cancel and terminate, and that the first cause wins (semantics: ends)."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from fencepost.v1 import error_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.flows import AT_ONCE, CORRECTIVE, OPERATIONAL, PERMANENT, OpenScene, Scene, state_of, step, value_of
from tests.engine.histories import check_end
from tests.engine.rows import count, fetch, until_listening
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK
from tests.fixtures.refusals import refused
from tests.fixtures.waiting import eventually

NO_GRACE = {"nanos": 0}
SHORT = {"nanos": 200_000_000}
FORK = {"id": "both", "parallel": [[step("a"), step("d")], [step("b"), step("e")], [step("c")]]}


# A step fails for good


async def test_the_failure_of_a_run_names_node_attempt_kind_code_and_message(scene: Scene) -> None:
    run_id = await scene.run(step("a", retry=AT_ONCE))
    await scene.fail(await scene.task("a"), OPERATIONAL)
    await scene.fail(await scene.task("a"), code="NO_STOCK", message="sold out")
    failure = await scene.failure(run_id)
    assert (failure.node_id, failure.attempt, failure.code, failure.message) == ("a", 2, "NO_STOCK", "sold out")
    [ended] = await scene.events(run_id, "run_failed")
    assert ended.failure == failure


async def test_the_siblings_of_a_step_that_fails_for_good_are_asked_to_stop_and_nothing_new_begins(
    scene: Scene,
) -> None:
    run_id = await scene.run(FORK)
    a, b, c = await scene.tasks("a", "b", "c")
    await scene.fail(c, code="FIRST")
    cancel = await scene.worker.next(pb.Cancel)
    assert {ref.task_id for ref in cancel.tasks} == {a.task.task_id, b.task.task_id}
    assert cancel.reason == error_pb2.ERROR_REASON_RUN_ENDED
    assert 25 < cancel.remaining.ToTimedelta().total_seconds() <= 30
    run = await scene.api.get(run_id)
    assert (state_of(run), run.failure.code) == ("ENDING", "FIRST")
    [ending] = await scene.events(run_id, "run_ending")
    assert ending.failure.code == "FIRST"
    await scene.complete(a)
    await scene.no_task()
    await scene.fail(b, code="SECOND")
    assert (await scene.failure(run_id)).code == "FIRST"
    assert len(await scene.events(run_id, "step_scheduled")) == 3


async def test_nothing_is_tried_again_while_a_run_ends(scene: Scene) -> None:
    run_id = await scene.run(FORK)
    a, b, c = await scene.tasks("a", "b", "c")
    await scene.fail(c, code="FIRST")
    await scene.fail(a, OPERATIONAL)
    await scene.fail(b, CORRECTIVE)
    assert (await scene.failure(run_id)).code == "FIRST"
    events = await scene.kinds(run_id)
    assert (events.count("step_failed"), events.count("step_retrying")) == (3, 0)


async def test_a_step_that_comes_back_unbegun_while_its_run_ends_is_over(scene: Scene) -> None:
    run_id = await scene.run(FORK)
    a, b, c = await scene.tasks("a", "b", "c")
    await scene.fail(c, code="FIRST")
    assert [result.outcome for result in await scene.worker.release(a, b)] == [OK, OK]
    assert (await scene.failure(run_id)).code == "FIRST"
    assert [event.node_id for event in await scene.events(run_id, "step_cancelled")] == ["a", "b"]


async def test_steps_that_wait_for_a_worker_or_a_retry_end_with_their_run(scene: Scene) -> None:
    await scene.worker.capacity(2)
    run_id = await scene.run(
        {"id": "both", "parallel": [[step("a")], [step("b", retry={"initial_delay": "1m"})], [step("c")]]}
    )
    tasks = {task.handler: task for task in await scene.worker.tasks(2)}
    one, other = tasks.values()
    await scene.worker.capacity(0)
    await scene.fail(other)
    await scene.until(run_id, "ENDING")
    assert len((await scene.api.get(run_id)).open_steps) == 1, "only the one that is leased is waited for"
    await scene.complete(one)
    await scene.failure(run_id)


async def test_a_corrective_failure_by_the_server_counts_in_the_grace_too(scene: Scene) -> None:
    nodes = [[step("a", output_schema={"type": "integer"})], [step("b")]]
    run_id = await scene.run({"id": "both", "parallel": nodes})
    a, b = await scene.tasks("a", "b")
    await scene.fail(b, code="FIRST")
    await scene.worker.complete(a, '"x"')
    assert (await scene.failure(run_id)).code == "FIRST"
    [failed, _] = sorted(await scene.events(run_id, "step_failed"), key=lambda event: str(event.node_id))
    assert failed.failure.code == "OUTPUT_SCHEMA_MISMATCH"


# Cancel


async def test_a_cancel_is_pushed_and_a_result_within_the_grace_counts(scene: Scene) -> None:
    run_id = await scene.run(step("a"), step("b"))
    task = await scene.task("a")
    answer = await scene.call("Cancel", run_id, reason="no longer wanted")
    assert state_of(answer) == "ENDING"
    cancel = await scene.worker.next(pb.Cancel)
    assert [ref.fencing_token for ref in cancel.tasks] == [task.task.fencing_token]
    assert cancel.reason == error_pb2.ERROR_REASON_RUN_CANCELLED
    [beat] = await scene.worker.heartbeat([task])
    assert (beat.outcome, beat.cancel_wanted) == (OK, True)
    assert (await scene.worker.complete(task, "7")).outcome == OK
    failure = await scene.failure(run_id, "CANCELLED")
    assert (failure.code, failure.message) == ("RUN_CANCELLED", "cancelled: no longer wanted")
    [completed] = await scene.events(run_id, "step_completed")
    assert value_of(completed.output) == 7
    assert (await scene.kinds(run_id))[-1] == "run_cancelled"


async def test_a_step_that_ignores_the_cancel_loses_its_lease_and_changes_nothing_any_more(scene: Scene) -> None:
    """Row 33 of the field's failures: what comes after the grace is lost; nothing follows of it."""
    run_id = await scene.run(step("a"), step("b"))
    task = await scene.task("a")
    await scene.call("Cancel", run_id, grace=SHORT)
    revoke = await scene.worker.next(pb.Revoke)
    assert [ref.task_id for ref in revoke.tasks] == [task.task.task_id]
    await scene.failure(run_id, "CANCELLED")
    before = await scene.kinds(run_id)
    assert before == ["run_started", "step_scheduled", "run_ending", "step_cancelled", "run_cancelled"]
    for report in (scene.worker.complete(task), scene.worker.fail(task), scene.worker.checkpoint(task, 1)):
        assert (await report).outcome == LEASE_LOST
    [released] = await scene.worker.release(task)
    assert released.outcome == LEASE_LOST
    assert await scene.kinds(run_id) == before
    assert await scene.state(run_id) == "CANCELLED"
    await scene.no_task()


async def test_heartbeats_do_not_prolong_the_grace(scene: Scene) -> None:
    run_id = await scene.run(step("a"))
    task = await scene.task("a")
    await scene.call("Cancel", run_id, grace=SHORT)
    while (await scene.worker.heartbeat([task]))[0].outcome == OK:
        pass
    await scene.failure(run_id, "CANCELLED")


async def test_without_a_grace_leases_are_gone_at_once(scene: Scene) -> None:
    run_id = await scene.run(step("a"))
    task = await scene.task("a")
    assert state_of(await scene.call("Cancel", run_id, grace=NO_GRACE)) == "CANCELLED"
    revoke = await scene.worker.next(pb.Revoke)
    assert (revoke.tasks[0].task_id, revoke.reason) == (task.task.task_id, error_pb2.ERROR_REASON_RUN_CANCELLED)
    assert (await scene.worker.complete(task)).outcome == LEASE_LOST


async def test_a_cancel_reaches_a_worker_that_was_away_when_it_was_pushed(scene: Scene) -> None:
    run_id = await scene.run(step("a"))
    task = await scene.task("a")
    await scene.worker.drop()
    await scene.call("Cancel", run_id)
    await scene.worker.reconnect()
    [beat] = await scene.worker.heartbeat([task])
    assert (beat.outcome, beat.cancel_wanted) == (OK, True)
    await scene.complete(task)
    await scene.failure(run_id, "CANCELLED")


async def test_a_cancel_reaches_a_worker_at_another_server(open_scene: OpenScene, dsn: str) -> None:
    """By NOTIFY; without it the answer to the next heartbeat tells (I10)."""
    scene, other = await open_scene(listen_dsn=dsn), await open_scene(listen_dsn=dsn)
    await other.worker.capacity(0)
    await eventually(lambda: other.server.app.engine.notifier.others)
    await until_listening(dsn, 2)
    run_id = await scene.run(step("a"))
    task = await scene.task("a")
    await other.call("Cancel", run_id)
    cancel = await scene.worker.next(pb.Cancel)
    assert [ref.task_id for ref in cancel.tasks] == [task.task.task_id]
    await scene.complete(task)
    await scene.failure(run_id, "CANCELLED")


async def test_a_run_that_only_waits_is_cancelled_at_once(scene: Scene) -> None:
    run_id = await scene.run({"id": "nap", "sleep": "1d"})
    assert state_of(await scene.call("Cancel", run_id)) == "CANCELLED"
    assert await count(scene.dsn, "timer") == 0
    assert await scene.kinds(run_id) == ["run_started", "timer_started", "run_cancelled"]


async def test_the_first_cause_wins(scene: Scene) -> None:
    run_id = await scene.run({"id": "both", "parallel": [[step("a")], [step("b")]]})
    a, b = await scene.tasks("a", "b")
    await scene.call("Cancel", run_id, reason="first")
    await scene.fail(a, code="LATE")
    assert state_of(await scene.call("Cancel", run_id, reason="second")) == "ENDING"
    await scene.fail(b, code="LATE")
    assert (await scene.failure(run_id, "CANCELLED")).message == "cancelled: first"


async def test_a_failure_is_not_turned_into_a_cancel(scene: Scene) -> None:
    run_id = await scene.run({"id": "both", "parallel": [[step("a")], [step("b")]]})
    a, b = await scene.tasks("a", "b")
    await scene.fail(a, code="FIRST")
    assert state_of(await scene.call("Cancel", run_id)) == "ENDING"
    await scene.complete(b)
    assert (await scene.failure(run_id)).code == "FIRST"


# Terminate


async def test_a_terminated_run_ends_at_once_and_undoes_nothing(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo=True), step("b"), {"id": "nap", "sleep": "1d"})
    await scene.do("a")
    task = await scene.task("b")
    assert state_of(await scene.call("Terminate", run_id, reason="stuck")) == "TERMINATED"
    revoke = await scene.worker.next(pb.Revoke)
    assert revoke.reason == error_pb2.ERROR_REASON_RUN_TERMINATED
    assert (await scene.worker.complete(task)).outcome == LEASE_LOST
    failure = await scene.failure(run_id, "TERMINATED")
    assert (failure.code, failure.message) == ("RUN_TERMINATED", "stuck")
    assert (await scene.kinds(run_id))[-1] == "run_terminated"
    for table in ("task", "undo", "timer", "checkpoint"):
        assert await count(scene.dsn, table) == 0


@pytest.mark.parametrize("phase", ["ENDING", "UNDOING"])
async def test_a_run_that_ends_already_can_be_terminated(scene: Scene, phase: str) -> None:
    run_id = await scene.run(step("a", undo=True), step("b"))
    await scene.do("a")
    task = await scene.task("b")
    await scene.call("Cancel", run_id)
    if phase == "UNDOING":
        await scene.complete(task)
        await scene.task("undo-a")
    assert await scene.state(run_id) == phase
    await scene.call("Terminate", run_id)
    assert await scene.state(run_id) == "TERMINATED"
    await scene.no_task()
    assert await count(scene.dsn, "task") == await count(scene.dsn, "undo") == 0


# Everything at once


async def test_whatever_ends_many_runs_at_once_each_has_one_end(open_scene: OpenScene) -> None:
    """Rows 16 and 50 of the field's failures: two servers; complete, cancel, expire, fail, terminate at once."""
    scene, other = await open_scene(cancel_grace=0.2), await open_scene(cancel_grace=0.2)
    await other.worker.capacity(0)
    await scene.worker.capacity(300)
    first = await scene.run({"id": "both", "parallel": [[step("a", undo=True)], [step("b")], [step("c")]]}, step("d"))
    requests = [scene.api.start_request() for _ in range(99)]
    runs = [first, *(result.started.run_id for result in await scene.api.start_many(requests))]
    tasks = await scene.worker.tasks(300)
    chance = random.Random(5)
    chance.shuffle(tasks)

    async def act(task: pb.Task) -> None:
        server = chance.choice((scene, other))
        what = chance.choices(["complete", "fail", "cancel", "expire", "terminate", "release"], [8, 2, 1, 1, 1, 1])[0]
        try:
            if what == "complete":
                await scene.worker.complete(task, "1")
            elif what == "fail":
                await scene.worker.fail(task, PERMANENT)
            elif what == "release":
                await scene.worker.release(task)
            elif what == "expire":
                await scene.expire(task)
            else:
                await server.call(what.capitalize(), task.task.run_id)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION  # noqa: PT017  # it is one of those that end well

    async def finish() -> None:
        while True:
            task = await scene.worker.task(timeout=60)
            await scene.worker.complete(task, "1")

    await asyncio.gather(*(act(task) for task in tasks))
    finishing = asyncio.create_task(finish())
    try:
        for run_id in runs:
            await check_end(scene.api, run_id)
    finally:
        finishing.cancel()
    assert await count(scene.dsn, "task") == await count(scene.dsn, "timer") == 0
    states = {row[0] for row in await fetch(scene.dsn, "select distinct state from run")}
    assert len(states) >= 3, "too peaceful to show anything"


@pytest.mark.parametrize("cause", ["cancel", "fail", "terminate"])
async def test_a_final_state_absorbs(scene: Scene, cause: str) -> None:
    """I4: nothing that comes afterwards is written."""
    run_id = await scene.run({"id": "both", "parallel": [[step("a")], [step("b")]]})
    a, b = await scene.tasks("a", "b")
    if cause == "fail":
        await scene.fail(b)
        await scene.fail(a)
    else:
        await scene.call(cause.capitalize(), run_id, **({"grace": NO_GRACE} if cause == "cancel" else {}))
    await scene.api.wait(run_id)
    before = await fetch(scene.dsn, "select r.*, e.* from run r join event e using (run_id) order by seq")
    for task in (a, b):
        for report in (scene.worker.complete(task, "1"), scene.worker.fail(task), scene.worker.checkpoint(task, 9)):
            assert (await report).outcome in (LEASE_LOST, ALREADY_DONE)
    for call in ("Pause", "Resume"):
        with refused("ILLEGAL_TRANSITION"):
            await scene.call(call, run_id)
    after = await fetch(scene.dsn, "select r.*, e.* from run r join event e using (run_id) order by seq")
    assert [tuple(map(str, row)) for row in after] == [tuple(map(str, row)) for row in before]
