"""JSON Pointers (RFC 6901) as manifests write them: read once, then followed into many values.

They are plain pointers, not URI fragments: `%20` is three characters. `violation.pointer` writes them.
"""

from __future__ import annotations

from typing import Final, final


@final
class Missing:
    """The type of `MISSING`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()
"""What a pointer that leads nowhere finds; null is a value."""

_MAX_INDEX_DIGITS = 10


def parse_pointer(text: str) -> tuple[str, ...]:
    """Return the keys and indexes of a pointer, outermost first; "" is the whole value, and gives none.

    Raises:
        ValueError: `text` is no pointer; the message is for its author.
    """
    if text and not text.startswith("/"):
        raise ValueError("is not a JSON Pointer: it begins with / or is empty")
    parts = text.split("/")[1:]
    for part in parts:
        if "~" in part.replace("~0", "").replace("~1", ""):
            raise ValueError("is not a JSON Pointer: ~ is written ~0, and / inside a key ~1")
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)


def follow(value: object, parts: tuple[str, ...]) -> object:
    """Return what is in `value` at the end of `parts`, or MISSING."""
    for part in parts:
        if isinstance(value, dict):
            value = value.get(part, MISSING)
        elif isinstance(value, list) and (index := array_index(part)) is not None and index < len(value):
            value = value[index]
        else:
            return MISSING
    return value


def array_index(part: str) -> int | None:
    """Return the index that a part of a pointer means in an array: digits without a leading zero, else None."""
    if not (part.isascii() and part.isdecimal()) or len(part) > _MAX_INDEX_DIGITS or (part[0] == "0" and part != "0"):
        return None
    return int(part)
