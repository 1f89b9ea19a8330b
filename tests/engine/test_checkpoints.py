"""Numbered states of a step for its next attempt (semantics: checkpoints). What streams say: tests/session."""

from __future__ import annotations

from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.engine.flows import AT_ONCE, CORRECTIVE, OPERATIONAL, PERMANENT, OpenScene, Scene, step, value_of
from tests.engine.rows import count
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK


async def test_the_fourth_of_four_checkpoints_in_a_row_is_what_the_next_attempt_sees(scene: Scene) -> None:
    """Row 38 of the field's failures."""
    await scene.run(step("a", retry=AT_ONCE))
    for attempt in range(1, 4):
        task = await scene.task("a")
        assert task.attempt == attempt
        if attempt > 1:
            assert (task.checkpoint.number, value_of(task.checkpoint.state)) == (4 * attempt - 4, attempt - 1)
        frames = []
        for number in range(4 * attempt - 3, 4 * attempt + 1):
            item = pb.CheckpointItem(task=task.task, number=number, state=Payload(json=f"{attempt}"))
            frames.append(await scene.worker.send(pb.Checkpoint(items=[item])))
        await scene.fail(task, OPERATIONAL)
        for frame in frames:
            [result] = await scene.worker.results(frame, 1)
            assert result.outcome == OK


async def test_the_last_checkpoint_may_come_with_the_failure_and_is_applied_before_it(scene: Scene) -> None:
    await scene.run(step("a", retry=AT_ONCE))
    task = await scene.task("a")
    await scene.worker.checkpoint(task, 1, '"early"')
    await scene.fail(task, CORRECTIVE, checkpoint=(2, '"late"'), feedback="[1]")
    task = await scene.task("a")
    assert (task.checkpoint.number, value_of(task.checkpoint.state)) == (2, "late")
    assert value_of(task.feedback.feedback) == [1]


async def test_a_number_that_is_not_new_changes_nothing(scene: Scene) -> None:
    await scene.run(step("a", retry=AT_ONCE))
    task = await scene.task("a")
    assert (await scene.worker.checkpoint(task, 5, "5")).outcome == OK
    for number in (5, 4, 1):
        assert (await scene.worker.checkpoint(task, number, "0")).outcome == ALREADY_DONE
    await scene.fail(task, OPERATIONAL, checkpoint=(3, "3"))
    task = await scene.task("a")
    assert (task.checkpoint.number, value_of(task.checkpoint.state)) == (5, 5)
    assert (await scene.worker.checkpoint(task, 5, "6")).outcome == ALREADY_DONE
    assert (await scene.worker.checkpoint(task, 6, "6")).outcome == OK


async def test_a_checkpoint_by_a_lease_that_is_gone_is_lost(scene: Scene) -> None:
    """Row 10 of the field's failures."""
    await scene.run(step("a", retry=AT_ONCE))
    old = await scene.task("a")
    await scene.worker.checkpoint(old, 1, '"old"')
    await scene.expire(old)
    new = await scene.task("a")
    assert (await scene.worker.checkpoint(old, 9, '"zombie"')).outcome == LEASE_LOST
    await scene.fail(new, OPERATIONAL)
    task = await scene.task("a")
    assert (task.checkpoint.number, value_of(task.checkpoint.state)) == (1, "old")


async def test_a_checkpoint_outlives_a_worker_that_is_lost_or_gives_the_task_back(scene: Scene) -> None:
    await scene.run(step("a", retry=AT_ONCE))
    task = await scene.task("a")
    await scene.worker.checkpoint(task, 1, "1")
    await scene.expire(task)
    task = await scene.task("a")
    assert task.checkpoint.number == 1
    await scene.worker.release(task)
    assert (await scene.task("a")).checkpoint.number == 1


async def test_a_checkpoint_is_gone_with_its_step(scene: Scene) -> None:
    run_id = await scene.run(step("a"), step("b"))
    task = await scene.task("a")
    await scene.worker.checkpoint(task, 1, '"x"')
    assert await count(scene.dsn, "checkpoint") == 1
    await scene.complete(task)
    b = await scene.task("b")
    assert not b.HasField("checkpoint")
    assert await count(scene.dsn, "checkpoint") == 0
    await scene.worker.checkpoint(b, 1, '"x"')
    await scene.call("Terminate", run_id)
    assert await count(scene.dsn, "checkpoint") == 0


async def test_a_checkpoint_is_no_event(scene: Scene) -> None:
    run_id = await scene.run(step("a"))
    task = await scene.task("a")
    for number in range(1, 20):
        await scene.worker.checkpoint(task, number, str(number))
    assert await scene.kinds(run_id) == ["run_started", "step_scheduled"]
    [open_step] = (await scene.api.get(run_id)).open_steps
    assert open_step.checkpoint_number == 19


async def test_a_binary_checkpoint_comes_back_as_it_was(scene: Scene) -> None:
    await scene.run(step("a", retry=AT_ONCE))
    task = await scene.task("a")
    state = Payload(binary=b"\0\xff", metadata={"content-type": "x/y"})
    item = pb.CheckpointItem(task=task.task, number=1, state=state)
    await scene.worker.results(await scene.worker.send(pb.Checkpoint(items=[item])), 1)
    await scene.fail(task, OPERATIONAL)
    assert (await scene.task("a")).checkpoint.state == state


async def test_a_retry_of_a_failed_run_goes_on_from_the_checkpoint(scene: Scene) -> None:
    run_id = await scene.run(step("a"))
    task = await scene.task("a")
    await scene.fail(task, PERMANENT, checkpoint=(7, '"seven"'))
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    again = await scene.task("a")
    assert (again.attempt, again.checkpoint.number, value_of(again.checkpoint.state)) == (1, 7, "seven")
    assert again.task.fencing_token > task.task.fencing_token
    await scene.complete(again)
    await scene.output(run_id)
    assert await count(scene.dsn, "checkpoint") == 0


async def test_an_undo_has_checkpoints_of_its_own(open_scene: OpenScene) -> None:
    scene = await open_scene()
    run_id = await scene.run(step("a", undo={"retry": AT_ONCE}), step("b"))
    task = await scene.task("a")
    await scene.worker.checkpoint(task, 9, '"step"')
    await scene.complete(task)
    await scene.fail(await scene.task("b"))
    undo = await scene.task("undo-a")
    assert not undo.HasField("checkpoint")
    await scene.worker.checkpoint(undo, 1, '"undo"')
    await scene.fail(undo, OPERATIONAL)
    undo = await scene.task("undo-a")
    assert value_of(undo.checkpoint.state) == "undo"
    await scene.complete(undo)
    await scene.failure(run_id)
    assert await count(scene.dsn, "checkpoint") == 0
