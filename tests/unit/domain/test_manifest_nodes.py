"""The nodes of every kind: what is read, what is left out of the canonical text, and each fault with its place."""

from __future__ import annotations

import json

import pytest

from fencepost_server.domain.conditions import parse_condition
from fencepost_server.domain.input_mapping import parse_mapping
from fencepost_server.domain.manifest import RetryPolicy, StepNode, parse_manifest
from fencepost_server.domain.manifest_diff import difference
from fencepost_server.domain.nodes import (
    Case,
    ChildNode,
    ChooseNode,
    MapNode,
    Node,
    ParallelNode,
    SignalNode,
    SleepNode,
    Undo,
    iter_nodes,
)
from tests.unit.domain.manifests import faults, manifest, node, read
from tests.unit.domain.test_manifest_faults import NAME_MESSAGE

YAML = """
id: order
compatibility_id: "1"
retention: 720h
sequence:
  - id: charge
    step: payments.charge
    queue: money
    queue_timeout: 60m
    total_timeout: 1d
    undo: {step: payments.refund, timeout: 10s, lease: 2m, retry: {max_attempts: 100}, undo_unfinished: true}
    input: {order: {$from: "#/id"}}
  - {id: cool-off, sleep: 24h}
  - {id: approval, wait_signal: approve, timeout: 7d, output_schema: {type: object}}
  - id: both
    parallel:
      - [{id: left, step: do}]
      - [{id: right, step: do}, {id: right-2, step: do}]
  - id: lines
    map:
      over: /left
      max_parallel: 10
      do: [{id: line, step: do, undo: {step: undo-it, queue: default, undo_unfinished: false}}]
  - id: route
    choose:
      - {when: {at: /n, gt: 1}, do: [{id: case-1, step: do}]}
      - {otherwise: [{id: case-2, step: do}]}
  - {id: invoice, workflow: invoicing, on_parent_end: abandon, undo: {step: invoices.cancel, queue: default}}
"""

RETRY = RetryPolicy()


def step(node_id: str, undo: Undo | None = None) -> StepNode:
    """Return a step node with nothing but defaults."""
    return StepNode(node_id, "do", "default", None, None, None, 60.0, RETRY, undo=undo)


NODES = (
    StepNode(
        id="charge",
        handler="payments.charge",
        queue="money",
        input_schema=None,
        output_schema=None,
        timeout_seconds=None,
        lease_seconds=60.0,
        retry=RETRY,
        queue_timeout_seconds=3600.0,
        total_timeout_seconds=86400.0,
        undo=Undo("payments.refund", "money", 10.0, 120.0, RetryPolicy(max_attempts=100), True),
        input=parse_mapping({"order": {"$from": "#/id"}}),
    ),
    SleepNode("cool-off", 86400.0),
    SignalNode("approval", "approve", {"type": "object"}, 604800.0),
    ParallelNode("both", ((step("left"),), (step("right"), step("right-2")))),
    MapNode("lines", "/left", (step("line", Undo("undo-it", "default", None, 60.0, RETRY)),), 10),
    ChooseNode(
        "route",
        (Case(parse_condition({"at": "/n", "gt": 1}), (step("case-1"),)), Case(None, (step("case-2"),))),
    ),
    ChildNode(
        "invoice",
        "invoicing",
        None,
        None,
        "strict",
        None,
        Undo("invoices.cancel", "default", None, 60.0, RETRY),
        "abandon",
    ),
)


def test_every_kind_of_node_is_read_in_full() -> None:
    found = parse_manifest(YAML, yaml=True)
    assert found.nodes == NODES
    assert found.retention_seconds == 30 * 86400.0
    assert found.children == {"invoicing"}
    assert (read(manifest()).retention_seconds, read(manifest()).children) == (None, frozenset())


def test_the_canonical_text_of_every_kind_of_node_leaves_defaults_out() -> None:
    found = parse_manifest(YAML, yaml=True)
    assert found.canonical == (
        '{"compatibility_id":"1","id":"order","retention":"30d","sequence":['
        '{"id":"charge","input":{"order":{"$from":"#/id"}},"queue":"money","queue_timeout":"1h",'
        '"step":"payments.charge","total_timeout":"1d","undo":{"lease":"2m","retry":{"max_attempts":1e2},'
        '"step":"payments.refund","timeout":"10s","undo_unfinished":true}},'
        '{"id":"cool-off","sleep":"1d"},'
        '{"id":"approval","output_schema":{"type":"object"},"timeout":"7d","wait_signal":"approve"},'
        '{"id":"both","parallel":[[{"id":"left","step":"do"}],'
        '[{"id":"right","step":"do"},{"id":"right-2","step":"do"}]]},'
        '{"id":"lines","map":{"do":[{"id":"line","step":"do","undo":{"step":"undo-it"}}],"over":"/left"}},'
        '{"choose":[{"do":[{"id":"case-1","step":"do"}],"when":{"at":"/n","gt":1}},'
        '{"otherwise":[{"id":"case-2","step":"do"}]}],"id":"route"},'
        '{"id":"invoice","on_parent_end":"abandon","undo":{"step":"invoices.cancel"},"workflow":"invoicing"}]}'
    )
    assert parse_manifest(found.canonical) == found
    assert parse_manifest(found.canonical, yaml=True) == found
    assert found.hash.hex() == "d6dfd3d93002d828d2a8c480f4083b0aea5f08dfcaf9c82313ad0be2f6c17d48"


def test_nodes_come_in_preorder_with_their_places_in_the_manifest() -> None:
    found = parse_manifest(YAML, yaml=True)
    listed = list(iter_nodes(found.nodes))
    assert [(entry.id, path) for entry, path in listed] == [
        ("charge", "/sequence/0"),
        ("cool-off", "/sequence/1"),
        ("approval", "/sequence/2"),
        ("both", "/sequence/3"),
        ("left", "/sequence/3/parallel/0/0"),
        ("right", "/sequence/3/parallel/1/0"),
        ("right-2", "/sequence/3/parallel/1/1"),
        ("lines", "/sequence/4"),
        ("line", "/sequence/4/map/do/0"),
        ("route", "/sequence/5"),
        ("case-1", "/sequence/5/choose/0/do/0"),
        ("case-2", "/sequence/5/choose/1/otherwise/0"),
        ("invoice", "/sequence/6"),
    ]


def test_differences_inside_containers_are_told_by_the_node() -> None:
    old = parse_manifest(YAML, yaml=True).canonical
    new = YAML.replace("{id: left, step: do}", "{id: first, step: do}, {id: left, step: other}").replace(
        "gt: 1", "gt: 2"
    )
    assert difference(old, parse_manifest(new, yaml=True).canonical) == [
        '/sequence/3/parallel/0/0: new node "first"',
        '/sequence/3/parallel/0/1/step: "do" → "other"',
        "/sequence/5/choose/0/when/gt: 1 → 2",
    ]


def sleep(node_id: str = "s", duration: object = "1d", **more: object) -> dict[str, object]:
    """Return a sleep node."""
    return {"id": node_id, "sleep": duration, **more}


def mapped(*body: object, **more: object) -> dict[str, object]:
    """Return a map node."""
    return {"id": "m", "map": {"over": "/lines", "do": list(body) or [node(id="in-map")], **more}}


def branches(*bodies: list[object]) -> dict[str, object]:
    """Return a parallel node."""
    return {"id": "p", "parallel": list(bodies)}


def choose(*cases: object) -> dict[str, object]:
    """Return a choose node."""
    return {"id": "c", "choose": list(cases)}


def case(*body: object, when: object = None) -> dict[str, object]:
    """Return a case of a choose node."""
    return {"when": when or {"at": "", "exists": True}, "do": list(body)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (sleep(duration="0ms"), [("/sleep", "must be from 1ms to 3650d")]),
        (sleep(duration=5), [("/sleep", "must be a duration with its unit, such as 30s, not 5")]),
        (sleep(duration=None), [("/sleep", "must not be null: leave the key out or give it a value")]),
        (sleep(duration="1s", timeout="1s"), [("/timeout", 'unknown key "timeout"')]),
        (sleep(input={}), [("/input", 'unknown key "input"')]),
        ({"id": "w", "wait_signal": "a b"}, [("/wait_signal", '"a b"' + NAME_MESSAGE)]),
        ({"id": "w", "wait_signal": "a", "timeout": "0s"}, [("/timeout", "must be from 1ms to 3650d")]),
        ({"id": "w", "wait_signal": "a", "input_schema": {}}, [
            ("/input_schema", 'unknown key "input_schema"; did you mean output_schema?'),
        ]),
        ({"id": "a", "slep": "1s"}, [("", "step is missing"), ("/slep", 'unknown key "slep"; did you mean sleep?')]),
        (node(sleep="1d"), [("/sleep", "a node is of one kind, and this one has step")]),
        ({"id": "a", "sleep": 1, "map": 1, "workflow": 1, "timeout": 3}, [
            ("/map", "a node is of one kind, and this one has sleep"),
            ("/workflow", "a node is of one kind, and this one has sleep"),
        ]),
        ({"id": "p", "parallel": []}, [("/parallel", "must not be empty")]),
        ({"id": "p", "parallel": {}}, [("/parallel", "must be an array, not an object")]),
        ({"id": "p", "parallel": [[], 5, ["x"]]}, [
            ("/parallel/0", "must not be empty"),
            ("/parallel/1", "must be an array, not 5"),
            ("/parallel/2/0", 'must be an object, not "x"'),
        ]),
        ({"id": "p", "parallel": [[1]] * 101}, [("/parallel", "has 101 items; at most 100 are accepted")]),
        ({"id": "m", "map": 5}, [("/map", "must be an object, not 5")]),
        ({"id": "m", "map": {}}, [("/map", "over is missing"), ("/map", "do is missing")]),
        (mapped(over="lines"), [("/map/over", '"lines" is not a JSON Pointer: it begins with / or is empty')]),
        (mapped(over=1), [("/map/over", "must be a JSON Pointer such as /lines, not 1")]),
        (mapped(max_parallel=0), [("/map/max_parallel", "must be an integer from 1 to 1000, not 0")]),
        (mapped(max_parallel=1001), [("/map/max_parallel", "must be an integer from 1 to 1000, not 1001")]),
        (mapped(max_paralel=1), [("/map/max_paralel", 'unknown key "max_paralel"; did you mean max_parallel?')]),
        (mapped(node(step=5)), [("/map/do/0/step", "must be a string, not 5")]),
        (choose(), [("/choose", "must not be empty")]),
        (choose(5), [("/choose/0", "must be an object, not 5")]),
        (choose({}), [("/choose/0", "when is missing"), ("/choose/0", "do is missing")]),
        (choose(case(node(), when={"at": "n", "gt": 1})), [
            ("/choose/0/when/at", '"n" is not a JSON Pointer: it begins with / or is empty'),
        ]),
        (choose(case()), [("/choose/0/do", "must not be empty")]),
        (choose({"otherwise": [node()]}, case(node(id="b"))), [("/choose/0/otherwise", "must be the last case")]),
        (choose({"otherwise": [node()]}, {"otherwise": []}), [
            ("/choose/0/otherwise", "must be the last case"),
            ("/choose/1/otherwise", "must not be empty"),
        ]),
        (choose({"otherwise": [node()], "when": {}}), [("/choose/0/when", 'unknown key "when"')]),
        (choose(*[case(node())] * 101), [("/choose", "has 101 items; at most 100 are accepted")]),
        ({"id": "w", "workflow": "wf"}, [("/workflow", "wf is this workflow itself")]),
        ({"id": "w", "workflow": "x", "on_parent_end": "kill"}, [
            ("/on_parent_end", 'must be cancel or terminate or abandon, not "kill"'),
        ]),
        ({"id": "w", "workflow": "x", "queue": "q", "input": {"$from": 5}}, [
            ("/input/$from", "must be a string such as #/order_id, from the run's input, or node-id#/order_id"),
            ("/queue", 'unknown key "queue"'),
        ]),
        (node(undo=5), [("/undo", "must be an object, not 5")]),
        (node(undo={}), [("/undo", "step is missing")]),
        (node(undo={"step": "x", "unfinished": True, "input_schema": {}}), [
            ("/undo/unfinished", 'unknown key "unfinished"; did you mean undo_unfinished?'),
            ("/undo/input_schema", 'unknown key "input_schema"'),
        ]),
    ],
)  # fmt: skip
def test_each_fault_of_a_node_has_its_place(value: object, expected: list[tuple[str, str]]) -> None:
    found = faults(manifest(value))
    assert found == [(f"/sequence/0{path}", message) for path, message in expected]


@pytest.mark.parametrize("value", ["59s", "99999d", "1", 5])
def test_a_retention_is_a_duration_of_a_minute_or_more(value: object) -> None:
    ((path, _),) = faults(manifest(retention=value))
    assert path == "/retention"


def test_faults_deep_inside_are_found_together_with_all_others() -> None:
    inner = choose(case(node(id="x", lease="0s"), sleep("x")), {"otherwise": [mapped(node(step=1), over=2)]})
    found = faults(manifest(node(), {"id": "p", "parallel": [[node()], [inner, sleep("s", "1")]]}, retention="1s"))
    assert [path for path, _ in found] == [
        "/retention",
        "/sequence/1/parallel/0/0/id",
        "/sequence/1/parallel/1/0/choose/0/do/0/lease",
        "/sequence/1/parallel/1/0/choose/0/do/1/id",
        "/sequence/1/parallel/1/0/choose/1/otherwise/0/map/over",
        "/sequence/1/parallel/1/0/choose/1/otherwise/0/map/do/0/id",
        "/sequence/1/parallel/1/0/choose/1/otherwise/0/map/do/0/step",
        "/sequence/1/parallel/1/1/sleep",
    ]
    assert dict(found)["/sequence/1/parallel/0/0/id"] == "a is already the id of /sequence/0"


def test_a_container_and_a_node_in_it_differ_in_their_ids() -> None:
    assert faults(manifest(mapped(node(id="m")))) == [("/sequence/0/map/do/0/id", "m is already the id of /sequence/0")]


def test_nodes_in_containers_count_against_the_limit() -> None:
    branches = [[node(id=f"n{n}-{m}") for m in range(10)] for n in range(99)]
    full = manifest({"id": "p", "parallel": branches}, *[node(id=f"n{n}") for n in range(9)])
    assert sum(1 for _ in iter_nodes(read(full).nodes)) == 1000
    over = manifest({"id": "p", "parallel": branches}, *[node(id=f"n{n}", lease=0) for n in range(12)])
    assert faults(over)[9:] == [("/sequence/10", "is one node too many; at most 1000 are accepted in all")]


def nested(depth: int) -> dict[str, object]:
    """Return a step in so many containers."""
    value: dict[str, object] = node()
    for level in range(depth):
        inner: list[object] = [value]
        contents: list[dict[str, object]] = [
            {"parallel": [inner]},
            {"map": {"over": "", "do": inner}},
            {"choose": [{"when": {"at": "", "exists": True}, "do": inner}]},
        ]
        value = {"id": f"level-{level}", **contents[level % 3]}
    return value


def test_containers_nest_to_a_limit() -> None:
    found = read(manifest(nested(20)))
    assert parse_manifest(found.canonical) == found
    assert parse_manifest(found.canonical, yaml=True) == found
    ((path, message),) = faults(manifest(nested(21)))
    assert path.count("/do/") + path.count("/parallel/0/") == 20
    assert message == "nodes are nested more than 20 deep"


def taking(source: str, node_id: str = "taker", pointer: str = "/x") -> dict[str, object]:
    """Return a step that takes from the output of a node."""
    return node(id=node_id, input={"got": [{"$from": f"{source}#{pointer}"}]})


@pytest.mark.parametrize(
    "nodes",
    [
        [taking("")],
        [node(), sleep(), taking("a")],
        [node(), mapped(taking("a"))],
        [mapped(taking("m"))],
        [mapped(node(id="x"), taking("m"))],
        [mapped(node(id="x"), taking("x"))],
        [mapped({"id": "inner", "map": {"over": "", "do": [taking("m"), taking("inner", "other")]}})],
        [mapped(), taking("m")],
        [node(), branches([node(id="x"), {**branches([taking("x")], [taking("a", "t")]), "id": "q"}])],
        [branches([node()]), taking("p")],
        [choose(case(node())), taking("c")],
        [node(), choose(case(node(id="x"), {"id": "w", "workflow": "o", "input": {"$from": "x#"}}))],
    ],
)  # fmt: skip
def test_an_input_is_taken_from_what_has_run(nodes: list[object]) -> None:
    found = read(manifest(*nodes))
    assert parse_manifest(found.canonical) == found


@pytest.mark.parametrize(
    ("nodes", "place", "message"),
    [
        ([taking("b")], "0", 'no node is called "b"'),
        ([taking("taker")], "0", "taker (/sequence/0) has not run where this node stands"),
        ([taking("b"), node(id="b")], "0", "b (/sequence/1) has not run where this node stands"),
        (
            [branches([node()], [taking("a")])],
            "0/parallel/1/0",
            "a (/sequence/0/parallel/0/0) has not run where this node stands",
        ),
        ([branches([taking("p")])], "0/parallel/0/0", "p (/sequence/0) has not run where this node stands"),
        ([choose(case(taking("c")))], "0/choose/0/do/0", "c (/sequence/0) has not run where this node stands"),
        ([mapped(), taking("in-map")], "1", "in-map (/sequence/0/map/do/0) has not run where this node stands"),
        (
            [choose(case(node()), {"otherwise": [taking("a")]})],
            "0/choose/1/otherwise/0",
            "a (/sequence/0/choose/0/do/0) has not run where this node stands",
        ),
        (
            [branches([node()]), taking("a")],
            "1",
            "a (/sequence/0/parallel/0/0) has not run where this node stands",
        ),
    ],
)  # fmt: skip
def test_an_input_from_what_has_not_run_is_refused(nodes: list[object], place: str, message: str) -> None:
    assert faults(manifest(*nodes)) == [(f"/sequence/{place}/input/got/0/$from", message)]


@pytest.mark.parametrize(
    ("plain", "spelled", "other"),
    [
        (mapped(), mapped(max_parallel=10.0), mapped(max_parallel=11)),
        (mapped(), mapped(), mapped(over="/x")),
        (sleep(), sleep(duration="24h"), sleep(duration="23h")),
        (
            {"id": "w", "workflow": "x"},
            {"id": "w", "workflow": "x", "on_parent_end": "cancel", "schema_check": "strict"},
            {"id": "w", "workflow": "x", "on_parent_end": "terminate"},
        ),
        (
            node(undo={"step": "u"}),
            node(undo={"step": "u", "lease": "60s", "retry": {}, "undo_unfinished": False, "queue": "default"}),
            node(undo={"step": "u", "undo_unfinished": True}),
        ),
        (
            node(queue="q", undo={"step": "u"}),
            node(queue="q", undo={"step": "u", "queue": "q"}),
            node(queue="q", undo={"step": "u", "queue": "default"}),
        ),
        (node(input={"a": 1}), node(input={"a": 1.0}), node(input={"a": True})),
        (
            choose(case(node(), when={"at": "", "eq": 1})),
            choose(case(node(), when={"eq": 1.0, "at": ""})),
            choose(case(node(), when={"at": "", "eq": 2})),
        ),
        (
            {"id": "w", "wait_signal": "x", "timeout": "1m"},
            {"id": "w", "wait_signal": "x", "timeout": "60s"},
            {"id": "w", "wait_signal": "x"},
        ),
    ],
)  # fmt: skip
def test_one_meaning_of_a_node_has_one_hash(plain: object, spelled: object, other: object) -> None:
    assert read(manifest(plain)) == read(manifest(spelled))
    assert read(manifest(plain)).hash != read(manifest(other)).hash


def test_nodes_are_found_wherever_they_stand() -> None:
    found = read(manifest(mapped({"id": "w", "workflow": "other"}), {"id": "v", "workflow": "third"}))
    assert found.children == {"other", "third"}
    kinds: list[Node] = [entry for entry, _ in iter_nodes(found.nodes)]
    assert [type(entry) for entry in kinds] == [MapNode, ChildNode, ChildNode]
    assert json.loads(found.canonical)["sequence"][1] == {"id": "v", "workflow": "third"}
