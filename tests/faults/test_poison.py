"""Runs whose definition this release can't read, or that is gone, in front of everybody else: with tasks, timers and
messages that can't be handled. A thousand good runs pass them by; the poisoned ones are BLOCKED with the reason, can be
looked at and terminated, and go on once the definition is there again (row 12 of the field's failures).
"""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.flows import HANDLERS, Scene, state_of, step, workflow
from tests.engine.rows import execute, fetch
from tests.faults.crashing import SETTINGS
from tests.faults.scene import Scene as Stage
from tests.faults.scene import until_count
from tests.fixtures.api import kinds
from tests.fixtures.raw_worker import OK, REFUSED
from tests.fixtures.refusals import refused

GOOD = 1000
POISONED = 5
NAP: dict[str, Any] = {"id": "nap", "sleep": "1h"}
POISON = workflow(
    step("a", undo=True),
    {"id": "all", "parallel": [[step("b")], [NAP], [{"id": "kid", "workflow": "kid"}], [step("c")]]},
    workflow_id="poison",
)
"""A run of it has a completed step, two open ones, a timer and a child."""
DAMAGES = {
    "gone": "delete from definition where workflow_id = 'poison'",
    "of-a-later-release": (
        "update definition set manifest = replace(manifest::text, '\"sleep\"', '\"hibernate\"')::json "
        "where workflow_id = 'poison'"
    ),
    "of-no-shape": "update definition set manifest = '[]' where workflow_id = 'poison'",
}
damaged = pytest.mark.parametrize("damage", DAMAGES)


async def open_scene(stage: Stage) -> Scene:
    """A new server, which remembers no definition, and a worker of all handlers."""
    server = await stage.serve(**SETTINGS)
    worker = await stage.raw(server.grpc_address, handlers=HANDLERS, capacity=200)
    return Scene(server, stage.api(server.grpc_address), worker, stage.dsn)


async def poison(stage: Stage, damage: str, n: int = 1) -> tuple[list[str], str]:
    """Runs under a definition that is then damaged. Returns their ids, and the definition as it was."""
    s = await open_scene(stage)
    await s.api.register(workflow(step("g"), workflow_id="kid"))
    await s.api.register(POISON)
    run_ids = [await s.start(workflow_id="poison", priority=1) for _ in range(n)]
    for task in await s.worker.tasks(n):
        await s.complete(task)
    await until_count(stage.dsn, "run where parent_run_id is not null", n)
    await s.server.stop()
    [(row,)] = await fetch(stage.dsn, "select row_to_json(d)::text from definition d where workflow_id = 'poison'")
    await execute(stage.dsn, DAMAGES[damage])
    # Leased to a stream that is gone, and due: found by every loop, again and again.
    await execute(stage.dsn, "update task set lease_expires_at = clock_timestamp() where lease_session is not null")
    await execute(stage.dsn, "update timer set fire_at = clock_timestamp() - interval '1 day'")
    return run_ids, str(row)


async def heal(dsn: str, row: str) -> None:
    """Put the definition back."""
    await execute(dsn, "delete from definition where workflow_id = 'poison'")
    await execute(dsn, "insert into definition select * from json_populate_record(null::definition, %s)", [row])


@damaged
async def test_a_thousand_good_runs_pass_by_poisoned_ones_which_wait_and_go_on_when_they_can_be_read(
    scene: Stage, damage: str
) -> None:
    poisoned, row = await poison(scene, damage, POISONED)
    s = await open_scene(scene)
    good = workflow({**NAP, "sleep": "1ms"}, {"id": "kid", "workflow": "kid"}, step("a"))
    await s.api.register(good)
    results = await s.api.start_many([s.api.start_request() for _ in range(GOOD)])
    left = GOOD + GOOD + POISONED  # their children too, and those of the poisoned ones
    while left:
        tasks = (await s.worker.next(pb.Tasks, 30)).tasks
        assert {task.workflow_id for task in tasks} <= {"wf", "kid"}
        assert {result.outcome for result in await s.worker.complete_all([(task, "1") for task in tasks])} == {OK}
        left -= len(tasks)
    for result in results[:: GOOD // 20]:
        assert state_of(await s.api.wait(result.started.run_id, 30)) == "COMPLETED"
    for run_id in poisoned:
        blocked = await s.until(run_id, "BLOCKED")
        assert blocked.failure.code == "UNKNOWN_DEFINITION"
        assert blocked.failure.message
    await s.server.stop()

    await heal(scene.dsn, row)
    s = await open_scene(scene)
    for run_id in poisoned:
        await s.call("Retry", run_id)
    for task in await s.worker.tasks(2 * POISONED):
        await s.complete(task, task.handler)
    for run_id in poisoned:
        run = await s.api.wait(run_id)
        assert state_of(run) == "COMPLETED"


@damaged
async def test_a_poisoned_run_can_be_read_and_terminated_and_all_else_is_refused_with_the_reason(
    scene: Stage, damage: str
) -> None:
    [run_id], _row = await poison(scene, damage)
    s = await open_scene(scene)
    await s.until(run_id, "BLOCKED")
    assert "step_completed" in kinds(await s.api.history(run_id))
    assert run_id in [run.run_id for run in await s.api.list_all()]
    for name in ("Cancel", "Pause"):
        with refused("UNKNOWN_DEFINITION"):
            await s.call(name, run_id)
    [child] = await s.api.list_all(parent_run_id=run_id)
    await s.call("Terminate", run_id, reason="poisoned")
    assert state_of(await s.api.wait(run_id)) == "TERMINATED"
    await s.until(child.run_id, "TERMINATED", "CANCELLED", "ENDING")


@damaged
async def test_a_failed_run_whose_definition_cannot_be_read_is_not_retried(scene: Stage, damage: str) -> None:
    s = await open_scene(scene)
    await s.api.register(workflow(step("a"), {**NAP, "sleep": "1ms"}, workflow_id="poison"))
    run_id = await s.start(workflow_id="poison")
    await s.fail(await s.task("a"))
    await s.until(run_id, "FAILED")
    await s.server.stop()
    await execute(scene.dsn, DAMAGES[damage])
    s = await open_scene(scene)
    with refused("UNKNOWN_DEFINITION"):
        await s.call("Retry", run_id)
    assert await s.state(run_id) == "FAILED"
    await s.no_task()


async def test_what_a_worker_did_for_a_poisoned_run_is_refused_until_it_can_be_read_and_counts_then(
    scene: Stage,
) -> None:
    """It keeps its lease meanwhile."""
    s = await open_scene(scene)
    await s.api.register(workflow(step("a", retry={"max_attempts": 1}), workflow_id="poison"))
    run_id = await s.start(workflow_id="poison")
    a = await s.task("a")
    await s.server.stop()
    [(row,)] = await fetch(scene.dsn, "select row_to_json(d)::text from definition d where workflow_id = 'poison'")
    await execute(scene.dsn, DAMAGES["gone"])
    for repaired in (False, True):
        if repaired:
            await heal(scene.dsn, row)
        server = await scene.serve(**SETTINGS)
        nonce = s.worker.hello().process_nonce
        again = await scene.raw(
            server.grpc_address, handlers=HANDLERS, process_nonce=nonce, previous_session_ids=s.worker.sessions,
            held=[a.task],
        )  # fmt: skip
        s.worker.sessions[:0] = again.sessions
        result: pb.ItemResult = await again.complete(a, '"done"')
        assert result.outcome == (OK if repaired else REFUSED)
        if not repaired:
            await server.stop()
        else:
            api = scene.api(server.grpc_address)
            assert state_of(await api.wait(run_id)) == "COMPLETED"
