"""What one JSON Schema, or several that hold together, say about a value: the reading side of `schema_match`.

A *fact* is one object schema that holds for the value; a list of them is their conjunction. Everything here
may say less than the schemas do (that a property may be anything, say), but never more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from urllib.parse import unquote

from fencepost_server.domain.jsontext import canonical_value
from fencepost_server.domain.schema import compile_schema, subschemas

Facts = list[Mapping[str, object]]

INTEGER, FRACTION = "integer", "fraction"
NUMBERS = frozenset((INTEGER, FRACTION))
ALL_TYPES = frozenset(("array", "boolean", "null", "object", "string")) | NUMBERS
"""The types of JSON Schema, with `number` cut in two, so that sets of them tell which contains which."""


class Document:
    """A whole schema, to look local references up in."""

    def __init__(self, root: object) -> None:
        self.root = root
        self._anchors: dict[str, object] | None = None

    def target(self, reference: object) -> object | None:
        """Return the schema that a `$ref` means, or None if it is not found.

        Nothing is found in a document that has resources of their own `$id` inside: there, what `#` means
        depends on the place.
        """
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        anchors = self._read_anchors()
        if anchors is None:
            return None
        fragment = unquote(reference[1:])
        if fragment and not fragment.startswith("/"):
            return anchors.get(fragment)
        found: object | None = self.root
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(key)
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found

    def _read_anchors(self) -> dict[str, object] | None:
        if self._anchors is None:
            anchors: dict[str, object] = {}
            for path, schema in subschemas(self.root):
                if path and "$id" in schema:
                    return None
                for keyword in ("$anchor", "$dynamicAnchor"):
                    name = schema.get(keyword)
                    if isinstance(name, str):
                        anchors.setdefault(name, schema)
            self._anchors = anchors
        return self._anchors


def flatten(document: Document, schemas: tuple[object, ...]) -> Facts | None:
    """Return the facts of schemas that all hold, with their `allOf` and `$ref`; None if no value can fit."""
    facts: Facts = []
    seen: set[int] = set()
    waiting = list(reversed(schemas))
    while waiting:
        schema = waiting.pop()
        if schema is False:
            return None
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        facts.append(schema)
        waiting.extend(listed(schema, "allOf"))
        if "$ref" in schema:
            waiting.append(document.target(schema["$ref"]))
    return facts


def mapped(schema: Mapping[str, object], keyword: str) -> dict[str, object]:
    """Return the object that a keyword has, or an empty one."""
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def listed(schema: Mapping[str, object], keyword: str) -> list[object]:
    """Return the array that a keyword has, or an empty one."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def named_types(value: object) -> frozenset[str]:
    """Return the types that the value of `type` names."""
    names = {str(name) for name in (value if isinstance(value, list) else [value])}
    return frozenset((names - {"number"}) | NUMBERS if "number" in names else names)


def type_of(value: object) -> str:
    """Return the type of a JSON value; a number without a fraction is an integer, however it is written."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return FRACTION if "e-" in canonical_value(value) else INTEGER


def exact(value: object) -> object:
    """Return a number as what it is written as: a float stands for the decimal that it prints as."""
    return Decimal(repr(value)) if isinstance(value, float) else value


def types(facts: Facts) -> frozenset[str]:
    """Return the types that the value may have."""
    possible = ALL_TYPES
    for fact in facts:
        if "type" in fact:
            possible &= named_types(fact["type"])
    values = finite_values(facts)
    return possible if values is None else possible & {type_of(value) for value in values}


def finite_values(facts: Facts) -> list[object] | None:
    """Return a list with every value that is possible, if a `const` or an `enum` gives one."""
    best: list[object] | None = None
    for fact in facts:
        values = [fact["const"]] if "const" in fact else fact.get("enum")
        if isinstance(values, list) and (best is None or len(values) < len(best)):
            best = values
    return best


def required(facts: Facts) -> set[str]:
    """Return the names of properties that are there if the value is an object."""
    return {str(name) for fact in facts for name in listed(fact, "required")}


def property_schemas(facts: Facts, name: str) -> tuple[object, ...]:
    """Return schemas that hold for the property `name` of an object."""
    return tuple(_property(fact, name) for fact in facts)


def described(facts: Facts) -> list[str]:
    """Return the names that `properties` describes, each once."""
    return list(dict.fromkeys(name for fact in facts for name in mapped(fact, "properties")))


def undescribed(facts: Facts, covered: Mapping[str, object]) -> Iterator[tuple[object, ...]]:
    """Yield cases for properties that `described` does not name: in each, schemas that hold for their values.

    Every such property falls under one of the cases. Names that match a pattern in `covered` may be left out.
    """
    plain = tuple(fact.get("additionalProperties", True) for fact in facts if not fact.get("patternProperties"))
    patterned = next((fact for fact in facts if fact.get("patternProperties")), None)
    if patterned is None:
        yield plain
        return
    yield (*plain, patterned.get("additionalProperties", True))
    for pattern, schema in mapped(patterned, "patternProperties").items():
        if pattern not in covered:
            yield (*plain, schema)


def item_schemas(facts: Facts, index: int) -> tuple[object, ...]:
    """Return schemas that hold for the item at `index` of an array."""
    return tuple(_item(fact, index) for fact in facts)


def prefix_length(facts: Facts) -> int:
    """Return the index from which on all items of an array are described alike."""
    return max((len(listed(fact, "prefixItems")) for fact in facts), default=0)


def matches(pattern: str, name: str) -> bool:
    """Tell whether a regular expression of a schema matches somewhere in `name`."""
    return compile_schema({"pattern": pattern}).is_valid(name)


def is_closed(schema: object) -> bool:
    """Tell whether a schema means the same outside its document: it refers to nothing."""
    return not any("$ref" in part or "$dynamicRef" in part for _, part in subschemas(schema))


def _property(fact: Mapping[str, object], name: str) -> object:
    properties = mapped(fact, "properties")
    if name in properties:
        return properties[name]
    for pattern, schema in mapped(fact, "patternProperties").items():
        if matches(pattern, name):
            return schema
    return fact.get("additionalProperties", True)


def _item(fact: Mapping[str, object], index: int) -> object:
    longest = fact.get("maxItems")
    if isinstance(longest, int) and longest <= index:
        return False
    prefix = listed(fact, "prefixItems")
    return prefix[index] if index < len(prefix) else fact.get("items", True)
