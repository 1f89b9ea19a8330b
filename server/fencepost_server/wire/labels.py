"""The names and labels that users choose: what is allowed in them, wherever they come in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fencepost_server.domain.violation import Violation

MAX_NAME = 200
MAX_ATTRIBUTES = 32
MAX_ATTRIBUTE_KEY = 100
MAX_ATTRIBUTE_VALUE = 200
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
"""An identifier as in manifests."""


def name_fault(name: str) -> str | None:
    """What is wrong with an identifier, or None."""
    if len(name) > MAX_NAME or NAME.fullmatch(name) is None:
        return f"must be 1 to {MAX_NAME} letters, digits or . _ - / and begin with a letter or digit"
    return None


def attribute_faults(values: Mapping[str, str], path: str, most: int = MAX_ATTRIBUTES) -> Iterator[Violation]:
    """Every fault of the labels of a run."""
    if len(values) > most:
        yield Violation(path, f"at most {most}")
    for key, value in sorted(values.items()):
        place = f"{path}[{key[:MAX_ATTRIBUTE_KEY]!r}]"
        if len(key) > MAX_ATTRIBUTE_KEY or NAME.fullmatch(key) is None:
            yield Violation(
                place,
                f"the key must be 1 to {MAX_ATTRIBUTE_KEY} letters, digits or . _ - / and begin with a letter or digit",
            )
        if len(value) > MAX_ATTRIBUTE_VALUE:
            yield Violation(place, f"the value has at most {MAX_ATTRIBUTE_VALUE} characters")
        if "\0" in value:
            yield Violation(place, "NUL is not allowed")
