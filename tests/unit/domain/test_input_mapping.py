"""Inputs that are built from a template: what goes where, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_server.domain.input_mapping import (
    MAX_REFERENCES,
    InputMapping,
    MappingFailed,
    MappingInvalid,
    Reference,
    parse_mapping,
)
from fencepost_server.domain.jsontext import MAX_DEPTH, canonical_value, parse

VALUES = {
    "": {"order": {"id": 7, "a/b~c": [None]}},
    "price.1/x": [{"net": 1.5}, "two"],
}


def build(template: object) -> object:
    """Fill a template from VALUES."""
    return parse_mapping(template).build(VALUES)


def failures(template: object) -> list[tuple[str, str]]:
    """Return why a template cannot be filled from VALUES."""
    with pytest.raises(MappingFailed) as failure:
        build(template)
    return [(fault.path, fault.message) for fault in failure.value.violations]


def test_a_template_is_filled_wherever_a_reference_stands() -> None:
    template = {
        "id": {"$from": "#/order/id"},
        "list": [1, {"$from": "price.1/x#/0/net"}, {"deep": {"$from": "#/order/a~1b~0c/0"}}],
        "whole": {"$from": "price.1/x#"},
        "literal": {"a": None, "b": ["#/order/id"]},
    }
    mapping = parse_mapping(template)
    assert mapping.sources == {"", "price.1/x"}
    assert mapping.build(VALUES) == {
        "id": 7,
        "list": [1, 1.5, {"deep": None}],
        "whole": [{"net": 1.5}, "two"],
        "literal": {"a": None, "b": ["#/order/id"]},
    }
    assert list(mapping.references())[:2] == [
        Reference("/id", "", ("order", "id")),
        Reference("/list/1", "price.1/x", ("0", "net")),
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ({"$from": "#"}, VALUES[""]),
        ({"$from": "#/order/id"}, 7),
        ("text", "text"),
        ([], []),
        ({}, {}),
        ({"$from": "#/order/id", "more": 1}, {"$from": "#/order/id", "more": 1}),
    ],
)
def test_a_template_may_be_any_value(template: object, expected: object) -> None:
    assert build(template) == expected


def test_every_pointer_that_leads_nowhere_is_told_with_its_place_in_the_template() -> None:
    template = {
        "a/b": [{"$from": "#/order/no"}, {"$from": "price.1/x#/2"}],
        "c": {"$from": "#/order/id"},
        "d": {"$from": "elsewhere#"},
    }
    assert failures(template) == [
        ("/a~1b/0", 'nothing is at "/order/no" in the input of the run'),
        ("/a~1b/1", 'nothing is at "/2" in the output of price.1/x'),
        ("/d", 'nothing is at "" in the output of elsewhere'),
    ]
    assert failures({"$from": "#/x"}) == [("", 'nothing is at "/x" in the input of the run')]


NO_HASH = "must be a string such as #/order_id, from the run's input, or node-id#/order_id"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ({"$from": 1}, [("/$from", NO_HASH)]),
        ({"a": [{"$from": "/order"}]}, [("/a/0/$from", NO_HASH)]),
        ({"a": {"$from": None}, "b": {"$from": "x#y"}}, [
            ("/a/$from", NO_HASH),
            ("/b/$from", '"y" is not a JSON Pointer: it begins with / or is empty'),
        ]),
        ({"$from": {"$from": "#"}}, [("/$from", NO_HASH)]),
        ({"$from": "#/~"}, [("/$from", '"/~" is not a JSON Pointer: ~ is written ~0, and / inside a key ~1')]),
        (
            [{"$from": "#"}] * (MAX_REFERENCES + 1),
            [("", f"has {MAX_REFERENCES + 1} references; at most {MAX_REFERENCES} are accepted")],
        ),
    ],
)  # fmt: skip
def test_each_fault_of_a_template_has_its_place(template: object, expected: list[tuple[str, str]]) -> None:
    with pytest.raises(MappingInvalid) as refusal:
        parse_mapping(template)
    assert [(fault.path, fault.message) for fault in refusal.value.violations] == expected


def nested(depth: int) -> object:
    """Return arrays inside each other."""
    value: object = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_what_is_built_can_be_read_again() -> None:
    mapping = parse_mapping({"a": {"$from": "#"}})
    assert parse(canonical_value(mapping.build({"": nested(MAX_DEPTH - 1)}))) is not None
    with pytest.raises(MappingFailed) as failure:
        mapping.build({"": nested(MAX_DEPTH)})
    assert [(fault.path, fault.message) for fault in failure.value.violations] == [
        ("/a", f"arrays and objects would be nested more than {MAX_DEPTH} deep")
    ]
    assert parse_mapping({"$from": "#"}).build({"": nested(MAX_DEPTH)}) == nested(MAX_DEPTH)


def test_a_small_template_does_not_build_a_huge_value() -> None:
    mapping = parse_mapping([{"$from": "#"}] * MAX_REFERENCES)
    values = {"": ["x" * 100_000]}
    with pytest.raises(MappingFailed) as failure:
        mapping.build(values)
    (fault,) = failure.value.violations
    assert fault.message == f"the value would have more than {64 << 20} characters"
    assert mapping.build({"": "x"}) == ["x"] * MAX_REFERENCES
    with pytest.raises(MappingFailed, match="would have more than 1000 characters"):
        parse_mapping({"$from": "#"}).build(values, max_chars=1_000)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(values)
def test_what_is_no_reference_stays_as_it_is(template: Any) -> None:
    mapping = parse_mapping(template)
    assert mapping == InputMapping(template, frozenset())
    assert canonical_value(mapping.build({})) == canonical_value(template)


@given(values)
def test_a_value_that_fits_as_text_is_never_refused_as_too_large(value: Any) -> None:
    built = parse_mapping({"$from": "#"}).build({"": value}, max_chars=len(canonical_value(value)))
    assert built == value
