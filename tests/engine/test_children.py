"""Child runs (semantics: children): started once, told to end, heard of, undone."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from fencepost.v1 import run_pb2
from fencepost.v1.payload_pb2 import Payload
from fencepost_server.engine.timers import Outbox
from tests.engine.flows import (
    CORRECTIVE,
    ONCE,
    OPERATIONAL,
    PERMANENT,
    OpenScene,
    Scene,
    given,
    state_of,
    step,
    value_of,
    workflow,
)
from tests.engine.rows import count, execute, fetch
from tests.fixtures.raw_worker import LEASE_LOST
from tests.fixtures.refusals import refused
from tests.fixtures.waiting import eventually

CHILD: dict[str, Any] = {"id": "sub", "workflow": "child"}


async def family(scene: Scene, *nodes: dict[str, Any], child: dict[str, Any] | None = None, **top: Any) -> str:
    """Register a child workflow of one step b, and start a parent with these nodes."""
    await scene.api.register(workflow(child or step("b"), workflow_id="child", **top))
    return await scene.run(*nodes, data="in")


async def child_of(scene: Scene, run_id: str) -> run_pb2.Run:
    """The newest child of a run, when it is there."""

    async def found() -> run_pb2.Run | None:
        return next(iter(await scene.api.list_all(parent_run_id=run_id)), None)

    run = await eventually(found)
    assert run is not None
    return run


async def test_a_child_gets_the_nodes_input_and_gives_the_nodes_output(scene: Scene) -> None:
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    await scene.api.register(workflow(step("a"), CHILD, step("c")))
    run_id = await scene.start(user_id="u", priority=1)
    await scene.do("a", output=[1])
    b = await scene.task("b")
    assert (b.workflow_id, given(b), b.user_id) == ("child", [1], "u")
    assert await scene.state(run_id) == "WAITING"
    child = await scene.api.get(b.task.run_id)
    assert (child.parent_run_id, child.priority) == (run_id, 1)
    [wait] = (await scene.api.get(run_id)).open_waits
    assert wait.child_run_id == child.run_id
    await scene.complete(b, "out")
    c = await scene.task("c")
    assert given(c) == "out"
    await scene.complete(c, 1)
    assert await scene.output(run_id) == 1
    [ended] = await scene.events(run_id, "child_ended")
    assert (ended.child_run_id, ended.state) == (child.run_id, run_pb2.RUN_STATE_COMPLETED)
    assert value_of(ended.output) == "out"
    assert await count(scene.dsn, "child") == await count(scene.dsn, "message") == 0


async def test_the_id_of_a_child_is_fixed_by_the_event_that_schedules_it(scene: Scene) -> None:
    run_id = await family(scene, CHILD)
    b = await scene.task("b")
    at = await scene.seq_of(run_id, "child_scheduled", "sub")
    assert b.task.run_id == str(uuid.uuid5(uuid.UUID(run_id), str(at)))


async def test_children_of_the_items_of_a_map_are_joined_in_order(scene: Scene) -> None:
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    run_id = await scene.run({"id": "each", "map": {"over": "", "do": [CHILD]}}, data=[1, 2, 3])
    for task in reversed(await scene.worker.tasks(3)):
        await scene.complete(task, given(task) * 10)
    assert await scene.output(run_id) == [10, 20, 30]


async def test_a_child_may_have_a_binary_input_and_output(scene: Scene) -> None:
    await scene.api.register(workflow({"id": "nap", "sleep": "1ms"}, workflow_id="child"))
    await scene.api.register(workflow(CHILD))
    request = scene.api.start_request()
    request.input.CopyFrom(Payload(binary=b"\0\xff"))
    run_id = (await scene.api.runs.StartRun(request, timeout=30)).run_id
    assert (await scene.api.wait(run_id)).output.binary == b"\0\xff"


async def test_a_child_at_another_server_is_heard_of(open_scene: OpenScene) -> None:
    scene, other = await open_scene(), await open_scene()
    run_id = await family(scene, CHILD, CHILD | {"id": "sub2"})
    for _ in range(2):
        task = None
        while task is None:
            for each in (scene, other):
                held = list(each.worker.held.values())
                if held:
                    task = held[0]
                    await each.worker.complete(task, "1")
            await scene.worker.sync()
    assert await scene.output(run_id) == 1


# Failure


@pytest.mark.parametrize("kind", [PERMANENT, OPERATIONAL, CORRECTIVE])
async def test_the_kind_and_the_cause_of_a_childs_failure_survive(
    scene: Scene, kind: run_pb2.FailureKind.ValueType
) -> None:
    """Row 37 of the field's failures: not tried again by the parent either."""
    retry = {"max_attempts": 1, "max_corrective_attempts": 1}
    run_id = await family(scene, step("a", undo=True), CHILD, child=step("b", retry=retry))
    await scene.do("a")
    b = await scene.task("b")
    await scene.fail(b, kind, code="NO_STOCK", message="sold out")
    await scene.do("undo-a")
    failure = await scene.failure(run_id)
    assert (failure.code, failure.kind, failure.node_id) == ("CHILD_FAILED", kind, "sub")
    for word in (b.task.run_id, "FAILED", "NO_STOCK", "sold out"):
        assert word in failure.message
    [ended] = await scene.events(run_id, "child_ended")
    assert (ended.state, ended.failure) == (run_pb2.RUN_STATE_FAILED, failure)


@pytest.mark.parametrize("call", ["Cancel", "Terminate"])
async def test_a_child_that_is_ended_by_somebody_fails_its_parent(scene: Scene, call: str) -> None:
    run_id = await family(scene, CHILD, child={"id": "nap", "sleep": "1d"})
    child = await child_of(scene, run_id)
    await scene.call(call, child.run_id)
    failure = await scene.failure(run_id)
    assert failure.code == "CHILD_FAILED"
    assert ("CANCELLED" if call == "Cancel" else "TERMINATED") in failure.message


async def test_a_child_of_a_workflow_that_nobody_registered_fails_its_node(scene: Scene) -> None:
    run_id = await scene.run({"id": "sub", "workflow": "nobody"})
    failure = await scene.failure(run_id)
    assert (failure.code, failure.kind) == ("CHILD_FAILED", PERMANENT)
    assert failure.message.startswith("the child could not be started: UNKNOWN_WORKFLOW: ")
    assert "child run" not in failure.message, "there is none"
    assert await scene.api.list_all(parent_run_id=run_id) == []
    assert await count(scene.dsn, "message") == 0


async def test_a_child_whose_input_breaks_its_schema_fails_its_node(scene: Scene) -> None:
    run_id = await family(scene, step("a"), CHILD, input_schema={"type": "integer"})
    await scene.do("a", output="no integer")
    failure = await scene.failure(run_id)
    assert failure.message.startswith("the child could not be started: INPUT_SCHEMA_MISMATCH: ")
    assert await scene.api.list_all(parent_run_id=run_id) == []


async def test_the_output_of_a_child_has_to_fit_the_nodes_schema(scene: Scene) -> None:
    run_id = await family(scene, CHILD | {"output_schema": {"type": "integer"}})
    await scene.do("b", output="x")
    failure = await scene.failure(run_id)
    assert (failure.code, failure.node_id) == ("OUTPUT_SCHEMA_MISMATCH", "sub")


# The end of the parent


async def test_a_cancelled_parent_cancels_its_child_and_waits_for_it(scene: Scene) -> None:
    run_id = await family(scene, CHILD, child=step("b", undo=True))
    b = await scene.task("b")
    await scene.call("Cancel", run_id)
    child = await scene.until(b.task.run_id, "ENDING")
    assert await scene.state(run_id) == "ENDING"
    await scene.complete(b)
    await scene.do("undo-b")
    failure = await scene.failure(child.run_id, "CANCELLED")
    assert run_id in failure.message
    await scene.failure(run_id, "CANCELLED")
    [ended] = await scene.events(run_id, "child_ended")
    assert ended.state == run_pb2.RUN_STATE_CANCELLED


async def test_a_parent_that_fails_terminates_a_child_that_is_to_be_terminated(scene: Scene) -> None:
    fork = {"id": "both", "parallel": [[CHILD | {"on_parent_end": "terminate"}], [step("a")]]}
    run_id = await family(scene, fork, child=step("b", undo=True))
    a, b = await scene.tasks("a", "b")
    await scene.fail(a)
    assert (await scene.failure(b.task.run_id, "TERMINATED")).code == "RUN_TERMINATED"
    assert (await scene.worker.complete(b)).outcome == LEASE_LOST
    assert (await scene.failure(run_id)).node_id == "a"


async def test_an_abandoned_child_goes_on_and_its_parent_does_not_wait(scene: Scene) -> None:
    run_id = await family(scene, CHILD | {"on_parent_end": "abandon"})
    b = await scene.task("b")
    assert state_of(await scene.call("Cancel", run_id)) == "CANCELLED"
    await scene.complete(b, 1)
    assert await scene.output(b.task.run_id) == 1

    async def told() -> bool:
        return await count(scene.dsn, "message") == 0

    await eventually(told)
    assert (await scene.kinds(run_id))[-1] == "run_cancelled"


@pytest.mark.parametrize(
    ("policy", "state"), [("cancel", "CANCELLED"), ("terminate", "TERMINATED"), ("abandon", "PENDING")]
)
async def test_a_terminated_parent_takes_its_children_along_as_chosen(scene: Scene, policy: str, state: str) -> None:
    run_id = await family(scene, CHILD | {"on_parent_end": policy})
    b = await scene.task("b")
    await scene.call("Terminate", run_id)
    assert await scene.state(run_id) == "TERMINATED"
    if policy == "cancel":
        await scene.until(b.task.run_id, "ENDING")
        await scene.complete(b)
    await scene.until(b.task.run_id, state)
    assert (await scene.kinds(run_id))[-1] == "run_terminated"


async def test_a_cancel_reaches_the_children_of_children(scene: Scene) -> None:
    await scene.api.register(workflow(step("b"), workflow_id="grandchild"))
    run_id = await family(scene, CHILD, child={"id": "deep", "workflow": "grandchild"})
    b = await scene.task("b")
    await scene.call("Cancel", run_id, grace={"nanos": 0})
    await scene.until(b.task.run_id, "ENDING", "CANCELLED")
    await scene.worker.complete(b)
    for run in (await child_of(scene, run_id), await scene.api.get(run_id)):
        await scene.failure(run.run_id, "CANCELLED")


async def test_a_child_that_completes_while_its_parent_ends_is_undone(scene: Scene) -> None:
    run_id = await family(scene, CHILD | {"undo": {"step": "undo-b"}})
    b = await scene.task("b")
    await scene.call("Cancel", run_id)
    await scene.until(b.task.run_id, "ENDING")
    await scene.call("Terminate", b.task.run_id)
    await scene.failure(run_id, "CANCELLED")
    assert "undo_scheduled" not in await scene.kinds(run_id)


@pytest.fixture
def held_outbox(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Nothing is delivered until this is called."""
    deliver = Outbox.run_once
    open_ = False

    async def held(self: Outbox) -> float | None:
        return await deliver(self) if open_ else 0.02

    monkeypatch.setattr(Outbox, "run_once", held)

    def let_go() -> None:
        nonlocal open_
        open_ = True

    return let_go


@pytest.mark.parametrize("call", ["Cancel", "Terminate"])
async def test_a_child_of_a_run_that_ends_before_it_began_never_runs(
    held_outbox: Callable[[], None], scene: Scene, call: str
) -> None:
    """Row 53 of the field's failures: the start is dropped, and the parent told."""
    run_id = await family(scene, step("a", undo=True), CHILD)
    await scene.do("a")
    assert await count(scene.dsn, "message") == 1
    await scene.call(call, run_id)
    assert await scene.state(run_id) == ("ENDING" if call == "Cancel" else "TERMINATED")
    held_outbox()
    if call == "Cancel":
        await scene.do("undo-a")
        await scene.failure(run_id, "CANCELLED")

    async def delivered() -> bool:
        return await count(scene.dsn, "message") == 0

    await eventually(delivered)
    assert await count(scene.dsn, "run") == 1
    await scene.no_task()


async def test_a_message_that_is_delivered_twice_is_applied_once(
    held_outbox: Callable[[], None], scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the answer to the delivery's commit was lost: it is looked for again, and is gone."""
    run_id = await family(scene, CHILD, CHILD | {"id": "sub2"})
    take = Outbox._done

    def twice(self: Outbox, deliver: Any) -> None:
        take(self, deliver)
        if not deliver.again:
            deliver.again = True
            self._submit([deliver])

    monkeypatch.setattr(Outbox, "_done", twice)
    held_outbox()
    for n in range(2):
        await scene.do("b", output=n)
    assert await scene.output(run_id) == 1
    assert await count(scene.dsn, "run") == 3
    assert (await scene.kinds(run_id)).count("child_ended") == 2


# Retries and undo


async def test_a_completed_child_is_undone_by_the_nodes_handler_only(scene: Scene) -> None:
    node = CHILD | {"undo": {"step": "undo-c", "retry": ONCE}}
    run_id = await family(scene, step("a", undo=True), node, step("d"), child=step("b", undo=True))
    await scene.do("a", output="A")
    b = await scene.task("b")
    await scene.complete(b, "B")
    await scene.fail(await scene.task("d"))
    undo = await scene.task("undo-c")
    assert (given(undo), value_of(undo.undo_output), undo.node_id) == ("A", "B", "sub")
    assert undo.step_idempotency_key == ""
    await scene.complete(undo)
    await scene.do("undo-a")
    await scene.failure(run_id)
    assert await scene.state(b.task.run_id) == "COMPLETED"
    [scheduled, _] = await scene.events(run_id, "undo_scheduled")
    assert scheduled.of_seq == await scene.seq_of(run_id, "child_ended", "sub")


async def test_a_completed_child_without_a_handler_is_left_as_it_is(scene: Scene) -> None:
    run_id = await family(scene, CHILD, step("d"), child=step("b", undo=True))
    await scene.do("b")
    await scene.fail(await scene.task("d"))
    await scene.failure(run_id)
    assert "undo_scheduled" not in await scene.kinds(run_id)


async def test_a_retry_of_the_parent_starts_a_failed_child_anew_and_no_other(scene: Scene) -> None:
    """Row 45 of the field's failures: each child is created once."""
    fork = {"id": "both", "parallel": [[CHILD], [CHILD | {"id": "sub2"}]]}
    run_id = await family(scene, fork, step("d"))
    good, bad = await scene.worker.tasks(2)
    await scene.complete(good, "good")
    await scene.fail(bad)
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    again = await scene.task("b")
    assert again.task.run_id not in (good.task.run_id, bad.task.run_id)
    await scene.complete(again, "again")
    d = await scene.task("d")
    assert sorted(given(d).values()) == ["again", "good"]
    await scene.fail(d)
    await scene.failure(run_id)
    for _ in range(2):
        await scene.call("Retry", run_id)
        await scene.fail(await scene.task("d"))
        await scene.failure(run_id)
    assert len(await scene.api.list_all(parent_run_id=run_id)) == 3
    assert len(await scene.events(run_id, "child_scheduled")) == 3


async def test_a_child_can_not_be_retried_once_its_parent_knows(scene: Scene) -> None:
    run_id = await family(scene, CHILD)
    b = await scene.task("b")
    await scene.fail(b)
    await scene.failure(run_id)
    with refused("PARENT_DECIDED", grpc.StatusCode.FAILED_PRECONDITION):
        await scene.call("Retry", b.task.run_id)


async def test_a_paused_parent_hears_of_its_child_and_goes_on_after_the_pause(scene: Scene) -> None:
    run_id = await family(scene, CHILD, step("c"))
    b = await scene.task("b")
    await scene.call("Pause", run_id)
    await scene.complete(b, "B")

    async def heard() -> bool:
        return "child_ended" in await scene.kinds(run_id)

    await eventually(heard)
    assert await scene.state(run_id) == "PAUSED"
    await scene.no_task()
    await scene.call("Resume", run_id)
    assert given(await scene.task("c")) == "B"


async def test_a_message_of_a_kind_that_a_newer_release_has_keeps_no_other_from_delivery(scene: Scene) -> None:
    """Row 12."""
    await execute(
        scene.dsn,
        """insert into message (target_run, kind, source_run, source_seq, namespace, body)
           values (gen_random_uuid(), 99, gen_random_uuid(), 1, 'default', '{}')""",
    )
    run_id = await family(scene, CHILD)
    await scene.do("b", output="out")
    assert await scene.output(run_id) == "out"
    assert await count(scene.dsn, "message") == 1


async def test_the_outbox_leaves_nothing_behind(scene: Scene) -> None:
    runs = [await family(scene, CHILD) for _ in range(5)]
    for _ in range(5):
        await scene.do("b")
    for run_id in runs:
        await scene.output(run_id)
    for table in ("message", "child", "task"):
        assert await fetch(scene.dsn, f"select count(*)::int from {table}") == [(0,)]
