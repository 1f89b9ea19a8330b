"""How much work a schema can make of one place in a value, bounded when it is registered.

A few lines can ask for more than a machine can do: ``anyOf`` with two references to a schema that has two such
references, and so on, is evaluated 2^n times for the value 1. What is counted here is how often subschemas meet
one and the same place: through ``allOf``, ``anyOf``, ``oneOf``, ``not``, ``if``, ``then``, ``else``,
``dependentSchemas`` and references. A cycle of them would never end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fencepost_server.domain.schema import subschemas
from fencepost_server.domain.schema_facts import Document
from fencepost_server.domain.violation import Violation

MAX_EVALUATIONS = 10_000
"""So many subschemas may meet one place in a value."""

_MAX_CHAIN = 300
_LISTS = ("allOf", "anyOf", "oneOf")
_SINGLES = ("not", "if", "then", "else")
_REFERENCES = ("$ref", "$dynamicRef")


def excess(schema: object) -> Violation | None:
    """The fault of a valid schema that asks for too much at one place, or None."""
    document = Document(schema)
    known: dict[int, float] = {}
    for path, part in subschemas(schema):
        if _evaluations(document, part, known, set()) > MAX_EVALUATIONS:
            message = f"over {MAX_EVALUATIONS:,} subschemas would be evaluated at one place of a value"
            return Violation(path, message)
    return None


def _evaluations(document: Document, schema: object, known: dict[int, float], open_: set[int]) -> float:
    """How many subschemas meet the place that ``schema`` meets; infinite for a cycle. Each subschema is counted
    once.
    """
    if not isinstance(schema, dict):
        return 1
    key = id(schema)
    if key in open_ or len(open_) > _MAX_CHAIN:
        return math.inf
    if key not in known:
        open_.add(key)
        known[key] = 1 + sum(_evaluations(document, part, known, open_) for part in _in_place(document, schema))
        open_.discard(key)
    return known[key]


def _in_place(document: Document, schema: dict[str, object]) -> Iterator[object]:
    for keyword in _LISTS:
        parts = schema.get(keyword)
        if isinstance(parts, list):
            yield from parts
    for keyword in _SINGLES:
        if keyword in schema:
            yield schema[keyword]
    dependent = schema.get("dependentSchemas")
    if isinstance(dependent, dict):
        yield from dependent.values()
    for keyword in _REFERENCES:
        if keyword in schema:
            yield document.target(schema[keyword])
