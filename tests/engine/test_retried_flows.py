"""A run that fails again and again, at any step of it, and is retried each time gives what it would have given at once:
every step of every branch and item completes exactly once (I5).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from tests.engine.flows import OPERATIONAL, PERMANENT, OpenScene, Scene, given, step, value_of
from tests.engine.rows import count
from tests.engine.tasks import end
from tests.fixtures.raw_worker import LEASE_LOST, OK

ITEM = [
    {"id": "fork", "parallel": [[step("a")], [step("b"), step("c", input=[{"$from": "each#"}, {"$from": "b#"}])]]},
    {
        "id": "way",
        "choose": [
            {"when": {"at": "/a", "gt": 2}, "do": [step("d")]},
            {"otherwise": [{"id": "nap", "sleep": "1ms"}, step("e")]},
        ],
    },
]
NODES = [step("f"), {"id": "each", "map": {"over": "/items", "do": ITEM, "max_parallel": 3}}, step("g")]
ITEMS = [0, 1, 2, 3, 4, 5]


def does(handler: str, data: Any) -> Any:
    """What the steps do."""
    match handler:
        case "f":
            return {"items": data}
        case "a" | "b":
            return data + (handler == "b")
        case "c":
            return sum(data)
        case "d" | "e":
            return [handler, data["a"], data["c"]]
        case _:
            return {"all": data}


def expected(items: list[int]) -> Any:
    """What the run gives."""
    return {"all": [["d" if n > 2 else "e", n, n + n + 1] for n in items]}


async def work(scene: Scene, chance: random.Random) -> None:
    """Do what comes, and fail some of it, for good or not."""
    while True:
        task = await scene.worker.task(timeout=60)
        if chance.random() < 0.3:
            result = await scene.worker.fail(task, chance.choice([PERMANENT, OPERATIONAL]), retry_after=0)
        elif chance.random() < 0.1:
            [result] = await scene.worker.release(task)
        else:
            result = (await scene.worker.complete_all([(task, json.dumps(does(task.handler, given(task))))]))[0]
        assert result.outcome in (OK, LEASE_LOST)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_run_that_is_retried_until_it_completes_gives_what_it_should(open_scene: OpenScene, seed: int) -> None:
    scene = await open_scene(cancel_grace=1.0, free_redeliveries=100)
    chance = random.Random(seed)
    run_id = await scene.run(*NODES, data=ITEMS)
    working = asyncio.create_task(work(scene, chance))
    retries = 0
    try:
        async with asyncio.timeout(60):
            while (run := await scene.api.wait(run_id)).state == run_pb2.RUN_STATE_FAILED:
                await scene.call("Retry", run_id)
                retries += 1
    finally:
        assert not working.done(), working.exception()
        await end([working])
    assert value_of(run.output) == expected(ITEMS)
    assert retries, "too peaceful to show anything"
    await check_steps(scene, run_id)


async def check_steps(scene: Scene, run_id: str) -> None:
    """Each step of each item was scheduled once and completed once; nothing is left."""
    events = await scene.api.history(run_id, page_size=1000)
    scheduled = Counter(
        (e.step_scheduled.node_id, e.step_scheduled.scope_id, e.step_scheduled.item)
        for e in events
        if e.WhichOneof("kind") == "step_scheduled"
    )
    assert set(scheduled.values()) == {1}, scheduled
    assert len(scheduled) == 2 + 4 * len(ITEMS)
    completed = Counter(e.step_completed.task_id for e in events if e.WhichOneof("kind") == "step_completed")
    assert set(completed.values()) == {1}
    assert len(completed) == len(scheduled)
    opened = [e for e in events if e.WhichOneof("kind") == "scope_opened"]
    assert len(opened) == 1 + len(ITEMS) == len([e for e in events if e.WhichOneof("kind") == "scope_closed"])
    for table in ("task", "scope", "output", "stopped_task", "timer"):
        assert await count(scene.dsn, table) == 0
