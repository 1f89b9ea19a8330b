"""What falls due and what runs tell each other: two loops that bring it to the lanes.

Any server may do it, and several may try the same at once: each timer and each message is a row that is read again
under the lock of its run and goes in the transaction that acts on it, so that it acts once (I13). What is under way
here is remembered only so as not to try it twice. What a newer release has written, and this one does not know, is left
to the servers that do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from fencepost_server.config import Config
from fencepost_server.domain.model import TimerKind
from fencepost_server.engine.loops import Loop
from fencepost_server.engine.operations import Deliver, Fire, MessageKind
from fencepost_server.store import extras
from fencepost_server.store.connection import Database
from fencepost_server.store.extras import DueTimer

_MAX_PAGES = 40
_FAR = 3600.0
_AGAIN = 0.05
_PUT_OFF_BYTES = 1 << 20
_TIMERS, _MESSAGES = frozenset(map(int, TimerKind)), frozenset(map(int, MessageKind))


class Timers:
    """Finds timers that are due, in bounded pages, and submits them; each is checked again under its run's lock."""

    def __init__(self, config: Config, database: Database, submit: Callable[[Sequence[Fire]], None]) -> None:
        self._config = config
        self._database = database
        self._submit = submit
        self._due = asyncio.get_running_loop().time() + _FAR  # the probe tells what there is
        self._under_way: set[tuple[str, int, int]] = set()
        self._after: DueTimer | None = None
        self.loop = Loop("timers", self.run_once)

    def due_in(self, seconds: float | None) -> None:
        """The first timer falls due in so many seconds, perhaps sooner than was known; None: there is none."""
        if seconds is not None:
            due = asyncio.get_running_loop().time() + seconds
            if due < self._due:
                self._due = due
                self.loop.wake()

    async def run_once(self) -> float | None:
        """Submit all that is due."""
        now = asyncio.get_running_loop().time()
        if self._due > now:
            return self._due - now
        self._due = now + _FAR  # before the look: whoever tells of an earlier timer meanwhile is not overruled
        try:
            await self._look()
        except BaseException:
            self._due = now
            raise
        return max(0.0, self._due - asyncio.get_running_loop().time())

    async def _look(self) -> None:
        after, self._after = self._after, None  # behind those of the last look, if these were too many for it
        for _ in range(_MAX_PAGES):
            page = await extras.due_timers(self._database, after, self._config.timer_batch)
            fresh = [
                timer
                for timer in page
                if timer.kind in _TIMERS and (timer.run_id, timer.seq, timer.kind) not in self._under_way
            ]
            self._under_way.update((timer.run_id, timer.seq, timer.kind) for timer in fresh)
            self._submit([self._fire(timer) for timer in fresh])
            if len(page) < self._config.timer_batch:
                return
            after = page[-1]
        self._after = after
        self.due_in(_AGAIN)

    def _fire(self, timer: DueTimer) -> Fire:
        kind = TimerKind(timer.kind)
        # What was put off was too much for one batch: a few of them fill the next.
        size = _PUT_OFF_BYTES if kind is TimerKind.PUT_OFF else 0
        return Fire(timer.run_id, timer.namespace, timer.seq, kind, self._done, size=size)

    def _done(self, fire: Fire) -> None:
        self._under_way.discard((fire.run_id, fire.seq, fire.kind))


class Outbox:
    """Delivers messages between runs, in the order in which they were written."""

    def __init__(self, config: Config, database: Database, submit: Callable[[Sequence[Deliver]], None]) -> None:
        self._config = config
        self._database = database
        self._submit = submit
        self._waiting = False  # the probe tells what there is
        self._after = 0
        self._under_way: set[int] = set()
        self.loop = Loop("outbox", self.run_once)

    def wake(self) -> None:
        """There is something to deliver."""
        self._waiting = True
        self.loop.wake()

    async def run_once(self) -> float | None:
        """Submit all that waits."""
        if not self._waiting:
            return None
        self._waiting = False
        after, self._after = self._after, 0
        try:
            for _ in range(_MAX_PAGES):
                page = await extras.messages(self._database, after, self._config.outbox_batch)
                fresh = [m for m in page if m.kind in _MESSAGES and m.message_id not in self._under_way]
                self._under_way.update(message.message_id for message in fresh)
                self._submit(
                    [
                        Deliver(
                            m.message_id, m.target_run, MessageKind(m.kind), m.source_run, m.source_seq, m.namespace,
                            m.body, self._done, len(m.body) + json.loads(m.body).get("size", 0),
                        )
                        for m in fresh
                    ]
                )  # fmt: skip
                if len(page) < self._config.outbox_batch:
                    break
                after = page[-1].message_id
            else:
                self._after = after  # too many for one look: the next goes on behind them
                self._waiting = True
        except BaseException:
            self._waiting = True
            raise
        return _AGAIN if self._waiting else None

    def _done(self, deliver: Deliver) -> None:
        self._under_way.discard(deliver.message_id)
