"""How often what a workflow asks for is tried, how it is undone, and how durations are spelled for the server.

`Retry` and `UndoPolicy` have the defaults and bounds of a manifest's nodes. A remote step's policy goes to the server
as options; a local step's is kept by the worker that runs it.
"""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

from fencepost.models import FailureKind
from fencepost.names import NAME_RULE, is_name
from fencepost.steps import Undo

Seconds: TypeAlias = "float | dt.timedelta"
"""A length of time: a number of seconds, or a timedelta."""

MAX_WAIT = 3650 * 86_400.0
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))

DAY = 86_400.0
ATTEMPT = (0.001, 365 * DAY, "1 ms to 365 days")
"""The shortest and the longest timeout that the server keeps, in seconds, and both for people."""
LEASE = (1.0, DAY, "1 s to 1 day")


def seconds_in(length: Seconds, what: str = "") -> float:
    """A length of time in seconds. Raises ValueError if it is negative or longer than ten years, TypeError
    for what is none; ``what`` it is of begins the message.
    """
    given: object = length
    of = f"{what}: " if what else ""
    if isinstance(given, dt.timedelta):
        seconds = given.total_seconds()
    elif isinstance(given, int | float | Real) and not isinstance(given, bool):
        try:
            seconds = float(given)
        except OverflowError:
            seconds = -1.0
    else:
        raise TypeError(f"{of}{given!r} is no length of time: give seconds as a number, or a timedelta")
    if not 0.0 <= seconds <= MAX_WAIT:
        raise ValueError(f"{of}{given!r} is no length of time from 0 to 3650 days")
    return seconds


def limit_in(limit: object, what: str) -> float:
    """A limit in seconds, which may be infinite. Raises ValueError for NaN, which no time ever comes up to, TypeError
    for what is no number; ``what`` it is of begins the message.
    """
    if not isinstance(limit, int | float | Real) or isinstance(limit, bool):
        raise TypeError(f"{what}: {limit!r} is no number of seconds")
    try:
        seconds = float(limit)
    except OverflowError:
        seconds = math.nan
    if math.isnan(seconds):
        raise ValueError(f"{what}: {limit!r} is no number of seconds")
    return seconds


Fault: TypeAlias = TypeError | ValueError
"""What is wrong with one option; its text begins with the option's name."""


def name_faults(option: str, name: object) -> Iterator[Fault]:
    """What is wrong with the name of something; None is no name, and right."""
    if name is None:
        return
    if not isinstance(name, str):
        yield TypeError(f"{option}: a name is text, which {type(name).__name__} is not")
    elif not is_name(name):
        yield ValueError(f"{option}: {name[:40]!r} is not a name: {NAME_RULE}")


def length_faults(option: str, length: Seconds | None, bounds: tuple[float, float, str]) -> Iterator[Fault]:
    """What is wrong with a length of time that the server is told, in whole milliseconds."""
    if length is None:
        return
    try:
        seconds = seconds_in(length, option)
    except (TypeError, ValueError) as error:
        yield error
        return
    if not bounds[0] <= round(seconds, 3) <= bounds[1]:
        yield ValueError(f"{option}: {length!r} is not from {bounds[2]}")


def retry_faults(retry: object) -> Iterator[Fault]:
    """What is wrong with what is given for a `Retry`; it has looked at its own fields when it was made."""
    if retry is not None and not isinstance(retry, Retry):
        hint = f": write Retry(max_attempts={retry})" if type(retry) is int else ""
        yield TypeError(f"retry: {retry!r} is no fencepost.Retry{hint}")


def raise_all(what: str, faults: list[Fault]) -> None:
    """Raise all of them as one: as TypeError if one of them is, else as ValueError."""
    if faults:
        kind = TypeError if any(isinstance(fault, TypeError) for fault in faults) else ValueError
        raise kind(f"{what}: " + "; ".join(str(fault) for fault in faults))


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
    Raises ValueError and TypeError for what no manifest could have.
    """

    max_attempts: int = 5
    initial_delay: Seconds = 1.0
    multiplier: float = 2.0
    max_delay: Seconds = 60.0
    jitter: float = 0.2
    max_corrective_attempts: int = 3

    def __post_init__(self) -> None:
        given: dict[str, object] = {"max_attempts": self.max_attempts, "multiplier": self.multiplier}
        given |= {"jitter": self.jitter, "max_corrective_attempts": self.max_corrective_attempts}
        for option, value in given.items():
            whole = option.startswith("max_")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise TypeError(f"Retry: {option}: {value!r} is no {'whole ' if whole else ''}number")
        if not 1 <= self.max_attempts <= 1_000_000:
            raise ValueError("Retry: max_attempts is from 1 to 1,000,000")
        if not 0 <= self.max_corrective_attempts <= 1_000:
            raise ValueError("Retry: max_corrective_attempts is from 0 to 1,000")
        if not 1 <= self.multiplier <= 1_000 or not 0 <= self.jitter <= 1:
            raise ValueError("Retry: multiplier is from 1 to 1,000, jitter from 0 to 1")
        longest = seconds_in(self.max_delay, "Retry: max_delay")
        if seconds_in(self.initial_delay, "Retry: initial_delay") > longest or longest > 7 * DAY:
            raise ValueError("Retry: initial_delay is at most max_delay, and that at most 7 days")

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
    steps that may have acted without completing. Times are in seconds or timedeltas. Raises TypeError and ValueError
    for what no manifest could have, all of it at once.
    """

    handler: str | Undo[..., Any]
    queue: str | None = None
    timeout: Seconds | None = None
    lease: Seconds | None = None
    retry: Retry | None = None
    unfinished: bool = False

    def __post_init__(self) -> None:
        faults = [
            *handler_faults("handler", self.handler),
            *name_faults("queue", self.queue),
            *length_faults("timeout", self.timeout, ATTEMPT),
            *length_faults("lease", self.lease, LEASE),
            *retry_faults(self.retry),
        ]
        raise_all("UndoPolicy", faults)

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


def handler_faults(option: str, handler: object) -> Iterator[Fault]:
    """What is wrong with what is given for a handler that undoes."""
    if isinstance(handler, Undo):
        yield from name_faults(option, handler.name)
        yield from name_faults(f"{option}'s queue", handler.queue)
    elif isinstance(handler, str):
        yield from name_faults(option, handler)
    else:
        yield TypeError(f"{option}: {handler!r} undoes nothing: give what @fencepost.undo has made, or its name")


DEFAULT_RETRY = Retry()
