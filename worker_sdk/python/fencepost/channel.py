"""Where the servers are and how a channel to one of them is set up; delays between tries.

Shared by worker and client.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

ChannelOptions = list[tuple[str, Any]]

KEEPALIVE_SECONDS = 20.0
KEEPALIVE_TIMEOUT_SECONDS = 10.0
# Room for what surrounds payloads in a message.
MESSAGE_SLACK = 1 << 20
_PORT = re.compile(r":[0-9]+$")


class Targets:
    """The addresses of equal servers, tried in turn. Raises ValueError for text without one, or that names no port."""

    def __init__(self, text: str) -> None:
        self._addresses = [part.strip() for part in text.split(",") if part.strip()]
        if not self._addresses:
            raise ValueError(f"no address in {text!r}; say for example 127.0.0.1:7654")
        for address in self._addresses:
            # gRPC would take these for a host's port 443, or for a host's name, and try for ever.
            if address.startswith(("http://", "https://")):
                raise ValueError(f"{address!r} is a URL; say host:port, for example 127.0.0.1:7654")
            if (
                ":///" not in address
                and not address.startswith(("unix:", "unix-abstract:"))
                and not _PORT.search(address)
            ):
                raise ValueError(f"{address!r} has no port; say host:port, for example 127.0.0.1:7654")
        self._index = 0

    @property
    def current(self) -> str:
        """The address to use now."""
        return self._addresses[self._index]

    def advance(self, failed: str) -> None:
        """Use the one after ``failed`` from now on, unless that has been left already: of several calls that fail at
        the same time one moves on, or an even number of two addresses would lead back to where all of them failed.
        """
        if failed == self.current:
            self._index = (self._index + 1) % len(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    def __str__(self) -> str:
        return ",".join(self._addresses)


def channel_options(max_receive_bytes: int) -> ChannelOptions:
    """Options of every channel: notice a dead peer, reconnect soon, take what the server may send."""
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        # Repeating is ours: with request ids and held leases, not blindly by the library.
        ("grpc.enable_retries", 0),
        # A connection that failed for another channel says nothing of this one.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the time that one attempt to connect may take; a busy server needs some.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


class Backoff:
    """Delays with full jitter:

    each is random below a limit that doubles from ``first`` to ``most`` seconds.
    """

    def __init__(self, first: float = 0.05, most: float = 5.0, chance: Callable[[], float] = random.random) -> None:
        self._first = first
        self._most = most
        self._chance = chance
        self._limit = first

    def next(self, at_least: float | None = None) -> float:
        """The next delay in seconds, not below what the server asked for."""
        delay = self._limit * self._chance()
        self._limit = min(self._limit * 2, self._most)
        # Spread over another fifth, or all who were told the same would come back together.
        return delay if at_least is None else max(delay, at_least * (1 + 0.2 * self._chance()))

    def reset(self) -> None:
        """It went well: begin anew with short delays."""
        self._limit = self._first
