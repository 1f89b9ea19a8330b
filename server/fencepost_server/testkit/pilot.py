"""Puts the clock of one server forward, from one due time to the next, whenever nothing else is to be done.

Nothing is to be done when no task is leased, none is ready for a worker that is connected, no run has a message to get
and no timer or schedule is due. So a lease never runs out by a skip: there is none. (Leases could be moved along
instead; but then a step that takes long would see days pass while it works, and what it does meanwhile would come to
different times with each run of the test.)

The clock stops at each due time on its way and waits until all that follows from it is done: timers, retries and
schedules come in their order, each with the time that it has asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from datetime import datetime

from fencepost_server.engine.engine import Engine
from fencepost_server.store.shifted_clock import Place, ShiftedClock, View

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
_IDLE_PAUSE = 0.02


class Stuck(TimeoutError):
    """It took too long; the message says what was under way."""


class Pilot:
    """Skips for one server."""

    def __init__(self, engine: Engine, clock: ShiftedClock) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = asyncio.Lock()
        self._wanted = 0
        self._flight: asyncio.Task[None] | None = None
        self._idle_since: float | None = None
        self.skips = 0
        """How often the clock was put forward."""

    async def now(self) -> datetime:
        """The server's time."""
        return (await self._clock.look()).now

    async def settle(self, timeout: float) -> None:
        """Wait until nothing is to be done now. Raises Stuck after ``timeout`` seconds."""
        await self._within(timeout, self._settle())

    async def skip_to(self, to: datetime, timeout: float) -> datetime:
        """Let it be ``to``, stopping at each due time before. Returns the time then. Raises Stuck."""
        return await self._within(timeout, self._skip_to(to))

    @asynccontextmanager
    async def skipping(self) -> AsyncIterator[None]:
        """Skip whenever nothing else is to be done, until the end of the block. Blocks may overlap."""
        self._wanted += 1
        self._idle_since = None
        if self._flight is None:
            self._flight = asyncio.create_task(self._fly(), name="testkit-pilot")
        try:
            yield
        finally:
            self._wanted -= 1
            if not self._wanted and self._flight is not None:
                flight, self._flight = self._flight, None
                flight.cancel()
                with suppress(asyncio.CancelledError):
                    await flight

    @property
    def failure(self) -> BaseException | None:
        """Why it does not skip any more; None if it does."""
        if self._flight is None or not self._flight.done() or self._flight.cancelled():
            return None
        return self._flight.exception()

    @property
    def idle_for(self) -> float:
        """For how many seconds nothing has been there to do, nor to skip to."""
        return 0.0 if self._idle_since is None else asyncio.get_running_loop().time() - self._idle_since

    async def waits_for(self) -> str:
        """What is under way or is not, as a sentence for people."""
        view = await self._clock.look()
        return describe(view, self._workers_lack(view))

    # Inside

    async def _within(self, timeout: float, work: Awaitable[datetime]) -> datetime:
        try:
            async with asyncio.timeout(timeout):
                return await work
        except TimeoutError as error:
            if isinstance(error, Stuck):
                raise
            raise Stuck(f"nothing came to rest within {timeout:g} s: {await self.waits_for()}") from None

    async def _settle(self) -> datetime:
        pause = _FIRST_PAUSE
        while True:
            view = await self._clock.look()
            if self._still(view):
                return view.now
            self._idle_since = None
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _skip_to(self, to: datetime) -> datetime:
        while True:
            now = await self._settle()
            if now >= to:
                return now
            await self._leap(to)

    async def _fly(self) -> None:
        while True:
            await self._settle()
            if await self._leap(None):
                self._idle_since = None
                continue
            if self._idle_since is None:
                self._idle_since = asyncio.get_running_loop().time()
            await asyncio.sleep(_IDLE_PAUSE)

    async def _leap(self, limit: datetime | None) -> bool:
        """Put the clock forward to the next due time, or to ``limit`` if that comes first; False if there is neither,
        or if something has come up meanwhile.
        """
        async with self._lock:
            view = await self._clock.look()
            times = [time for time in (view.due, limit) if time is not None]
            if not times or not self._still(view):
                return False
            if not await self._clock.put_forward(min(times), self._still):
                return False
            self.skips += 1
            # Its loops sleep for as long as they knew to be left.
            await self._engine.probe_once()
            return True

    def _still(self, view: View) -> bool:
        """Nothing is to be done now."""
        if view.leased or view.moving:
            return False
        return len(self._workers_lack(view)) == len(view.ready)

    def _workers_lack(self, view: View) -> list[Place]:
        """Where tasks are ready that nobody who is connected serves."""
        served = {(s.namespace, *place) for s in self._engine.dispatcher.sessions for place in s.handlers}
        return [p for p in view.ready if (p.namespace, p.queue, p.handler) not in served]


def describe(view: View, lacking: list[Place]) -> str:
    """What is under way, as a sentence."""
    parts = [f"a worker has {p.handler} of run {p.run_id}" for p in view.leased]
    parts += [f"{p.handler} is due" for p in view.moving]
    parts += [f"no worker is connected that serves {p.handler} on the queue {p.queue}" for p in lacking]
    parts += [f"{p.handler} waits for a free worker" for p in view.ready if p not in lacking]
    if not parts:
        parts = ["nothing is under way, and nothing falls due" if view.due is None else "nothing is under way"]
    return f"at {view.now.isoformat(timespec='seconds')} {'; '.join(parts)}"
