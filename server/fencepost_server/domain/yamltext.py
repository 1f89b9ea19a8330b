"""YAML text that means JSON: one YAML 1.2 document in the core schema, without what JSON cannot say.

The values are those of `jsontext.parse`, under the same limits. Refused, each fault with its place: anchors,
aliases, tags, merge keys, keys that are not strings, duplicate keys, infinities and NaN, more than one
document. There is no half-way: a document either means exactly one JSON value or has faults.

Core schema: only `true`, `false`, `null`, `~` and plain decimal, `0o` and `0x` numbers are not strings when
unquoted. `no`, `2026-11-01`, `1_000` and `12:30` are strings, and `010` is ten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError

from fencepost_server.domain.jsontext import MAX_DEPTH, MAX_DIGITS, JsonError, parse_number
from fencepost_server.domain.violation import Violation, cut_message, pointer

MAX_NODES = 200_000
"""Scalars and collections in one document; bounded because the reader takes some 50 µs for each."""

_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
# Line breaks of YAML 1.1 only. The reader would still fold them away, and so change a string without a word.
_OLD_BREAKS = re.compile("[\u0085\u2028\u2029]")


class YamlError(ValueError):
    """The text is not YAML as accepted here; `violations` has the faults, with paths in the value."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("; ".join(fault.message for fault in violations))
        self.violations = violations


def parse_yaml(text: str) -> object:
    """Return the one value that `text` means, None if it is empty; see `jsontext.parse` for the types.

    Raises:
        YamlError: a syntax error (it ends the reading and stands alone or last) or the faults named above.
    """
    old_break = _OLD_BREAKS.search(text)
    if old_break is not None:
        line = text.count("\n", 0, old_break.start()) + 1
        code = f"U+{ord(old_break.group()):04X}"
        raise YamlError((Violation("", f"a raw {code} in line {line}: write it as an escape in double quotes"),))
    reading = _Reading()
    try:
        for event in _events(text):
            reading.take(event)
    except MarkedYAMLError as error:
        problem = error.problem or error.context or "not YAML"
        reading.fault("", problem, error.problem_mark or error.context_mark)
    except ReaderError as error:
        character = error.character if isinstance(error.character, int) else ord(error.character[:1] or "\0")
        reading.fault("", f"the character U+{character:04X} at position {error.position + 1} is not allowed")
    except _Stop:
        pass
    if reading.faults:
        raise YamlError(tuple(reading.faults))
    return reading.root


class _Stop(Exception):
    """Nothing that follows can be read; the fault is noted."""


@dataclass(slots=True)
class _Collection:
    """A mapping or sequence that is being read. In a mapping, `key` is the key whose value comes next."""

    path: str
    value: dict[str, object] | list[object]
    key: str | None = None
    has_key: bool = False
    seen: set[str] = field(default_factory=set)


class _Reading:
    """Builds the value out of events and notes faults; a faulty node is left out, and reading goes on."""

    def __init__(self) -> None:
        self.root: object = None
        self.faults: list[Violation] = []
        self._documents = 0
        self._nodes = 0
        self._open: list[_Collection] = []

    def fault(self, path: str, message: str, mark: object = None) -> None:
        """Note a fault, with line and column where they are known."""
        line, column = getattr(mark, "line", None), getattr(mark, "column", None)
        if isinstance(line, int) and isinstance(column, int):
            message = f"{message} (line {line + 1}, column {column + 1})"
        self.faults.append(Violation(path, cut_message(message)))

    def take(self, event: object) -> None:
        """Go on by one event of the parser."""
        match event:
            case events.DocumentStartEvent():
                self._document(event)
            case events.AliasEvent():
                self._count(event)
                self.fault(self._place(), "aliases are not accepted", event.start_mark)
                self._put(None, event)
            case events.ScalarEvent():
                self._scalar(event)
            case events.SequenceStartEvent():
                self._begin([], event)
            case events.MappingStartEvent():
                self._begin({}, event)
            case events.SequenceEndEvent() | events.MappingEndEvent():
                done = self._open.pop()
                self._put(done.value, event)
            case _:
                pass

    def _document(self, event: events.DocumentStartEvent) -> None:
        self._documents += 1
        if self._documents > 1:
            self.fault("", "more than one document", event.start_mark)
            raise _Stop
        version = getattr(event, "version", None)
        if version is not None and tuple(version) != (1, 2):
            self.fault("", "only YAML 1.2 is accepted", event.start_mark)
        if getattr(event, "tags", None):
            self.fault("", "tags are not accepted", event.start_mark)

    def _place(self) -> str:
        """Return the path of the node that comes next."""
        if not self._open:
            return ""
        parent = self._open[-1]
        if isinstance(parent.value, list):
            return f"{parent.path}/{len(parent.value)}"
        return parent.path + pointer((parent.key,)) if parent.key is not None else parent.path

    def _begin(self, value: dict[str, object] | list[object], event: events.CollectionStartEvent) -> None:
        self._refuse_extras(event)
        if len(self._open) == MAX_DEPTH:
            self.fault(self._place(), f"collections are nested more than {MAX_DEPTH} deep", event.start_mark)
            raise _Stop
        self._open.append(_Collection(self._place(), value))

    def _count(self, event: events.NodeEvent) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self.fault("", f"more than {MAX_NODES:,} values", event.start_mark)
            raise _Stop

    def _refuse_extras(self, event: events.NodeEvent) -> None:
        self._count(event)
        if getattr(event, "anchor", None) is not None:
            self.fault(self._place(), "anchors are not accepted", event.start_mark)
        # Also the tag that is only "!".
        if getattr(event, "tag", None) is not None or getattr(event, "ctag", None) is not None:
            self.fault(self._place(), "tags are not accepted", event.start_mark)

    def _scalar(self, event: events.ScalarEvent) -> None:
        self._refuse_extras(event)
        try:
            value = _resolve(event.value) if event.style is None else _checked(event.value)
        except JsonError as error:
            self.fault(self._place(), error.message, event.start_mark)
            value = None
        merge = event.style is None and value == "<<" and bool(self._open) and not self._open[-1].has_key
        if merge and isinstance(self._open[-1].value, dict):
            self.fault(self._place(), "merge keys are not accepted", event.start_mark)
        self._put(value, event)

    def _put(self, value: object, event: events.Event) -> None:
        """Put a complete node where it belongs: root, item, key or value."""
        if not self._open:
            self.root = value
            return
        parent = self._open[-1]
        if isinstance(parent.value, list):
            parent.value.append(value)
        elif parent.has_key:
            if parent.key is not None:
                parent.value[parent.key] = value
            parent.key, parent.has_key = None, False
        else:
            parent.has_key = True
            parent.key = self._key(parent, value, event)

    def _key(self, parent: _Collection, value: object, event: events.Event) -> str | None:
        if not isinstance(value, str):
            written = getattr(event, "value", None)
            what = f": quote {written}" if written else ", not empty" if written == "" else ", not collections"
            self.fault(parent.path, f"keys are strings{what}", event.start_mark)
            return None
        if value in parent.seen:
            self.fault(parent.path + pointer((value,)), "duplicate key", event.start_mark)
            return None
        parent.seen.add(value)
        return value


def _events(text: str) -> Iterator[object]:
    """Yield the parser's events; what the reader trips over ends them like any other syntax error."""
    # The pure Python reader is the one that follows YAML 1.2.
    stream = iter(YAML(typ="safe", pure=True).parse(text))
    while True:
        try:
            event = next(stream)
        except StopIteration:
            return
        except (ValueError, OverflowError, AssertionError):
            # An escape past U+10FFFF; a %YAML version that it has never heard of.
            raise MarkedYAMLError(problem="an escape or a directive has no meaning") from None
        yield event


def _resolve(text: str) -> object:
    """Return what a plain scalar means in the core schema."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] not in "+-.0123456789":
        return _checked(text)
    if _DECIMAL.fullmatch(text):
        return _number(text)
    if _BASED.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise JsonError(f"a number has more than {MAX_DIGITS} digits")
        return parse_number(str(int(text, 0)))
    if _NOT_FINITE.fullmatch(text):
        raise JsonError(f"{text} is not JSON")
    return _checked(text)


def _number(text: str) -> int | float | Decimal:
    sign = "-" if text.startswith("-") else ""
    digits = text.lstrip("+-")
    return parse_number(f"{sign}0{digits}" if digits.startswith(".") else sign + digits)


def _checked(text: str) -> str:
    """Return a string with pairs of surrogate escapes made one character, as in JSON; refuse a lone one."""
    if text.isascii():
        return text
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise JsonError("a lone surrogate") from None
