"""Which schemas match: tables of pairs, and a search for pairs that match and should not."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_server.domain.schema import compile_schema
from fencepost_server.domain.schema_match import WorkBudget, mismatch

STRING: dict[str, object] = {"type": "string"}
INTEGER: dict[str, object] = {"type": "integer"}
NUMBER: dict[str, object] = {"type": "number"}
NULL: dict[str, object] = {"type": "null"}


def thing(closed: bool = False, required: str = "", **properties: object) -> dict[str, object]:
    """Return the schema of an object."""
    schema: dict[str, object] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required.split()
    if closed:
        schema["additionalProperties"] = False
    return schema


def array(items: object, **more: object) -> dict[str, object]:
    """Return the schema of an array."""
    return {"type": "array", "items": items, **more}


def tree(value: object, **more: object) -> dict[str, object]:
    """Return a recursive schema."""
    return {"$ref": "#/$defs/node", "$defs": {"node": {**thing(left={"$ref": "#/$defs/node"}, value=value), **more}}}


CARD = thing(required="kind no", kind={"const": "card"}, no=STRING)
CASH = thing(required="kind", kind={"const": "cash"})
LOOSE_CARD = thing(required="kind no", kind={"const": "card"}, no={})

MATCHES: list[tuple[object, object]] = [
    (STRING, {}),
    (STRING, True),
    (False, STRING),
    ({"type": "string", "title": "a"}, {"title": "b", "type": "string", "description": "c", "format": "uri"}),
    (INTEGER, NUMBER),
    ({"type": ["string", "null"]}, {"type": ["null", "integer", "string"]}),
    ({"type": ["integer", "string"]}, {"anyOf": [NUMBER, STRING]}),
    ({"const": 1.0}, INTEGER),
    ({"const": "a"}, {"enum": ["b", "a"]}),
    ({"enum": ["a", "b"]}, {"type": "string", "minLength": 1, "pattern": "^[ab]$"}),
    ({"type": "boolean"}, {"enum": [True, False, 1]}),
    ({"type": "boolean"}, {"oneOf": [{"const": True}, {"const": False}]}),
    ({"enum": [1, "a"], "type": "string"}, {"const": "a"}),
    ({"type": "number", "minimum": 3, "maximum": 5}, {"minimum": 2, "exclusiveMaximum": 6}),
    ({"exclusiveMinimum": 3, "type": "integer"}, {"minimum": 3}),
    ({"type": "number", "minimum": 10**30}, {"minimum": Decimal("1e29")}),
    ({"type": "number", "minimum": 10**30}, {"minimum": Decimal("1e30")}),
    (STRING, {"minimum": 3, "maxItems": 1, "required": ["a"]}),
    ({"type": "string", "minLength": 3, "maxLength": 4}, {"minLength": 2, "maxLength": 4}),
    ({"type": "string", "pattern": "^a"}, {"pattern": "^a"}),
    (STRING, {"type": "string", "minLength": 0}),
    ({"type": "number", "multipleOf": 0.1}, {"multipleOf": 0.1}),
    (thing(a=INTEGER, required="a"), thing(a=NUMBER, required="a")),
    (thing(a=INTEGER, b=STRING, required="a b"), thing(a=INTEGER, required="a")),
    (thing(True, a=INTEGER), thing(a=NUMBER, b=STRING)),
    (thing(True, a=INTEGER), thing(True, a=NUMBER, b=STRING)),
    (thing(True, a=INTEGER), {"type": "object", "additionalProperties": NUMBER}),
    ({"type": "object", "additionalProperties": INTEGER}, thing(a=NUMBER)),
    ({"type": "object", "patternProperties": {"^a": INTEGER}}, thing(abc=NUMBER)),
    ({"type": "object", "patternProperties": {"^a": INTEGER}}, {"patternProperties": {"^a": NUMBER}}),
    (thing(True, ab=INTEGER, b=STRING), {"patternProperties": {"^a": NUMBER}, "additionalProperties": STRING}),
    (thing(required="a b c"), {"minProperties": 3}),
    (thing(True, a=INTEGER, bb=STRING), {"propertyNames": {"maxLength": 2}}),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, {"propertyNames": {"maxLength": 3}}),
    (thing(required="a b"), {"dependentRequired": {"a": ["b"], "c": ["a"]}}),
    (thing(True, a=INTEGER), {"dependentSchemas": {"b": False}}),
    (array(INTEGER), array(NUMBER)),
    (array(INTEGER, minItems=2, maxItems=3), array(NUMBER, minItems=1, maxItems=3)),
    ({"type": "array", "prefixItems": [INTEGER, STRING], "items": False}, array({"type": ["number", "string"]})),
    ({"type": "array", "prefixItems": [INTEGER, STRING]}, {"prefixItems": [NUMBER]}),
    (array(INTEGER, maxItems=1), {"type": "array", "prefixItems": [INTEGER], "items": False}),
    (array(STRING, uniqueItems=True), {"uniqueItems": True}),
    (array(STRING), {"uniqueItems": False}),
    (array(STRING, contains={"const": "a"}), {"contains": {"const": "a"}}),
    ({"allOf": [STRING, {"minLength": 2}]}, {"type": "string", "minLength": 1}),
    ({"type": "string", "minLength": 2}, {"allOf": [STRING, {"minLength": 1}]}),
    ({"anyOf": [STRING, INTEGER]}, {"type": ["string", "number"]}),
    ({"anyOf": [STRING, NULL]}, {"oneOf": [NULL, STRING]}),
    ({"oneOf": [CARD, CASH]}, {"oneOf": [CASH, LOOSE_CARD]}),
    (CARD, {"oneOf": [CASH, LOOSE_CARD]}),
    (CARD, {"not": CASH}),
    (STRING, {"not": NULL}),
    ({"not": {"minLength": 3}}, {"not": {"minLength": 3}}),
    (CARD, {"if": {"properties": {"kind": {"const": "card"}}, "required": ["kind"]}, "then": {"required": ["no"]}}),
    (CASH, {"if": {"properties": {"kind": {"const": "card"}}, "required": ["kind"]}, "then": {"required": ["no"]}}),
    (STRING, {"if": INTEGER, "then": False, "else": STRING}),
    ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, NUMBER),
    (INTEGER, {"$ref": "#n", "$defs": {"a": {"$anchor": "n", "type": "number"}}}),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INTEGER}}, {"type": "integer", "minimum": 2}),
    (tree(INTEGER, additionalProperties=False), tree(NUMBER)),
    (tree({"type": "null"}), tree({"type": ["null", "string"]})),
    ({"unevaluatedProperties": False, "type": "object"}, {"type": "object", "unevaluatedProperties": False}),
    ({"if": STRING, "then": NULL, "type": "string", "minLength": 2}, {"minLength": 1}),
]

MISMATCHES: list[tuple[object, object, str]] = [
    (STRING, NUMBER, "may be string; accepted is number"),
    (NUMBER, INTEGER, "may be number; accepted is integer"),
    ({}, STRING, "may be array or boolean or null or number or object; accepted is string"),
    (True, STRING, "may be anything (the output schema does not describe it)"),
    (STRING, False, "must not be there"),
    ({"type": ["string", "null"]}, STRING, "may be null; accepted is string"),
    ({"const": 1.5}, INTEGER, "1.5 is not accepted"),
    ({"const": 1}, {"const": True}, "1 is not accepted"),
    ({"type": "boolean"}, {"enum": [0, 1]}, "is not limited to the values of enum"),
    (STRING, {"enum": ["a"]}, "is not limited to the values of enum that are accepted"),
    ({"enum": ["a", ""]}, {"type": "string", "minLength": 1}, '"" is not accepted'),
    (NUMBER, {"minimum": 3}, "minimum 3 is not guaranteed"),
    ({"type": "number", "minimum": 0.1}, {"minimum": Decimal("0.100000000000000001")}, "minimum 0.100000000000000001"),
    ({"type": "number", "minimum": 3}, {"exclusiveMinimum": 3}, "exclusiveMinimum 3 is not guaranteed"),
    ({"type": "string", "maxLength": 4}, {"maxLength": 3}, "maxLength 3 is not guaranteed"),
    ({"type": "string", "pattern": "^ab"}, {"pattern": "^a"}, "pattern cannot be compared"),
    (thing(a=INTEGER), thing(a=INTEGER, required="a"), '"a" is required and may be missing'),
    (thing(a=thing(b=STRING)), thing(a=thing(b=INTEGER)), "/a/b: may be string; accepted is integer"),
    (thing(a=INTEGER), thing(a=INTEGER, b=STRING), "/b: may be anything"),
    (thing(a=INTEGER), thing(True, a=INTEGER), "may have properties that are not accepted"),
    (thing(True, a=INTEGER, b=STRING), thing(True, a=INTEGER), "/b: must not be there"),
    ({"type": "object", "patternProperties": {"^a": STRING}}, thing(abc=NUMBER), "/abc: may be string"),
    (
        {"type": "object", "patternProperties": {"^a": STRING}, "additionalProperties": NUMBER},
        thing(abc=NUMBER),
        "/abc: may be string",
    ),
    (
        {"type": "object", "patternProperties": {"^a": STRING}},
        {"additionalProperties": STRING},
        "may have properties that are not accepted",
    ),
    ({"type": "object", "patternProperties": {"^a": STRING}}, {"patternProperties": {"^b": STRING}}, "/*: may be"),
    (
        {"type": "object", "patternProperties": {"^a": STRING}, "additionalProperties": False},
        thing(True),
        "may have properties",
    ),
    (thing(a=STRING), {"propertyNames": {"maxLength": 2}}, "may have properties with names"),
    (thing(required="a"), {"minProperties": 2}, "minProperties 2 is not guaranteed"),
    (thing(required="a"), {"dependentRequired": {"a": ["b"]}}, 'what "a" needs beside it may be missing'),
    (array(STRING), array(INTEGER), "/*: may be string; accepted is integer"),
    ({"type": "array", "prefixItems": [INTEGER, STRING]}, array(INTEGER), "/1: may be string"),
    ({"type": "array"}, array(INTEGER), "/*: may be anything"),
    (array(STRING), {"uniqueItems": True}, "uniqueItems cannot be compared"),
    ({"anyOf": [STRING, INTEGER]}, STRING, "may be integer; accepted is string"),
    (STRING, {"anyOf": [INTEGER, NULL]}, "may fit no branch of anyOf (may be string"),
    (INTEGER, {"oneOf": [INTEGER, NUMBER]}, "may fit more than one branch of oneOf"),
    (CARD, {"not": {"required": ["no"]}}, "not cannot be compared"),
    (STRING, {"if": {"minLength": 3}, "then": {"pattern": "^a"}}, "pattern cannot be compared"),
    (INTEGER, {"$ref": "#/$defs/a", "$defs": {"a": STRING}}, "may be integer; accepted is string"),
    (INTEGER, {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}}, "$dynamicRef cannot be compared"),
    (
        INTEGER,
        {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "x", "type": "integer"}}},
        'the reference "#/$defs/a" cannot be followed',
    ),
    (tree(NUMBER), tree(INTEGER), "/left/value: may be number; accepted is integer"),
    ({"type": "object"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "a schema refers to itself"),
    ({"type": "object"}, {"unevaluatedProperties": False}, "unevaluatedProperties cannot be compared"),
    (
        {"anyOf": [thing(a=STRING), thing(b=STRING)], "unevaluatedProperties": False},
        {"unevaluatedProperties": False},
        "unevaluatedProperties cannot be compared",
    ),
]


@pytest.mark.parametrize(("output", "accepted"), MATCHES)
def test_a_plain_subset_matches(output: object, accepted: object) -> None:
    compile_schema(output)
    compile_schema(accepted)
    assert mismatch(output, accepted) is None


@pytest.mark.parametrize(("output", "accepted", "reason"), MISMATCHES)
def test_what_does_not_plainly_match_is_refused_with_the_reason(output: object, accepted: object, reason: str) -> None:
    compile_schema(output)
    compile_schema(accepted)
    assert (mismatch(output, accepted) or "matches").startswith(reason)


@pytest.mark.parametrize("schema", [output for output, _ in MATCHES] + [output for output, _, _ in MISMATCHES])
def test_every_schema_matches_itself_and_what_accepts_all(schema: object) -> None:
    assert mismatch(schema, schema) is None
    assert mismatch(schema, None) is None
    assert mismatch(schema, {}) is None
    assert mismatch(False, schema) is None


def test_without_an_output_schema_only_what_accepts_all_matches() -> None:
    assert mismatch(None, None) is None
    assert mismatch(None, {"title": "anything"}) is None
    assert mismatch(None, STRING) == "may be anything (the output schema does not describe it)"


def test_deep_and_entangled_schemas_are_refused_in_bounded_time() -> None:
    deep: dict[str, object] = {"type": "string"}
    other: dict[str, object] = {"type": "string", "minLength": 0}
    for _ in range(120):
        deep, other = array(deep), array(other)
    assert "nested more than" in (mismatch(deep, other) or "")
    wide = {"allOf": [{"anyOf": [{"minLength": n}, {"maxLength": n}, {"pattern": str(n)}]} for n in range(20)]}
    assert mismatch(wide, {"maxLength": 3, **STRING}) is not None
    budget = WorkBudget(50)
    assert "too large" in (mismatch(wide, {"maxLength": 3, **STRING}, budget) or "")
    assert budget.left == 0
    assert "too large" in (mismatch(INTEGER, NUMBER, budget) or "")
    assert mismatch(INTEGER, INTEGER, budget) is None


# A small world, in which random schemas are often comparable: few names, few values.
VALUES: list[Any] = [None, True, False, 0, 1, 2, 1.5, 1.0, -3, 10**20, "", "a", "b", "ab", "aab"]
VALUES += [[], [1], ["a"], [1, "a"], [1, 1], ["a", "b", "a"], [None], [[1]], [2, 1.5], [{}], [{"a": 1}, 0]]
VALUES += [{}, {"a": 1}, {"a": "a"}, {"b": 1}, {"a": 1, "b": "b"}, {"ab": 2}, {"a": None, "ab": 1.5}, {"c": 0}]
VALUES += [{"a": {"a": 1}}, {"a": {"b": "a"}, "b": []}, {"a": [1], "b": {"a": 2}}, {"a": 1, "b": 2, "c": 3}]
VALUES += [{"a": {"a": {"a": "b"}}}, {"b": [{"a": 1}, {"a": "a"}]}, {"a": 2, "ab": "a", "c": {}}]

names = st.sampled_from(["a", "b", "ab", "c"])
type_names = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
small = st.integers(0, 3)
patterns = st.sampled_from(["a", "^a", "^b$", "^.$"])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return schemas with some keywords of every kind."""
    lists = st.lists(inner, min_size=1, max_size=3)
    properties = st.dictionaries(names, inner, max_size=3)
    every = {
        "type": st.one_of(type_names, st.lists(type_names, min_size=1, max_size=3, unique=True)),
        "const": st.sampled_from(VALUES),
        "enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=4),
        "minimum": small,
        "maximum": small,
        "exclusiveMinimum": small,
        "exclusiveMaximum": small,
        "multipleOf": st.sampled_from([1, 0.5]),
        "minLength": small,
        "maxLength": small,
        "pattern": patterns,
        "minItems": small,
        "maxItems": small,
        "uniqueItems": st.booleans(),
        "items": inner,
        "prefixItems": lists,
        "contains": inner,
        "minContains": small,
        "minProperties": small,
        "maxProperties": small,
        "required": st.lists(names, max_size=2, unique=True),
        "properties": properties,
        "patternProperties": st.dictionaries(patterns, inner, max_size=2),
        "additionalProperties": inner,
        "propertyNames": inner,
        "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2, unique=True), max_size=2),
        "dependentSchemas": properties,
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
        "allOf": lists,
        "anyOf": lists,
        "oneOf": lists,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y", "#"]),
    }
    chosen = st.lists(st.sampled_from(sorted(every)), max_size=4, unique=True)
    return chosen.flatmap(lambda keys: st.fixed_dictionaries({key: every[key] for key in keys}))


parts = st.recursive(st.one_of(st.booleans(), keywords(st.booleans())), keywords, max_leaves=6)
roots = st.builds(
    lambda root, x, y: {**(root if isinstance(root, dict) else {"allOf": [root]}), "$defs": {"x": x, "y": y}},
    *[parts, parts, parts],
)


@st.composite
def variants(draw: st.DrawFn, schema: Any) -> Any:
    """Return a schema that is like another one but for a change here or there, so that the two often compare."""
    if isinstance(schema, list):
        return [draw(variants(item)) for item in schema]
    if not isinstance(schema, dict) or draw(st.integers(0, 9)) == 0:
        return schema if draw(st.integers(0, 5)) or not isinstance(schema, bool | dict) else draw(parts)
    changed = {}
    for key, value in schema.items():
        what = draw(st.integers(0, 7))
        if what == 0 and key != "$defs":
            continue
        if what == 1 and isinstance(value, int) and not isinstance(value, bool):
            changed[key] = max(0, value + draw(st.sampled_from([-1, 1])))
        else:
            changed[key] = value if key in {"const", "enum", "type", "required"} else draw(variants(value))
    return changed


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """Return two schemas, mostly related."""
    output = draw(roots)
    return output, draw(st.one_of(variants(output), variants(output), roots))


def valid(schema: Any) -> bool:
    """Tell whether a schema of the small world compiles: a variant may have a repeated name, say."""
    try:
        compile_schema(schema)
    except ValueError:
        return False
    return True


@given(pairs())
def test_no_value_of_a_matching_output_breaks_the_input(pair: tuple[Any, Any]) -> None:
    output, accepted = pair
    if not (valid(output) and valid(accepted)) or mismatch(output, accepted) is not None:
        return
    before, after = compile_schema(output), compile_schema(accepted)
    wrong = [value for value in VALUES if before.is_valid(value) and not after.is_valid(value)]
    assert wrong == []
