"""Schemas made of other schemas: what a container gives, told from what the nodes in it give, and the way back.

A schema means the same inside another one only if its references are written anew, and some cannot be (to
anchors, dynamic ones, or inside a resource with an `$id` of its own). Of such a schema nothing is known once
it is a part: what is composed may say less than its parts do, but never more.

What is composed is for `schema_match`, and not always fit to be compiled. Its parts are shared with the
schemas that it is made of, or copied where references have to change. Because parts are shared, a few nodes could
give a schema that has no end as text: past a weight, nothing is known of the parts. The work is taken off a budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

from fencepost_server.domain import schema_facts as known
from fencepost_server.domain.json_pointer import array_index
from fencepost_server.domain.schema import subschemas
from fencepost_server.domain.schema_facts import Document
from fencepost_server.domain.schema_match import WorkBudget
from fencepost_server.domain.schema_rules import type_names
from fencepost_server.domain.violation import pointer

MAX_WEIGHT = 5_000
"""Schemas inside a composed one, counted as often as they stand there."""

_MAX_PREFIX = 50
_COPY_COST = 5
_LOOK_COST = 5
_PATTERN_COST = 10
_NAMES = ("$anchor", "$dynamicAnchor", "$id", "$schema")
"""Keywords that would name the part inside the whole; they constrain nothing."""
_REFERENCES = ("$ref", "$dynamicRef")


class NoArray(ValueError):
    """No value of a schema has an array at a place; the message says what it has."""


class Composer:
    """Composes schemas at the cost of one budget; when it is used up, nothing is known of what is composed."""

    def __init__(self, budget: WorkBudget) -> None:
        self._budget = budget
        # By identity, with the schema, so that no other one gets its identity while this lives.
        self._seen: dict[int, tuple[object, bool, int]] = {}

    def weight(self, schema: object | None) -> int:
        """Return how many schemas are in a schema, itself among them."""
        return self._look(schema)[1] if isinstance(schema, dict) else 1

    def object_of(self, members: Mapping[str, object | None]) -> object:
        """Return the schema of an object that has exactly these members."""
        parts = self._parts({pointer(("properties", name)): schema for name, schema in members.items()})
        return self._made(
            {
                "type": "object",
                "properties": dict(zip(members, parts, strict=True)),
                "required": sorted(members),
                "additionalProperties": False,
            },
            parts,
        )

    def array_of(self, items: object | None) -> object:
        """Return the schema of an array of such items."""
        parts = self._parts({"/items": items})
        return self._made({"type": "array", "items": parts[0]}, parts)

    def any_of(self, schemas: Sequence[object | None]) -> object:
        """Return the schema of what keeps to at least one of these."""
        if len(schemas) == 1:
            return True if schemas[0] is None else schemas[0]
        parts = self._parts({f"/anyOf/{index}": schema for index, schema in enumerate(schemas)})
        return self._made({"anyOf": parts}, parts)

    def items_at(self, schema: object | None, at: Sequence[str]) -> object:
        """Return what the items of the array at a place in a value of `schema` keep to.

        True where the schema does not tell. It tells of the values that have an array there, and other ones may
        be possible too.

        Raises:
            NoArray: no value of the schema has an array there.
        """
        self._budget.left -= _LOOK_COST
        whole = self._part(schema, "/$defs/whole")
        if whole is True:
            return True
        document = Document({"$defs": {"whole": whole}})
        found: tuple[object, ...] = (whole,)
        for part in at:
            following = self._below(document, found, part)
            if following is None:
                return True
            found = following
        facts = known.flatten(document, found)
        if facts is None:
            raise NoArray("nothing can be there")
        if "array" not in known.types(facts):
            raise NoArray(f"may be {', '.join(type_names(known.types(facts))) or 'nothing at all'}")
        alike = known.prefix_length(facts)
        if alike > _MAX_PREFIX:
            return True
        cases = [_all_of(known.item_schemas(facts, index)) for index in range(alike + 1)]
        items = cases[0] if len(cases) == 1 else {"anyOf": cases}
        if self.weight(items) > MAX_WEIGHT:
            return True
        if self._is_plain(whole) or not isinstance(items, dict):
            return items
        return {"allOf": [items], "$defs": {"whole": whole}}

    def _below(self, document: Document, schemas: tuple[object, ...], part: str) -> tuple[object, ...] | None:
        """Return schemas of what is one step below; None if they do not tell."""
        facts = known.flatten(document, schemas)
        if facts is None:
            raise NoArray("nothing can be there")
        patterns = sum(len(known.mapped(fact, "patternProperties")) for fact in facts)
        self._budget.left -= 1 + len(facts) + _PATTERN_COST * patterns
        if self._budget.left < 0:
            return None
        types = known.types(facts)
        index = array_index(part) if "array" in types else None
        if "object" not in types and index is None:
            raise NoArray(f"nothing is there, because what is above it may be {', '.join(type_names(types))}")
        if "object" not in types and index is not None:
            return known.item_schemas(facts, index)
        return known.property_schemas(facts, part) if index is None else None

    def _parts(self, schemas: Mapping[str, object | None]) -> list[object]:
        """Return schemas as they are to be written at their places; True for each if they are too much together."""
        if self._budget.left < 0 or sum(map(self.weight, schemas.values())) > MAX_WEIGHT:
            return [True] * len(schemas)
        return [self._part(schema, place) for place, schema in schemas.items()]

    def _made(self, schema: object, parts: Sequence[object]) -> object:
        """Return `schema`, and remember what it is if it is made of parts without references."""
        if all(self._is_plain(part) for part in parts):
            self._seen[id(schema)] = (schema, True, 1 + sum(map(self.weight, parts)))
        return schema

    def _is_plain(self, schema: object) -> bool:
        """Tell whether a schema has neither references nor names, and so means the same in any place."""
        return not isinstance(schema, dict) or self._look(schema)[0]

    def _look(self, schema: dict[str, object]) -> tuple[bool, int]:
        if id(schema) not in self._seen:
            parts = [part for _, part in subschemas(schema)]
            self._budget.left -= len(parts) // 10
            plain = all(part.keys().isdisjoint((*_NAMES, *_REFERENCES)) for part in parts)
            self._seen[id(schema)] = (schema, plain, len(parts))
        return self._seen[id(schema)][1:]

    def _part(self, schema: object | None, place: str) -> object:
        """Return a schema as it is to be written at a JSON Pointer in another one; True if it cannot be."""
        if schema is None or self._budget.left < 0:
            return True
        if not isinstance(schema, dict) or self._is_plain(schema):
            return schema
        if not _can_move(schema):
            return True
        self._budget.left -= _COPY_COST * sum(1 for _ in subschemas(schema))
        copied = deepcopy(schema)
        for _, part in list(subschemas(copied)):
            for name in _NAMES:
                part.pop(name, None)
            if "$ref" in part:
                part["$ref"] = f"#{place}{str(part['$ref'])[1:]}"
        return copied


def _can_move(schema: dict[str, object]) -> bool:
    """Tell whether all references in a schema are pointers to subschemas of it, and can be written anew."""
    parts = list(subschemas(schema))
    document = Document(schema)
    targets = {id(part) for _, part in parts}
    for path, part in parts:
        if "$dynamicRef" in part or (path and "$id" in part):
            return False
        if "$ref" in part:
            reference = str(part["$ref"])
            target = document.target(reference)
            if reference[:2] not in {"#", "#/"} or not (isinstance(target, bool) or id(target) in targets):
                return False
    return True


def _all_of(schemas: tuple[object, ...]) -> object:
    kept = [schema for schema in schemas if schema is not True]
    if not kept:
        return True
    return kept[0] if len(kept) == 1 else {"allOf": kept}
