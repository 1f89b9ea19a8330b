"""What runs in the session's thread: the links to servers, the executor between them and users' code, the
drain.

There is one link that takes tasks and, after a server asked to be left (Drain), a bounded number of older
ones that finish theirs. The capacity that the current one offers is what the older ones and zombies leave of
the slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import grpc

from fencepost.advances import Given, Leaving
from fencepost.channel import Backoff, Targets
from fencepost.checkpoints import Saving
from fencepost.decider import Decider
from fencepost.executor import Executor
from fencepost.failure import Released
from fencepost.history_pages import HistoryPages, Page, Reading
from fencepost.identity import Identity
from fencepost.lease import DecideLease
from fencepost.link import Link
from fencepost.queries import Answer
from fencepost.registering import Registering
from fencepost.run_cache import Limits
from fencepost.sdk_log import SdkLog
from fencepost.session import Session

if TYPE_CHECKING:
    from fencepost.lease import Lease, Owner
    from fencepost.ledger import Counters, Effects

logger = SdkLog("fencepost.worker")

MAX_LEAVING_LINKS = 4
ABANDON_TIMEOUT = 5.0
SETTLE_SECONDS = 0.02
WATCH_INTERVAL = 0.25


@dataclass(frozen=True, slots=True)
class Settings:
    """How a worker runs; times in seconds."""

    identity: Identity
    targets: Targets
    slots: int
    workflow_slots: int
    workflow_cache: int
    deadlock_timeout: float
    on_input_change: Literal["warn", "block"]
    drain_timeout: float
    cancel_after_lease: float | None
    decider: type[Decider] = Decider


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
        identity = settings.identity
        self._registering = Registering(identity.namespace, identity.workflows.values())
        self._decider: Decider | None = None
        self._pages: HistoryPages | None = None
        if identity.workflows:
            limits = Limits(
                settings.workflow_slots, settings.workflow_cache, settings.deadlock_timeout, settings.on_input_change
            )
            self._decider = settings.decider(
                identity.workflows, users_loop, asyncio.get_running_loop(), limits, self._deliver_decisions
            )
            self._pages = HistoryPages(identity.namespace, self._channel_of, self._tell_page)

    @property
    def held_count(self) -> int:
        """How many leases the worker holds, over all its sessions."""
        return sum(link.session.held_count for link in list(self._links))

    @property
    def cached_count(self) -> int:
        """How many code runs are in memory."""
        return self._decider.cached if self._decider is not None else 0

    def stop(self, *, now: bool = False) -> None:
        """Take no new tasks, finish and end; ``now`` does not wait for what runs."""
        self._stopping = True
        if now:
            self._hurry.set()
        self._changed.set()

    async def main(self) -> None:
        """Work until stopped. Raises FencepostError if a server refuses the worker for good."""
        error: BaseException | None = None
        watch = asyncio.create_task(self._watch_turns())
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
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch_turns(self) -> None:
        """See to it that no workflow holds up the others, from this thread, because theirs is the one held up."""
        if self._decider is not None:
            while True:
                await asyncio.sleep(min(WATCH_INTERVAL, self._settings.deadlock_timeout / 4))
                try:
                    self._decider.watchdog.check()
                except Exception:
                    logger.exception("a fault of the SDK as it looked after the workflows; the worker goes on")

    def _open(self, delay: float) -> None:
        settings = self._settings
        session = Session(
            settings.identity,
            self._counters,
            capacity=settings.slots,
            workflow_capacity=settings.workflow_slots if self._decider is not None else 0,
            cancel_after_lease=settings.cancel_after_lease,
        )
        link = Link(session, settings.targets, self._backoff, self._apply, self._registering)
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
                    self._cut_off(link)
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
        if effects.news:
            self._tell(link, effects)
        if effects.drain and link is self._current and not self._stopping:
            logger.info("the server asks to be left: a new session is made, this one finishes its tasks")
            self._current = None
            self._settings.targets.advance(link.address)
            link.leave()
            self._tell_leaving()
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

    # Between the links and the decider.

    def _tell(self, link: Link, effects: Effects) -> None:
        """Let the decider know, but for new tasks when the worker wants no more."""
        if self._decider is None:
            return
        if self._stopping:
            for heard in effects.news:
                if isinstance(heard, Given):
                    link.session.release(heard.lease)
            self._decider.tell([heard for heard in effects.news if not isinstance(heard, Given)])
        else:
            self._decider.tell(effects.news)

    def _tell_leaving(self) -> None:
        if self._decider is not None:
            self._decider.tell([Leaving()])

    def _tell_page(self, page: Page) -> None:
        if self._decider is not None:
            self._decider.tell([page])

    def _channel_of(self, owner: Owner | None) -> grpc.aio.Channel | None:
        """Where the histories of a session's runs can be read now."""
        return next((link.channel for link in self._links if link.session is owner), None)

    def _deliver_decisions(self) -> None:
        if self._decider is None or self._pages is None:
            return
        for said in self._decider.take():
            if isinstance(said, Reading):
                self._pages.read(said)
            elif isinstance(said, Answer):
                said.session.answer(said.item)
            else:
                lease, what = said
                if isinstance(lease.owner, Session):
                    lease.owner.decided(lease, what)
        for link in self._links:
            link.wake()

    def _share_slots(self) -> None:
        """Offer on the current session what the others and the zombies leave of the slots."""
        current = self._current
        if current is None or self._stopping:
            return
        session = current.session
        taken, decided = self._counters.zombies, 0
        if len(self._links) > 1:
            others = [link.session.ledger for link in self._links if link is not current]
            decided = sum(ledger.decide_count for ledger in others)
            taken += sum(len(ledger.held) for ledger in others) - decided
        capacity = max(0, self._settings.slots - taken)
        workflow_capacity = max(0, self._settings.workflow_slots - decided) if self._decider is not None else 0
        if (capacity, workflow_capacity) != (session.capacity, session.workflow_capacity):
            session.capacity, session.workflow_capacity = capacity, workflow_capacity
            current.wake()

    # The end.

    async def _drain(self) -> None:
        """Give back what was not begun, let the rest end and be acknowledged; past the time cut it off."""
        self._current = None
        for link in self._links:
            link.leave()
            self._give_back(link)
        self._tell_leaving()
        if await self._wait_for_links(self._settings.drain_timeout, hurry=True):
            return
        if held := self.held_count:
            logger.warning("steps that have not ended in time and are cut off: %d", held)
        for link in self._links:
            self._give_back(link)
            self._cut_off(link)
            link.wake()
        if any(link.session.is_open for link in self._links):
            await self._wait_for_links(ABANDON_TIMEOUT, hurry=False)

    def _cut_off(self, link: Link) -> None:
        """End what still runs of a session's, without waiting for it."""
        effects = link.session.cut_off()
        self._cancel(effects.cancel)
        self._tell(link, effects)

    def _give_back(self, link: Link) -> None:
        """Release what the steps' loop and threads have not come to."""
        held = [lease for lease in link.session.ledger.held.values() if not isinstance(lease, DecideLease)]
        held = [lease for lease in held if lease.outcome is None]
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
            self._cut_off(link)
            task.cancel()
        await asyncio.gather(*self._links.values(), return_exceptions=True)
        self._links.clear()
        self._executor.close()
        if self._decider is not None:
            self._decider.close()
        if self._pages is not None:
            await self._pages.close()
        # Let gRPC deliver the last of its events while this loop is there; see `Link._close`.
        await asyncio.sleep(SETTLE_SECONDS)
