"""Compiled JSON Schemas (Draft 2020-12) for the inputs and outputs of workflows and steps.

What is decided here, beyond the draft:

- **Nothing is fetched.** `$ref` and `$dynamicRef` begin with `#`: they stay inside the schema that has them.
- **One dialect.** `$schema` may be left out, or name 2020-12.
- **`format` is an annotation**, as the draft has it by default: it is not checked. Whether a string is an
  e-mail address differs between libraries and their versions, and a pinned run must not change its mind with
  an upgrade of the server; a `pattern` says exactly what is meant.
- **Patterns run in linear time.** Look-around and back-references, which cannot, are refused when the schema
  is.
- **Numbers are exact**: integers of any size and the Decimals that `jsontext.parse` makes are compared as
  they are. The engine compares such numbers with each other one by one where items have to be unique, so
  arrays that have them are compared here, by their canonical text.

Messages quote the offending value, shortened: whoever may read a violation may read the payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice

from jsonschema_rs import (
    Draft202012,
    Draft202012Validator,
    ReferencingError,
    RegexOptions,
    Registry,
    ValidationError,
)

from fencepost_server.domain.jsontext import canonical_value
from fencepost_server.domain.violation import Violation, cut_message, pointer

__all__ = ["DIALECT", "CompiledSchema", "SchemaInvalid", "Violation", "compile_schema", "subschemas"]

DIALECT = "https://json-schema.org/draft/2020-12/schema"

MAX_FAULTS = 100
"""At most so many faults of one schema are listed."""

# The engine makes a list of all errors at once, some 10 µs each and more where they quote large values. A
# payload heavier than this is told its first violation only, or one bad payload would hold up everybody for
# seconds.
_MAX_LISTED_WEIGHT = 5_000
_CHARS_PER_WEIGHT = 100

# Any violation quotes what it is about, and the engine writes 1e-999999 out with all its zeros: a ms or more for
# each such number, and a payload holds 80,000 of them. Past so many zeros nothing is quoted.
_MAX_QUOTED_ZEROS = 100_000_000

_EXACT_WORD = 1 << 63

_REGEX = RegexOptions(size_limit=1 << 20, dfa_size_limit=1 << 20)
_META = Draft202012Validator({"$ref": DIALECT}, offline=True)
_TYPES = "array, boolean, integer, null, number, object or string, or a list of these without repeats"

_ONE = frozenset(
    (
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
_LIST = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_MAP = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
_REFERENCES = ("$ref", "$dynamicRef")


class SchemaInvalid(ValueError):
    """A JSON Schema has faults; `violations` has all of them, with paths inside the schema."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("; ".join(f"{fault.path}: {fault.message}" for fault in violations))
        self.violations = violations


@dataclass(frozen=True, slots=True, eq=False)
class CompiledSchema:
    """A schema that is known to be valid, ready to check values; safe to share between threads."""

    schema: bool | dict[str, object]
    _validator: Draft202012Validator = field(repr=False)
    _exact: Draft202012Validator | None = field(default=None, repr=False)
    """For values with numbers that no machine word holds, where items have to be unique."""

    def is_valid(self, value: object) -> bool:
        """Tell whether `value`, as `jsontext.parse` returns it, keeps to the schema."""
        return self._for(value).is_valid(value)

    def _for(self, value: object) -> Draft202012Validator:
        if self._exact is None or next(_long_numbers(value), None) is None:
            return self._validator
        return self._exact

    def violations(self, value: object, limit: int = 20) -> list[Violation]:
        """Return at most `limit` faults of `value`, each with the pointer to its place; [] if it is valid.

        `value` is as `jsontext.parse` returns it. For a very large invalid one only the first fault is
        listed, and not even that where quoting its numbers would take long.
        """
        validator = self._for(value)
        if validator.is_valid(value):
            return []
        if sum(abs(n.adjusted()) for n in _long_numbers(value) if isinstance(n, Decimal)) > _MAX_QUOTED_ZEROS:
            return [Violation("", "breaks the schema; its numbers have too many decimal places to say where")]
        if _is_heavier(value, _MAX_LISTED_WEIGHT):
            try:
                validator.validate(value)
            except ValidationError as error:
                return [_violation(error)]
        return [_violation(error) for error in islice(validator.iter_errors(value), limit)]


def compile_schema(schema: object) -> CompiledSchema:
    """Check a schema (a value as `jsontext.parse` returns it) and make it ready for use.

    Raises:
        SchemaInvalid: with every fault found: what the draft's own meta-schema refuses, another dialect, a
            pattern that the engine cannot run, a reference that leaves the schema or leads nowhere.
    """
    if not isinstance(schema, bool | dict):
        raise SchemaInvalid((Violation("", "a schema is an object or a boolean"),))
    faults = dict.fromkeys(_meta_faults(schema))
    faults.update(dict.fromkeys(_faults_of_subschemas(schema)))
    if not faults:
        try:
            # Looked for in the text: a reference may lead to where no keyword of the draft does.
            unique = "uniqueItems" in canonical_value(schema)
            return CompiledSchema(schema, _validator(schema), _exact_validator(schema) if unique else None)
        except (ValidationError, ReferencingError, ValueError) as error:
            faults.update(dict.fromkeys(_dangling_references(schema)))
            if not faults:
                faults[Violation("", cut_message(_first_line(error)))] = None
    raise SchemaInvalid(tuple(islice(faults, MAX_FAULTS)))


def subschemas(schema: object, path: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """Yield every object schema in `schema`, itself first, with its JSON Pointer; tolerates faults in it."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword, value in schema.items():
        below = f"{path}{pointer((keyword,))}"
        if keyword in _ONE:
            yield from subschemas(value, below)
        elif keyword in _LIST and isinstance(value, list):
            for index, item in enumerate(value):
                yield from subschemas(item, f"{below}/{index}")
        elif keyword in _MAP and isinstance(value, dict):
            for name, item in value.items():
                yield from subschemas(item, below + pointer((name,)))


def _validator(schema: bool | dict[str, object]) -> Draft202012Validator:
    return Draft202012Validator(schema, validate_formats=False, offline=True, pattern_options=_REGEX)


class _UniqueItems:
    """The keyword, in the engine's way of adding one: `validate` raises ValueError."""

    def __init__(self, _parent: object, wanted: object, _path: object) -> None:
        self._wanted = wanted is True

    def validate(self, instance: object) -> None:
        if self._wanted and isinstance(instance, list) and len(set(map(canonical_value, instance))) < len(instance):
            raise ValueError("the array has non-unique elements")


def _exact_validator(schema: bool | dict[str, object]) -> Draft202012Validator:
    return Draft202012Validator(
        schema,
        validate_formats=False,
        offline=True,
        pattern_options=_REGEX,
        keywords={"uniqueItems": _UniqueItems},
    )


def _violation(error: ValidationError) -> Violation:
    # Keys are part of the path and may be as long as a payload.
    return Violation(cut_message(pointer(error.instance_path)), cut_message(error.message))


def _meta_faults(schema: bool | dict[str, object]) -> Iterator[Violation]:
    for error in () if _META.is_valid(schema) else _META.iter_errors(schema):
        if error.instance_path[-1:] == ["type"] and error.kind.name == "anyOf":
            yield Violation(pointer(error.instance_path), f"a type is {_TYPES}")
        else:
            yield _violation(error)


def _faults_of_subschemas(schema: bool | dict[str, object]) -> Iterator[Violation]:
    for path, subschema in subschemas(schema):
        if subschema.get("$schema", DIALECT) not in {DIALECT, DIALECT + "#"}:
            yield Violation(f"{path}/$schema", f"only {DIALECT} is supported")
        for keyword in _REFERENCES:
            target = subschema.get(keyword)
            if isinstance(target, str) and not target.startswith("#"):
                yield Violation(
                    f"{path}/{keyword}",
                    "a reference begins with # and stays in its schema; nothing is fetched from elsewhere",
                )
        pattern = subschema.get("pattern")
        if isinstance(pattern, str) and not _runs(pattern):
            yield _bad_pattern(f"{path}/pattern", pattern)
        patterns = subschema.get("patternProperties")
        for name in patterns if isinstance(patterns, dict) else ():
            if not _runs(name):
                yield _bad_pattern(f"{path}/patternProperties{pointer((name,))}", name)


def _runs(pattern: str) -> bool:
    try:
        _validator({"pattern": pattern})
    except ValidationError:
        return False
    return True


def _bad_pattern(path: str, pattern: str) -> Violation:
    return Violation(
        path,
        cut_message(f'"{pattern}" is not a regular expression, is too large, or uses look-around or back-references'),
    )


def _dangling_references(schema: bool | dict[str, object]) -> Iterator[Violation]:
    """Yield the references of the root resource that lead nowhere.

    Those inside a subschema with an `$id` of its own are relative to that; the engine names them without a
    path.
    """
    root_id = schema.get("$id") if isinstance(schema, dict) else None
    base = root_id if isinstance(root_id, str) else "json-schema:///"
    try:
        resolver = Registry([(base, schema)], draft=Draft202012).resolver(base)
    except (ReferencingError, ValueError):
        return
    embedded: list[str] = []
    for path, subschema in subschemas(schema):
        if path and "$id" in subschema:
            embedded.append(f"{path}/")
        if any(f"{path}/".startswith(resource) for resource in embedded):
            continue
        for keyword in _REFERENCES:
            target = subschema.get(keyword)
            if isinstance(target, str):
                try:
                    resolver.lookup(target)
                except ReferencingError as error:
                    yield Violation(f"{path}/{keyword}", cut_message(_first_line(error)))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _is_heavier(value: object, limit: int) -> bool:
    """Tell whether a value has more than `limit` members, with long strings and numbers counted as several."""
    weight = 0
    waiting = [value]
    while waiting and weight <= limit:
        item = waiting.pop()
        weight += 1
        if isinstance(item, str):
            weight += len(item) // _CHARS_PER_WEIGHT
        elif isinstance(item, Decimal):
            weight += abs(item.adjusted()) // _CHARS_PER_WEIGHT
        elif isinstance(item, list):
            waiting.extend(item[: limit + 1])
        elif isinstance(item, dict):
            waiting.extend(islice(item.values(), limit + 1))
    return weight > limit


def _long_numbers(value: object) -> Iterator[int | Decimal]:
    """Yield the numbers of a value that no machine word holds."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, Decimal) or (isinstance(item, int) and not -_EXACT_WORD <= item < _EXACT_WORD):
            yield item
