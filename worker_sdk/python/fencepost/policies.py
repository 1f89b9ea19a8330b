"""How often what a workflow asks for is tried, how it is undone, and how durations are spelled for the server.

`Retry` and `UndoPolicy` have the defaults and bounds of a manifest's nodes. A remote step's policy goes to the server
as options; a local step's is kept by the worker that runs it.
"""

from __future__ import annotations

import datetime as dt
import json
import random
from dataclasses import dataclass
from typing import Any, TypeAlias

from fencepost.models import FailureKind
from fencepost.steps import Undo

Seconds: TypeAlias = "float | dt.timedelta"
"""A length of time: a number of seconds, or a timedelta."""

MAX_WAIT = 3650 * 86_400.0
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))


def seconds_in(length: Seconds) -> float:
    """A length of time in seconds. Raises ValueError if it is negative or longer than ten years, TypeError
    for what is none.
    """
    try:
        seconds = length.total_seconds() if isinstance(length, dt.timedelta) else float(length)
    except (TypeError, ValueError):
        raise TypeError(f"{length!r} is no length of time: give seconds as a number, or a timedelta") from None
    if not 0.0 <= seconds <= MAX_WAIT:
        raise ValueError(f"{length!r} is no length of time from 0 to 3650 days")
    return seconds


def duration_text(seconds: float) -> str:
    """Seconds as manifests spell them, to the millisecond: ``1m30s`` for 90."""
    left = round(seconds * 1000)
    parts = []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often a step is tried, with what pauses.

    ``max_attempts`` bounds attempts that fail as operational, ``max_corrective_attempts`` those that fail as
    corrective. Delays are in seconds or timedeltas; ``jitter`` is the part of a delay that chance may take or add.
    Raises ValueError for what no manifest could have.
    """

    max_attempts: int = 5
    initial_delay: Seconds = 1.0
    multiplier: float = 2.0
    max_delay: Seconds = 60.0
    jitter: float = 0.2
    max_corrective_attempts: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= 1_000_000:
            raise ValueError("max_attempts is from 1 to 1,000,000")
        if not 0 <= self.max_corrective_attempts <= 1_000:
            raise ValueError("max_corrective_attempts is from 0 to 1,000")
        if not 1 <= self.multiplier <= 1_000 or not 0 <= self.jitter <= 1:
            raise ValueError("multiplier is from 1 to 1,000, jitter from 0 to 1")
        if seconds_in(self.initial_delay) > seconds_in(self.max_delay) or seconds_in(self.max_delay) > 7 * 86_400:
            raise ValueError("initial_delay is at most max_delay, and that at most 7 days")

    def options(self) -> dict[str, Any]:
        """As a manifest has it."""
        return {
            "max_attempts": self.max_attempts,
            "initial_delay": duration_text(seconds_in(self.initial_delay)),
            "multiplier": self.multiplier,
            "max_delay": duration_text(seconds_in(self.max_delay)),
            "jitter": self.jitter,
            "max_corrective_attempts": self.max_corrective_attempts,
        }

    def pause_after(
        self, kind: FailureKind, operational: int, corrective: int, retry_after: float | None = None
    ) -> float | None:
        """How many seconds to wait before the next attempt, after one that failed as ``kind``; None if there is none.

        ``operational`` and ``corrective`` count the failures of each kind, this one included.
        """
        if kind is FailureKind.PERMANENT:
            return None
        if kind is FailureKind.CORRECTIVE:
            return 0.0 if corrective < self.max_corrective_attempts else None
        if operational >= self.max_attempts:
            return None
        if retry_after is not None:
            return retry_after
        longest = seconds_in(self.max_delay)
        try:
            delay = min(longest, seconds_in(self.initial_delay) * self.multiplier ** (operational - 1))
        except OverflowError:
            delay = longest
        return delay * (1 + self.jitter * (2 * random.random() - 1))


@dataclass(frozen=True, slots=True)
class UndoPolicy:
    """How a completed step or child is undone, if its run fails or is cancelled.

    ``handler`` is what workers register with `undo`, by name or as the object. ``unfinished``: it is also asked to undo
    steps that may have acted without completing. Times are in seconds or timedeltas.
    """

    handler: str | Undo[..., Any]
    queue: str | None = None
    timeout: Seconds | None = None
    lease: Seconds | None = None
    retry: Retry | None = None
    unfinished: bool = False

    def options(self) -> dict[str, Any]:
        """As a manifest has it."""
        named = isinstance(self.handler, Undo)
        queue = self.queue or (self.handler.queue if isinstance(self.handler, Undo) else None)
        options: dict[str, Any] = {"step": self.handler.name if isinstance(self.handler, Undo) else self.handler}
        if queue is not None and (not named or queue != "default"):
            options["queue"] = queue
        if self.timeout is not None:
            options["timeout"] = duration_text(seconds_in(self.timeout))
        if self.lease is not None:
            options["lease"] = duration_text(seconds_in(self.lease))
        if self.retry is not None:
            options["retry"] = self.retry.options()
        if self.unfinished:
            options["undo_unfinished"] = True
        return options


UndoBy: TypeAlias = "str | Undo[..., Any] | UndoPolicy"
"""How to undo: a handler by its name or as the object, or a policy."""

DEFAULT_RETRY = Retry()


def options_json(undo: UndoBy | None, retry: Retry | None = None, **options: object) -> str:
    """JSON text of the options of an op, empty if there are none; what is None is left out, times become text."""
    if undo is None and retry is None and not options:
        return ""
    told: dict[str, Any] = {
        key: value if isinstance(value, str) else duration_text(seconds_in(value))
        for key, value in options.items()
        if isinstance(value, str | int | float | dt.timedelta)
    }
    if retry is not None:
        told["retry"] = retry.options()
    if undo is not None:
        told["undo"] = (undo if isinstance(undo, UndoPolicy) else UndoPolicy(undo)).options()
    return json.dumps(told, separators=(",", ":")) if told else ""
