"""A schema's work at one place of a value is bounded when it is registered."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost_server.domain.schema_cost import MAX_EVALUATIONS, excess


def doubling(levels: int, keyword: str = "anyOf") -> dict[str, Any]:
    """Each definition asks twice for the next one."""
    definitions: dict[str, Any] = {f"a{levels}": {"type": "string"}}
    for level in range(levels):
        reference = {"$ref": f"#/$defs/a{level + 1}"}
        definitions[f"a{level}"] = {keyword: [reference, dict(reference)]}
    return {"$defs": definitions, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_references_that_double_at_each_level_are_too_much(keyword: str) -> None:
    assert excess(doubling(8, keyword)) is None
    fault = excess(doubling(24, keyword))
    assert fault is not None
    assert f"{MAX_EVALUATIONS:,}" in fault.message


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"type": "string"}, {"not": {"$ref": "#"}}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"if": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
        {"dependentSchemas": {"x": {"$ref": "#"}}},
    ],
)
def test_what_never_leaves_its_place_is_too_much(schema: object) -> None:
    assert excess(schema) is not None


def test_a_long_chain_of_references_is_too_much() -> None:
    chain: dict[str, Any] = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(2000)}
    assert excess({"$defs": {**chain, "a2000": {}}, "$ref": "#/$defs/a0"}) is not None


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
        {"oneOf": [{"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}, {"type": "number"}]},
        {"oneOf": [{"const": n} for n in range(3000)]},
    ],
)
def test_recursion_into_parts_of_a_value_and_long_lists_of_cases_are_fine(schema: object) -> None:
    assert excess(schema) is None
