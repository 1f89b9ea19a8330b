"""What manifests mean: one canonical text and one hash for one meaning."""

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

from fencepost_server.domain.manifest import RetryPolicy, StepNode, parse_manifest
from tests.unit.domain.manifests import manifest, node, read

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
