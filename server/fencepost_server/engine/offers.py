"""Blocked code runs, offered to each worker process that comes with their code: they go on by themselves when one
fits.

A hint, like all that is here: what is lost with this server is offered again when the next worker connects, and
RetryRun does it at any time. Whether a run may be offered is decided under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fencepost_server.domain.errors import Overloaded, ServerDraining
from fencepost_server.engine.loops import Loop
from fencepost_server.engine.operations import Command, CommandKind, WorkerSession
from fencepost_server.store import tasks
from fencepost_server.store.connection import Database

_PAGE = 200
_AGAIN = 0.05


@dataclass(slots=True)
class _Offer:
    """Who has come. ``after``: the last run of the page before."""

    namespace: str
    places: list[tuple[str, str]] = field(default_factory=list)
    process_nonce: str = ""
    gone: bool = False
    after: str = tasks.NO_RUN


class Offers:
    """Finds blocked runs for workers that have come, a page at a time."""

    def __init__(self, database: Database, submit: Callable[[Command], None]) -> None:
        self._database = database
        self._submit = submit
        self._waiting: deque[_Offer] = deque()
        self.loop = Loop("offers", self.run_once)

    def came(self, session: WorkerSession) -> None:
        """The DECIDE side of a worker's session: what is blocked is for it to try."""
        self._add(session, gone=False)

    def gone(self, session: WorkerSession) -> None:
        """It has ended: what it was to try, and has not, is for all again."""
        self._add(session, gone=True)

    def _add(self, session: WorkerSession, *, gone: bool) -> None:
        offer = _Offer(session.namespace, gone=gone)
        for queue, handler in session.handlers:
            plain, _, nonce = handler.partition("#")
            if nonce:
                offer.process_nonce = nonce
                offer.places.append((queue, plain))
        if offer.process_nonce:
            self._waiting.append(offer)
            self.loop.wake()

    async def run_once(self) -> float | None:
        """One page of one offer."""
        if not self._waiting:
            return None
        offer = self._waiting[0]
        page = await tasks.blocked_deciders(self._database, offer.namespace, offer.places, offer.after, _PAGE)
        try:
            for run_id in page:
                kind = CommandKind.TAKE_BACK if offer.gone else CommandKind.OFFER
                self._submit(Command(kind, run_id, offer.namespace, reason=offer.process_nonce))
                offer.after = run_id
        except (Overloaded, ServerDraining):
            return _AGAIN
        if len(page) < _PAGE:
            self._waiting.popleft()
        return 0.0 if self._waiting else None
