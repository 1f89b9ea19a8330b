"""Compiled schemas: what they refuse, and how they say it."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest

from fencepost_server.domain.jsontext import parse
from fencepost_server.domain.schema import DIALECT, MAX_FAULTS, SchemaInvalid, compile_schema, subschemas
from fencepost_server.domain.violation import MAX_MESSAGE, Violation

ORDER: dict[str, object] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1},
        "a/b~c": {"maxLength": 2},
    },
    "required": ["id", "lines"],
    "additionalProperties": False,
    "$defs": {"line": {"type": "object", "properties": {"qty": {"type": "integer", "minimum": 1}}}},
}


def faults(schema: object) -> dict[str, str]:
    """Return the faults of a schema by path."""
    with pytest.raises(SchemaInvalid) as refusal:
        compile_schema(schema)
    return {fault.path: fault.message for fault in refusal.value.violations}


def test_a_valid_value_has_no_violations() -> None:
    assert compile_schema(ORDER).violations({"id": 1, "lines": [{"qty": 2}]}) == []


def test_each_violation_has_the_pointer_of_its_place() -> None:
    value = {"id": "x", "lines": [{"qty": 1}, {"qty": 0}], "a/b~c": "long", "more": 1}
    found = compile_schema(ORDER).violations(value)
    assert {violation.path for violation in found} == {"", "/id", "/lines/1/qty", "/a~1b~0c"}
    assert Violation("/id", '"x" is not of type "integer"') in found


def test_violations_are_limited() -> None:
    schema = compile_schema({"items": {"type": "string"}})
    assert len(schema.violations(list(range(100)))) == 20
    assert len(schema.violations(list(range(100)), limit=7)) == 7
    assert len(schema.violations(list(range(100)), limit=1000)) == 100


@pytest.mark.parametrize("value", [list(range(200_000)), [0, "x" * 1_000_000], {str(n): [n] for n in range(3000)}])
def test_a_very_large_value_is_told_its_first_violation_only(value: object) -> None:
    schema = compile_schema({"items": {"type": "string"}, "additionalProperties": {"type": "string"}})
    assert len(schema.violations(value)) == 1


def test_a_message_is_cut_and_keeps_what_is_wrong() -> None:
    (violation,) = compile_schema({"type": "integer"}).violations("😀" * 10_000)
    assert len(violation.message) == MAX_MESSAGE
    assert violation.message.endswith('is not of type "integer"')


@pytest.mark.parametrize(
    ("schema", "text", "valid"),
    [
        ('{"maximum": 18446744073709551616}', "18446744073709551616", True),
        ('{"maximum": 18446744073709551616}', "18446744073709551617", False),
        ('{"const": 9007199254740992}', "9007199254740993", False),
        ('{"const": 1}', "1.0", True),
        ('{"const": 1}', "true", False),
        ('{"type": "integer"}', "1e400", True),
        ('{"type": "integer"}', "-1e-400", False),
        ('{"exclusiveMinimum": 0}', "1e-1000000", True),
        ('{"maximum": 1e400}', "1e401", False),
        ('{"const": 1e23}', "1" + "0" * 23, True),
        ('{"maximum": 1e23}', "1" + "0" * 23, True),
        ('{"minimum": 100000000000000000000000}', "1e23", True),
        ('{"multipleOf": 10}', "1e23", True),
        ('{"maximum": 0.1}', "0.10000000000000000000001", False),
        ('{"minimum": 0.3}', "0.29999999999999999999999", False),
        ('{"multipleOf": 0.01}', "0.29", True),
        ('{"multipleOf": 0.01}', "1e1000000", True),
        ('{"multipleOf": 3}', "1e1000000", False),
        ('{"multipleOf": 1e-400}', "1.5", True),
        ('{"uniqueItems": true}', "[18446744073709551616, 18446744073709551617]", True),
        ('{"enum": [1e1000000]}', "10e999999", True),
        ('{"type": "integer"}', "9" * 1000, True),
        ('{"minLength": 2}', '"😀"', False),
        ('{"pattern": "^.\\u0000$"}', '"a\\u0000"', True),
    ],
)
def test_numbers_and_strings_are_compared_exactly(schema: str, text: str, valid: bool) -> None:
    compiled = compile_schema(parse(schema))
    assert (compiled.violations(parse(text)) == []) is valid
    assert compiled.is_valid(parse(text)) is valid


def test_all_faults_of_a_schema_are_found_at_once() -> None:
    found = faults(
        {
            "type": "strin",
            "minLength": -1,
            "required": "a",
            "pattern": "(",
            "properties": {
                "a": {"$ref": "https://example.invalid/order.json"},
                "b": 7,
                "c/d": {"items": {"type": ["string", "int"]}},
            },
            "patternProperties": {"(?=look)": True, "ok": {"pattern": "(a)\\1"}},
            "allOf": [True, {"$schema": "http://json-schema.org/draft-07/schema#"}],
            "$defs": {"x": {"if": {"multipleOf": 0}}},
        }
    )
    assert set(found) == {
        "/type",
        "/minLength",
        "/required",
        "/pattern",
        "/properties/a/$ref",
        "/properties/b",
        "/properties/c~1d/items/type",
        "/patternProperties/(?=look)",
        "/patternProperties/ok/pattern",
        "/allOf/1/$schema",
        "/$defs/x/if/multipleOf",
    }
    assert found["/type"].startswith("a type is array, boolean,")
    assert "nothing is fetched" in found["/properties/a/$ref"]
    assert "look-around" in found["/patternProperties/(?=look)"]


@pytest.mark.parametrize("schema", [None, 5, "string", [], 1.5])
def test_a_schema_is_an_object_or_a_boolean(schema: object) -> None:
    assert faults(schema) == {"": "a schema is an object or a boolean"}


def test_the_list_of_faults_is_limited() -> None:
    assert len(faults({"properties": {str(n): {"minLength": "x"} for n in range(500)}})) == MAX_FAULTS


@pytest.mark.parametrize(
    "reference",
    ["http://127.0.0.1:9/x", "file:///etc/passwd", "other.json", "other.json#/a", "//host/x", DIALECT, "urn:x:y"],
)
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_a_reference_never_leaves_its_schema(keyword: str, reference: str) -> None:
    assert set(faults({"items": {keyword: reference}})) == {f"/items/{keyword}"}


def test_references_that_lead_nowhere_are_named() -> None:
    schema = {
        "$id": "https://example.invalid/root",
        "properties": {"a": {"$ref": "#/$defs/none"}, "b": {"$ref": "#anchor"}, "c": {"$ref": "#/$defs/ok"}},
        "$defs": {"ok": {"type": "string"}},
    }
    assert set(faults(schema)) == {"/properties/a/$ref", "/properties/b/$ref"}
    inner = {"$defs": {"part": {"$id": "part", "$ref": "#/$defs/none"}, "none": True}, "$ref": "#/$defs/part"}
    assert set(faults(inner)) == {""}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"$ref": "#/$defs/a%20b/items", "$defs": {"a b": {"items": {"type": "null"}}}}, None, 1),
        ({"$ref": "#name", "$defs": {"x": {"$anchor": "name", "type": "null"}}}, None, 1),
        ({"$dynamicRef": "#name", "$defs": {"x": {"$dynamicAnchor": "name", "type": "null"}}}, None, 1),
        ({"properties": {"next": {"$ref": "#"}}, "required": ["v"]}, {"v": 1, "next": {"v": 2}}, {"v": 1, "next": {}}),
        ({"$schema": DIALECT, "prefixItems": [{"type": "string"}]}, ["x"], [1]),
        (True, 1, ...),
        (False, ..., 1),
    ],
)
def test_local_references_and_the_draft_are_supported(schema: object, valid: object, invalid: object) -> None:
    compiled = compile_schema(schema)
    assert valid is ... or compiled.violations(valid) == []
    assert invalid is ... or compiled.violations(invalid) != []


def test_formats_are_annotations_and_are_not_checked() -> None:
    compiled = compile_schema({"format": "date-time", "contentMediaType": "application/json"})
    assert compiled.violations("tomorrow") == []


def test_a_pattern_takes_linear_time() -> None:
    compiled = compile_schema({"pattern": "^(a+)+$"})
    assert not compiled.is_valid("a" * 100_000 + "!")


@pytest.mark.parametrize("pattern", ["(?<!a)b", "(?!a)", "(?<name>a)\\k<name>", "[", "a{1000}{1000}{1000}"])
def test_a_pattern_that_cannot_run_in_bounded_time_is_refused(pattern: str) -> None:
    assert set(faults({"not": {"pattern": pattern}})) == {"/not/pattern"}


def test_schemas_that_refer_to_themselves_end() -> None:
    for schema in (
        {"$ref": "#"},
        {"not": {"$ref": "#"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
    ):
        compile_schema(schema).violations({"x": [1]})


def test_subschemas_are_walked_by_keyword_and_not_by_name() -> None:
    schema = {
        "properties": {"pattern": {"title": "a"}, "$ref": {"title": "b"}},
        "enum": [{"items": {"title": "no"}}],
        "default": {"not": {"title": "no"}},
        "oneOf": [{"title": "c"}, True],
    }
    assert [path for path, _ in subschemas(schema)] == ["", "/properties/pattern", "/properties/$ref", "/oneOf/0"]
    compile_schema(schema)


def test_a_decimal_from_elsewhere_is_a_number() -> None:
    assert compile_schema({"type": "number", "maximum": 2}).violations(Decimal("1.10")) == []


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("[1.5e-500, 1.5e-501]", True),
        ("[1.5e-500, 15e-501]", False),
        ("[1e400, 1, true, 1e401]", True),
        ("[1e400, 1, 1.0]", False),
        ("[12345678901234567890123, 12345678901234567890124]", True),
        ('[{"a": [1e400]}, {"a": [10e399]}]', False),
    ],
)
def test_items_with_long_numbers_are_told_apart_exactly(text: str, valid: bool) -> None:
    for schema in ({"uniqueItems": True}, {"$ref": "#/x/y", "x": {"y": {"uniqueItems": True}}}):
        compiled = compile_schema(schema)
        assert compiled.is_valid(parse(text)) is valid
        assert bool(compiled.violations(parse(text))) is not valid


@pytest.mark.parametrize("number", ["1.5e-9{}", "{}" + "9" * 80])
def test_many_long_numbers_are_told_apart_quickly(number: str) -> None:
    value = parse("[" + ",".join(number.format(i) for i in range(10_000, 20_000)) + "]")
    started = time.process_time()
    assert compile_schema({"uniqueItems": True}).violations(value) == []
    assert time.process_time() - started < 5  # compared with each other, they take many minutes


@pytest.mark.parametrize("schema", [{"type": "string"}, {"items": {"type": "string"}}])
@pytest.mark.parametrize("count", [100, 4_000, 50_000])
def test_a_violation_by_many_tiny_numbers_is_told_quickly(schema: object, count: int) -> None:
    value = parse("[" + ",".join(["1.5e-999999"] * count) + "]")
    started = time.process_time()
    assert compile_schema(schema).violations(value)
    assert time.process_time() - started < 5  # with all zeros written out, a minute and more
