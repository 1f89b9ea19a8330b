"""How the clients ask and go on when it fails, without I/O: one logic for the sync and the async client.

A `Plan` is a generator. It yields a `Call` to be made or a `Pause` to be kept, is sent the call's response or
thrown the FencepostError that it ended with, and returns its result. Every call can be repeated: reads change
nothing, and mutations carry a random request id or are known by what they are about. So a plan repeats whatever may
pass by itself (`Unavailable`), with jitter, as the server asks, until its time is up.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from google.protobuf.message import Message

from fencepost.channel import Backoff
from fencepost.deterministic.guard import refuse_in_turn
from fencepost.errors import Unavailable
from fencepost.policies import limit_in

T = TypeVar("T")

ATTEMPT_TIMEOUT = 10.0
PAGE_SIZE = 100

Service: TypeAlias = Literal["runs", "definitions", "schedules"]


@dataclass(frozen=True, slots=True)
class Call:
    """A unary call to make, within ``timeout`` seconds."""

    service: Service
    method: str
    request: Message
    timeout: float


@dataclass(frozen=True, slots=True)
class Pause:
    """A time to wait, in seconds."""

    seconds: float


Plan: TypeAlias = Generator[Call | Pause, Any, T]
Page: TypeAlias = tuple[list[T], str]
"""Some items, and the token of the next page; '' on the last one."""


class Asker:
    """Asks in one namespace. ``patience``: seconds to repeat what fails; ValueError, TypeError if it is none."""

    def __init__(self, namespace: str, patience: float) -> None:
        self._namespace = namespace
        self._patience = limit_in(patience, "timeout")

    def _ask(
        self,
        service: Service,
        method: str,
        request: Message,
        *,
        attempt: float | None = None,
        patience: float | None = None,
        final: type[Unavailable] | None = None,
    ) -> Plan[Any]:
        """One call, repeated while it is Unavailable, but not as ``final``, and ``patience`` lasts."""
        backoff = Backoff()
        end = time.monotonic() + (self._patience if patience is None else patience)
        while True:
            left = max(0.001, end - time.monotonic())
            limit = min(ATTEMPT_TIMEOUT, left) if attempt is None else attempt
            try:
                return (yield Call(service, method, request, limit))
            except Unavailable as error:
                delay = backoff.next(error.retry_after)
                if (final is not None and isinstance(error, final)) or time.monotonic() + delay >= end:
                    raise
                yield Pause(delay)


def outside_of_workflows() -> None:
    """Raise NonDeterministic in workflow code, where a replay would ask the server once more."""
    refuse_in_turn("a client", "start children with ctx.child(...), or use the client in a step, with ctx.run(...)")


def new_id() -> str:
    """A request id of its own."""
    return str(uuid.uuid4())
