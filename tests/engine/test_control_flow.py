"""Parallel, choose, containers inside each other, and what input mappings take from (semantics: control flow)."""

from __future__ import annotations

import base64
from typing import Any

from fencepost.v1 import error_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.engine.flows import OpenScene, Scene, given, step, value_of, workflow
from tests.engine.rows import count
from tests.fixtures.raw_worker import OK, REFUSED

FORK = {"id": "both", "parallel": [[step("a"), step("b")], [step("c")]]}


def taken(pointer: str) -> dict[str, str]:
    """What stands for a value from elsewhere."""
    return {"$from": pointer}


# Parallel


async def test_branches_begin_together_with_the_nodes_input_and_join_by_their_last_nodes(scene: Scene) -> None:
    run_id = await scene.run(FORK, step("d"), data=[1])
    a, c = await scene.tasks("a", "c")
    assert given(a) == given(c) == [1]
    await scene.complete(c, "C")
    await scene.complete(a, "A")
    b = await scene.task("b")
    assert given(b) == "A"
    await scene.no_task()
    await scene.complete(b, "B")
    d = await scene.task("d")
    assert given(d) == {"b": "B", "c": "C"}
    await scene.complete(d, 1)
    assert await scene.output(run_id) == 1
    assert await count(scene.dsn, "scope") == await count(scene.dsn, "output") == 0


async def test_the_output_of_a_parallel_node_at_the_end_is_the_runs(scene: Scene) -> None:
    run_id = await scene.run(FORK)
    for task, output in zip(await scene.tasks("a", "c"), ("A", None), strict=True):
        await scene.complete(task, output)
    await scene.do("b", output=[2])
    assert await scene.output(run_id) == {"b": [2], "c": None}


async def test_branches_that_end_in_one_batch_join_once(scene: Scene) -> None:
    """Row 50 of the field's failures."""
    await scene.run({"id": "both", "parallel": [[step(name)] for name in "abcd"]}, step("e"))
    for _ in range(9):
        await scene.start()
    first = await scene.worker.tasks(40)
    results = await scene.worker.complete_all([(task, f'"{task.handler}"') for task in first])
    assert {result.outcome for result in results} == {OK}
    joined = await scene.worker.tasks(10)
    assert [given(task) for task in joined] == [{name: name for name in "abcd"}] * 10
    await scene.worker.complete_all([(task, "1") for task in joined])
    for run_id in {task.task.run_id for task in joined}:
        assert await scene.output(run_id) == 1
        assert (await scene.kinds(run_id)).count("scope_closed") == 1


async def test_a_binary_output_is_joined_as_base64(scene: Scene) -> None:
    run_id = await scene.run({"id": "both", "parallel": [[step("a")], [step("b")]]})
    a, b = await scene.tasks("a", "b")
    item = pb.CompleteItem(task=a.task, output=Payload(binary=b"\0\xff"))
    await scene.worker.results(await scene.worker.send(pb.Complete(items=[item])), 1)
    await scene.complete(b, 1)
    assert await scene.output(run_id) == {"a": {"binary": base64.b64encode(b"\0\xff").decode()}, "b": 1}


async def test_a_joined_output_above_the_limit_of_payloads_becomes_its_count(open_scene: OpenScene) -> None:
    scene = await open_scene(max_payload_bytes=1024)
    run_id = await scene.run({"id": "both", "parallel": [[step("a")], [step("b")]]})
    for task in await scene.tasks("a", "b"):
        await scene.complete(task, "x" * 600)
    assert await scene.output(run_id) == {"count": 2}


# Choose

CASES: list[tuple[dict[str, Any], Any, Any]] = [
    # when, an input for which it holds, one for which it does not
    ({"at": "/n", "eq": 1}, {"n": 1.0}, {"n": "1"}),
    ({"at": "/n", "ne": 1}, {}, {"n": 1}),
    ({"at": "/n", "lt": 2}, {"n": 1.5}, {"n": 2}),
    ({"at": "/n", "le": 2}, {"n": 2}, {"n": "1"}),
    ({"at": "/n", "gt": "a"}, {"n": "b"}, {"n": 5}),
    ({"at": "/n", "ge": 2**53 + 1}, {"n": 2**53 + 1}, {"n": 2**53}),
    ({"at": "/n", "in": [1, None, [2]]}, {"n": [2]}, {"n": 2}),
    ({"at": "/n", "exists": True}, {"n": None}, {"m": 1}),
    ({"at": "/n", "exists": False}, [], {"n": 1}),
    ({"all": [{"at": "/n", "gt": 1}, {"at": "/n", "lt": 3}]}, {"n": 2}, {"n": 3}),
    ({"any": [{"at": "/n", "eq": 1}, {"at": "", "eq": 7}]}, 7, {"n": 2}),
    ({"not": {"at": "/n", "lt": 2}}, {"n": "x"}, {"n": 1}),
]


async def test_every_operator_of_a_condition_decides_at_run_time(scene: Scene) -> None:
    for number, (when, holds, fails) in enumerate(CASES):
        await scene.api.register(_choose(f"w{number}", {"when": when, "do": [step("a")]}, {"otherwise": [step("b")]}))
        for data, handler in ((holds, "a"), (fails, "b")):
            run_id = await scene.start(data, f"w{number}")
            task = await scene.task(handler)
            assert given(task) == data
            await scene.complete(task, handler)
            assert await scene.output(run_id) == handler, when
            [choice] = await scene.events(run_id, "choice_made")
            assert choice.case_index == "ab".index(handler)


def _choose(workflow_id: str, *cases: dict[str, Any]) -> str:
    return workflow({"id": "way", "choose": cases}, workflow_id=workflow_id)


async def test_the_first_case_that_fits_runs_and_only_that(scene: Scene) -> None:
    first, second = ({"when": {"at": "", "gt": n}, "do": [step(name)]} for n, name in ((1, "a"), (0, "b")))
    run_id = await scene.run({"id": "way", "choose": [first, second]}, step("c"), data=2)
    await scene.do("a", output="A")
    c = await scene.task("c")
    assert given(c) == "A"
    await scene.complete(c)
    assert await scene.output(run_id) is None
    assert len(await scene.events(run_id, "step_scheduled")) == 2


async def test_where_no_case_fits_the_input_passes_through(scene: Scene) -> None:
    run_id = await scene.run({"id": "way", "choose": [{"when": {"at": "", "eq": 1}, "do": [step("a")]}]}, data=[2])
    assert await scene.output(run_id) == [2]
    [choice] = await scene.events(run_id, "choice_made")
    assert choice.case_index == -1


async def test_of_a_binary_value_only_otherwise_and_not_can_be_chosen(scene: Scene) -> None:
    """Nothing can be looked for in it: it is as if every pointer led nowhere."""
    cases = [{"when": {"at": "", "exists": True}, "do": [step("b")]}, {"otherwise": [step("c")]}]
    run_id = await scene.run(step("a"), {"id": "way", "choose": cases})
    a = await scene.task("a")
    item = pb.CompleteItem(task=a.task, output=Payload(binary=b"\0"))
    await scene.worker.results(await scene.worker.send(pb.Complete(items=[item])), 1)
    c = await scene.task("c")
    assert c.input.binary == b"\0"
    await scene.complete(c, 1)
    assert await scene.output(run_id) == 1


# Inside each other, with mappings


async def test_a_mapping_takes_from_the_input_from_earlier_nodes_and_from_the_item_around(scene: Scene) -> None:
    inner = {
        "id": "inner",
        "map": {
            "over": "/parts",
            "do": [
                step("b", input={"whole": taken("#/x"), "first": taken("a#/y"), "line": taken("lines#/name"),
                                 "part": taken("inner#"), "fixed": [1, {"two": 2}]}),
            ],
        },
    }  # fmt: skip
    lines = {"id": "lines", "map": {"over": "/lines", "do": [inner]}}
    run_id = await scene.run(
        step("a"), lines, step("c", input={"x": taken("#/x"), "all": taken("lines#")}), data={"x": 9}
    )
    data = {"y": 3, "lines": [{"name": "p", "parts": [1, 2]}, {"name": "q", "parts": [3]}]}
    await scene.do("a", output=data)
    inputs = []
    for task in await scene.worker.tasks(3):
        inputs.append(given(task))
        await scene.complete(task, given(task)["part"] * 10)
    same = {"whole": 9, "first": 3, "fixed": [1, {"two": 2}]}
    expected = [{**same, "line": name, "part": part} for name, part in (("p", 1), ("p", 2), ("q", 3))]
    assert sorted(inputs, key=lambda value: int(value["part"])) == expected
    c = await scene.task("c")
    assert given(c) == {"x": 9, "all": [[10, 20], [30]]}
    await scene.complete(c, 0)
    assert await scene.output(run_id) == 0


async def test_numbers_pass_a_mapping_as_they_were_written(scene: Scene) -> None:
    """An integer stays one for whoever reads it with a common parser, in what is taken and in the template itself."""
    data = [100, 12345678901234567890, 2**70, -1, 1.5, 1e-7, 0.1, True]
    run_id = await scene.run(step("a", input={"all": taken("#"), "fixed": [1000, 0.5]}), data=data)
    a = await scene.task("a")
    assert repr(given(a)) == repr({"all": data, "fixed": [1000, 0.5]})
    await scene.complete(a)
    await scene.output(run_id)


async def test_each_branch_and_item_takes_from_its_own_earlier_nodes(scene: Scene) -> None:
    body = [step("a"), step("b"), step("c", input=[taken("a#"), taken("b#")])]
    run_id = await scene.run({"id": "each", "map": {"over": "", "do": body}}, data=[1, 2, 3])
    for handler, factor in (("a", 10), ("b", 10)):
        for task in reversed(await scene.tasks(*[handler] * 3)):
            await scene.complete(task, given(task) * factor)
    for task in await scene.tasks("c", "c", "c"):
        await scene.complete(task, given(task))
    assert await scene.output(run_id) == [[10, 100], [20, 200], [30, 300]]


async def test_a_node_inside_a_choice_takes_from_what_ran_around_it(scene: Scene) -> None:
    deep = {"otherwise": [step("b"), step("c", input={"a": taken("a#"), "b": taken("b#"), "in": taken("#")})]}
    run_id = await scene.run(step("a"), {"id": "way", "choose": [deep]}, step("d", input=taken("way#")), data="I")
    await scene.do("a", output="A")
    await scene.do("b", output="B")
    c = await scene.task("c")
    assert given(c) == {"a": "A", "b": "B", "in": "I"}
    await scene.complete(c, "C")
    d = await scene.task("d")
    assert given(d) == "C"
    await scene.complete(d, "D")
    assert await scene.output(run_id) == "D"


async def test_containers_inside_each_other_join_from_the_inside(scene: Scene) -> None:
    """parallel in map in choose in parallel."""
    fork = {"id": "fork", "parallel": [[step("a")], [step("b")]]}
    each = {"id": "each", "map": {"over": "", "do": [fork], "max_parallel": 1}}
    way = {"id": "way", "choose": [{"when": {"at": "/0", "exists": True}, "do": [each]}]}
    run_id = await scene.run({"id": "top", "parallel": [[way], [step("c")]]}, data=[1, 2])
    a, b, c = await scene.tasks("a", "b", "c")
    await scene.complete(c, "C")
    for name, task in (("a", a), ("b", b)):
        await scene.complete(task, [name, given(task)])
    for name, task in zip("ab", await scene.tasks("a", "b"), strict=True):
        await scene.complete(task, [name, given(task)])
    items = [{"a": ["a", n], "b": ["b", n]} for n in (1, 2)]
    assert await scene.output(run_id) == {"way": items, "c": "C"}


async def test_a_mapping_that_points_nowhere_fails_the_run_at_that_node(scene: Scene) -> None:
    run_id = await scene.run(step("a"), step("b", input={"v": taken("a#/no/thing")}))
    await scene.do("a", output={"no": []})
    failure = await scene.failure(run_id)
    assert (failure.code, failure.node_id) == ("INVALID_NODE_INPUT", "b")
    assert "/no/thing" in failure.message
    [failed] = await scene.events(run_id, "node_failed")
    assert failed.failure == failure


async def test_what_a_mapping_builds_has_to_fit_the_nodes_schema(scene: Scene) -> None:
    node = step(
        "a", input={"n": taken("#/n")}, input_schema={"type": "object", "properties": {"n": {"type": "integer"}}}
    )
    await scene.run(node, data={"n": 1})
    await scene.do("a")
    failure = await scene.failure(await scene.start({"n": "x"}))
    assert (failure.code, failure.node_id) == ("INVALID_NODE_INPUT", "a")
    assert "/n" in failure.message


async def test_what_a_mapping_builds_may_not_be_larger_than_a_payload(open_scene: OpenScene) -> None:
    scene = await open_scene(max_payload_bytes=1024)
    run_id = await scene.run(step("a", input=[taken("#")] * 3), data="x" * 500)
    failure = await scene.failure(run_id)
    assert failure.code == "INVALID_NODE_INPUT"


async def test_a_mapping_takes_nothing_from_a_binary_value(scene: Scene) -> None:
    run_id = await scene.run(step("a"), step("b", input=taken("a#")))
    a = await scene.task("a")
    item = pb.CompleteItem(task=a.task, output=Payload(binary=b"\0"))
    await scene.worker.results(await scene.worker.send(pb.Complete(items=[item])), 1)
    failure = await scene.failure(run_id)
    assert (failure.code, failure.node_id) == ("INVALID_NODE_INPUT", "b")


# Schemas between nodes


async def test_the_step_before_a_node_that_is_checked_at_run_time_is_told_what_it_broke(scene: Scene) -> None:
    schema = {"type": "object", "required": ["n"]}
    run_id = await scene.run(step("a"), step("b", input_schema=schema, schema_check="runtime"))
    a = await scene.task("a")
    result = await scene.worker.complete(a, "{}")
    assert (result.outcome, result.reason) == (REFUSED, error_pb2.ERROR_REASON_OUTPUT_SCHEMA_MISMATCH)
    again = await scene.task("a")
    assert value_of(again.feedback.feedback)[0]["message"]
    await scene.complete(again, {"n": 1})
    await scene.do("b")
    await scene.output(run_id)


async def test_what_comes_from_a_join_or_a_signal_is_checked_when_it_arrives(scene: Scene) -> None:
    late: dict[str, Any] = {"schema_check": "runtime", "input_schema": {"type": "integer"}}
    await scene.run({"id": "ask", "wait_signal": "go"}, step("a", **late))
    for data, state in ((1, "COMPLETED"), ("x", "FAILED")):
        run_id = await scene.start()
        await scene.signal(run_id, data=data)
        if state == "COMPLETED":
            await scene.do("a")
        else:
            assert (await scene.failure(run_id)).code == "INVALID_NODE_INPUT"
        await scene.until(run_id, state)
