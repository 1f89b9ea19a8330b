"""Manifests of all kinds of nodes, as they come: one meaning, one canonical text, one hash."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost_server.domain.manifest import parse_manifest
from fencepost_server.domain.manifest_diff import difference
from fencepost_server.domain.nodes import iter_nodes

# Each has two spellings of one value; the first is the one of the canonical text.
DURATIONS = [("1s", "1000ms"), ("1m30s", "90s"), ("2h", "120m"), ("1d", "24h")]

durations = st.sampled_from(DURATIONS).flatmap(st.sampled_from)
names = st.sampled_from(["default", "other", "a/b", "x_1.y-z"])
schemas = st.sampled_from([True, {}, {"type": ["string", "object", "array"]}, {"enum": [1.0, "é", None]}])
schemas_of_node = {"output_schema": schemas, "input_schema": schemas}
retries = st.fixed_dictionaries(
    {},
    optional={
        "max_attempts": st.sampled_from([1, 5, 5.0, 100]),
        "jitter": st.sampled_from([0, 0.2, 1]),
        "max_delay": st.sampled_from(["60s", "1m", "2h"]),
    },
)
undos = st.fixed_dictionaries(
    {"step": names},
    optional={
        "queue": names,
        "timeout": durations,
        "lease": durations,
        "retry": retries,
        "undo_unfinished": st.booleans(),
    },
)
templates = st.recursive(
    st.sampled_from([1, 1.0, 1.5, True, None, "é", {"$from": "#"}, {"$from": "#/a~1b/0"}]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
).filter(lambda template: template is not None)
conditions = st.recursive(
    st.one_of(
        st.builds(lambda value: {"at": "/a", "eq": value}, st.sampled_from([1, 1.0, {"b": [1, None], "a": 2}])),
        st.builds(lambda value: {"lt": value, "at": ""}, st.sampled_from([1, 1.5, "é"])),
        st.just({"at": "/x/0", "in": [1, True, "a"]}),
        st.just({"at": "/x", "exists": False}),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"all": parts}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"any": parts}),
        inner.map(lambda part: {"not": part}),
    ),
    max_leaves=3,
)
leaves = st.one_of(
    st.fixed_dictionaries(
        {"step": names, "schema_check": st.just("runtime")},
        optional={
            **schemas_of_node,
            "queue": names,
            "timeout": durations,
            "queue_timeout": durations,
            "total_timeout": durations,
            "lease": durations,
            "retry": retries,
            "undo": undos,
            "input": templates,
        },
    ),
    st.fixed_dictionaries({"sleep": durations}),
    st.fixed_dictionaries({"wait_signal": names}, optional={"timeout": durations, "output_schema": schemas}),
    st.fixed_dictionaries(
        {"workflow": names, "schema_check": st.just("runtime")},
        optional={
            **schemas_of_node,
            "input": templates,
            "undo": undos.map(lambda undo: {key: undo[key] for key in undo if key != "undo_unfinished"}),
            "on_parent_end": st.sampled_from(["cancel", "terminate", "abandon"]),
        },
    ),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Make containers of nodes."""
    body = st.lists(inner, min_size=1, max_size=2)
    cases = st.lists(st.fixed_dictionaries({"when": conditions, "do": body}), min_size=1, max_size=2)
    otherwise = st.lists(st.fixed_dictionaries({"otherwise": body}), max_size=1)
    return st.one_of(
        st.lists(body, min_size=1, max_size=2).map(lambda bodies: {"parallel": bodies}),
        st.fixed_dictionaries(
            {"over": st.just("/never-described"), "do": body}, optional={"max_parallel": st.sampled_from([1, 10, 10.0])}
        ).map(lambda content: {"map": content}),
        st.builds(lambda some, last: {"choose": some + last}, cases, otherwise),
    )


manifests = st.fixed_dictionaries(
    {
        "id": st.just("wf"),
        "compatibility_id": names,
        "sequence": st.lists(st.recursive(leaves, containers, max_leaves=6), min_size=1, max_size=3),
    },
    optional={"retention": st.sampled_from(["1m", "60s", "30d"])},
)


def named(value: Any) -> Any:
    """Return a manifest's value, each node of it with an id of its own.

    Before each map there is a step of which nothing is known: what a container gives may plainly be no array.
    """
    count = iter(range(1_000_000))

    def copy(part: Any) -> Any:
        if isinstance(part, list):
            steps = ([{"step": "any"}, item] if isinstance(item, dict) and "map" in item else [item] for item in part)
            return [copy(item) for pair in steps for item in pair]
        if not isinstance(part, dict):
            return part
        copied = {key: copy(item) if key in INSIDE else item for key, item in part.items()}
        is_node = any(kind in part for kind in KINDS)
        return {"id": f"n{next(count)}", **copied} if is_node else copied

    return {**value, "sequence": copy(value["sequence"])}


KINDS = ("step", "sleep", "wait_signal", "workflow", "parallel", "map", "choose")
INSIDE = ("parallel", "map", "choose", "do", "otherwise")


def respelled(value: Any) -> Any:
    """Return the same manifest in another spelling: keys in the other order, durations in other units."""
    if isinstance(value, dict):
        return {key: respelled(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [respelled(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return next((pair[1 - pair.index(value)] for pair in DURATIONS if value in pair), value)


@settings(max_examples=40)
@given(manifests.map(named))
def test_a_canonical_manifest_reads_as_itself(value: Any) -> None:
    found = parse_manifest(json.dumps(value))
    assert parse_manifest(found.canonical) == found
    assert difference(found.canonical, found.canonical) == []


@settings(max_examples=40)
@given(manifests.map(named))
def test_another_spelling_of_a_manifest_is_the_same_manifest(value: Any) -> None:
    found = parse_manifest(json.dumps(value))
    assert parse_manifest(json.dumps(respelled(value))) == found
    assert parse_manifest(json.dumps(value, indent=1), yaml=True) == found


@settings(max_examples=40)
@given(manifests.map(named))
def test_the_place_of_each_node_leads_to_it_in_the_canonical_text(value: Any) -> None:
    found = parse_manifest(json.dumps(value))
    listed = list(iter_nodes(found.nodes))
    for entry, path in listed:
        part = json.loads(found.canonical)
        for key in path.split("/")[1:]:
            part = part[int(key)] if isinstance(part, list) else part[key]
        assert part["id"] == entry.id
    assert len({entry.id for entry, _ in listed}) == len(listed)


@settings(max_examples=40)
@given(manifests.map(named), manifests.map(named))
def test_manifests_have_one_hash_exactly_if_nothing_differs(one: Any, other: Any) -> None:
    first, second = parse_manifest(json.dumps(one)), parse_manifest(json.dumps(other))
    assert (first.hash == second.hash) is (difference(first.canonical, second.canonical) == [])
