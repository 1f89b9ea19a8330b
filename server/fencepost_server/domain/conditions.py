"""The conditions of `choose` nodes: comparisons of what is at a JSON Pointer with a constant, and their combinations.

A comparison is `{at: <pointer>, <operator>: <constant>}`, a combination `{all: […]}`, `{any: […]}` or
`{not: …}`. What they mean:

- `eq`, `ne`, `in` compare JSON values of any type by their canonical text: deeply, numbers by their exact
  value (1, 1.0 and 1e0 are equal; true is not 1), objects whatever the order of their keys.
- `lt`, `le`, `gt`, `ge` order two numbers by their exact value, or two strings by code point. Between values
  of any other or of different types they do not hold, so that `not lt` is not always `ge`.
- A pointer that leads nowhere: `exists: false` holds, and so does `ne`, because `ne` is `not eq`; nothing
  else does. null is a value that is there.

`Condition.holds` never raises: a choice is made the same way whenever it is made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from fencepost_server.domain.json_pointer import MISSING, follow, parse_pointer
from fencepost_server.domain.jsontext import canonical_value
from fencepost_server.domain.violation import Violation, pointer, shown

MAX_DEPTH = 20
"""Conditions inside each other, the outermost counting as 1."""
MAX_PARTS = 1_000
"""Comparisons and combinations in one `when`."""

# What each makes of a value that is less than the constant (-1), equal to it (0) or greater (1).
_ORDERS: Mapping[str, frozenset[int]] = {
    "lt": frozenset((-1,)),
    "le": frozenset((-1, 0)),
    "gt": frozenset((1,)),
    "ge": frozenset((0, 1)),
}
_COMPARISONS = ("eq", "ne", "in", "exists", *_ORDERS)
_COMBINATIONS = ("all", "any", "not")


class ConditionInvalid(ValueError):
    """A condition has faults; `violations` has all of them, with paths inside the condition."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("; ".join(f"{fault.path or 'condition'}: {fault.message}" for fault in violations[:5]))
        self.violations = violations


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison, of what is at the keys `at`, or one combination of `parts`.

    `operator` is the key that a manifest has. Of a comparison, `texts` has the canonical texts that are looked
    for, or that of the bound; `bound` is the bound itself, of an order.
    """

    operator: str
    at: tuple[str, ...] = ()
    texts: frozenset[str] = frozenset()
    parts: tuple[Condition, ...] = ()
    bound: object = field(default=None, compare=False, repr=False)

    def holds(self, value: object) -> bool:
        """Tell whether `value`, as `jsontext.parse` returns it, satisfies the condition. Never raises."""
        match self.operator:
            case "all":
                return all(part.holds(value) for part in self.parts)
            case "any":
                return any(part.holds(value) for part in self.parts)
            case "not":
                return not self.parts[0].holds(value)
            case _:
                return self._compare(follow(value, self.at))

    def _compare(self, found: object) -> bool:
        match self.operator:
            case "exists":
                return (found is not MISSING) == ("true" in self.texts)
            case "eq" | "in":
                return self._is_listed(found)
            case "ne":
                return not self._is_listed(found)
            case _:
                return _order(found, self.bound) in _ORDERS[self.operator]

    def _is_listed(self, found: object) -> bool:
        return found is not MISSING and canonical_value(found) in self.texts


def parse_condition(value: object) -> Condition:
    """Read a condition from the value that a manifest has.

    Raises:
        ConditionInvalid: with all its faults.
    """
    reader = _Reader([])
    condition = reader.read(value, "", 1)
    if reader.faults:
        raise ConditionInvalid(tuple(reader.faults))
    return condition


@dataclass(slots=True)
class _Reader:
    """Reads one condition; after a fault it goes on with one that stands for nothing."""

    faults: list[Violation]
    count: int = 0

    def read(self, value: object, path: str, depth: int) -> Condition:
        self.count += 1
        if self.count > MAX_PARTS:
            if self.count == MAX_PARTS + 1:
                self._fault(path, f"the condition has more than {MAX_PARTS} parts")
        elif depth > MAX_DEPTH:
            self._fault(path, f"conditions are nested more than {MAX_DEPTH} deep")
        elif not isinstance(value, dict):
            self._fault(path, f"must be a condition such as {{at: /total, gt: 100}}, not {_describe(value)}")
        elif len(value) == 1 and (name := next(iter(value))) in _COMBINATIONS:
            return Condition(name, parts=tuple(self._read_parts(name, value[name], path + pointer((name,)), depth)))
        else:
            return self._read_comparison(value, path)
        return Condition("any")

    def _read_parts(self, name: str, value: object, path: str, depth: int) -> Iterator[Condition]:
        if name == "not":
            yield self.read(value, path, depth + 1)
        elif not isinstance(value, list) or not value:
            self._fault(path, f"must be an array of at least one condition, not {shown(value)}")
        else:
            for index, part in enumerate(value):
                yield self.read(part, f"{path}/{index}", depth + 1)

    def _read_comparison(self, value: Mapping[str, object], path: str) -> Condition:
        names = [key for key in value if key != "at"]
        for key in names:
            if key not in _COMPARISONS:
                what = "stands alone in its object" if key in _COMBINATIONS else "is no operator of a condition"
                self._fault(path + pointer((key,)), f"{shown(key)} {what}; there are {', '.join(_COMPARISONS)}")
        operators = [key for key in names if key in _COMPARISONS]
        if len(names) != 1:
            self._fault(path, f"must have one operator beside at, or be one of {', '.join(_COMBINATIONS)}")
        at = self._read_at(value, path)
        if len(operators) != 1:
            return Condition("any")
        name = operators[0]
        constant = value[name]
        fault = _fault_of_constant(name, constant)
        if fault is not None:
            self._fault(path + pointer((name,)), f"{fault}, not {_describe(constant)}")
            return Condition("any")
        listed = constant if name == "in" and isinstance(constant, list) else [constant]
        bound = constant if name in _ORDERS else None
        return Condition(name, at, frozenset(map(canonical_value, listed)), bound=bound)

    def _read_at(self, value: Mapping[str, object], path: str) -> tuple[str, ...]:
        if "at" not in value:
            self._fault(path, "at is missing: the JSON Pointer to what is compared")
            return ()
        at = value["at"]
        if not isinstance(at, str):
            self._fault(f"{path}/at", f"must be a JSON Pointer, not {_describe(at)}")
            return ()
        try:
            return parse_pointer(at)
        except ValueError as error:
            self._fault(f"{path}/at", f"{shown(at)} {error}")
            return ()

    def _fault(self, path: str, message: str) -> None:
        self.faults.append(Violation(path, message))


def _fault_of_constant(name: str, constant: object) -> str | None:
    match name:
        case "exists":
            return None if isinstance(constant, bool) else "must be true or false"
        case "in":
            return None if isinstance(constant, list) and constant else "must be an array of at least one value"
        case "eq" | "ne":
            return None
        case _:
            return None if _order(constant, constant) == 0 else "must be a number or a string"


def _describe(value: object) -> str:
    return "an object" if isinstance(value, dict) else "an array" if isinstance(value, list) else shown(value)


def _order(one: object, other: object) -> int | None:
    """Return -1, 0 or 1 as `one` is less than, equal to or greater than `other`, None where neither is meant."""
    if isinstance(one, str) and isinstance(other, str):
        return (one > other) - (one < other)
    first, second = _exact(one), _exact(other)
    return None if first is None or second is None else (first > second) - (first < second)


def _exact(value: object) -> Decimal | None:
    """Return a number as what was written: a float stands for the decimal that it prints as."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
