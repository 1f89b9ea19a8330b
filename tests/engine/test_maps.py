"""Maps: their order, their bounds, and what an item costs whatever the size of the map (semantics: control flow)."""

from __future__ import annotations

import base64
import random
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest

from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from fencepost_server.store import pipeline
from tests.engine.flows import AT_ONCE, OPERATIONAL, PERMANENT, OpenScene, Scene, given, step
from tests.engine.rows import count
from tests.fixtures.raw_worker import OK


def each(*body: dict[str, Any], over: str = "", **more: Any) -> dict[str, Any]:
    """A map node."""
    return {"id": "each", "map": {"over": over, "do": body, **more}}


async def test_outputs_are_in_the_order_of_the_items_however_they_come(scene: Scene) -> None:
    run_id = await scene.run(each(step("a"), max_parallel=20), step("b"), data=list(range(20)))
    tasks = await scene.worker.tasks(20)
    random.shuffle(tasks)
    for task in tasks:
        await scene.complete(task, given(task) * 2)
    b = await scene.task("b")
    assert given(b) == [n * 2 for n in range(20)]
    await scene.complete(b, 0)
    assert await scene.output(run_id) == 0
    assert await count(scene.dsn, "scope") == await count(scene.dsn, "output") == 0


async def test_no_more_items_than_max_parallel_are_under_way_and_none_waits_for_its_siblings(scene: Scene) -> None:
    run_id = await scene.run(each(step("a"), step("b"), max_parallel=3), data=list(range(8)))
    open_, begun, done = await scene.worker.tasks(3), 3, 0
    while open_:
        run = await scene.api.get(run_id)
        assert len(run.open_steps) == len(open_) <= 3
        assert len({step.item for step in run.open_steps}) == len(open_)
        await scene.worker.sync()
        assert scene.worker.unread(pb.Tasks) == []
        task = open_.pop(random.randrange(len(open_)))
        await scene.complete(task, given(task))
        done += task.handler == "b"
        begun += task.handler == "b" and begun < 8
        while len(open_) < begun - done:
            open_ += await scene.worker.tasks(1)
    assert await scene.output(run_id) == list(range(8))


async def test_ten_items_are_under_way_where_a_map_does_not_say(scene: Scene) -> None:
    await scene.run(each(step("a")), data=list(range(12)))
    await scene.worker.tasks(10)
    await scene.no_task()


async def test_a_map_over_nothing_gives_an_empty_array_at_once(scene: Scene) -> None:
    run_id = await scene.run(each(step("a"), over="/none"), step("b"), data={"none": []})
    b = await scene.task("b")
    assert given(b) == []
    await scene.complete(b, "end")
    assert await scene.output(run_id) == "end"


async def test_a_map_over_nothing_may_be_all_that_a_run_does(scene: Scene) -> None:
    assert await scene.output(await scene.run(each(step("a")), data=[])) == []


async def test_an_item_keeps_its_place_over_failures_and_its_input_to_the_letter(scene: Scene) -> None:
    data = [{"b": 1, "a": 2**70}, "\u0000x", 12345678901234567890, 100, 1.5, None]
    run_id = await scene.run(each(step("a", retry=AT_ONCE)), data=data)
    for task in await scene.worker.tasks(6):
        await scene.fail(task, OPERATIONAL)
    for task in await scene.worker.tasks(6):
        assert task.attempt == 2
        await scene.complete(task, given(task))
    found = await scene.output(run_id)
    assert [type(value) for value in found] == [type(value) for value in data]
    assert found == data


@pytest.mark.parametrize(
    ("over", "data", "told"),
    [
        ("/no/where", {"no": 1}, "points nowhere"),
        ("/text", {"text": "abc"}, "is no array"),
        ("", {"0": 1}, "is no array"),
        ("/many", {"many": [0] * 10_001}, "10001 items; at most 10000"),
    ],
)
async def test_what_can_not_be_mapped_over_fails_the_run(scene: Scene, over: str, data: Any, told: str) -> None:
    failure = await scene.failure(await scene.run(each(step("a"), over=over), data=data))
    assert (failure.code, failure.kind, failure.node_id) == ("INVALID_NODE_INPUT", PERMANENT, "each")
    assert told in failure.message


async def test_a_binary_value_can_not_be_mapped_over(scene: Scene) -> None:
    run_id = await scene.run(step("a"), each(step("b")))
    item = pb.CompleteItem(task=(await scene.task("a")).task, output=Payload(binary=b"\0"))
    await scene.worker.results(await scene.worker.send(pb.Complete(items=[item])), 1)
    assert (await scene.failure(run_id)).code == "INVALID_NODE_INPUT"


async def test_the_limit_of_items_is_a_setting_and_the_last_one_that_fits_runs(open_scene: OpenScene) -> None:
    scene = await open_scene(max_map_items=3)
    run_id = await scene.run(each(step("a")), data=[1, 2, 3])
    for task in await scene.worker.tasks(3):
        await scene.complete(task, given(task))
    assert await scene.output(run_id) == [1, 2, 3]
    assert (await scene.failure(await scene.start([1, 2, 3, 4]))).code == "INVALID_NODE_INPUT"


@pytest.mark.parametrize(("size", "fits"), [(508, True), (509, False)])
async def test_a_joined_output_above_the_limit_of_payloads_becomes_its_count(
    open_scene: OpenScene, size: int, fits: bool
) -> None:
    """Two strings, their quotes, a comma and two brackets: 2 × (508 + 2) + 3 = 1023 bytes, one less than the limit."""
    scene = await open_scene(max_payload_bytes=1024)
    run_id = await scene.run(each(step("a")), data=[1, 2])
    for task in await scene.worker.tasks(2):
        await scene.complete(task, "x" * size)
    assert await scene.output(run_id) == (["x" * size] * 2 if fits else {"count": 2})


async def test_the_limit_of_a_joined_output_counts_bytes(open_scene: OpenScene) -> None:
    scene = await open_scene(max_payload_bytes=1024)
    run_id = await scene.run(each(step("a")), data=[1, 2])
    tasks = await scene.worker.tasks(2)
    results = await scene.worker.complete_all([(task, '"' + "ü" * 300 + '"') for task in tasks])
    assert [result.outcome for result in results] == [OK, OK]
    assert await scene.output(run_id) == {"count": 2}


async def test_binary_outputs_are_joined_as_base64(scene: Scene) -> None:
    run_id = await scene.run(each(step("a")), data=[1, 2])
    for task in await scene.worker.tasks(2):
        item = pb.CompleteItem(task=task.task, output=Payload(binary=bytes([given(task)])))
        await scene.worker.results(await scene.worker.send(pb.Complete(items=[item])), 1)
    assert await scene.output(run_id) == [{"binary": base64.b64encode(bytes([n])).decode()} for n in (1, 2)]


async def test_an_item_that_fails_for_good_ends_the_run_and_its_siblings(scene: Scene) -> None:
    run_id = await scene.run(each(step("a"), max_parallel=2), data=[1, 2, 3])
    first, _second = await scene.worker.tasks(2)
    await scene.fail(first)
    await scene.until(run_id, "ENDING")
    cancel = await scene.worker.next(pb.Cancel)
    assert [ref.task_id for ref in cancel.tasks] == [_second.task.task_id]
    await scene.complete(_second)
    failure = await scene.failure(run_id)
    assert (failure.code, failure.node_id) == ("TEST", "a")
    assert len(await scene.events(run_id, "step_scheduled")) == 2
    await scene.no_task()


# What an item costs


class Counted:
    """Statements that the lanes have sent, elements of arrays that went with them, and rows that they touched."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.elements = 0
        self.answers: list[Any] = []

    def numbers(self) -> tuple[int, int, int]:
        """All three."""
        return self.names.total(), self.elements, sum(answer.affected for answer in self.answers)


async def counted(scene: Scene, patch: pytest.MonkeyPatch, work: Awaitable[Any]) -> Counted:
    """Await ``work`` and count what the lanes have asked the database for meanwhile."""
    seen = Counted()
    send = pipeline.Session.send

    def counting(self: Any, statement: bytes, params: Any = None) -> Any:
        answer = send(self, statement, params)
        if any(lane._connection is self._connection for lane in scene.server.app.engine.lanes):
            seen.names[statement.strip().split(b"\n")[-1].decode()] += 1
            seen.elements += sum(len(value) for value in (params or {}).values() if isinstance(value, list))
            seen.answers.append(answer)
        return answer

    with patch.context() as inner:
        inner.setattr(pipeline.Session, "send", counting)
        await work
    return seen


async def item_by_item(scene: Scene, n: int) -> None:
    """Complete items one after the other, so that each is a batch of its own."""
    for _ in range(n):
        await scene.do("a", output=1)


async def test_an_item_costs_the_same_in_a_map_of_a_hundred_and_of_a_thousand(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scopes count joins: no item reads its siblings. Neither statements, nor what goes with them, nor rows grow."""
    scene = await open_scene(lanes=1)
    await scene.run(each(step("a"), max_parallel=5), data=[0])
    await scene.do("a")
    found = []
    for size in (100, 1000):
        run_id = await scene.start([0] * size)
        await scene.worker.sync()
        found.append(await counted(scene, monkeypatch, item_by_item(scene, 30)))
        await scene.call("Terminate", run_id)
        await scene.worker.reconnect(held=[])
    small, large = found
    assert small.names.total() >= 30
    assert small.numbers() == large.numbers(), small.names - large.names | large.names - small.names
