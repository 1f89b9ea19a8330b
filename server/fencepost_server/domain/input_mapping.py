"""The `input:` of a node: a JSON template that is filled from the run's input and from earlier outputs.

Anywhere in the template an object whose one key is `$from` is replaced by a value:

- `{$from: "#/pointer"}`: from the run's input;
- `{$from: "node-id#/pointer"}`: from the output of a node that has run, or, inside the body of a map, under
  the id of the map node, from the item that the body runs for.

What follows `#` is a plain JSON Pointer; none stands for the whole value. All else is itself, and so a literal
object whose only key is `$from` cannot be written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

from fencepost_server.domain.json_pointer import MISSING, follow, parse_pointer
from fencepost_server.domain.jsontext import MAX_DEPTH
from fencepost_server.domain.violation import Violation, pointer, shown

FROM = "$from"
"""The key of an object that stands for a value from elsewhere."""

MAX_REFERENCES = 1_000
"""Objects with `$from` in one template."""
_MOST_IN_DIGITS = 10**21
"""Larger ones stay as they are spelled."""
MAX_BUILT_CHARS = 64 << 20
"""A value is not built if it would have more characters, at the least, than this as JSON text: the same large
value may be taken many times, and what is small as a template and in memory would not be as text."""


class MappingInvalid(ValueError):
    """A template has faults; `violations` has all of them, with paths inside the template."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("; ".join(f"{fault.path or 'input'}: {fault.message}" for fault in violations[:5]))
        self.violations = violations


class MappingFailed(ValueError):
    """A template cannot be filled; `violations` has why, with paths inside the template."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("; ".join(f"{fault.path or 'input'}: {fault.message}" for fault in violations[:5]))
        self.violations = violations


@dataclass(frozen=True, slots=True)
class Reference:
    """One `$from`: where it stands in the template, the node it takes from ("": the run's input), the keys there."""

    place: str
    source: str
    at: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InputMapping:
    """A template that `parse_mapping` has read. `sources`: the ids that it takes from, "" for the run's input."""

    template: object
    sources: frozenset[str]

    def references(self) -> Iterator[Reference]:
        """Yield each `$from`, in the order of the template."""
        return _references(self.template, "", [])

    def build(self, values: Mapping[str, object], max_chars: int = MAX_BUILT_CHARS) -> object:
        """Return the template with its references replaced; `values` has the value of each of `sources`.

        What is returned shares parts with the template and with `values`: change none of them.

        Raises:
            MappingFailed: with every pointer that leads nowhere, or the places from which on the value would be
                nested deeper than JSON may be here, or larger than `max_chars`.
        """
        filler = _Filler(values, max_chars)
        built = filler.fill(self.template, "", 0)
        if filler.faults:
            raise MappingFailed(tuple(filler.faults))
        return built


def parse_mapping(template: object) -> InputMapping:
    """Read a template, a value as `jsontext.parse` returns it.

    Raises:
        MappingInvalid: with all its faults.
    """
    faults: list[Violation] = []
    found = list(_references(template, "", faults))
    if len(found) > MAX_REFERENCES:
        faults.append(Violation("", f"has {len(found)} references; at most {MAX_REFERENCES} are accepted"))
    if faults:
        raise MappingInvalid(tuple(faults))
    return InputMapping(_in_digits(template), frozenset(reference.source for reference in found))


def _in_digits(template: object) -> object:
    """The same template with whole numbers as integers: a canonical manifest spells 1000 as 1e3, and who reads the
    input that is built expects what was written.
    """
    if isinstance(template, dict):
        return {key: _in_digits(value) for key, value in template.items()}
    if isinstance(template, list):
        return [_in_digits(value) for value in template]
    if isinstance(template, float | Decimal) and -_MOST_IN_DIGITS < template < _MOST_IN_DIGITS:
        whole = int(template)
        return whole if whole == template else template
    return template


def _references(template: object, place: str, faults: list[Violation]) -> Iterator[Reference]:
    if isinstance(template, dict):
        if template.keys() == {FROM}:
            try:
                source, at = _read(template[FROM])
            except ValueError as error:
                faults.append(Violation(f"{place}/{FROM}", str(error)))
            else:
                yield Reference(place, source, at)
            return
        for key, value in template.items():
            if isinstance(value, dict | list):
                yield from _references(value, place + pointer((key,)), faults)
    elif isinstance(template, list):
        for index, value in enumerate(template):
            if isinstance(value, dict | list):
                yield from _references(value, f"{place}/{index}", faults)


def _read(written: object) -> tuple[str, tuple[str, ...]]:
    """Return the source and the keys of a `$from`; raises ValueError, with a message for its author."""
    source, hash_sign, at = written.partition("#") if isinstance(written, str) else ("", "", "")
    if not hash_sign:
        raise ValueError("must be a string such as #/order_id, from the run's input, or node-id#/order_id")
    try:
        return source, parse_pointer(at)
    except ValueError as error:
        raise ValueError(f"{shown(at)} {error}") from None


class _Filler:
    """Fills one template: collects the faults, and adds up what the value would be as text."""

    def __init__(self, values: Mapping[str, object], max_chars: int) -> None:
        self.faults: list[Violation] = []
        self._values = values
        self._left = max_chars
        self._max_chars = max_chars
        self._measured: dict[int, tuple[int, int]] = {}

    def fill(self, template: object, place: str, depth: int) -> object:
        if isinstance(template, dict):
            if template.keys() == {FROM}:
                return self._take(template[FROM], place, depth)
            return {key: self.fill(value, place + pointer((key,)), depth + 1) for key, value in template.items()}
        if isinstance(template, list):
            return [self.fill(value, f"{place}/{index}", depth + 1) for index, value in enumerate(template)]
        return template

    def _take(self, written: object, place: str, depth: int) -> object:
        source, at = _read(written)
        found = follow(self._values.get(source, MISSING), at)
        if found is MISSING:
            where = f"the output of {source}" if source else "the input of the run"
            self.faults.append(Violation(place, f"nothing is at {shown(pointer(at))} in {where}"))
            return None
        if id(found) not in self._measured:
            self._measured[id(found)] = _measure(found)
        deep, chars = self._measured[id(found)]
        if depth + deep > MAX_DEPTH:
            self.faults.append(Violation(place, f"arrays and objects would be nested more than {MAX_DEPTH} deep"))
        # Only the first that is too much is told: all that follow would be.
        if self._left >= 0 > self._left - chars:
            self.faults.append(Violation(place, f"the value would have more than {self._max_chars} characters"))
        self._left -= chars
        return found


def _measure(value: object) -> tuple[int, int]:
    """Return how deep arrays and objects in a value go, and how many characters it has as JSON at the least."""
    deepest, chars, depth = 0, 0, 0
    level = [value]
    while level:
        below: list[object] = []
        for item in level:
            chars += len(item) + 2 if isinstance(item, str) else 1
            if isinstance(item, dict):
                deepest = depth + 1
                chars += sum(map(len, item)) + 4 * len(item)
                below.extend(item.values())
            elif isinstance(item, list):
                deepest = depth + 1
                chars += len(item)
                below.extend(item)
        level, depth = below, depth + 1
    return deepest, chars
