"""A definition at run time: its nodes by their place in preorder, what follows each, and what has to fit where."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fencepost_server.domain.graph import Graph, compile_graph
from fencepost_server.domain.manifest import parse_manifest
from fencepost_server.domain.nodes import iter_nodes

INTEGER, OBJECT = {"type": "integer"}, {"type": "object"}
CHECKED = {"schema_check": "runtime"}


def step(node_id: str, **more: Any) -> dict[str, Any]:
    return {"id": node_id, "step": f"do-{node_id}", **more}


def graph(*nodes: dict[str, Any], **top: Any) -> Graph:
    """By way of the canonical text, as a server reads it."""
    text = json.dumps({"id": "wf", "compatibility_id": "1", **top, "sequence": nodes})
    return compile_graph(parse_manifest(text).canonical)


NESTED = graph(
    step("a"),
    {
        "id": "all",
        "parallel": [
            [step("b"), step("c")],
            [{"id": "each", "map": {"over": "", "do": [step("d"), {"id": "nap", "sleep": "1s"}]}}],
        ],
    },
    {
        "id": "way",
        "choose": [
            {"when": {"at": "", "eq": 1}, "do": [step("e")]},
            {"otherwise": [{"id": "sub", "workflow": "child"}, step("f")]},
        ],
    },
    {"id": "ask", "wait_signal": "go"},
)


def test_nodes_are_numbered_in_preorder_as_the_manifest_lists_them() -> None:
    ids = [node.id for node in NESTED.nodes]
    assert ids == ["a", "all", "b", "c", "each", "d", "nap", "way", "e", "sub", "f", "ask"]
    assert NESTED.manifest is not None
    assert ids == [node.id for node, _ in iter_nodes(NESTED.manifest.nodes)]
    assert NESTED.by_id == {node_id: index for index, node_id in enumerate(ids)}
    assert [node.index for node in NESTED.nodes] == list(range(len(ids)))


def test_what_follows_and_what_is_around_is_known_of_each() -> None:
    of = {node.id: node for node in NESTED.nodes}

    def name(index: int | None) -> str | None:
        return None if index is None else NESTED.nodes[index].id

    follows = {node_id: name(node.next) for node_id, node in of.items() if node.next is not None}
    assert follows == {"a": "all", "b": "c", "d": "nap", "all": "way", "sub": "f", "way": "ask"}
    around = {node_id: name(node.parent) for node_id, node in of.items() if node.parent is not None}
    inside = {"b": "all", "c": "all", "each": "all", "d": "each", "nap": "each", "e": "way", "sub": "way", "f": "way"}
    assert around == inside
    bodies = {node_id: [name(body) for body in node.bodies] for node_id, node in of.items() if node.bodies}
    assert bodies == {"all": ["b", "each"], "each": ["d"], "way": ["e", "sub"]}


def test_a_branch_is_named_by_its_last_node_and_found_by_its_first() -> None:
    of = {node.id: node for node in NESTED.nodes}
    assert [of[first].branch for first in ("b", "each")] == ["c", "each"]


@pytest.mark.parametrize(
    ("more", "simple"),
    [
        ({}, True),
        ({"timeout": "1s", "retry": {"max_attempts": 9}, "queue": "q", "lease": "2s"}, True),
        ({"undo": {"step": "u"}}, False),
        ({"queue_timeout": "1s"}, False),
        ({"total_timeout": "1s"}, False),
        ({"input": {"$from": "#"}}, False),
    ],
)
def test_a_sequence_of_steps_is_simple_as_long_as_a_step_brings_nothing_but_its_task(
    more: dict[str, Any], simple: bool
) -> None:
    assert graph(step("a"), step("b", **more)).simple == simple
    assert not graph(step("a"), {"id": "nap", "sleep": "1s"}).simple


def test_a_task_is_made_of_its_step_or_of_the_undo_of_it() -> None:
    undo = {"step": "refund", "queue": "money", "timeout": "2s", "lease": "90s", "retry": {"max_attempts": 7}}
    compiled = graph(step("a", queue="q", timeout="1500ms", undo=undo | {"undo_unfinished": True}), step("b"))
    work = compiled.work(0, undo=False)
    assert (work.handler, work.queue, work.lease_ms, work.timeout_ms) == ("do-a", "q", 60_000, 1500)
    work = compiled.work(0, undo=True)
    assert (work.handler, work.queue, work.lease_ms, work.timeout_ms) == ("refund", "money", 90_000, 2000)
    assert work.retry.max_attempts == 7
    assert compiled.nodes[0].undo_unfinished
    assert compiled.nodes[1].undo is None
    assert compiled.work(1, undo=False).timeout_ms is None


# What has to fit


def test_an_output_has_to_fit_its_own_schema_and_what_takes_it_where_nobody_compared_the_two() -> None:
    compiled = graph(
        step("a", output_schema=OBJECT),
        step("b", input_schema={"type": "object", "required": ["x"]}, **CHECKED),
        step("c"),
    )
    a = compiled.nodes[0]
    assert [fault.path for fault in a.violations(1)] == [""]
    assert a.violations({}), "the next node needs x"
    assert a.violations({"x": 1}) == []
    assert compiled.nodes[1].violations("anything") == []


def test_the_last_step_has_to_fit_the_output_schema_of_the_workflow_also_inside_a_choice() -> None:
    last = {"schema_check": "runtime"}
    assert graph(step("a", **last), output_schema=INTEGER).nodes[0].violations("x")
    way = {"id": "way", "choose": [{"otherwise": [step("a", output_schema=INTEGER)]}]}
    compiled = graph(way, output_schema=INTEGER)
    assert compiled.nodes[compiled.by_id["a"]].violations("x")
    fork = {"id": "all", "parallel": [[step("a")]]}
    assert graph(fork).nodes[1].violations("x") == []


def test_the_input_of_a_run_has_to_fit_the_workflow_and_its_first_node() -> None:
    compiled = graph(step("a", input_schema={"type": "object", "required": ["x"]}, **CHECKED), input_schema=OBJECT)
    assert compiled.input_violations(1)
    assert compiled.input_violations({})
    assert compiled.input_violations({"x": 1}) == []
    mapped = graph(step("a", input={"x": 1}, input_schema={"type": "object", "required": ["x"]}))
    assert mapped.input_violations("anything") == [], "the first node does not take the run's input"


def test_what_a_mapping_builds_is_checked_when_it_arrives() -> None:
    compiled = graph(step("a"), step("b", input={"$from": "a#"}, input_schema=INTEGER))
    [check] = compiled.nodes[1].arrival
    assert check.violations("x")
    assert compiled.nodes[0].arrival == ()
    assert [node.recorded for node in compiled.nodes] == [True, False]


@pytest.mark.parametrize("before", ["signal", "sleep", "join", "choice", "step"])
def test_what_comes_from_where_no_step_is_told_is_checked_when_it_arrives(before: str) -> None:
    nodes: dict[str, dict[str, Any]] = {
        "signal": {"id": "x", "wait_signal": "go"},
        "sleep": {"id": "x", "sleep": "1s"},
        "join": {"id": "x", "parallel": [[step("a")], [step("b")]]},
        "choice": {"id": "x", "choose": [{"when": {"at": "", "eq": 1}, "do": [step("a")]}]},
        "step": step("x"),
    }
    compiled = graph(nodes[before], step("last", input_schema=INTEGER, **CHECKED))
    assert bool(compiled.nodes[-1].arrival) == (before != "step")


def test_the_payload_of_a_signal_has_to_fit_every_wait_of_its_name() -> None:
    waits = [
        {"id": f"w{n}", "wait_signal": "go", "output_schema": schema}
        for n, schema in enumerate((INTEGER, {"type": "number", "minimum": 5}))
    ]
    compiled = graph(*waits, {"id": "other", "wait_signal": "else"})
    assert compiled.signal_violations("go", "x")
    assert compiled.signal_violations("go", 3)
    assert compiled.signal_violations("go", 7) == []
    assert compiled.signal_violations("else", "x") == compiled.signal_violations("nobody", "x") == []


def test_schemas_that_differ_in_spelling_only_are_checked_once_and_true_is_not_one() -> None:
    same = {"required": ["x"], "type": "object"}
    compiled = graph(
        step("a", output_schema={"type": "object", "required": ["x"]}), step("b", input_schema=same, **CHECKED)
    )
    assert len(compiled.nodes[0].checks) == 1
    compiled = graph(step("a", output_schema={"const": 1}), step("b", input_schema={"const": True}, **CHECKED))
    assert len(compiled.nodes[0].checks) == 2
