"""Definitions that this release can't read are told as such to whoever asks for what needs them; others go on."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.v1.error_pb2 import ERROR_REASON_UNKNOWN_DEFINITION
from tests.engine.code import COMPLETE, CONTINUE, WAIT, local, open_code, payload
from tests.engine.flows import ONCE, OpenScene, Scene, step, workflow
from tests.engine.rows import count, execute, fetch
from tests.fixtures.raw_worker import LEASE_LOST, OK, REFUSED, RawWorker
from tests.fixtures.refusals import refused
from tests.fixtures.waiting import eventually

MANY = 45
"""More than the pages of one look."""
DAMAGE = "update definition set manifest = '{\"newer\": 1}' where workflow_id = %s"


async def _as_of_a_newer_release(
    scene: Scene, open_scene: OpenScene, *, workflow_id: str = "wf", **settings: int
) -> Scene:
    """The server comes back, and can't read the workflow any more."""
    await scene.server.stop()
    await execute(scene.dsn, DAMAGE, [workflow_id])
    return await open_scene(**settings)


async def _let_nobody_work(scene: Scene) -> None:
    await scene.worker.capacity(0)
    await scene.worker.sync()


async def _until_ready(scene: Scene, tasks: int) -> None:
    """Children have begun, and nobody has their steps."""

    async def ready() -> bool:
        return await count(scene.dsn, "task", "lease_session is null") == tasks

    await eventually(ready)


async def test_a_start_under_a_definition_that_can_not_be_read_is_refused_with_the_reason(
    open_scene: OpenScene,
) -> None:
    scene = await open_scene()
    await scene.api.register(workflow(step("a")))
    await scene.api.register(workflow(step("b"), workflow_id="good"))
    scene = await _as_of_a_newer_release(scene, open_scene)
    with refused("UNKNOWN_DEFINITION") as refusal:
        await scene.start()
    assert "read" in refusal.error.message
    await scene.start(workflow_id="good")
    await scene.do("b")


async def test_a_child_whose_definition_can_not_be_read_fails_its_node_once(open_scene: OpenScene) -> None:
    """Its start is not delivered again and again."""
    scene = await open_scene()
    await scene.api.register(workflow(step("a")))
    await scene.api.register(workflow(step("b"), {"id": "sub", "workflow": "wf"}, workflow_id="parent"))
    await _let_nobody_work(scene)
    run_id = await scene.start(workflow_id="parent")
    scene = await _as_of_a_newer_release(scene, open_scene)
    await scene.do("b")
    failure = await scene.failure(run_id)
    assert failure.code == "CHILD_FAILED"
    assert "UNKNOWN_DEFINITION" in failure.message
    assert await count(scene.dsn, "message") == 0


async def test_a_run_whose_undo_failed_can_be_terminated_and_not_retried_without_its_definition(
    open_scene: OpenScene,
) -> None:
    scene = await open_scene()
    run_id = await scene.run(step("a", undo={"retry": ONCE}), step("b"))
    await scene.do("a")
    await scene.fail(await scene.task("b"))
    await scene.fail(await scene.task("undo-a"))
    await scene.until(run_id, "BLOCKED")
    scene = await _as_of_a_newer_release(scene, open_scene)
    for more in ({}, {"skip_undo": True, "reason": "by hand"}):
        with refused("UNKNOWN_DEFINITION"):
            await scene.call("Retry", run_id, **more)
    assert (await scene.until(run_id, "BLOCKED")).failure.code == "UNDO_FAILED"
    await scene.call("Terminate", run_id)
    await scene.failure(run_id, "TERMINATED")


async def test_a_run_that_can_not_be_read_is_terminated_with_its_open_child(open_scene: OpenScene) -> None:
    scene = await open_scene()
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    await _let_nobody_work(scene)
    run_id = await scene.run({"id": "sub", "workflow": "child"})
    await _until_ready(scene, 1)
    scene = await _as_of_a_newer_release(scene, open_scene)
    b = await scene.task("b")
    await scene.call("Terminate", run_id)
    await scene.failure(run_id, "TERMINATED")
    await scene.until(b.task.run_id, "ENDING")
    await scene.worker.release(b)
    await scene.failure(b.task.run_id, "CANCELLED")

    async def nothing_is_left() -> bool:
        return await count(scene.dsn, "message") == 0

    await eventually(nothing_is_left)
    assert await count(scene.dsn, "task") == await count(scene.dsn, "child") == 0


@pytest.mark.parametrize("by", ["a timer", "a child"])
async def test_a_run_that_only_waits_is_blocked_by_what_it_waits_for_until_it_can_be_read(
    open_scene: OpenScene, by: str
) -> None:
    scene = await open_scene()
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    node = {"id": "nap", "sleep": "1h"} if by == "a timer" else {"id": "sub", "workflow": "child"}
    await _let_nobody_work(scene)
    run_id = await scene.run(node)
    if by == "a child":
        await _until_ready(scene, 1)
    [(manifest,)] = await fetch(scene.dsn, "select manifest::text from definition where workflow_id = 'wf'")
    scene = await _as_of_a_newer_release(scene, open_scene)
    assert await scene.state(run_id) == "WAITING"
    if by == "a timer":
        await scene.hurry(run_id, "SLEEP")
    else:
        await scene.do("b")
    assert (await scene.until(run_id, "BLOCKED")).failure.code == "UNKNOWN_DEFINITION"
    await scene.no_task()
    assert (await scene.kinds(run_id)).count("run_blocked") == 1, "once, however often it is found again"
    await scene.server.stop()
    await execute(scene.dsn, "update definition set manifest = %s where workflow_id = 'wf'", [manifest])
    scene = await open_scene()
    await scene.output(run_id)


async def test_timers_that_nothing_can_be_decided_about_hide_none_behind_them(open_scene: OpenScene) -> None:
    """More of them than one look takes, and all of them due before."""
    scene = await open_scene()
    await scene.api.register(workflow({"id": "nap", "sleep": "1h"}))
    await scene.api.register(workflow({"id": "nap", "sleep": "1h"}, workflow_id="good"))
    for _ in range(MANY):
        await scene.start()
    good = await scene.start(workflow_id="good")
    await scene.server.stop()
    await execute(scene.dsn, DAMAGE, ["wf"])
    await execute(scene.dsn, "update timer set fire_at = now() - interval '1 minute' where run_id <> %s", [good])
    await execute(scene.dsn, "update timer set fire_at = now() where run_id = %s", [good])
    scene = await open_scene(timer_batch=1)
    await scene.output(good)
    assert await count(scene.dsn, "timer") == MANY, "they are there for when it can be read again"


async def test_messages_that_nothing_can_be_decided_about_hide_none_behind_them(open_scene: OpenScene) -> None:
    scene = await open_scene()
    child = {"id": "sub", "workflow": "child"}
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    await scene.api.register(workflow(child))
    await scene.api.register(workflow(child, workflow_id="good"))
    await _let_nobody_work(scene)
    for _ in range(MANY):
        await scene.start()
    await _until_ready(scene, MANY)
    scene = await _as_of_a_newer_release(scene, open_scene, outbox_batch=1)
    for task in await scene.worker.tasks(MANY):
        await scene.complete(task)

    async def ended() -> bool:
        return await count(scene.dsn, "message") == MANY

    await eventually(ended)
    good = await scene.start(workflow_id="good")
    await scene.do("b", output=1)
    assert await scene.output(good) == 1


@pytest.mark.parametrize("outcome", [CONTINUE, WAIT, COMPLETE])
async def test_what_a_function_decides_is_not_taken_while_its_definition_can_not_be_read(
    open_scene: OpenScene, outcome: Any
) -> None:
    """Its worker comes to a server of the release before amid a run. The run goes on when it can be read again."""
    code = await open_code(open_scene, disconnect_grace=60.0)  # the worker still has its lease when it comes back
    await code.start()
    run = await code.take()
    run_id = run.task.task.run_id
    [(manifest,)] = await fetch(code.scene.dsn, "select manifest::text from definition where workflow_id = 'code'")
    scene = await _as_of_a_newer_release(code.scene, open_scene, workflow_id="code")
    await code.decider.move(scene.server.grpc_address)
    more = {"output": payload(1)} if outcome == COMPLETE else {}
    result = await run.advance(local(1, "done"), outcome=outcome, **more)
    assert (result.outcome, result.reason) == (REFUSED, ERROR_REASON_UNKNOWN_DEFINITION), result
    assert [each.outcome for each in await code.decider.heartbeat()] == [OK], "the lease is left to it"
    await code.decider.release(run.task)
    assert (await scene.until(run_id, "BLOCKED")).failure.code == "UNKNOWN_DEFINITION"
    await scene.server.stop()
    await execute(scene.dsn, "update definition set manifest = %s where workflow_id = 'code'", [manifest])
    scene = await open_scene()
    await scene.call("Retry", run_id)
    await code.decider.move(scene.server.grpc_address)
    run = await code.take()
    await run.advance(local(1, "done"), outcome=CONTINUE)
    await run.complete(2)
    assert await scene.output(run_id) == 2
    await code.decider.close()


async def test_a_worker_of_another_namespace_can_not_touch_a_step_whose_definition_can_not_be_read(
    open_scene: OpenScene,
) -> None:
    scene = await open_scene(disconnect_grace=60.0)  # the lease does not run out meanwhile
    run_id = await scene.run(step("a"))
    a = await scene.task("a")
    scene = await _as_of_a_newer_release(scene, open_scene)
    stranger = RawWorker(scene.server.grpc_address, namespace="other")
    await stranger.connect()
    assert [each.outcome for each in await stranger.release(a)] == [LEASE_LOST]
    assert (await stranger.complete(a)).outcome == LEASE_LOST
    assert await scene.state(run_id) == "PENDING"
    await stranger.close()
