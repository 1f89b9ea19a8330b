"""Reads objects of a manifest key by key, notes each fault with its place, collects the canonical spelling.

One `ObjectReader` reads one object. Each of its methods reads one key, returns the value to go on with (the
default where the key is missing or wrong, so that reading can go on to the other faults), and adds the key to
`canonical` unless it says no more than the default. `finish` then refuses the keys that nobody asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches

from fencepost_server.domain.conditions import Condition, ConditionInvalid, parse_condition
from fencepost_server.domain.durations import format_duration, parse_duration
from fencepost_server.domain.input_mapping import InputMapping, MappingInvalid, parse_mapping
from fencepost_server.domain.json_pointer import parse_pointer
from fencepost_server.domain.schema import SchemaInvalid, compile_schema
from fencepost_server.domain.schema_cost import excess
from fencepost_server.domain.violation import Violation, cut_message, pointer, shown

NAME_RULE = "1 to 200 letters, digits and . _ - / of ASCII, beginning with a letter or digit"
"""What ids, compatibility ids, handlers and queues are made of."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_MAX_MISSPELT_CHARS = 40


@dataclass(slots=True)
class Faults:
    """Collects violations, the first `limit` of them in full and the others by number."""

    limit: int
    kept: list[Violation] = field(default_factory=list)
    count: int = 0
    bad_schemas: set[str] = field(default_factory=set)
    """The paths of schemas that have faults, and cannot be compared with others."""

    def add(self, path: str, message: str) -> None:
        """Note one fault at a JSON Pointer."""
        self.count += 1
        if len(self.kept) < self.limit:
            self.kept.append(Violation(path, cut_message(message)))

    def violations(self) -> tuple[Violation, ...]:
        """Return what was kept, and at the end a violation that tells how many more there are."""
        more = self.count - len(self.kept)
        return (*self.kept, Violation("", f"and {more} more faults")) if more else tuple(self.kept)


class ObjectReader:
    """One object of a manifest, at `path`; anything else counts as an empty object, and is a fault."""

    def __init__(self, value: object, path: str, faults: Faults) -> None:
        self.path = path
        self.canonical: dict[str, object] = {}
        self._faults = faults
        self._known: set[str] = set()
        self.is_object = isinstance(value, dict)
        self._members: Mapping[str, object] = value if isinstance(value, dict) else {}
        if not self.is_object:
            faults.add(path, f"must be an object, not {describe(value)}")

    def __contains__(self, key: str) -> bool:
        return key in self._members

    def fault(self, key: str, message: str) -> None:
        """Note a fault at a key of this object."""
        self._faults.add(self.path + pointer((key,)), message)

    def name(self, key: str, default: str | None = None) -> str:
        """Read a name (NAME_RULE); without a default the key is required."""
        value = self._take(key, required=default is None)
        if value is None:
            return default or ""
        if not isinstance(value, str):
            self.fault(key, f"must be a string, not {describe(value)}")
        elif not _NAME.fullmatch(value):
            self.fault(key, f"{describe(value)} is not a name: {NAME_RULE}")
        else:
            if value != default:
                self.canonical[key] = value
            return value
        return default or ""

    def seconds(self, key: str, low: str, high: str, *, required: bool = False) -> float | None:
        """Read a duration from `low` to `high` that has no default, in seconds; None if there is none."""
        milliseconds = self.duration(key, low, high, required=required)
        return None if milliseconds is None else milliseconds / 1000

    def duration(
        self, key: str, low: str, high: str, default: str | None = None, *, required: bool = False
    ) -> int | None:
        """Read a duration from `low` to `high` in milliseconds; None if there is none and no default."""
        otherwise = None if default is None else parse_duration(default)
        value = self._take(key, required=required)
        if value is None:
            return otherwise
        if not isinstance(value, str):
            self.fault(key, f"must be a duration with its unit, such as 30s, not {describe(value)}")
            return otherwise
        try:
            milliseconds = parse_duration(value)
        except ValueError as error:
            self.fault(key, str(error))
            return otherwise
        if not parse_duration(low) <= milliseconds <= parse_duration(high):
            self.fault(key, f"must be from {low} to {high}")
            return otherwise
        if milliseconds != otherwise:
            self.canonical[key] = format_duration(milliseconds)
        return milliseconds

    def integer(self, key: str, low: int, high: int, default: int) -> int:
        """Read an integer from `low` to `high`; 5.0 is one, as everywhere in JSON."""
        value = self._number(key, low, high, whole=True)
        if value is None:
            return default
        if value != default:
            self.canonical[key] = int(value)
        return int(value)

    def number(self, key: str, low: int, high: int, default: float) -> float:
        """Read a number from `low` to `high`."""
        value = self._number(key, low, high, whole=False)
        if value is None:
            return default
        if value != default:
            self.canonical[key] = value
        return float(value)

    def choice(self, key: str, options: Sequence[str]) -> str:
        """Read one of `options`, the first of which is the default."""
        value = self._take(key)
        if value is None:
            return options[0]
        if not isinstance(value, str) or value not in options:
            self.fault(key, f"must be {' or '.join(options)}, not {describe(value)}")
            return options[0]
        if value != options[0]:
            self.canonical[key] = value
        return value

    def boolean(self, key: str) -> bool:
        """Read true or false; false is the default."""
        value = self._take(key)
        if value is not None and not isinstance(value, bool):
            self.fault(key, f"must be true or false, not {describe(value)}")
        if value is not True:
            return False
        self.canonical[key] = True
        return True

    def pointer(self, key: str) -> str | None:
        """Read a required JSON Pointer; None if it has faults."""
        value = self._take(key, required=True)
        if value is None:
            return None
        if not isinstance(value, str):
            self.fault(key, f"must be a JSON Pointer such as /lines, not {describe(value)}")
            return None
        try:
            parse_pointer(value)
        except ValueError as error:
            self.fault(key, f"{describe(value)} {error}")
            return None
        self.canonical[key] = value
        return value

    def condition(self, key: str) -> Condition | None:
        """Read a required condition; None if it has faults, which are noted one by one."""
        value = self._take(key, required=True)
        if value is None:
            return None
        try:
            condition = parse_condition(value)
        except ConditionInvalid as error:
            self._add_all(key, error.violations)
            return None
        self.canonical[key] = value
        return condition

    def mapping(self, key: str) -> InputMapping | None:
        """Read a template for an input; None if there is none or it has faults, which are noted one by one."""
        value = self._take(key)
        if value is None:
            return None
        try:
            mapping = parse_mapping(value)
        except MappingInvalid as error:
            self._add_all(key, error.violations)
            return None
        self.canonical[key] = value
        return mapping

    def schema(self, key: str) -> object | None:
        """Read a JSON Schema; None if there is none or it has faults, which are noted one by one."""
        self._known.add(key)
        if key not in self:
            return None
        value = self._members[key]
        try:
            compile_schema(value)
        except SchemaInvalid as error:
            self._faults.bad_schemas.add(self.path + pointer((key,)))
            self._add_all(key, error.violations)
            return None
        if (fault := excess(value)) is not None:
            path = self.path + pointer((key,))
            self._faults.bad_schemas.add(path)
            self._faults.add(path + fault.path, fault.message)
            return None
        self.canonical[key] = value
        return value

    def inner(self, key: str) -> ObjectReader:
        """Return the reader of an object inside this one; of an empty one if the key is missing."""
        value = self._take(key)
        return ObjectReader({} if value is None else value, self.path + pointer((key,)), self._faults)

    def items(self, key: str, limit: int) -> list[tuple[object, str]]:
        """Read a required array of 1 to `limit` items; return each with its path, none if it is not one."""
        value = self._take(key, required=True)
        return [] if value is None else read_items(value, self.path + pointer((key,)), limit, self._faults)

    def finish(self, hints: Iterable[str] = ()) -> None:
        """Refuse the keys that are left. `hints` has more keys that a misspelt one may have been meant for."""
        for key in self._members:
            if key in self._known:
                continue
            near: list[str] = []
            if len(key) <= _MAX_MISSPELT_CHARS:
                near = get_close_matches(key, sorted(self._known.union(hints)), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.fault(key, f"unknown key {describe(key)}{hint}")

    def _add_all(self, key: str, violations: Iterable[Violation]) -> None:
        path = self.path + pointer((key,))
        for violation in violations:
            self._faults.add(path + violation.path, violation.message)

    def _take(self, key: str, *, required: bool = False) -> object | None:
        self._known.add(key)
        if key not in self._members:
            if required and self.is_object:
                self._faults.add(self.path, f"{key} is missing")
            return None
        value = self._members[key]
        if value is None:
            self.fault(key, "must not be null: leave the key out or give it a value")
        return value

    def _number(self, key: str, low: int, high: int, *, whole: bool) -> int | float | Decimal | None:
        value = self._take(key)
        if value is None:
            return None
        kind = "an integer" if whole else "a number"
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            self.fault(key, f"must be {kind}, not {describe(value)}")
        elif not low <= value <= high or (whole and value != int(value)):
            self.fault(key, f"must be {kind} from {low} to {high}, not {describe(value)}")
        else:
            return value
        return None


def describe(value: object) -> str:
    """Return a value for use in a message, shortened, and large ones by their type only."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return shown(value)


def read_items(value: object, path: str, limit: int, faults: Faults) -> list[tuple[object, str]]:
    """Read an array of 1 to `limit` items at `path`; return each with its path, none if it is not one."""
    if not isinstance(value, list):
        faults.add(path, f"must be an array, not {describe(value)}")
    elif not value:
        faults.add(path, "must not be empty")
    elif len(value) > limit:
        faults.add(path, f"has {len(value)} items; at most {limit} are accepted")
    else:
        return [(item, f"{path}/{index}") for index, item in enumerate(value)]
    return []
