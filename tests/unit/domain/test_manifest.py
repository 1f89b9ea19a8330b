"""Manifests: every fault with its place, one hash for one meaning."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from hashlib import sha256
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from fencepost_server.domain.manifest import (
    Manifest,
    ManifestInvalid,
    ManifestLimits,
    RetryPolicy,
    StepNode,
    parse_manifest,
)

FULL_YAML = """
# An order, from receipt to invoice.
id: order-fulfilment
compatibility_id: "2026-11"
input_schema: {type: object, required: [order_id], properties: {order_id: {type: integer}}}
output_schema: {type: object}
sequence:
  - id: validate
    step: orders.validate
    queue: default
    input_schema: {type: object, properties: {order_id: {type: number}}}
    timeout: 30s
    lease: 60s
    retry: {max_attempts: 5, initial_delay: 1s, multiplier: 2, max_delay: 1m, jitter: 0.2, max_corrective_attempts: 3}
    schema_check: strict
  - id: ship
    step: orders/ship
    queue: warehouse.eu-1
    output_schema: {type: object, properties: {no: {const: 1.50}}}
    timeout: 1h30m
    lease: 90s
    retry:
      {max_attempts: 1, initial_delay: 500ms, multiplier: 1.5, max_delay: 2h, jitter: 0, max_corrective_attempts: 0}
    schema_check: runtime
"""

FULL_CANONICAL = (
    '{"compatibility_id":"2026-11","id":"order-fulfilment",'
    '"input_schema":{"properties":{"order_id":{"type":"integer"}},"required":["order_id"],"type":"object"},'
    '"output_schema":{"type":"object"},"sequence":['
    '{"id":"validate","input_schema":{"properties":{"order_id":{"type":"number"}},"type":"object"},'
    '"step":"orders.validate","timeout":"30s"},'
    '{"id":"ship","lease":"1m30s","output_schema":{"properties":{"no":{"const":15e-1}},"type":"object"},'
    '"queue":"warehouse.eu-1","retry":{"initial_delay":"500ms","jitter":0,"max_attempts":1,'
    '"max_corrective_attempts":0,"max_delay":"2h","multiplier":15e-1},"schema_check":"runtime",'
    '"step":"orders/ship","timeout":"1h30m"}]}'
)

# Hashes that are in databases. If one of these changes, every registered definition is another one.
GOLDEN = {
    "full": "9ed388e16b331b275ac34c1f31b1fb690649071bc899d60790a22ada2b19d5c4",
    "least": "24e624d970138a7a9e9cd34fd68e4ee947439cf9af391978ceb0f6e0600fc5f1",
}


def node(**more: object) -> dict[str, object]:
    """Return a step node."""
    return {"id": "a", "step": "do", **more}


def manifest(*nodes: object, **more: object) -> dict[str, object]:
    """Return a manifest of these nodes, or of one."""
    return {"id": "wf", "compatibility_id": "1", "sequence": list(nodes) or [node()], **more}


def read(value: object, **limits: int) -> Manifest:
    """Parse a manifest given as a value."""
    return parse_manifest(json.dumps(value), limits=ManifestLimits(**limits))


def faults(value: object, **limits: int) -> list[tuple[str, str]]:
    """Return the faults of a manifest given as a value."""
    with pytest.raises(ManifestInvalid) as refusal:
        read(value, **limits)
    return [(fault.path, fault.message) for fault in refusal.value.violations]


def test_a_manifest_is_read_in_full() -> None:
    found = parse_manifest(FULL_YAML, yaml=True)
    assert found.workflow_id == "order-fulfilment"
    assert found.compatibility_id == "2026-11"
    assert found.output_schema == {"type": "object"}
    assert found.nodes == (
        StepNode(
            id="validate",
            handler="orders.validate",
            queue="default",
            input_schema={"type": "object", "properties": {"order_id": {"type": "number"}}},
            output_schema=None,
            timeout_seconds=30.0,
            lease_seconds=60.0,
            retry=RetryPolicy(),
        ),
        StepNode(
            id="ship",
            handler="orders/ship",
            queue="warehouse.eu-1",
            input_schema=None,
            output_schema={"type": "object", "properties": {"no": {"const": 1.5}}},
            timeout_seconds=5400.0,
            lease_seconds=90.0,
            retry=RetryPolicy(1, 0.5, 1.5, 7200.0, 0.0, 0),
            schema_check="runtime",
        ),
    )


def test_the_canonical_manifest_leaves_defaults_out_and_is_what_is_hashed() -> None:
    found = parse_manifest(FULL_YAML, yaml=True)
    assert found.canonical == FULL_CANONICAL
    assert found.hash == sha256(FULL_CANONICAL.encode()).digest()


def test_the_hashes_in_databases_stay_what_they_are() -> None:
    assert parse_manifest(FULL_YAML, yaml=True).hash.hex() == GOLDEN["full"]
    assert read(manifest()).hash.hex() == GOLDEN["least"]


def test_the_defaults_are_the_documented_ones() -> None:
    (step,) = read(manifest()).nodes
    assert step == StepNode("a", "do", "default", None, None, None, 60.0, RetryPolicy(), "strict")
    assert RetryPolicy() == RetryPolicy(5, 1.0, 2.0, 60.0, 0.2, 3)


def test_a_canonical_manifest_is_a_manifest_with_the_same_hash() -> None:
    found = parse_manifest(FULL_YAML, yaml=True)
    assert parse_manifest(found.canonical) == found
    assert parse_manifest(found.canonical, yaml=True) == found


@pytest.mark.parametrize(
    ("key", "default", "same", "other"),
    [
        ("queue", "default", ["default"], "slow"),
        ("lease", "60s", ["1m", "60000ms"], "61s"),
        ("schema_check", "strict", ["strict"], "runtime"),
        (
            "retry",
            {},
            [{"max_attempts": 5}, {"max_attempts": 5.0, "jitter": 0.20}, {"max_delay": "60s"}],
            {"jitter": 0},
        ),
        ("timeout", None, [], "30s"),
    ],
)
def test_a_default_that_is_spelled_out_changes_no_hash(
    key: str, default: object, same: list[object], other: object
) -> None:
    plain = read(manifest(node()))
    for value in same if default is None else [default, *same]:
        assert read(manifest(node(**{key: value}))) == plain
    assert read(manifest(node(**{key: other}))).hash != plain.hash


def test_spelling_changes_no_hash() -> None:
    first = manifest(node(timeout="90s", output_schema={"const": 100, "title": "é"}))
    text = (
        '{"sequence" :[{"output_schema":{"title":"\\u00e9","const":1e2},"timeout":"1m30s","step":"do","id":"a"}],\n'
        '"compatibility_id":"\\u0031", "id":"wf"}'
    )
    yaml = (
        "sequence:\n- {step: do, id: a, timeout: 90000ms, output_schema: {const: 0x64, title: é}}\n"
        "compatibility_id: '1'\nid: wf"
    )
    assert read(first) == parse_manifest(text) == parse_manifest(yaml, yaml=True)


def test_each_meaning_has_its_own_hash() -> None:
    values = [
        manifest(),
        manifest(id="other"),
        manifest(compatibility_id="2"),
        manifest(input_schema={}),
        manifest(input_schema=True),
        manifest(output_schema=True),
        manifest(node(), node(id="b")),
        manifest(node(id="b"), node()),
        manifest(node(id="b")),
        manifest(node(step="other")),
        manifest(node(output_schema={"enum": [1, True]})),
        manifest(node(output_schema={"enum": [True, 1]})),
        manifest(node(output_schema={"enum": [1, 1.5]})),
        manifest(node(retry={"multiplier": 2.0000000000001})),
        manifest(node(timeout="1s")),
        manifest(node(lease="1s")),
    ]
    assert len({read(value).hash for value in values}) == len(values)


def test_manifests_and_nodes_cannot_be_changed() -> None:
    found = read(manifest())
    with pytest.raises(FrozenInstanceError):
        found.workflow_id = "x"  # type: ignore[misc]  # that it is refused is the point


NAME_MESSAGE = " is not a name: 1 to 200 letters, digits and . _ - / of ASCII, beginning with a letter or digit"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, [("", "must be an object, not 5")]),
        ([], [("", "must be an object, not an array")]),
        (None, [("", "must be an object, not null")]),
        (
            {},
            [("", "id is missing"), ("", "compatibility_id is missing"), ("", "sequence is missing")],
        ),
        (manifest(id=5), [("/id", "must be a string, not 5")]),
        (manifest(id=""), [("/id", '""' + NAME_MESSAGE)]),
        (manifest(id="-a"), [("/id", '"-a"' + NAME_MESSAGE)]),
        (manifest(id="a" * 201), [("/id", '"' + "a" * 59 + "…" + NAME_MESSAGE)]),
        (manifest(id="é"), [("/id", '"é"' + NAME_MESSAGE)]),
        (manifest(id="a b"), [("/id", '"a b"' + NAME_MESSAGE)]),
        (manifest(id="a\n"), [("/id", '"a\\n"' + NAME_MESSAGE)]),
        (manifest(id=None), [("/id", "must not be null: leave the key out or give it a value")]),
        (manifest(compatibility_id=2026), [("/compatibility_id", "must be a string, not 2026")]),
        (manifest(sequence=[]), [("/sequence", "must not be empty")]),
        (manifest(sequence={}), [("/sequence", "must be an array, not an object")]),
        (manifest("step"), [("/sequence/0", 'must be an object, not "step"')]),
        (manifest({}), [("/sequence/0", "id is missing"), ("/sequence/0", "step is missing")]),
        (manifest(node(step=["a"])), [("/sequence/0/step", "must be a string, not an array")]),
        (manifest(node(queue="a b")), [("/sequence/0/queue", '"a b"' + NAME_MESSAGE)]),
        (manifest(node(), node()), [("/sequence/1/id", "a is already the id of /sequence/0")]),
        (
            manifest(node(), node(id="b"), node(), {"id": "b", "sleep": "1d"}),
            [
                ("/sequence/2/id", "a is already the id of /sequence/0"),
                ("/sequence/3/id", "b is already the id of /sequence/1"),
                ("/sequence/3/sleep", "sleep is not supported by this server release"),
            ],
        ),
        (manifest(sequnce=[]), [("/sequnce", 'unknown key "sequnce"; did you mean sequence?')]),
        (manifest(**{"a/b": 1}), [("/a~1b", 'unknown key "a/b"')]),
        (manifest(node(tiemout="1s")), [("/sequence/0/tiemout", 'unknown key "tiemout"; did you mean timeout?')]),
        (
            manifest({"id": "a", "stpe": "x"}),
            [("/sequence/0", "step is missing"), ("/sequence/0/stpe", 'unknown key "stpe"; did you mean step?')],
        ),
        (
            manifest(node(retry={"max_attemps": 1, "multiplyer": 1})),
            [
                ("/sequence/0/retry/max_attemps", 'unknown key "max_attemps"; did you mean max_attempts?'),
                ("/sequence/0/retry/multiplyer", 'unknown key "multiplyer"; did you mean multiplier?'),
            ],
        ),
        (manifest(node(retry=3)), [("/sequence/0/retry", "must be an object, not 3")]),
        (manifest(node(schema_check="lax")), [("/sequence/0/schema_check", 'must be strict or runtime, not "lax"')]),
        (manifest(node(schema_check=True)), [("/sequence/0/schema_check", "must be strict or runtime, not true")]),
    ],
)  # fmt: skip
def test_each_fault_has_its_place(value: object, expected: list[tuple[str, str]]) -> None:
    assert faults(value) == expected


DURATION_MESSAGE = "is not a duration such as 500ms, 30s, 5m, 1h30m or 1d"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("timeout", 30, "must be a duration with its unit, such as 30s, not 30"),
        ("timeout", "30", f"'30' {DURATION_MESSAGE}"),
        ("timeout", "1.5s", f"'1.5s' {DURATION_MESSAGE}"),
        ("timeout", "0s", "must be from 1ms to 365d"),
        ("timeout", "366d", "must be from 1ms to 365d"),
        ("timeout", "99999d", "'99999d' is longer than 3650d"),
        ("timeout", None, "must not be null: leave the key out or give it a value"),
        ("lease", "999ms", "must be from 1s to 1d"),
        ("lease", "25h", "must be from 1s to 1d"),
        ("lease", {}, "must be a duration with its unit, such as 30s, not an object"),
        ("retry/initial_delay", "8d", "must be from 0s to 7d"),
        ("retry/initial_delay", "2m", "2m is longer than max_delay (1m)"),
        ("retry/max_delay", "8d", "must be from 0s to 7d"),
        ("retry/max_attempts", 0, "must be an integer from 1 to 1000000, not 0"),
        ("retry/max_attempts", 1.5, "must be an integer from 1 to 1000000, not 1.5"),
        ("retry/max_attempts", 10**30, f"must be an integer from 1 to 1000000, not {10**30}"),
        ("retry/max_attempts", "5", 'must be an integer, not "5"'),
        ("retry/max_attempts", True, "must be an integer, not true"),
        ("retry/max_corrective_attempts", -1, "must be an integer from 0 to 1000, not -1"),
        ("retry/multiplier", 0.5, "must be a number from 1 to 1000, not 0.5"),
        ("retry/multiplier", [2], "must be a number, not an array"),
        ("retry/jitter", -0.1, "must be a number from 0 to 1, not -0.1"),
        ("retry/jitter", 1.1, "must be a number from 0 to 1, not 1.1"),
    ],
)
def test_each_value_has_a_range(key: str, value: object, message: str) -> None:
    outer, _, inner = key.partition("/")
    step = node(**{outer: {inner: value} if inner else value})
    assert faults(manifest(step)) == [(f"/sequence/0/{key}", message)]


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e1000000", "0.10000000000000000000001e1", "1e-400"])
def test_numbers_beyond_floats_are_judged_like_others(number: str) -> None:
    text = json.dumps(manifest(node(retry={"max_attempts": "@"}))).replace('"@"', number)
    with pytest.raises(ManifestInvalid) as refusal:
        parse_manifest(text)
    assert [fault.path for fault in refusal.value.violations] == ["/sequence/0/retry/max_attempts"]


@pytest.mark.parametrize("key", ["undo", "queue_timeout", "total_timeout", "input"])
def test_keys_that_come_later_are_refused_as_such(key: str) -> None:
    assert faults(manifest(node(**{key: "1s"}))) == [
        (f"/sequence/0/{key}", f"{key} is not supported by this server release")
    ]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("sleep", "1d"),
        ("wait_signal", "approve"),
        ("parallel", [[], []]),
        ("map", {"over": "/lines"}),
        ("choose", []),
        ("workflow", "invoicing"),
    ],
)
def test_nodes_that_come_later_are_refused_as_such(kind: str, value: object) -> None:
    later = {"id": "later", kind: value, "timeout": "7d", "anything": 1}
    expected = f"{kind} is not supported by this server release"
    assert faults(manifest(node(), later, node(id="b", input_schema={"type": "string"}))) == [
        (f"/sequence/1/{kind}", expected)
    ]
    assert faults(manifest(node(**{kind: value}))) == [(f"/sequence/0/{kind}", expected)]


def test_all_faults_are_found_at_once() -> None:
    found = faults(
        {
            "compatibility_id": "",
            "input_schema": {"type": "strin"},
            "output_schema": {"$ref": "http://127.0.0.1:9/x"},
            "extra": 1,
            "sequence": [
                node(timeout="x", output_schema={"minLength": -1, "properties": {"a/b": {"pattern": "("}}}),
                node(lease=5, retry={"max_attempts": 0, "jitter": 2}),
                node(id="c", output_schema={"type": "integer"}),
                node(id="d", input_schema={"type": "string"}, output_schema={"type": "null"}),
                5,
            ],
        }
    )
    assert [path for path, _ in found] == [
        "",
        "/compatibility_id",
        "/input_schema/type",
        "/output_schema/$ref",
        "/sequence/0/timeout",
        "/sequence/0/output_schema/minLength",
        "/sequence/0/output_schema/properties/a~1b/pattern",
        "/sequence/1/id",
        "/sequence/1/lease",
        "/sequence/1/retry/max_attempts",
        "/sequence/1/retry/jitter",
        "/sequence/4",
        "/extra",
        "/sequence/3/input_schema",
    ]


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (manifest(node(input_schema=NUMBER, output_schema=INTEGER), input_schema=INTEGER, output_schema=NUMBER), []),
        (manifest(node(output_schema=INTEGER), node(id="b")), []),
        (manifest(node(), input_schema=STRING), []),
        (
            manifest(node(input_schema=STRING), input_schema=INTEGER),
            [("/sequence/0/input_schema", "the input of the workflow (/input_schema): may be integer")],
        ),
        (
            manifest(node(input_schema=STRING)),
            [("/sequence/0/input_schema", "the input of the workflow (/input_schema): may be anything")],
        ),
        (
            manifest(node(output_schema=INTEGER), node(id="b", input_schema=STRING)),
            [("/sequence/1/input_schema", "the output of a (/sequence/0/output_schema): may be integer")],
        ),
        (
            manifest(node(), node(id="b", input_schema=STRING)),
            [("/sequence/1/input_schema", "the output of a (/sequence/0/output_schema): may be anything")],
        ),
        (
            manifest(node(output_schema=NUMBER), output_schema=INTEGER),
            [("/output_schema", "the output of a (/sequence/0/output_schema): may be number")],
        ),
        (manifest(node(input_schema=STRING, schema_check="runtime"), input_schema=INTEGER), []),
        (manifest(node(output_schema=NUMBER, schema_check="runtime"), output_schema=INTEGER), []),
        (
            manifest(node(output_schema=INTEGER, schema_check="runtime"), node(id="b", input_schema=STRING)),
            [("/sequence/1/input_schema", "the output of a (/sequence/0/output_schema): may be integer")],
        ),
        (
            manifest(
                node(input_schema=STRING, output_schema=INTEGER),
                node(id="b", input_schema=STRING, output_schema=INTEGER),
                input_schema=INTEGER,
                output_schema=STRING,
            ),
            [
                ("/sequence/0/input_schema", "the input of the workflow (/input_schema): may be integer"),
                ("/sequence/1/input_schema", "the output of a (/sequence/0/output_schema): may be integer"),
                ("/output_schema", "the output of b (/sequence/1/output_schema): may be integer"),
            ],
        ),
    ],
)
def test_what_one_side_gives_the_next_one_takes(value: object, expected: list[tuple[str, str]]) -> None:
    if not expected:
        read(value)
        return
    found = faults(value)
    assert [path for path, _ in found] == [path for path, _ in expected]
    assert all(
        message.startswith(f"does not take {start}") for (_, message), (_, start) in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("text", "yaml", "expected"),
    [
        ("{", False, "Expecting property name enclosed in double quotes (line 1, column 2)"),
        ('{"id": "a",\n "id": "b"}', False, 'duplicate key "id" in one object'),
        ("\ud800", False, "a lone surrogate (U+D800) at character 1"),
        ("id: [", True, "expected the node content, but found '<stream end>' (line 1, column 6)"),
        ("", True, "must be an object, not null"),
        ("id: a", False, "Expecting value (line 1, column 1)"),
    ],
)
def test_a_syntax_error_stands_alone(text: str, yaml: bool, expected: str) -> None:
    with pytest.raises(ManifestInvalid) as refusal:
        parse_manifest(text, yaml=yaml)
    assert [(fault.path, fault.message) for fault in refusal.value.violations] == [("", expected)]


def test_yaml_that_is_not_json_is_refused_with_all_its_faults() -> None:
    text = "id: &a wf\ncompatibility_id: *a\nid: 1\nsequence: [{step: !x y, 1: 2}]"
    with pytest.raises(ManifestInvalid) as refusal:
        parse_manifest(text, yaml=True)
    assert [fault.path for fault in refusal.value.violations] == [
        *["/id", "/compatibility_id", "/id", "/sequence/0/step", "/sequence/0"]
    ]


def test_unquoted_yaml_is_what_the_core_schema_says() -> None:
    text = "id: no\ncompatibility_id: 2026-11-01\nsequence: [{id: 1_000, step: on, timeout: 30s}]"
    found = parse_manifest(text, yaml=True)
    assert (found.workflow_id, found.compatibility_id, found.nodes[0].id, found.nodes[0].handler) == (
        *["no", "2026-11-01", "1_000", "on"],
    )


def test_a_manifest_is_limited_in_bytes_as_sent_and_as_canonical_text() -> None:
    text = json.dumps(manifest(node(output_schema={"title": "é" * 100})), ensure_ascii=False)
    size = len(text.encode())
    parse_manifest(text, limits=ManifestLimits(max_bytes=size))
    with pytest.raises(ManifestInvalid, match=f"has {size} bytes; at most {size - 1} are accepted"):
        parse_manifest(text, limits=ManifestLimits(max_bytes=size - 1))
    grows = json.dumps(manifest(node(output_schema={"enum": [0.1 + n / 10 for n in range(9)] * 9 + [10]})))
    canonical = len(parse_manifest(grows).canonical.encode())
    assert canonical > len(grows.replace(" ", ""))
    with pytest.raises(ManifestInvalid, match=f"has {canonical} bytes in its canonical form"):
        parse_manifest(grows.replace(" ", ""), limits=ManifestLimits(max_bytes=canonical - 1))


def test_nodes_are_limited() -> None:
    nodes = [node(id=f"n{n}") for n in range(1001)]
    assert len(read(manifest(*nodes[:1000])).nodes) == 1000
    assert faults(manifest(*nodes)) == [("/sequence", "has 1001 items; at most 1000 are accepted")]


def test_the_list_of_faults_ends_with_how_many_more_there_are() -> None:
    found = faults(manifest(*[node(id=f"n{n}", lease="0s") for n in range(250)]))
    assert len(found) == 101
    assert found[99][0] == "/sequence/99/lease"
    assert found[100] == ("", "and 150 more faults")
    assert len(faults(manifest(node(a=1, b=2)), max_violations=2)) == 2


names = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9._/-]{0,8}", fullmatch=True)
schemas = st.sampled_from([True, {}, {"type": "string"}, {"const": 1.0}, {"enum": [1, "é", None]}])
durations = st.sampled_from(["1s", "1000ms", "90s", "1m30s", "1m", "60s", "2h"])
nodes = st.fixed_dictionaries(
    {"step": names},
    optional={
        "queue": st.one_of(st.just("default"), names),
        "timeout": durations,
        "lease": durations,
        "output_schema": schemas,
        "schema_check": st.sampled_from(["strict", "runtime"]),
        "retry": st.fixed_dictionaries(
            {},
            optional={
                "max_attempts": st.sampled_from([1, 5, 5.0, 100]),
                "jitter": st.sampled_from([0, 0.2, 0.20000000000000001, 1]),
                "multiplier": st.sampled_from([1, 2, 2.0, 1.5]),
                "initial_delay": st.sampled_from(["0s", "1s", "1000ms"]),
            },
        ),
    },
)


@given(names, names, st.lists(nodes, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_json_yaml_and_canonical_text_give_the_same_manifest(
    workflow: str, compatibility: str, steps: list[dict[str, object]], random: Any
) -> None:
    value = manifest(*[{**step, "id": f"n{n}"} for n, step in enumerate(steps)], id=workflow)
    value["compatibility_id"] = compatibility
    found = read(value)
    assert parse_manifest(found.canonical) == found
    keys = list(value)
    random.shuffle(keys)
    text = json.dumps({key: value[key] for key in keys}, indent=random.choice([None, 1]))
    assert parse_manifest(text) == found
    assert parse_manifest(text, yaml=True) == found


def test_the_yaml_of_another_writer_is_read() -> None:
    out = StringIO()
    YAML().dump(manifest(node(output_schema={"enum": ["no", "1", 1, None, "é"]})), out)
    assert parse_manifest(out.getvalue(), yaml=True) == read(
        manifest(node(output_schema={"enum": ["no", "1", 1, None, "é"]}))
    )
