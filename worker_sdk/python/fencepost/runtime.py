"""What runs in the session's thread: the links to servers, the executor between them and users' code, the
drain.

There is one link that takes tasks and, after a server asked to be left (Drain), a bounded number of older
ones that finish theirs. The capacity that the current one offers is what the older ones and zombies leave of
the slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fencepost.channel import Backoff, Targets
from fencepost.checkpoints import Saving
from fencepost.executor import Executor
from fencepost.failure import Released
from fencepost.identity import Identity
from fencepost.link import Link
from fencepost.session import Session

if TYPE_CHECKING:
    from fencepost.lease import Lease
    from fencepost.ledger import Counters, Effects

logger = logging.getLogger("fencepost.worker")

MAX_LEAVING_LINKS = 4
ABANDON_TIMEOUT = 5.0
SETTLE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Settings:
    """How a worker runs; times in seconds."""

    identity: Identity
    targets: Targets
    slots: int
    drain_timeout: float
    cancel_after_lease: float | None


class Runtime:
    """The worker's life in the session's loop. `main` runs it; `stop` may be called from that loop only."""

    def __init__(
        self,
        settings: Settings,
        counters: Counters,
        users_loop: asyncio.AbstractEventLoop,
        on_connected: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._on_connected = on_connected
        self._backoff = Backoff()
        self._links: dict[Link, asyncio.Task[None]] = {}
        self._current: Link | None = None
        self._changed = asyncio.Event()
        self._stopping = False
        self._hurry = asyncio.Event()
        self._executor = Executor(users_loop, asyncio.get_running_loop(), settings.slots, self._deliver)

    @property
    def held_count(self) -> int:
        """How many leases the worker holds, over all its sessions."""
        return sum(link.session.held_count for link in list(self._links))

    def stop(self, *, now: bool = False) -> None:
        """Take no new tasks, finish and end; ``now`` does not wait for what runs."""
        self._stopping = True
        if now:
            self._hurry.set()
        self._changed.set()

    async def main(self) -> None:
        """Work until stopped. Raises FencepostError if a server refuses the worker for good."""
        error: BaseException | None = None
        try:
            while not self._stopping:
                if self._current is None and len(self._links) <= MAX_LEAVING_LINKS:
                    self._open(self._backoff.next() if self._links else 0.0)
                await self._changed.wait()
                self._changed.clear()
                error = self._collect()
                if error is not None:
                    raise error
            await self._drain()
        finally:
            await self._end()

    def _open(self, delay: float) -> None:
        settings = self._settings
        session = Session(
            settings.identity,
            self._counters,
            capacity=settings.slots,
            cancel_after_lease=settings.cancel_after_lease,
        )
        link = Link(session, settings.targets, self._backoff, self._apply)
        self._current = link
        task = asyncio.create_task(link.run(delay))
        self._links[link] = task
        task.add_done_callback(lambda _: self._changed.set())
        self._share_slots()

    def _collect(self) -> BaseException | None:
        """Take the links that have ended out of the books; returns the error of one that failed."""
        for link, task in list(self._links.items()):
            if task.done():
                del self._links[link]
                if self._current is link:
                    self._current = None
                if not task.cancelled() and (error := task.exception()) is not None:
                    # Nobody will ever take what its steps say; those that wait for an answer must not wait for ever.
                    self._cancel(link.session.cut_off().cancel)
                    return error
        self._share_slots()
        return None

    # Between the links and the executor.

    def _apply(self, link: Link, effects: Effects) -> None:
        if self._stopping:
            # They crossed our wish for no more. Somebody else can begin them now.
            for lease in effects.start:
                link.session.release(lease)
        elif effects.start:
            self._executor.submit(effects.start)
        if effects.cancel:
            self._cancel(effects.cancel)
        if effects.drain and link is self._current and not self._stopping:
            logger.info("the server asks to be left: a new session is made, this one finishes its tasks")
            self._current = None
            self._settings.targets.advance()
            link.leave()
            self._changed.set()
        if link.session.is_open:
            self._on_connected()
        self._share_slots()

    def _cancel(self, leases: list[Lease]) -> None:
        for lease in self._executor.cancel(leases):
            # Never begun, so there will be no result, and it is no zombie.
            if lease.owner is not None:
                lease.owner.finish(lease, Released())

    def _deliver(self) -> None:
        for lease, result in self._executor.take_results():
            if lease.owner is None:
                continue
            if isinstance(result, Saving):
                lease.owner.save(lease, result)
            else:
                lease.owner.finish(lease, result)
        self._share_slots()
        for link in self._links:
            link.wake()

    def _share_slots(self) -> None:
        """Offer on the current session what the others and the zombies leave of the slots."""
        current = self._current
        if current is None or self._stopping:
            return
        taken = self._counters.zombies
        if len(self._links) > 1:
            taken += sum(link.session.held_count for link in self._links if link is not current)
        capacity = max(0, self._settings.slots - taken)
        if capacity != current.session.capacity:
            current.session.capacity = capacity
            current.wake()

    # The end.

    async def _drain(self) -> None:
        """Give back what was not begun, let the rest end and be acknowledged; past the time cut it off."""
        self._current = None
        for link in self._links:
            link.leave()
            self._give_back(link)
        if await self._wait_for_links(self._settings.drain_timeout, hurry=True):
            return
        logger.warning("%d steps have not ended in time and are cut off", self.held_count)
        for link in self._links:
            self._give_back(link)
            self._cancel(link.session.cut_off().cancel)
            link.wake()
        if any(link.session.is_open for link in self._links):
            await self._wait_for_links(ABANDON_TIMEOUT, hurry=False)

    def _give_back(self, link: Link) -> None:
        """Release what the steps' loop and threads have not come to."""
        held = [lease for lease in link.session.ledger.held.values() if lease.outcome is None]
        for lease in self._executor.withdraw(held):
            link.session.release(lease)
        link.wake()

    async def _wait_for_links(self, timeout: float, *, hurry: bool) -> bool:
        """Wait until all links have ended, the time is up, or there is hurry; tell if they have ended."""
        hurried = asyncio.create_task(self._hurry.wait())
        try:
            async with asyncio.timeout(timeout):
                while self._links:
                    waiting = {*self._links.values(), hurried} if hurry else set(self._links.values())
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if (error := self._collect()) is not None:
                        logger.error("a session could not be ended well: %s", error)
                    if hurry and hurried.done():
                        break
        except TimeoutError:
            pass
        finally:
            hurried.cancel()
        return not self._links

    async def _end(self) -> None:
        """End whatever is left, without waiting for it."""
        for link, task in self._links.items():
            self._cancel(link.session.cut_off().cancel)
            task.cancel()
        await asyncio.gather(*self._links.values(), return_exceptions=True)
        self._links.clear()
        self._executor.close()
        # Let gRPC deliver the last of its events while this loop is there; see `Link._close`.
        await asyncio.sleep(SETTLE_SECONDS)
