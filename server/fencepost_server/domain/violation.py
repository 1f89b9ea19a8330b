"""A fault in something that a caller sent, with its place: what BadRequest, feedback and the CLI list.

Places are JSON Pointers (RFC 6901), so that they mean the same in every language.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

MAX_MESSAGE = 500
"""Longest message, in code points."""

_CUT = " … "


@dataclass(frozen=True, slots=True)
class Violation:
    """One fault: `path` is a JSON Pointer ("" for the whole), `message` one sentence for the sender."""

    path: str
    message: str


def pointer(parts: Iterable[str | int]) -> str:
    """Return the JSON Pointer for keys and indexes, outermost first; no parts give ""."""
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in parts)


def shown(value: object, limit: int = 60) -> str:
    """Return a JSON value for use in a message, at most `limit` code points and an ellipsis."""
    if isinstance(value, str):
        value = value[: limit + 1]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[:limit]}…"


def cut_message(text: str) -> str:
    """Return `text` with at most MAX_MESSAGE code points.

    What is too long loses its middle: a message often begins with the offending value, which may be huge, and
    ends with what is wrong with it.
    """
    if len(text) <= MAX_MESSAGE:
        return text
    head = MAX_MESSAGE // 2 - len(_CUT)
    return text[:head] + _CUT + text[len(text) - (MAX_MESSAGE - head - len(_CUT)) :]
