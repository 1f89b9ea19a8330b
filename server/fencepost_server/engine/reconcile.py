"""Tasks that are leased to a session but are not on its stream.

To a session of this server, that happens when the answer to a commit was lost: the lease is in the database, and
nobody was told. They are looked for after every such commit, for as long as Postgres may still be at it. To a session
that its process has left for one here, it happens as long as the other server has not heard of that. Both go back as
undelivered: their attempt is not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fencepost_server.engine.dispatch import Dispatcher
from fencepost_server.engine.loops import Loop
from fencepost_server.engine.operations import Report, ReportKind
from fencepost_server.store import tasks
from fencepost_server.store.connection import Database
from fencepost_server.store.tasks import Ref

_MAX_LEASES = 100_000
_SETTLE = 1.0
# A connection that was cut says nothing about the transaction that was on it: Postgres may commit it when it comes to
# read what it had been sent.
_LOOKS, _BETWEEN_LOOKS = 4, 3.0
_FOLLOWED = 10.0


@dataclass(frozen=True, slots=True)
class _Left:
    """A session that its process has left, followed until then. ``held`` are leases that the process did receive."""

    namespace: str
    held: frozenset[Ref]
    until: float


class Reconciler:
    """Compares the leases of this server's sessions with what is on their streams, twice: a lease that is just
    on its way from a commit to its stream is unknown for a moment, one that was lost stays so.
    """

    def __init__(self, database: Database, dispatcher: Dispatcher, report: Callable[[Sequence[Report]], None]) -> None:
        self._database = database
        self._dispatcher = dispatcher
        self._report = report
        self._looks = 0
        self._left: dict[str, _Left] = {}
        self.loop = Loop("reconcile", self.run_once)

    def request(self) -> None:
        """The answer to a commit was lost."""
        self._looks = _LOOKS
        self.loop.wake()

    def follow(self, namespace: str, sessions: Sequence[str], held: Sequence[Ref]) -> None:
        """A process that has left ``sessions``, with ``held``, is here now. Their server may lease to them for a
        moment yet.
        """
        if sessions:
            left = _Left(namespace, frozenset(held), asyncio.get_running_loop().time() + _FOLLOWED)
            self._left.update(dict.fromkeys(sessions, left))
            self.loop.wake()

    async def run_once(self) -> float | None:
        """Take back what was lost, if a commit's answer was or a process has come from elsewhere."""
        if self._looks:
            self._looks -= 1  # before the look: a request that comes meanwhile is not forgotten
            try:
                await self._take_back()
            except BaseException:
                self._looks = _LOOKS
                raise
        if self._left:
            await self._take_back_left()
        return _BETWEEN_LOOKS if self._looks or self._left else None

    async def _take_back_left(self) -> None:
        rows = await tasks.session_leases(self._database, list(self._left), _MAX_LEASES)
        lost = [(ref, left.namespace) for ref, owner in rows if ref not in (left := self._left[owner]).held]
        self._report([Report(ReportKind.UNDELIVERED, *ref, namespace) for ref, namespace in lost])
        now = asyncio.get_running_loop().time()
        self._left = {session_id: left for session_id, left in self._left.items() if left.until > now}

    async def _take_back(self) -> None:
        suspects = await self._unknown()
        if suspects:
            await asyncio.sleep(_SETTLE)
            lost = suspects & await self._unknown()
            self._report([Report(ReportKind.UNDELIVERED, *ref, namespace) for ref, namespace in lost])

    async def _unknown(self) -> set[tuple[Ref, str]]:
        sessions = {session.session_id: session for session in self._dispatcher.sessions}
        if not sessions:
            return set()
        rows = await tasks.session_leases(self._database, list(sessions), _MAX_LEASES)
        return {(ref, sessions[owner].namespace) for ref, owner in rows if not sessions[owner].knows(ref)}
