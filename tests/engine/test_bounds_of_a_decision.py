"""What one decision reads and writes is bounded, whatever a workflow asks for: the rest goes on in the next one, and
other runs in between.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from fencepost_server.domain.model import EventType
from fencepost_server.engine import commit, flow
from fencepost_server.engine.operations import Start
from tests.engine.costs import counted
from tests.engine.flows import OpenScene, Scene, given, step, workflow
from tests.engine.rows import count, fetch, holding
from tests.fixtures.waiting import eventually

MEBIBYTE = 1 << 20
CHILDREN, LARGE = 12, "x" * 300_000


async def _most_written(scene: Scene, kind: EventType) -> int:
    """Bytes of payloads in events of one kind, in the transaction that wrote most of them."""
    rows = await fetch(
        scene.dsn,
        """select max(bytes)::int8 from (
             select sum(octet_length(payload::text)) as bytes from event where type = %s group by xmin::text
           ) as written""",
        [int(kind)],
    )
    return int(rows[0][0])


def _transactions_before_starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many transactions began between each start and that in which it is, at servers that are started after this.
    Counted where transactions begin: a caller may be slow itself.
    """
    began: list[float] = []
    waited: list[int] = []
    work = commit.Committer.work

    async def seen(self: Any, connection: Any, operations: list[Any], skip_locked: bool) -> Any:
        asked = [op.deadline - self._config.operation_timeout for op in operations if isinstance(op, Start)]
        waited.extend(sum(at > since for at in began) for since in asked)
        began.append(time.monotonic())
        return await work(self, connection, operations, skip_locked)

    monkeypatch.setattr(commit.Committer, "work", seen)
    return waited


async def test_large_inputs_of_many_items_are_built_a_few_at_a_time_and_others_start_in_between(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 items at once whose input is 900 KB each: all of them begin, and each has its input."""
    waited = _transactions_before_starts(monkeypatch)
    scene = await open_scene(lanes=1, statement_timeout=30.0, batch_timeout=60.0)
    each = {"id": "each", "map": {"over": "/xs", "max_parallel": 200, "do": [step("b", input={"all": {"$from": "#"}})]}}
    await scene.api.register(workflow(step("a"), each))
    await scene.api.register(workflow(step("c"), workflow_id="small"))
    run_id = await scene.start({"big": "x" * 900_000})
    a = await scene.task("a")
    await scene.worker.capacity(0)
    await scene.complete(a, {"xs": list(range(200))})
    async with asyncio.timeout(300):
        while await count(scene.dsn, "task", "run_id = %s", [run_id]) < 200:
            await scene.start(workflow_id="small")
    assert await _most_written(scene, EventType.INPUT_BUILT) < 20 * MEBIBYTE
    assert max(waited) <= 4, "a start waited for more than the transaction before it"
    assert await count(scene.dsn, "timer") == 0
    await scene.call("Terminate", run_id)


@pytest.mark.parametrize("behind", [False, True])
async def test_maps_in_a_map_are_opened_a_few_at_a_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """However small their items are: an input of a megabyte makes half a million events, on which a transaction was
    begun again and again that could not be done in its time. First in their sequences, or behind another node.
    """
    monkeypatch.setattr(flow, "_MAX_OPENED", 500)
    cases = [{"when": {"at": "", "eq": 1}, "do": [{"id": "nap", "sleep": "1h"}]}]
    other = [{"id": "other", "choose": [{"when": {"at": "", "eq": 1}, "do": [{"id": "sleep", "sleep": "1h"}]}]}]
    inner = {"id": "inner", "map": {"over": "", "do": [{"id": "pick", "choose": cases}], "max_parallel": 10}}
    outer = {"id": "outer", "map": {"over": "", "do": [*(other if behind else ()), inner], "max_parallel": 1000}}
    run_id = await scene.run(outer, data=[[0] * 300] * 10)
    assert await scene.output(run_id) == [[0] * 300] * 10
    [(most,)] = await fetch(scene.dsn, "select max(n) from (select count(*) as n from event group by xmin::text) x")
    assert most < 2000


async def test_maps_of_many_runs_that_are_started_at_once_are_opened_a_few_at_a_time(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come in one transaction, which has no more time for many runs than for one."""
    monkeypatch.setattr(flow, "_MAX_OPENED_IN_ALL", 500)
    scene = await open_scene(lanes=1)
    cases = [{"when": {"at": "", "eq": 1}, "do": [{"id": "nap", "sleep": "1h"}]}]
    each = {"id": "each", "map": {"over": "", "do": [{"id": "pick", "choose": cases}], "max_parallel": 300}}
    await scene.api.register(workflow(each))
    data = [0] * 300
    for result in await scene.api.start_many([scene.api.start_request("wf", json.dumps(data)) for _ in range(12)]):
        assert await scene.output(result.started.run_id) == data
    [(most,)] = await fetch(scene.dsn, "select max(n) from (select count(*) as n from event group by xmin::text) x")
    assert most < 2500


async def test_items_whose_inputs_are_put_off_go_on_over_a_failure_and_a_pause(open_scene: OpenScene) -> None:
    """Forty items, so that it takes three decisions; stopped before the last, retried, paused, resumed."""
    scene = await open_scene()
    await scene.worker.capacity(0)
    item = step("b", input={"all": {"$from": "#"}, "x": {"$from": "each#"}})
    each = {"id": "each", "map": {"over": "/xs", "max_parallel": 40, "do": [item]}}
    await scene.api.register(
        workflow({"id": "all", "parallel": [[each], [{"id": "w", "wait_signal": "go"}, step("c")]]})
    )
    run_id = await scene.start({"big": "x" * 900_000, "xs": list(range(40))})
    await scene.call("Pause", run_id)
    await scene.call("Resume", run_id)
    await scene.signal(run_id)
    await scene.worker.capacity(1)
    # c or one of the items that have begun: its failure stops the others, some of which may have not.
    first = await scene.worker.task()
    await scene.fail(first)
    await scene.failure(run_id)
    await scene.worker.capacity(0)
    await scene.call("Retry", run_id)
    await scene.worker.capacity(10)
    seen: list[object] = []
    while len(seen) < 41:
        for task in await scene.worker.tasks(1):
            seen.append("c" if task.handler == "c" else given(task)["x"])
            await scene.complete(task, 1)
    assert sorted(seen, key=str) == sorted(["c", *range(40)], key=str)
    assert len((await scene.output(run_id))["each"]) == 40


async def test_a_pause_with_thousands_of_waits_and_signals_of_one_name_can_be_ended(open_scene: OpenScene) -> None:
    """Where all signals are numbered anew for each wait, that takes more than twice the time that a statement has."""
    scene = await open_scene(statement_timeout=2.0)
    branches = []
    for name in ("first", "second", "third", "fourth"):
        wait = {"id": f"wait-{name}", "wait_signal": "go"}
        branches.append([{"id": name, "map": {"over": "", "max_parallel": 1000, "do": [wait]}}])
    await scene.api.register(workflow({"id": "all", "parallel": branches}))
    run_id = await scene.start(list(range(1000)))
    await scene.call("Pause", run_id)
    for _ in range(16):
        await asyncio.gather(*(scene.signal(run_id) for _ in range(250)))
    assert (await count(scene.dsn, "wait"), await count(scene.dsn, "signal")) == (4000, 4000)
    await scene.call("Resume", run_id)
    await scene.output(run_id)
    assert await count(scene.dsn, "signal") == 0


async def _family(open_scene: OpenScene) -> tuple[Scene, str]:
    """A run that starts children with large inputs, on a server that writes little at a time."""
    scene = await open_scene(lanes=1, lane_batch_bytes=MEBIBYTE, lock_timeout=0.05)
    await scene.api.register(workflow(step("b"), workflow_id="child"))
    kids = [[{"id": f"k{n}", "workflow": "child"}] for n in range(CHILDREN)]
    await scene.api.register(workflow({"id": "all", "parallel": kids}))
    return scene, await scene.start(LARGE)


async def test_children_with_large_inputs_start_a_few_at_a_time(open_scene: OpenScene) -> None:
    scene, _run_id = await _family(open_scene)
    assert len(await scene.worker.tasks(CHILDREN)) == CHILDREN
    assert await _most_written(scene, EventType.RUN_STARTED) <= MEBIBYTE


async def test_children_with_large_outputs_are_heard_of_a_few_at_a_time(open_scene: OpenScene) -> None:
    """All of them ended while their parent could not be told."""
    scene, run_id = await _family(open_scene)
    tasks = await scene.worker.tasks(CHILDREN)
    async with holding(scene.dsn, "select 1 from run where run_id = %s for update", [run_id]):
        for task in tasks:
            await scene.complete(task, LARGE)

        async def all_wait() -> bool:
            return await count(scene.dsn, "message") == CHILDREN

        await eventually(all_wait)
    assert await scene.output(run_id) == {"count": CHILDREN}
    assert await _most_written(scene, EventType.CHILD_ENDED) <= MEBIBYTE


async def test_what_all_items_of_a_map_take_from_is_read_once(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand items take from five earlier values, and begin in one transaction."""
    scene = await open_scene()
    sources = {name: {"$from": f"{name}#"} for name in "abcd"}
    item = step("e", input={**sources, "all": {"$from": "#"}})
    each = {"id": "each", "map": {"over": "", "max_parallel": 1000, "do": [item]}}
    run_id = await scene.run(*(step(name) for name in "abcd"), each, data="x" * 10_000)
    await scene.do("a", "b", "c", output=1)
    d = await scene.task("d")
    await scene.worker.capacity(0)
    with counted(monkeypatch) as found:
        await scene.complete(d, list(range(1000)))
    [begun] = [one for one in found if "batch.insert_tasks" in one.statements]
    assert (begun.statements.count("extra.payload"), begun.statements.count("extra.recorded")) == (5, 4)
    assert await count(scene.dsn, "task", "run_id = %s", [run_id]) == 1000
