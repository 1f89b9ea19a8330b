"""A background loop: start, stop, one awaited ``run_once``, and the time of its last good pass.

A pass that fails is logged (once a second at most) and tried again after a pause; a loop never dies quietly,
and every database call in it has a time limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from fencepost_server.domain.errors import Unavailable
from fencepost_server.store.outage import note_outage

log = logging.getLogger("fencepost.loop")

_LONGEST_PAUSE = 2.0


class Loop:
    """Calls ``run_once`` again and again. ``run_once`` returns the seconds until the next pass; ``wake`` cuts
    them short.
    """

    def __init__(self, name: str, run_once: Callable[[], Awaitable[float | None]]) -> None:
        self.name = name
        self.run_once = run_once
        self.last_good = 0.0
        """Monotonic time of the last good pass, 0 before the first."""
        self.errors = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._noted = 0.0
        self._stopping = False

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name=f"loop-{self.name}")

    async def stop(self) -> None:
        """End, also in the middle of a pass: whatever it was doing, its transaction does not commit."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def wake(self) -> None:
        """Make the next pass begin now."""
        self._wake.set()

    async def _run(self) -> None:
        pause = 0.05
        # The flag, because a cancel can get lost in a pass: Python 3.11's wait_for, which the driver uses, drops one
        # that comes together with its result, and a driver may turn one into an error of its own, caught here.
        while not self._stopping:
            self._wake.clear()
            delay: float | None
            failed = False
            try:
                delay = await self.run_once()
                self.last_good = time.monotonic()
                pause = 0.05
            except Exception as error:  # noqa: BLE001  # a loop outlives every error; it is logged and counted
                self.errors += 1
                self._note(error)
                failed = True
                delay, pause = pause, min(pause * 2, _LONGEST_PAUSE)
            await self._rest(delay, wakeable=not failed)

    async def _rest(self, delay: float | None, *, wakeable: bool) -> None:
        """Wait for the next pass: so many seconds, or until woken unless the last pass failed."""
        if self._stopping:
            return
        if not wakeable:
            await asyncio.sleep(delay or 0)
            return
        try:
            async with asyncio.timeout(delay):
                await self._wake.wait()
        except TimeoutError:
            return

    def _note(self, error: Exception) -> None:
        if isinstance(error, Unavailable):
            note_outage(self.name, error)
            return
        now = time.monotonic()
        if now - self._noted >= 1.0:
            self._noted = now
            log.error("%s: pass failed", self.name, exc_info=error)
