"""Whether the server takes the JSON of a payload: what it would refuse is better refused where the value was made.

A remote step's report, or a client's call, is answered with the reason. An Advance of a code run is refused as a whole,
and with it the worker that has made it, which could only come to the same again. So what goes into one is looked at
here first. Texts of the SDK's own encoder can break a rule in three ways, which are cheap to exclude in nearly all
texts; what a user has written as a `Value` may be no JSON at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fencepost.codec import Value, check_metadata, utf8_length
from fencepost.errors import NotEncodable

MAX_DEPTH = 128
"""Arrays and objects inside each other."""
MAX_DIGITS = 1_000
"""Digits of one number."""
_MAX_EXPONENT = 10**6
_SHOWN = 100

# Of these no text of the SDK's own encoder breaks a rule, unless it is a long number.
_SCALARS = frozenset((int, float, bool, str))
_LONG_NUMBER = re.compile(rf"[0-9.]{{{MAX_DIGITS + 1}}}")
# Two keys of one dict can have one text only if one of them was no string.
_KEY_OF_NO_STRING = re.compile(r'[{,]"(?:-?[0-9]|true"|false"|null")')
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))


def recordable(value: Value, *, given: object = None) -> Value:
    """The payload itself, which was made of ``given``, and of nothing else; that may be the payload. Raises
    NotEncodable if its JSON is none, or beyond what the server takes.
    """
    if value.metadata:
        check_metadata(value.metadata)
    text = value.json
    if text is None or (type(given) in _SCALARS and len(text) <= MAX_DIGITS):
        return value
    try:
        if value is given or _may_break_a_rule(text):
            _look_at_all(text)
        if text.count("[") + text.count("{") > MAX_DEPTH and _too_deep(text):
            raise RecursionError
    except RecursionError:
        raise NotEncodable(f"arrays and objects are nested more than {MAX_DEPTH} deep") from None
    except NotEncodable:
        raise
    except ValueError as error:
        raise NotEncodable(f"it is no JSON that can be recorded: {error}") from None
    return value


def _may_break_a_rule(text: str) -> bool:
    """Of a text of the SDK's own encoder, which writes valid JSON and no exponent that a float has not."""
    if len(text) > MAX_DIGITS and _LONG_NUMBER.search(text):
        return True
    return _KEY_OF_NO_STRING.search(text) is not None


def _too_deep(text: str) -> bool:
    marks = text.replace("\\\\", "").replace('\\"', "").encode().translate(_ONE_KIND, _NO_STRUCTURE)
    left = b"".join(marks.split(b'"')[::2])
    for _ in range(MAX_DEPTH):
        # What is innermost goes, level by level.
        left = left.replace(b"[]", b"")
    return bool(left)


def _members(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"duplicate key {key[:_SHOWN]!r} in one object")
        seen.add(key)


def _number(text: str) -> None:
    digits, _, exponent = text.lower().partition("e")
    if sum(map(str.isdigit, digits)) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    if len(exponent.lstrip("+-0")) > len(str(_MAX_EXPONENT)) or abs(int(exponent or 0)) > _MAX_EXPONENT:
        raise ValueError(f"a number has an exponent beyond {_MAX_EXPONENT}")


def _constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


_decode: Callable[[str], object] = json.JSONDecoder(
    object_pairs_hook=_members, parse_int=_number, parse_float=_number, parse_constant=_constant
).decode


def _look_at_all(text: str) -> None:
    utf8_length(text)
    _decode(text)
    if "\\u" in text:
        utf8_length(json.dumps(json.loads(text), ensure_ascii=False))  # what was escaped, keys too
