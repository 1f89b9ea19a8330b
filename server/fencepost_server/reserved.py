"""Keeps a port for several processes of one command, and from all others.

Who listens with SO_REUSEPORT shares the port with everybody of the same user who does so too: two commands on one port
would each get a part of the other's connections. So the port is bound here first, by a socket that never listens for
longer than it takes to find out that nobody else does. It stays bound as long as it lives: whoever binds to the port
without SO_REUSEPORT is refused, and with it, the processes of the command are let in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Self

_TRIES = 20
_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


class NotShared(OSError):
    """Processes can't share the port: another program has it, or this system can't do it."""


class ReservedPort:
    """A port that is ours alone until it is closed. ``port`` is its number."""

    def __init__(self, host: str, port: int) -> None:
        """``port`` 0 takes a free one. Looks the host up, which blocks. Raises NotShared."""
        if sys.platform != "linux":
            raise NotShared("several processes on one port need Linux, which spreads connections over them")
        self._host = host
        self._sockets: list[socket.socket] = []
        self.port = port
        for tries_left in reversed(range(_TRIES)):
            try:
                # Between a port's being found and held, somebody else may take it: then, another.
                self.port = port or self._free_port()
                self._hold_all()
                return
            except OSError as error:
                self.close()
                if port or not tries_left or error.errno != errno.EADDRINUSE:
                    why = "is the port in use?" if error.errno == errno.EADDRINUSE else error.strerror
                    raise NotShared(f"can't listen on {host}:{self.port}: {why}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let the port go."""
        while self._sockets:
            self._sockets.pop().close()

    def _hold_all(self) -> None:
        elsewhere: OSError | None = None
        for family, address in self._addresses(self.port):
            try:
                self._sockets.append(_held(family, address))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                elsewhere = error  # as ::1 for localhost where there is no IPv6
        if not self._sockets:
            raise elsewhere or OSError(errno.EADDRNOTAVAIL, "the host has no address")

    def _addresses(self, port: int) -> Iterator[tuple[socket.AddressFamily, tuple[object, ...]]]:
        found = socket.getaddrinfo(self._host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _kind, _protocol, _name, address in found:
            yield family, address

    def _free_port(self) -> int:
        """A number of its own for the next bind: a port that the kernel chose goes with the end of listening."""
        for family, address in self._addresses(0):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
                return int(probe.getsockname()[1])
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def _held(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    """A socket that holds an address. Raises OSError, EADDRINUSE if anybody listens there or holds it.

    In this order: of those who bind at the same time (which SO_REUSEADDR allows to all who do not listen) one can
    listen, for that asks the kernel again; SO_REUSEADDR goes while it does, so that nobody can bind any more.
    """
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections that have ended may still have the port, which is no obstacle.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(address)
        held.listen()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.shutdown(socket.SHUT_RD)  # listens no more, and stays bound
    except BaseException:
        held.close()
        raise
    return held
