"""The conditions of choices: what holds, what does not, and what is refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_server.domain.conditions import MAX_DEPTH, MAX_PARTS, Condition, ConditionInvalid, parse_condition
from fencepost_server.domain.jsontext import canonical_value, parse

VALUE = parse(
    '{"n": 10, "f": 1.50, "big": 18446744073709551617, "tiny": 1e-400, "huge": 1e400, "s": "abc", "t": true,'
    ' "null": null, "list": [1, {"a/b": "x~y"}], "o": {"b": 1, "a": [1.0]}, "": "empty"}'
)


def holds(condition: object, value: object = VALUE) -> bool:
    """Tell whether a condition given as a value holds."""
    return parse_condition(condition).holds(value)


def faults(condition: object) -> list[tuple[str, str]]:
    """Return the faults of a condition."""
    with pytest.raises(ConditionInvalid) as refusal:
        parse_condition(condition)
    return [(fault.path, fault.message) for fault in refusal.value.violations]


@pytest.mark.parametrize(
    ("at", "operator", "constant", "expected"),
    [
        ("/n", "eq", 10.0, True),
        ("/n", "eq", Decimal("1e1"), True),
        ("/n", "eq", "10", False),
        ("/f", "eq", Decimal("1.500"), True),
        ("/big", "eq", 2**64 + 1, True),
        ("/big", "eq", 2**64, False),
        ("/big", "gt", 2**64, True),
        ("/tiny", "gt", 0, True),
        ("/huge", "gt", 10**300, True),
        ("/huge", "lt", Decimal("1e401"), True),
        ("/t", "eq", 1, False),
        ("/t", "eq", True, True),
        ("/t", "ge", 0, False),
        ("/t", "in", [1, 0], False),
        ("/null", "eq", None, True),
        ("/null", "eq", False, False),
        ("/o", "eq", {"a": [1], "b": 1.0}, True),
        ("/o", "eq", {"a": [True], "b": 1}, False),
        ("/o", "ne", {"a": [1], "b": 1.0}, False),
        ("/list", "eq", [1, {"a/b": "x~y"}], True),
        ("/list", "eq", [{"a/b": "x~y"}, 1], False),
        ("/list/1/a~1b", "eq", "x~y", True),
        ("/list/01", "exists", True, False),
        ("/list/-", "exists", True, False),
        ("/list/2", "exists", True, False),
        ("/list/" + "9" * 5000, "exists", True, False),
        ("/s/0", "exists", True, False),
        ("/", "eq", "empty", True),
        ("", "eq", VALUE, True),
        ("/n", "in", [1, 10], True),
        ("/n", "in", ["10", 11], False),
        ("/n", "lt", 10, False),
        ("/n", "le", 10, True),
        ("/n", "ge", 10, True),
        ("/n", "gt", 9.999, True),
        ("/s", "gt", "abb", True),
        ("/s", "lt", "abcd", True),
        ("/s", "gt", "Z", True),
        ("/s", "lt", "\U0001f600", True),
        ("/s", "gt", 1, False),
        ("/n", "lt", "9", False),
        ("/list", "lt", 9, False),
        ("/null", "le", 0, False),
        ("/null", "exists", True, True),
        ("/null", "exists", False, False),
    ],
)
def test_a_comparison_is_exact_and_by_type(at: str, operator: str, constant: object, expected: bool) -> None:
    assert holds({"at": at, operator: constant}) is expected
    assert holds({"not": {"at": at, operator: constant}}) is not expected


def test_strings_are_ordered_by_code_point() -> None:
    assert holds({"at": "", "gt": "\uffff"}, "\U00010000")


@pytest.mark.parametrize(
    ("operator", "constant", "expected"),
    [
        ("eq", None, False),
        ("ne", None, True),
        ("ne", 1, True),
        ("in", [None], False),
        ("lt", 1, False),
        ("le", 1, False),
        ("gt", 1, False),
        ("ge", "", False),
        ("exists", True, False),
        ("exists", False, True),
    ],
)
def test_what_is_missing_is_equal_to_nothing(operator: str, constant: object, expected: bool) -> None:
    for at, value in [("/gone", VALUE), ("/n/x", VALUE), ("/a", None), ("/0", []), ("/a", "a")]:
        assert holds({"at": at, operator: constant}, value) is expected


def test_combinations_nest() -> None:
    is_ten, is_one = {"at": "/n", "eq": 10}, {"at": "/n", "eq": 1}
    assert holds({"all": [is_ten, {"not": is_one}, {"any": [is_one, is_ten]}]})
    assert not holds({"all": [is_ten, is_one]})
    assert not holds({"any": [is_one, {"not": is_ten}]})


def test_conditions_are_equal_only_if_they_mean_the_same() -> None:
    assert parse_condition({"at": "/a", "eq": 1}) == parse_condition({"eq": 1.0, "at": "/a"})
    assert parse_condition({"at": "/a", "eq": 1}) != parse_condition({"at": "/a", "eq": True})
    assert parse_condition({"at": "/a", "lt": 1}) != parse_condition({"at": "/a", "lt": 2})


OPERATORS = "eq, ne, in, exists, lt, le, gt, ge"


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (5, [("", "must be a condition such as {at: /total, gt: 100}, not 5")]),
        ([], [("", "must be a condition such as {at: /total, gt: 100}, not an array")]),
        (
            {},
            [
                ("", "must have one operator beside at, or be one of all, any, not"),
                ("", "at is missing: the JSON Pointer to what is compared"),
            ],
        ),
        ({"at": "/a"}, [("", "must have one operator beside at, or be one of all, any, not")]),
        ({"at": "/a", "eq": 1, "gt": 0}, [("", "must have one operator beside at, or be one of all, any, not")]),
        ({"eq": 1}, [("", "at is missing: the JSON Pointer to what is compared")]),
        ({"at": "a", "eq": 1}, [("/at", '"a" is not a JSON Pointer: it begins with / or is empty')]),
        ({"at": "/~2", "eq": 1}, [("/at", '"/~2" is not a JSON Pointer: ~ is written ~0, and / inside a key ~1')]),
        ({"at": 1, "eq": 1}, [("/at", "must be a JSON Pointer, not 1")]),
        ({"at": "/a", "eqals": 1}, [("/eqals", f'"eqals" is no operator of a condition; there are {OPERATORS}')]),
        ({"at": "/a", "in": 1}, [("/in", "must be an array of at least one value, not 1")]),
        ({"at": "/a", "in": []}, [("/in", "must be an array of at least one value, not an array")]),
        ({"at": "/a", "exists": 1}, [("/exists", "must be true or false, not 1")]),
        ({"at": "/a", "lt": True}, [("/lt", "must be a number or a string, not true")]),
        ({"at": "/a", "ge": None}, [("/ge", "must be a number or a string, not null")]),
        ({"at": "/a", "ge": {}}, [("/ge", "must be a number or a string, not an object")]),
        ({"all": []}, [("/all", "must be an array of at least one condition, not []")]),
        ({"any": {}}, [("/any", "must be an array of at least one condition, not {}")]),
        ({"not": []}, [("/not", "must be a condition such as {at: /total, gt: 100}, not an array")]),
        (
            {"any": [{"at": "x", "in": 1}, {"not": {"all": [3]}}]},
            [
                ("/any/0/at", '"x" is not a JSON Pointer: it begins with / or is empty'),
                ("/any/0/in", "must be an array of at least one value, not 1"),
                ("/any/1/not/all/0", "must be a condition such as {at: /total, gt: 100}, not 3"),
            ],
        ),
        (
            {"all": [], "at": "/a"},
            [("/all", f'"all" stands alone in its object; there are {OPERATORS}')],
        ),
    ],
)
def test_each_fault_of_a_condition_has_its_place(condition: object, expected: list[tuple[str, str]]) -> None:
    assert faults(condition) == expected


def test_conditions_are_limited_in_depth_and_number() -> None:
    deep: object = {"at": "", "exists": True}
    for _ in range(MAX_DEPTH - 1):
        deep = {"not": deep}
    assert isinstance(parse_condition(deep), Condition)
    assert faults({"not": deep}) == [("/not" * MAX_DEPTH, f"conditions are nested more than {MAX_DEPTH} deep")]
    many = [{"at": "", "exists": True}] * MAX_PARTS
    parse_condition({"all": many[1:]})
    assert faults({"all": [*many, *many]}) == [
        (f"/all/{MAX_PARTS - 1}", f"the condition has more than {MAX_PARTS} parts")
    ]


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(allow_nan=False, allow_infinity=False, places=2),
    st.text(max_size=3),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=1), inner))
comparisons = st.one_of(
    st.builds(
        lambda at, op, v: {"at": at, op: v}, st.sampled_from(["", "/0", "/a"]), st.sampled_from(["eq", "ne"]), values
    ),
    st.builds(lambda op, v: {"at": "", op: v}, st.sampled_from(["lt", "ge"]), st.integers(-3, 3) | st.text(max_size=2)),
    st.builds(lambda v: {"at": "/0", "in": v}, st.lists(values, min_size=1, max_size=3)),
    st.builds(lambda v: {"at": "/a", "exists": v}, st.booleans()),
)
conditions = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        inner.map(lambda part: {"not": part}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"all": parts}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"any": parts}),
    ),
    max_leaves=6,
)


def plain(condition: dict[str, Any], value: object) -> bool:
    """Judge a condition by other means than the code under test, for pointers of one part at most."""
    if "not" in condition:
        return not plain(condition["not"], value)
    if "all" in condition or "any" in condition:
        parts = [plain(part, value) for part in condition.get("all") or condition["any"]]
        return all(parts) if "all" in condition else any(parts)
    found = reached(condition["at"], value)
    name, constant = next((key, constant) for key, constant in condition.items() if key != "at")
    if name == "exists":
        return bool(found) is constant
    if name in {"eq", "ne", "in"}:
        listed = map(canonical_value, constant if name == "in" else [constant])
        return (bool(found) and canonical_value(found[0]) in listed) is (name != "ne")
    sides = [found[0], constant] if found else [None, constant]
    if all(isinstance(side, int | float | Decimal) and not isinstance(side, bool) for side in sides):
        sides = [Decimal(str(side)) for side in sides]
    elif not all(isinstance(side, str) for side in sides):
        return False
    below: bool = sides[0] < sides[1]
    return below is (name == "lt")


def reached(at: str, value: Any) -> list[Any]:
    """Return what is at a pointer of one part at most, or nothing."""
    if at == "":
        return [value]
    if isinstance(value, dict):
        return [value[at[1:]]] if at[1:] in value else []
    return value[:1] if isinstance(value, list) and at == "/0" else []


@given(conditions, values)
def test_any_condition_holds_or_not_of_any_value_and_never_raises(condition: Any, value: object) -> None:
    assert holds(condition, value) is plain(condition, value)


@given(conditions)
def test_a_condition_in_canonical_spelling_is_the_same_condition(condition: Any) -> None:
    assert parse_condition(parse(canonical_value(condition))) == parse_condition(condition)
