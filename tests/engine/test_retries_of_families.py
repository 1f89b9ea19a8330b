"""RetryRun of runs with children, waits and containers: what stood where when the run failed stands there again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from fencepost_server.engine import children
from fencepost_server.engine.retention import TURN, Retention
from tests.engine.code import AS_NEW, CONTINUE, FAIL, Code, call, cancel, payload
from tests.engine.code import child as start_child
from tests.engine.flows import PERMANENT, OpenScene, Scene, given, state_of, step, workflow
from tests.engine.rows import count, execute
from tests.faults.scene import asleep
from tests.fixtures.waiting import eventually


def child(node_id: str, workflow_id: str = "child", **more: Any) -> dict[str, Any]:
    """A node that starts a child."""
    return {"id": node_id, "workflow": workflow_id, **more}


def branches(*nodes: dict[str, Any] | list[dict[str, Any]]) -> dict[str, Any]:
    """A parallel node of these branches."""
    return {"id": "all", "parallel": [node if isinstance(node, list) else [node] for node in nodes]}


async def test_several_children_that_were_left_alone_are_all_waited_for_again(scene: Scene) -> None:
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    run_id = await scene.run(branches(step("a"), *(child(f"k{n}", on_parent_end="abandon") for n in range(3))))
    a, *others = await scene.tasks("a", "b", "b", "b")
    await scene.fail(a)
    await scene.failure(run_id)
    before, after, late = others
    await scene.complete(before, 1)
    await scene.output(before.task.run_id)
    await scene.call("Retry", run_id)
    await scene.complete(after, 2)
    await scene.do("a", output="A")
    await scene.complete(late, 3)
    output = await scene.output(run_id)
    assert (output.pop("a"), sorted(output.values())) == ("A", [1, 2, 3])
    assert len(await scene.events(run_id, "child_scheduled")) == 3


async def test_a_child_that_failed_alone_fails_the_retried_run_whatever_its_siblings_do(scene: Scene) -> None:
    """It ends, and the siblings that are left alone once more are there for the next retry."""
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    run_id = await scene.run(branches(step("a"), *(child(f"k{n}", on_parent_end="abandon") for n in range(3))))
    a, *others = await scene.tasks("a", "b", "b", "b")
    await scene.fail(a)
    await scene.failure(run_id)
    of_k1 = (await scene.events(run_id, "child_scheduled"))[1].child_run_id
    [bad] = [task for task in others if task.task.run_id == of_k1]
    others.remove(bad)
    await scene.fail(bad, code="SAD")
    await scene.failure(of_k1)
    await scene.call("Retry", run_id)
    assert (await scene.failure(run_id)).code == "CHILD_FAILED"
    await scene.call("Retry", run_id)
    for task in others:
        await scene.complete(task, 1)
    a, b = await scene.tasks("a", "b")
    await scene.complete(a, 1)
    await scene.complete(b, 1)
    assert await scene.output(run_id) == {"a": 1, "k0": 1, "k1": 1, "k2": 1}


async def refuse_the_start(scene: Scene) -> None:
    """Deliver the start of a child whose parent has failed; the answer to that stays on its way."""
    outbox = scene.server.app.engine.outbox
    outbox.wake()
    await outbox.run_once()
    await eventually(lambda: count(scene.dsn, "message", "kind = 4"), 30)
    assert await count(scene.dsn, "message") == 1


async def test_a_child_that_never_began_as_its_parent_had_failed_is_begun_anew_although_the_retry_came_first(
    scene: Scene,
) -> None:
    """Its parent hears that it never began when it goes on already."""
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    async with asleep(scene.server.app.engine.outbox.loop):
        run_id = await scene.run(branches(step("a"), child("k", on_parent_end="abandon")))
        await scene.fail(await scene.task("a"))
        await scene.failure(run_id)
        await refuse_the_start(scene)
        await scene.call("Retry", run_id)
    for task in await scene.tasks("a", "b"):
        await scene.complete(task, task.handler)
    assert await scene.output(run_id) == {"a": "a", "k": "b"}
    assert len(await scene.api.list_all(parent_run_id=run_id)) == len(await scene.events(run_id, "child_ended")) == 1


async def test_a_child_of_a_code_run_that_never_began_is_begun_although_the_retry_came_first(code: Code) -> None:
    """Its function is not told of a child that was cancelled: nobody has cancelled it."""
    scene = code.scene
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    async with asleep(scene.server.app.engine.outbox.loop):
        run = await code.begin(call(1, "a"), start_child(2, "child", on_parent_end="abandon"), outcome=CONTINUE)
        run_id = run.task.task.run_id
        a = await scene.task("a")
        await run.advance(outcome=FAIL, failure=run_pb2.Failure(kind=PERMANENT, code="BUG", message="x"))
        await scene.worker.release(a)
        assert state_of(await scene.api.wait(run_id)) == "FAILED"
        await refuse_the_start(scene)
        await scene.call("Retry", run_id)
    for task in await scene.tasks("a", "b"):
        await scene.complete(task, task.handler)
    run = await code.take()
    await run.wait()
    told = set(run.kinds())
    while not {"step_completed", "child_ended"} <= told:
        run = await code.again(run)
        await run.wait()
        told |= set(run.kinds())
    [ended] = await scene.events(run_id, "child_ended")
    assert ended.state == run_pb2.RUN_STATE_COMPLETED


@pytest.mark.parametrize("told_before", [True, False])
async def test_a_child_that_its_function_had_cancelled_before_it_began_is_not_begun_by_a_retry(
    code: Code, told_before: bool
) -> None:
    """Its start came when the run had failed, and with it the word that it should end, which found nobody."""
    scene = code.scene
    outbox = scene.server.app.engine.outbox
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    async with asleep(outbox.loop):
        run = await code.begin(start_child(1, "child", on_parent_end="abandon"), outcome=CONTINUE)
        run_id = run.task.task.run_id
        await run.advance(cancel(1, run.seq), outcome=CONTINUE)
        await run.advance(outcome=FAIL, failure=run_pb2.Failure(kind=PERMANENT, code="BUG", message="x"))
        assert state_of(await scene.api.wait(run_id)) == "FAILED"
        await refuse_the_start(scene)
        if told_before:
            outbox.wake()
            await outbox.run_once()
            await eventually(lambda: nothing_on_its_way(scene), 30)
        await scene.call("Retry", run_id)
    run = await code.take()
    await run.wait()
    if "child_ended" not in run.kinds():
        run = await code.again(run)
    assert "child_ended" in run.kinds()
    [ended] = await scene.events(run_id, "child_ended")
    assert ended.state == run_pb2.RUN_STATE_CANCELLED
    assert await scene.api.list_all(parent_run_id=run_id) == []


@pytest.mark.parametrize("over", [False, True])
async def test_a_child_that_has_continued_is_found_although_most_of_its_chain_is_deleted(
    code: Code, over: bool
) -> None:
    """It is waited for, or its end is heard of: another one would do its work once more."""
    scene = code.scene
    run_id = await scene.run(branches(step("a"), child("k", "code", on_parent_end="abandon")))
    for _ in range(2):
        await (await code.take()).advance(outcome=AS_NEW, output=payload(1))
    last = await code.take()
    await scene.fail(await scene.task("a"))
    await scene.failure(run_id)
    if over:
        await last.complete("K")
        await eventually(lambda: nothing_on_its_way(scene), 30)
    old = (
        "update run set created_at = created_at - interval '9 d', ended_at = ended_at - interval '9 d' where state = 12"
    )
    assert await execute(scene.dsn, old) == 2
    engine = scene.server.app.engine
    retention = Retention(dataclasses.replace(engine.config, retention=8 * 86_400.0), engine.database)
    while await retention.run_once() != TURN:
        pass
    assert await count(scene.dsn, "run", "state = 12") == 1, "the first one"
    if over:  # which releases before did not keep then
        await execute(scene.dsn, "delete from run where state = 12")
    await scene.call("Retry", run_id)
    await scene.do("a", output="A")
    if not over:
        await last.complete("K")
    assert await scene.output(run_id) == {"a": "A", "k": "K"}
    assert len(await scene.events(run_id, "child_scheduled")) == 1


async def half_deleted(scene: Scene, child_id: str) -> Retention:
    """Let an ended child be too old, and its last events, that of its output among them, be gone."""
    await eventually(lambda: nothing_on_its_way(scene), 30)
    old = "update run set created_at = created_at - %(ago)s::interval, ended_at = ended_at - %(ago)s::interval"
    await execute(scene.dsn, old + " where run_id = %(run_id)s", {"ago": "9 d", "run_id": child_id})
    engine = scene.server.app.engine
    config = dataclasses.replace(engine.config, retention=8 * 86_400.0, retention_batch_events=2)
    retention = Retention(config, engine.database)
    while await count(scene.dsn, "event", "run_id = %s", [child_id]) > 2:
        await retention.run_once()
    assert await count(scene.dsn, "run", "run_id = %s", [child_id])
    return retention


async def test_a_child_that_is_being_deleted_is_begun_anew_as_one_that_is_gone(scene: Scene) -> None:
    """It has too many events to go at once, and its output has gone with the last ones: that is not null."""
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    run_id = await scene.run(branches(step("a"), child("k", on_parent_end="abandon")))
    a, b = await scene.tasks("a", "b")
    await scene.fail(a)
    await scene.failure(run_id)
    await scene.complete(b, "B")
    await half_deleted(scene, b.task.run_id)
    await scene.call("Retry", run_id)
    for task in await scene.tasks("a", "b"):
        await scene.complete(task, task.handler)
    assert await scene.output(run_id) == {"a": "a", "k": "b"}


async def test_a_child_of_a_code_run_that_is_being_deleted_is_begun_anew_once_it_is_gone(code: Code) -> None:
    """Under the id that it had."""
    scene = code.scene
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    run = await code.begin(start_child(1, "child", on_parent_end="abandon"), outcome=CONTINUE)
    run_id = run.task.task.run_id
    b = await scene.task("b")
    await run.advance(outcome=FAIL, failure=run_pb2.Failure(kind=PERMANENT, code="BUG", message="x"))
    assert state_of(await scene.api.wait(run_id)) == "FAILED"
    await scene.complete(b, "B")
    retention = await half_deleted(scene, b.task.run_id)
    outbox = scene.server.app.engine.outbox
    async with asleep(outbox.loop):
        await scene.call("Retry", run_id)
        outbox.wake()
        await outbox.run_once()
        await eventually(lambda: not outbox._under_way, 30)
    assert await count(scene.dsn, "message", "kind = 1") == 1

    async def gone() -> bool:
        await retention.run_once()  # which passes by what the start has locked to look at
        assert not await count(scene.dsn, "run", "run_id = %s and namespace = ''", [b.task.run_id])
        return True

    await eventually(gone, 30)
    again = await scene.task("b")
    assert again.task.run_id == b.task.run_id
    await scene.complete(again, "anew")
    run = await code.take()
    await run.wait()
    if "child_ended" not in run.kinds():
        run = await code.again(run)
    [ended] = [event.child_ended for event in run.seen if event.HasField("child_ended")]
    assert ended.output.json == '"anew"'


async def nothing_on_its_way(scene: Scene) -> bool:
    """All that runs had to tell each other is told."""
    assert await count(scene.dsn, "message") == 0
    return True


async def test_a_code_run_is_told_after_a_retry_of_the_child_that_was_cancelled_as_it_failed(code: Code) -> None:
    """It is not started anew as that of a graph: its end is in the history that the function is fed."""
    scene = code.scene
    await scene.api.register(workflow(step("nobody"), workflow_id="child"))
    run = await code.begin(start_child(1, "child"), call(2, "a"))
    run_id = run.task.task.run_id
    await scene.worker.fail(await scene.task("a"), PERMANENT)
    run = await code.again(run)
    failure = run_pb2.Failure(kind=PERMANENT, code="X", message="let through")
    await run.advance(outcome=FAIL, failure=failure, failed_seq=run.seen[-1].seq)
    assert state_of(await scene.api.wait(run_id)) == "FAILED"
    await scene.call("Retry", run_id)
    run = await code.take()
    await run.wait()
    [ended] = [event.child_ended for event in run.seen if event.HasField("child_ended")]
    assert ended.state == run_pb2.RUN_STATE_CANCELLED
    await scene.complete(await scene.task("a"), "a")
    run = await code.again(run)
    await run.complete()
    assert state_of(await scene.api.wait(run_id)) == "COMPLETED"


async def test_a_run_that_fails_again_at_once_waits_for_the_child_that_it_has_begun_anew(open_scene: OpenScene) -> None:
    """One beside it was left alone, and is not counted for it."""
    scene, roomy = await open_scene(max_map_items=2), await open_scene(max_map_items=3)
    await roomy.worker.capacity(0)
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    await scene.api.register(workflow(step("c"), workflow_id="alone"))
    each = {"id": "each", "map": {"over": "", "do": [step("d")]}}
    alone = child("k1", "alone", on_parent_end="abandon")
    await scene.api.register(workflow(branches([step("a"), each], child("k0"), alone)))
    run_id = await scene.start()
    a, b, c = await scene.tasks("a", "b", "c")
    await scene.fail(b)
    await scene.until(run_id, "ENDING")
    await scene.complete(a, [1, 2, 3])
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    await scene.failure(run_id)
    assert len(await scene.events(run_id, "child_ended")) == 2, "of k0, twice"
    await scene.worker.capacity(0)
    await roomy.worker.capacity(10)
    await roomy.call("Retry", run_id)
    await scene.complete(c, "C")
    for task in await roomy.worker.tasks(4):
        await roomy.complete(task, task.handler)
    assert await roomy.output(run_id) == {"each": ["d", "d", "d"], "k0": "b", "k1": "C"}


async def test_a_node_that_fails_again_at_once_can_be_retried_once_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row of what was stopped goes and comes in one transaction, with no look at the database in between."""
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    with monkeypatch.context() as patch:
        patch.setattr(children, "MAX_DEPTH", 0)
        run_id = await scene.run(child("sub"))
        for _ in range(3):
            assert "inside each other" in (await scene.failure(run_id)).message
            assert await count(scene.dsn, "stopped_task") == 1
            await scene.call("Retry", run_id)
        await scene.failure(run_id)
    await scene.call("Retry", run_id)
    await scene.do("b", output=1)
    assert await scene.output(run_id) == 1


async def test_the_wait_that_is_older_takes_the_signal_that_came_while_the_run_ended(scene: Scene) -> None:
    old = [step("c"), {"id": "w1", "wait_signal": "go"}, step("b")]
    late = [{"id": "w0", "wait_signal": "go", "timeout": "1h"}, step("a")]
    run_id = await scene.run(branches(late, old, step("d")))
    c, d = await scene.tasks("c", "d")
    await scene.complete(c)
    await scene.hurry(run_id, "SIGNAL_TIMEOUT")
    await scene.until(run_id, "ENDING")
    await scene.signal(run_id, data="s")
    await scene.complete(d)
    await scene.failure(run_id)
    await scene.call("Retry", run_id)
    assert given(await scene.task("b")) == "s"
    await scene.no_task()


async def test_what_was_queued_behind_a_node_that_failed_is_begun_by_the_retry(open_scene: OpenScene) -> None:
    """The other branch was to begin in the same decision."""
    scene, roomy = await open_scene(max_map_items=2), await open_scene(max_map_items=3)
    await scene.worker.capacity(0)
    each = {"id": "each", "map": {"over": "", "do": [step("a")]}}
    await scene.api.register(workflow(branches(each, step("b"))))
    run_id = await scene.start([1, 2, 3])
    assert (await scene.failure(run_id)).code == "INVALID_NODE_INPUT"
    await roomy.call("Retry", run_id)
    for task in await roomy.worker.tasks(4):
        await roomy.complete(task, task.handler)
    assert await roomy.output(run_id) == {"each": ["a", "a", "a"], "b": "b"}


@pytest.mark.parametrize("last", ["parallel", "choose"])
async def test_steps_do_not_run_again_because_the_output_of_the_workflow_was_broken(
    open_scene: OpenScene, last: str
) -> None:
    """I5: a retry goes on behind the last node, and finds the same."""
    scene = await open_scene(max_payload_bytes=2048)
    text = {"type": "string"}
    both = branches(step("a", output_schema=text), step("b", output_schema=text))
    node = both if last == "parallel" else {"id": "which", "choose": [{"otherwise": [both]}]}
    schema = {"type": "object", "required": ["a"], "properties": {"a": text}}
    await scene.api.register(workflow(node, output_schema=schema))
    run_id = await scene.start()
    for task in await scene.tasks("a", "b"):
        await scene.complete(task, "x" * 1500)  # together more than a payload: {"count": 2}
    for retry in range(3):
        assert (await scene.failure(run_id)).code == "OUTPUT_SCHEMA_MISMATCH"
        assert (await scene.kinds(run_id)).count("run_retried") == retry
        assert await count(scene.dsn, "stopped_task") == 1
        await scene.call("Retry", run_id)
    await scene.no_task()
    assert len(await scene.events(run_id, "step_completed")) == 2


@pytest.mark.parametrize("code", ["RUN_TIMEOUT", "DEFINITION_REMOVED"])
async def test_a_step_may_fail_with_any_code_and_be_retried(scene: Scene, code: str) -> None:
    run_id = await scene.run(step("a"))
    await scene.fail(await scene.task("a"), code=code)
    assert (await scene.failure(run_id)).code == code
    await scene.call("Retry", run_id)
    await scene.do("a")
    await scene.output(run_id)
