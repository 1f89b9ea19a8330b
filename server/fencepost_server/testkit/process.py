"""What of the kit a process has once: its thread, and a PostgreSQL server for each that was asked for."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Mapping
from typing import Any

from fencepost_server.testkit.background import Background
from fencepost_server.testkit.databases import Databases
from fencepost_server.testkit.server import SkippingServer

_CLOSE_TIMEOUT = 90.0


class Process:
    """The kit of one process. Made by `shared`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.background = Background()
        self._databases: dict[str, Databases] = {}
        self._servers: set[SkippingServer] = set()
        atexit.register(self.close)

    async def start(self, admin_dsn: str, settings: Mapping[str, Any]) -> SkippingServer:
        """Start a server, with a new database on the server that ``admin_dsn`` names or on an embedded one. To be
        awaited in the kit's thread. Raises as `SkippingServer.start`.
        """
        if admin_dsn not in self._databases:
            self._databases[admin_dsn] = Databases(admin_dsn)
        server = await SkippingServer.start(self._databases[admin_dsn], settings)
        self._servers.add(server)
        return server

    async def stop(self, server: SkippingServer) -> None:
        """Stop a server and drop its database."""
        self._servers.discard(server)
        await server.stop()

    async def forget(self, admin_dsn: str) -> None:
        """Drop what is left on a database server, or end the embedded one. No server of the kit uses it any more."""
        databases = self._databases.pop(admin_dsn, None)
        if databases is not None:
            await databases.close()

    def close(self) -> None:
        """Stop what still runs. Called at the end of the process, which is the only one to do it."""
        if os.getpid() == self.pid:
            self.background.call(self._close(), _CLOSE_TIMEOUT)

    async def _close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for databases in self._databases.values():
                stack.push_async_callback(databases.close)
            for server in list(self._servers):
                stack.push_async_callback(self.stop, server)


_lock = threading.Lock()
_processes: list[Process] = []


def shared() -> Process:
    """The kit of this process, made by the first who asks; a forked child has one of its own."""
    with _lock:
        if not _processes or _processes[-1].pid != os.getpid():
            _processes.append(Process())
        return _processes[-1]
