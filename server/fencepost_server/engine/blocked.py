"""Tells operators of runs that wait for a person: counts them, and warns in the log.

A definition that can't be read blocks all its runs at once, so the log has at most one line a second; what is held back
meanwhile is told with the next line, which comes even if no further run is blocked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from fencepost_server.engine.changes import Blocked

log = logging.getLogger("fencepost.engine")

_PAUSE = 1.0


class BlockedRuns:
    """See the module. To be used in the event loop of the engine."""

    def __init__(self) -> None:
        self.count = 0
        """How often a run was BLOCKED, in the life of this server."""
        self._first: Blocked | None = None
        self._more = 0
        self._pause: asyncio.TimerHandle | None = None

    def add(self, blocked: Sequence[Blocked]) -> None:
        """These runs are BLOCKED now, and that is committed."""
        if not blocked:
            return
        self.count += len(blocked)
        if self._first is None:
            self._first = blocked[0]
            self._more = len(blocked) - 1
        else:
            self._more += len(blocked)
        if self._pause is None:
            self._tell()

    def flush(self) -> None:
        """Tell what is held back, at the end."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._warn()

    def _tell(self) -> None:
        self._pause = asyncio.get_running_loop().call_later(_PAUSE, self._tell) if self._warn() else None

    def _warn(self) -> bool:
        """A line for what is not told yet. False if there is none."""
        if self._first is None:
            return False
        run_id, workflow_id, code = self._first
        more = f" (and {self._more} more)" if self._more else ""
        log.warning("run %s of workflow %s is BLOCKED and waits for a person: %s%s", run_id, workflow_id, code, more)
        self._first, self._more = None, 0
        return True
