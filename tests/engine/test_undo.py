"""Undoing what a run has done (semantics: ends, undo)."""

from __future__ import annotations

import grpc
import pytest

from fencepost.v1 import definition_service_pb2 as definition_pb
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.flows import AT_ONCE, ONCE, OPERATIONAL, PERMANENT, OpenScene, Scene, given, step, value_of
from tests.engine.rows import count, fetch
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK
from tests.fixtures.refusals import refused

UNFINISHED = {"undo_unfinished": True}


async def undone(scene: Scene, run_id: str) -> list[str]:
    """The nodes that were undone, in order."""
    return [event.node_id for event in await scene.events(run_id, "undo_completed")]


async def test_completed_steps_are_undone_in_reverse_order_one_at_a_time(scene: Scene) -> None:
    """I8."""
    nodes = [step("a", undo=True), step("b"), step("c", undo=True), step("d", undo=True), step("e")]
    run_id = await scene.run(*nodes, data="in")
    for handler in "abcd":
        await scene.do(handler, output=handler.upper())
    await scene.fail(await scene.task("e"))
    for handler, data, output in (("undo-d", "C", "D"), ("undo-c", "B", "C"), ("undo-a", "in", "A")):
        assert await scene.state(run_id) == "UNDOING"
        task = await scene.task(handler)
        assert task.kind == pb.TASK_KIND_UNDO
        assert (given(task), value_of(task.undo_output), task.unfinished) == (data, output, False)
        await scene.no_task()
        assert len((await scene.api.get(run_id)).open_steps) == 1
        await scene.complete(task)
    failure = await scene.failure(run_id)
    assert (failure.code, failure.node_id) == ("TEST", "e")
    assert await undone(scene, run_id) == ["d", "c", "a"]
    assert await count(scene.dsn, "undo") == await count(scene.dsn, "task") == 0


async def test_a_run_that_has_nothing_to_undo_ends_at_once(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo=True), step("b"))
    await scene.fail(await scene.task("a"))
    await scene.failure(run_id)
    assert (await scene.kinds(run_id))[-2:] == ["step_failed", "run_failed"]


async def test_a_run_that_completes_is_not_undone(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo=True))
    await scene.do("a")
    await scene.output(run_id)
    await scene.no_task()
    assert await count(scene.dsn, "undo") == 0


async def test_what_can_be_undone_is_written_with_the_completion(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo=True), step("b"))
    await scene.do("a")
    await scene.task("b")
    at = await scene.seq_of(run_id, "step_completed", "a")
    assert await fetch(scene.dsn, "select of_seq, output_seq, unfinished from undo") == [(at, at, False)]


# Attempts and tokens


async def test_an_undo_has_attempts_and_retries_of_its_own(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo={"retry": {**AT_ONCE, "max_attempts": 3}}, retry=AT_ONCE), step("b"))
    first = await scene.task("a")
    await scene.fail(first, OPERATIONAL)
    second = await scene.task("a")
    await scene.complete(second)
    await scene.fail(await scene.task("b"))
    tokens = [first.task.fencing_token, second.task.fencing_token]
    for attempt in (1, 2):
        task = await scene.task("undo-a")
        assert task.attempt == attempt
        tokens.append(task.task.fencing_token)
        await scene.fail(task, OPERATIONAL)
    last = await scene.task("undo-a")
    assert last.attempt == 3
    tokens.append(last.task.fencing_token)
    assert tokens == sorted(set(tokens)), "the tokens of an undo go on from its step's (I3)"
    await scene.complete(last)
    await scene.failure(run_id)
    events = await scene.kinds(run_id)
    assert (events.count("undo_retrying"), events.count("undo_completed")) == (1, 1)


async def test_an_undo_is_repeated_and_fenced_as_steps_are(scene: Scene) -> None:
    """I2, I6."""
    run_id = await scene.run(step("a", undo={"retry": AT_ONCE}), step("b"))
    await scene.do("a")
    await scene.fail(await scene.task("b"))
    old = await scene.task("undo-a")
    await scene.expire(old)
    new = await scene.task("undo-a")
    assert (await scene.worker.complete(old)).outcome == LEASE_LOST
    assert (await scene.worker.complete(new, "1")).outcome == OK
    assert (await scene.worker.complete(new, "1")).outcome == ALREADY_DONE
    await scene.failure(run_id)
    assert (await scene.kinds(run_id)).count("undo_completed") == 1


async def test_the_undo_of_a_step_is_known_by_the_steps_key(scene: Scene) -> None:
    """So that what a step did under a key in another system can be found, and a refund is told from the charge."""
    run_id = await scene.run(step("a", undo={"retry": AT_ONCE}), step("b"))
    task = await scene.task("a")
    await scene.complete(task)
    await scene.fail(await scene.task("b"))
    undo = await scene.task("undo-a")
    assert undo.step_idempotency_key == task.idempotency_key
    assert undo.idempotency_key != task.idempotency_key
    await scene.fail(undo, OPERATIONAL)
    again = await scene.task("undo-a")
    assert (again.step_idempotency_key, again.idempotency_key) == (task.idempotency_key, undo.idempotency_key)
    await scene.complete(again)
    await scene.failure(run_id)


# Undo that fails


async def blocked(scene: Scene) -> tuple[str, pb.Task]:
    """A run whose second undo has failed for good, and that task."""
    nodes = [step("a", undo={"retry": ONCE}), step("b", undo={"retry": ONCE}), step("c", undo=True), step("d")]
    run_id = await scene.run(*nodes)
    await scene.do("a", "b", "c")
    await scene.fail(await scene.task("d"), code="FIRST")
    await scene.do("undo-c")
    task = await scene.task("undo-b")
    await scene.fail(task, code="BROKEN")
    await scene.until(run_id, "BLOCKED")
    return run_id, task


async def test_an_undo_that_fails_for_good_blocks_the_run_and_nothing_else_is_undone(scene: Scene) -> None:
    run_id, _ = await blocked(scene)
    run = await scene.api.get(run_id)
    assert (run.failure.code, run.failure.node_id) == ("UNDO_FAILED", "b")
    assert "BROKEN" in run.failure.message
    assert run.open_steps == []
    await scene.no_task()
    assert (await scene.kinds(run_id))[-2:] == ["undo_failed", "run_blocked"]
    assert not run.HasField("end_time")


async def test_a_retry_undoes_the_step_again_and_then_the_others(scene: Scene) -> None:
    run_id, failed = await blocked(scene)
    await scene.call("Retry", run_id, reason="repaired")
    assert await scene.state(run_id) == "UNDOING"
    task = await scene.task("undo-b")
    assert task.attempt == 1
    assert task.task.fencing_token > failed.task.fencing_token
    assert (await scene.worker.complete(failed)).outcome == LEASE_LOST
    await scene.complete(task)
    await scene.do("undo-a")
    assert (await scene.failure(run_id)).code == "FIRST"
    assert await undone(scene, run_id) == ["c", "b", "a"]


async def test_an_operator_may_skip_a_step_that_can_not_be_undone_with_a_reason(scene: Scene) -> None:
    run_id, _ = await blocked(scene)
    await scene.call("Retry", run_id, skip_undo=True, reason="refunded by hand")
    await scene.do("undo-a")
    assert (await scene.failure(run_id)).code == "FIRST"
    [skipped] = await scene.events(run_id, "undo_skipped")
    assert (skipped.node_id, skipped.reason) == ("b", "refunded by hand")
    assert skipped.of_seq == await scene.seq_of(run_id, "step_completed", "b")
    assert await undone(scene, run_id) == ["c", "a"]


async def test_skipping_the_last_undo_ends_the_run(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo={"retry": ONCE}), step("b"))
    await scene.do("a")
    await scene.task("b")
    await scene.call("Cancel", run_id, grace={"seconds": 0})
    await scene.fail(await scene.task("undo-a"))
    await scene.until(run_id, "BLOCKED")
    await scene.call("Retry", run_id, skip_undo=True, reason="no matter")
    await scene.failure(run_id, "CANCELLED")


async def test_there_is_nothing_to_skip_where_no_undo_has_failed(scene: Scene) -> None:
    run_id = await scene.run(step("a"))
    await scene.fail(await scene.task("a"))
    await scene.failure(run_id)
    with refused("ILLEGAL_TRANSITION", grpc.StatusCode.FAILED_PRECONDITION):
        await scene.call("Retry", run_id, skip_undo=True, reason="r")


async def test_an_undo_may_fail_again_after_a_retry(scene: Scene) -> None:
    run_id, _ = await blocked(scene)
    for _ in range(2):
        await scene.call("Retry", run_id)
        await scene.fail(await scene.task("undo-b"))
        await scene.until(run_id, "BLOCKED")
    await scene.call("Terminate", run_id)
    assert await scene.state(run_id) == "TERMINATED"
    assert await count(scene.dsn, "undo") == 0


async def test_an_undo_that_never_reaches_a_worker_does_not_stop_the_run_for_ever(open_scene: OpenScene) -> None:
    scene = await open_scene(free_redeliveries=0)
    run_id = await scene.run(step("a", undo={"retry": ONCE}), step("b"))
    await scene.do("a")
    await scene.fail(await scene.task("b"))
    await scene.worker.release(await scene.task("undo-a"))
    run = await scene.until(run_id, "BLOCKED")
    assert run.failure.code == "UNDO_FAILED"


# Steps that have not completed


async def test_a_step_that_may_have_acted_without_completing_is_undone_first(scene: Scene) -> None:
    nodes = [step("a", undo=True), step("b", undo=UNFINISHED)]
    run_id = await scene.run(*nodes)
    await scene.do("a")
    await scene.fail(await scene.task("b"))
    undo = await scene.task("undo-b")
    assert undo.unfinished
    assert not undo.HasField("undo_output")
    await scene.complete(undo)
    await scene.do("undo-a")
    await scene.failure(run_id)
    scheduled = await scene.events(run_id, "undo_scheduled")
    assert scheduled[0].of_seq == await scene.seq_of(run_id, "step_failed", "b")


async def test_unfinished_steps_are_undone_before_all_that_completed_later(scene: Scene) -> None:
    """B may have acted and is over first; A completes after it, and is undone after it."""
    fork = [[step("a", undo=True)], [step("b", undo=UNFINISHED)]]
    run_id = await scene.run({"id": "both", "parallel": fork})
    a, b = await scene.tasks("a", "b")
    await scene.fail(b)
    await scene.complete(a)
    undo = await scene.task("undo-b")
    assert undo.unfinished
    await scene.complete(undo)
    await scene.do("undo-a")
    await scene.failure(run_id)


@pytest.mark.parametrize("undo", [True, UNFINISHED])
async def test_a_step_that_nobody_took_is_not_undone(scene: Scene, undo: bool | dict[str, bool]) -> None:
    await scene.worker.capacity(0)
    run_id = await scene.run(step("a", undo=undo))
    await scene.call("Cancel", run_id)
    await scene.failure(run_id, "CANCELLED")
    assert "undo_scheduled" not in await scene.kinds(run_id)


async def test_a_step_that_fails_without_undo_unfinished_is_not_undone(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo=True))
    await scene.fail(await scene.task("a"))
    await scene.failure(run_id)
    assert "undo_scheduled" not in await scene.kinds(run_id)


async def test_a_step_whose_lease_was_revoked_at_the_end_of_its_grace_may_have_acted(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo=UNFINISHED))
    task = await scene.task("a")
    await scene.call("Cancel", run_id, grace={"nanos": 100_000_000})
    undo = await scene.task("undo-a")
    assert undo.unfinished
    assert undo.task.fencing_token > task.task.fencing_token
    assert (await scene.worker.complete(task)).outcome == LEASE_LOST
    await scene.complete(undo)
    await scene.failure(run_id, "CANCELLED")


# Together with others


async def test_a_branch_that_completes_in_its_grace_is_undone_first(scene: Scene) -> None:
    """Row 52 of the field's failures: undo does not begin while a sibling is still at work."""
    fork = {"id": "both", "parallel": [[step("a")], [step("b", undo=True)]]}
    run_id = await scene.run(step("c", undo=True), fork)
    await scene.do("c")
    a, b = await scene.tasks("a", "b")
    await scene.fail(a)
    assert await scene.state(run_id) == "ENDING"
    await scene.no_task()
    await scene.complete(b, "late")
    undo = await scene.task("undo-b")
    assert value_of(undo.undo_output) == "late"
    await scene.no_task()
    await scene.complete(undo)
    await scene.do("undo-c")
    assert (await scene.failure(run_id)).node_id == "a"
    assert await undone(scene, run_id) == ["b", "c"]


async def test_items_of_a_map_are_undone_in_reverse_order_of_their_completion(scene: Scene) -> None:
    each = {"id": "each", "map": {"over": "", "do": [step("a", undo=True)]}}
    run_id = await scene.run(each, step("b"), data=[0, 1, 2, 3])
    tasks = sorted(await scene.worker.tasks(4), key=lambda task: int(given(task)))
    for n in (2, 0, 3, 1):
        await scene.complete(tasks[n], f"out {n}")
    await scene.fail(await scene.task("b"))
    for n in (1, 3, 0, 2):
        undo = await scene.task("undo-a")
        assert (given(undo), value_of(undo.undo_output)) == (n, f"out {n}")
        await scene.complete(undo)
    await scene.failure(run_id)


async def test_a_cancelled_run_is_undone_too(scene: Scene) -> None:
    run_id = await scene.run(step("a", undo=True), {"id": "nap", "sleep": "1d"})
    await scene.do("a")
    await scene.until(run_id, "WAITING")
    await scene.call("Cancel", run_id, reason="changed my mind")
    assert (await scene.api.get(run_id)).ending
    await scene.do("undo-a")
    failure = await scene.failure(run_id, "CANCELLED")
    assert (failure.code, failure.message) == ("RUN_CANCELLED", "cancelled: changed my mind")


async def test_the_definition_of_a_run_that_is_undone_may_be_removed(scene: Scene) -> None:
    """Row 51 of the field's failures: removal does not fence its own undo."""
    run_id = await scene.run(step("a", undo=True), step("b"))
    await scene.do("a")
    b = await scene.task("b")
    run = await scene.api.get(run_id)
    request = definition_pb.RemoveDefinitionRequest(workflow_id="wf", definition_hash=run.definition_hash)
    await scene.api.definitions.RemoveDefinition(request, timeout=30)
    assert (await scene.worker.complete(b)).outcome == LEASE_LOST
    undo = await scene.task("undo-a")
    await scene.complete(undo)
    assert (await scene.failure(run_id)).code == "DEFINITION_REMOVED"
    assert (await scene.events(run_id, "undo_completed"))[0].node_id == "a"
    assert (await scene.api.get(run_id)).failure.kind == PERMANENT
