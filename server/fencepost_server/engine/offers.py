"""Blocked code runs, offered to the workers that have their code: they go on by themselves when one fits.

Each server does it for the workers that are connected to it: when one comes, when a run is blocked, and every few
seconds, because one may have been busy. A run is leased to one of them at a time, past what is claimed, so that a
misfit does not take it again and again; which processes have tried is in the run. Whether it may be offered is decided
under its lock: what is here can be lost.
"""

from __future__ import annotations

from collections.abc import Callable

from fencepost_server.domain.errors import Overloaded, ServerDraining
from fencepost_server.domain.rows import Control
from fencepost_server.engine.dispatch import Dispatcher
from fencepost_server.engine.loops import Loop
from fencepost_server.engine.operations import Command, CommandKind, WorkerSession
from fencepost_server.store import tasks
from fencepost_server.store.connection import Database
from fencepost_server.store.tasks import Blocked

_PAGE = 200
_AGAIN = 0.05
_INTERVAL = 5.0

Places = dict[tuple[str, str], list[WorkerSession]]
"""(queue, handler) → the sides of sessions that take such DECIDE tasks."""


class Offers:
    """Finds blocked runs for the workers of this server, a page at a time."""

    def __init__(self, database: Database, dispatcher: Dispatcher, submit: Callable[[Command], None]) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self._submit = submit
        self._after: dict[str, str] = {}
        """By namespace: the last run that was looked at; those behind it are next."""
        self.loop = Loop("offers", self.run_once)

    def wake(self) -> None:
        """A worker has come, or a run is blocked."""
        self.loop.wake()

    async def run_once(self) -> float | None:
        """One page a namespace."""
        namespaces: dict[str, Places] = {}
        for session in self._dispatcher.deciders:
            places = namespaces.setdefault(session.namespace, {})
            for queue, handler in session.handlers:
                places.setdefault((queue, handler), []).append(session)
        if not namespaces:
            self._after.clear()
            return None
        more = False
        for namespace, places in namespaces.items():
            more |= await self._look(namespace, places)
        return _AGAIN if more else _INTERVAL

    async def _look(self, namespace: str, places: Places) -> bool:
        """Offer the next page; True if there are more behind it."""
        after = self._after.pop(namespace, tasks.NO_RUN)
        page = await tasks.blocked_deciders(self._database, namespace, list(places), after, _PAGE)
        for blocked in page:
            session = _candidate(blocked, places)
            if session is None:
                continue
            try:
                self._submit(Command(CommandKind.OFFER, blocked.run_id, namespace, reason=session.session_id))
            except (Overloaded, ServerDraining):
                return False  # and at the next look from the beginning
        if len(page) < _PAGE:
            return False
        self._after[namespace] = page[-1].run_id
        return True


def _candidate(blocked: Blocked, places: Places) -> WorkerSession | None:
    """A worker of this server that has room, and whose process has not tried."""
    decider = None if blocked.control is None else Control.from_json(blocked.control).decider
    if decider is None:
        return None
    for session in places.get((blocked.queue, blocked.handler), ()):
        if session.nonce not in decider.tried and session.room() > 0:
            return session
    return None
