"""I12: what a hot operation costs the database is one transaction, with as many statements and round trips for many as
for few. Counted, not timed; whoever makes one cheaper says so here.
"""

from __future__ import annotations

import pytest

from tests.engine.code import CONTINUE, held, local, open_code, send
from tests.engine.costs import Transaction, counted
from tests.engine.flows import OpenScene, Scene, step
from tests.fixtures.raw_worker import OK
from tests.fixtures.waiting import eventually

FEW, MANY = 2, 60  # not more than a lane takes whole
SETTINGS = {"lanes": 1, "poll_interval": 60.0, "outage_gap": 120.0}
"""One lane, for one batch; and nobody looks for work unless told."""
SIZES = pytest.mark.parametrize("n", [FEW, MANY])

START = Transaction(
    [
        *("batch.lock_deployments", "batch.read_clock", "batch.insert_keys", "batch.read_keys"),
        *("batch.insert_runs", "batch.insert_tasks", "batch.insert_events"),
    ],
    trips=3,
)
CLAIM = Transaction(["task.claim"], trips=1)
HEARTBEAT = Transaction(["task.renew"], trips=2)
COMPLETE = Transaction(
    [
        *("batch.lock_runs", "batch.lock_tasks", "batch.read_clock"),
        *("batch.update_runs", "batch.delete_tasks", "batch.insert_tasks", "batch.insert_events"),
    ],
    trips=2,
)
ADVANCE = Transaction(
    [
        *("batch.lock_runs", "batch.read_deciders", "batch.read_clock", "extra.open_task"),
        *("batch.update_runs", "batch.insert_events"),
    ],
    trips=3,
)


async def scene_of_two_steps(open_scene: OpenScene) -> Scene:
    """Its worker takes nothing yet, and the definition is known: the server has started a run of it."""
    scene = await open_scene(**SETTINGS)
    # Nothing of what a server does at its start is to come late and be counted.
    await eventually(lambda: all(loop.last_good for loop in scene.server.app.engine.loops))
    await scene.worker.capacity(0)
    await scene.run(step("a"), step("b"))
    return scene


async def start(scene: Scene, n: int) -> None:
    """Start runs in one call."""
    results = await scene.api.start_many([scene.api.start_request() for _ in range(n)])
    assert not any(result.HasField("error") for result in results)


def those_with(statement: str, found: list[Transaction]) -> list[Transaction]:
    """Leaves out what is done besides: a worker that has room is given more."""
    return [transaction for transaction in found if statement in transaction.statements]


@SIZES
async def test_starting_runs(open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    scene = await scene_of_two_steps(open_scene)
    with counted(monkeypatch) as found:
        await start(scene, n)
    assert found == [START]


@SIZES
async def test_claiming_tasks_and_renewing_their_leases(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    scene = await scene_of_two_steps(open_scene)
    await start(scene, n - 1)
    with counted(monkeypatch) as found:
        await scene.worker.capacity(n)
        await scene.worker.tasks(n)
    assert found == [CLAIM]
    with counted(monkeypatch) as found:
        await scene.worker.heartbeat()
    assert found == [HEARTBEAT]


@SIZES
async def test_completing_steps_and_leasing_those_that_follow(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    scene = await scene_of_two_steps(open_scene)
    await start(scene, n - 1)
    await scene.worker.capacity(n)
    tasks = await scene.worker.tasks(n)
    with counted(monkeypatch) as found:
        results = await scene.worker.complete_all([(task, "1") for task in tasks])
        following = await scene.worker.tasks(n)
    assert {result.outcome for result in results} == {OK}
    assert {task.handler for task in following} == {"b"}
    assert those_with("batch.lock_runs", found) == [COMPLETE]


@pytest.mark.parametrize(("runs", "steps"), [(1, 1), (1, MANY), (40, 1)])
async def test_advancing_runs_with_local_steps(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch, runs: int, steps: int
) -> None:
    code = await open_code(open_scene, **SETTINGS)
    await code.scene.api.start_many([code.scene.api.start_request("code") for _ in range(runs)])
    taken = [held(code.decider, task) for task in await code.decider.tasks(runs)]
    advances = [run.item(*(local(op) for op in range(1, steps + 1)), outcome=CONTINUE) for run in taken]
    with counted(monkeypatch) as found:
        results = await send(code.decider, *advances)
    await code.decider.close()
    assert {result.outcome for result in results} == {OK}
    assert those_with("batch.lock_runs", found) == [ADVANCE]
