"""What a filter of runs says on the command line: states, attributes, times. Each raises BadParameter."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import typer

STATES = (
    *("PENDING", "RUNNING", "WAITING", "PAUSED", "BLOCKED", "ENDING", "UNDOING"),
    *("COMPLETED", "FAILED", "CANCELLED", "TERMINATED", "CONTINUED"),
)
"""As the SDK has them, which takes a while to import."""


def state_of(name: str) -> str:
    """The state of that name, in any case."""
    if name.upper() not in STATES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(STATES)}", param_hint="--state")
    return name.upper()


def attributes_of(texts: Sequence[str]) -> dict[str, str]:
    """What KEY=VALUE says, of all of them. No run has two values of one key, so that two are a slip."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--attribute")
        if found.setdefault(key, value) != value:
            raise typer.BadParameter(f"{key!r} has two values", param_hint="--attribute")
    return found


def time_of(text: str, flag: str) -> dt.datetime | None:
    """A date or a time as in ISO 8601, of this machine's zone if it has none; None for ''."""
    if not text:
        return None
    try:
        return dt.datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is not a time such as 2026-03-01, 2026-03-01T12:30 or 2026-03-01T12:30:00+01:00",
            param_hint=flag,
        ) from None
