"""Leases outside a run's batch: heartbeats, reconnects, ended streams, and the sweeper."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fencepost_server.config import Config
from fencepost_server.engine.loops import Loop
from fencepost_server.engine.operations import Report, ReportKind
from fencepost_server.store import cluster, tasks
from fencepost_server.store.cluster import SessionRow
from fencepost_server.store.connection import Database
from fencepost_server.store.tasks import Expired, Lease, Ref

log = logging.getLogger("fencepost.leases")

_SKIPPED_PAUSE = 0.05
_ADOPT_PAUSES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_ADOPT_SECONDS, _ADOPT_AT_LEAST = 3.2, 0.5  # half of the shortest lease that there is; less is left of a timeout
_MAX_PAGES = 40
_MAX_LEASES = 100_000
_MAX_CLOSING = 1000
_OFTEN_FOR, _RARELY, _GIVEN_UP = 5.0, 1.0, 3600.0
"""Seconds: locked leases of an ended stream are tried at short pauses so long, then at this one, then no more."""
_STATEMENT_LEASES = 5000
_MAX_WAITING = 20  # frames of one session: a heartbeat of 10,000 leases has ten
_MAX_PROGRESS = 4 << 20  # characters of one session


@dataclass(slots=True, eq=False)
class Renewal:
    """Leases to renew. ``answered`` gets, as they are known, each renewed lease and None for each lost one.
    ``progress``: JSON text of what some of their steps told of themselves.
    """

    session_id: str
    namespace: str
    refs: list[Ref]
    answered: Callable[[dict[Ref, Lease | None]], None]
    wanted: Callable[[], bool]
    progress: dict[Ref, str] = field(default_factory=dict)
    tried: bool = False
    """Its leases were locked when they were tried."""

    @property
    def told(self) -> int:
        """The size of the progress."""
        return sum(map(len, self.progress.values()))

    @property
    def weight(self) -> int:
        """What it adds to a statement: a lease counts for one, and so does a KiB of progress."""
        return len(self.refs) + self.told // 1024


class Renewer:
    """Renews the leases of all heartbeats together, one frame of each session in turn.

    However many frames a session sends, another's waits for one of them at most; and each statement commits by
    itself, so that there is progress however many leases wait.
    """

    def __init__(self, config: Config, database: Database) -> None:
        self._config = config
        self._database = database
        self._waiting: dict[str, deque[Renewal]] = {}
        self.loop = Loop("renew", self.run_once)

    def submit(self, renewal: Renewal) -> None:
        """Queue a heartbeat. A session's newest ones stay when more come than are renewed, as while the database is
        away; older ones are not answered. Of progress, which nobody is promised, less may wait: the older is dropped.
        """
        frames = self._waiting.setdefault(renewal.session_id, deque(maxlen=_MAX_WAITING))
        frames.append(renewal)
        if renewal.progress:
            spare = _MAX_PROGRESS
            for frame in reversed(frames):
                spare -= frame.told
                if spare < 0:
                    frame.progress = {}
        self.loop.wake()

    async def run_once(self) -> float | None:
        """Renew a frame of each session. A lease that another transaction holds just now is tried again."""
        parts = _parts(self._turn())
        while parts:
            try:
                skipped = await self._renew(parts[-1])
            except BaseException:
                for renewal in (renewal for part in parts for renewal in part):
                    self._put_back(renewal)
                raise
            parts.pop()
            for renewal in skipped:
                self._put_back(renewal)
        if not self._waiting:
            return None
        fresh = any(not renewal.tried for frames in self._waiting.values() for renewal in frames)
        return 0.0 if fresh else _SKIPPED_PAUSE

    def _turn(self) -> list[Renewal]:
        turn = []
        for session_id, frames in list(self._waiting.items()):
            while frames:
                renewal = frames.popleft()
                if renewal.wanted():
                    turn.append(renewal)
                    break
            if not frames:
                del self._waiting[session_id]
        return turn

    def _put_back(self, renewal: Renewal) -> None:
        """To be tried again: before what came later, unless that is so much that it replaces it."""
        frames = self._waiting.setdefault(renewal.session_id, deque(maxlen=_MAX_WAITING))
        if len(frames) == _MAX_WAITING:
            return
        if renewal.tried:
            frames.append(renewal)
        else:
            frames.appendleft(renewal)

    async def _renew(self, renewals: Sequence[Renewal]) -> list[Renewal]:
        """Renew in one transaction. Returns what was locked."""
        namespace = renewals[0].namespace
        refs = list({ref for renewal in renewals for ref in renewal.refs})
        progress = {ref: text for renewal in renewals for ref, text in renewal.progress.items()}
        async with self._database.transaction() as session:
            renewed, locked = await tasks.renew(session, namespace, refs, progress)
        skipped: list[Renewal] = []
        for renewal in renewals:
            again = [ref for ref in renewal.refs if ref in locked]
            renewal.answered({ref: renewed.get(ref) for ref in renewal.refs if ref not in locked})
            if again:
                told = {ref: renewal.progress[ref] for ref in again if ref in renewal.progress}
                skipped.append(
                    Renewal(renewal.session_id, namespace, again, renewal.answered, renewal.wanted, told, tried=True)
                )
        return skipped


def _parts(renewals: Sequence[Renewal]) -> list[list[Renewal]]:
    """What one statement renews: of one namespace, and not much more than _STATEMENT_LEASES."""
    parts: list[list[Renewal]] = []
    size = 0
    for renewal in sorted(renewals, key=lambda renewal: renewal.namespace):
        size += renewal.weight
        if parts and parts[-1][0].namespace == renewal.namespace and size <= _STATEMENT_LEASES:
            parts[-1].append(renewal)
        else:
            parts.append([renewal])
            size = renewal.weight
    return parts


@dataclass(slots=True)
class Adopted:
    """What became of a process's leases: those kept, and those that it never received."""

    kept: dict[Ref, Lease] = field(default_factory=dict)
    orphans: list[tuple[Ref, str]] = field(default_factory=list)


async def adopt(database: Database, row: SessionRow, previous: Sequence[str], held: Sequence[Ref]) -> Adopted:
    """Move a process's held leases to its new session; what its previous sessions had and it does not hold was
    never received.

    ``previous`` are sessions of the same process (checked by the caller). A lease that a transaction holds just now is
    tried again for about three seconds, a third of the time that a worker waits for its Welcome, and for no more than
    half of the shortest lease that was kept: its heartbeats begin after the Welcome. Then the worker takes it for lost,
    while its outcome, if one is under way, still counts by its token.
    """
    adopted = Adopted()
    rest = list(held)
    now = asyncio.get_running_loop().time
    give_up = now() + _ADOPT_SECONDS
    for pause in _ADOPT_PAUSES:
        left = give_up - now()
        if not rest or left <= 0:
            break
        await asyncio.sleep(min(pause, left))
        async with database.transaction() as session:
            renewed, locked = await tasks.adopt(session, row.namespace, row.session_id, rest)
        adopted.kept.update(renewed)
        rest = [ref for ref in rest if ref in locked]
        give_up = min([give_up, *(now() + max(lease.seconds / 2, _ADOPT_AT_LEAST) for lease in renewed.values())])
    if previous:
        leases = await tasks.session_leases(database, previous, _MAX_LEASES)
        skipped = set(rest)
        adopted.orphans = [(ref, session_id) for ref, session_id in leases if ref not in skipped]
    return adopted


class Closer:
    """Cuts the leases of ended streams down to the grace. Survives an outage: what could not be cut is tried again.
    ``cut`` is told in how many seconds the leases that were cut run out."""

    def __init__(self, config: Config, database: Database, cut: Callable[[float], None]) -> None:
        self._config = config
        self._database = database
        self._cut = cut
        self._waiting: dict[str, float] = {}
        """Sessions, and since when (by the loop's clock)."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.loop = Loop("close", self.run_once)

    def submit(self, session_id: str) -> None:
        """A stream has ended."""
        self._waiting[session_id] = asyncio.get_running_loop().time()
        self._idle.clear()
        self.loop.wake()

    async def drain(self) -> None:
        """Wait until the leases of all ended streams were cut."""
        await self._idle.wait()

    async def run_once(self) -> float | None:
        """Handle all streams that have ended, together: a thousand of them may end at once."""
        if not self._waiting:
            return None
        ended = list(self._waiting)[:_MAX_CLOSING]
        left = await tasks.shorten(self._database, ended, self._config.disconnect_grace)
        self._cut(self._config.disconnect_grace)
        for session_id in ended:  # to the end, so that none keeps others from their turn
            self._waiting[session_id] = self._waiting.pop(session_id)
        now = asyncio.get_running_loop().time()
        given_up = [s for s in ended if s in left and now - self._waiting[s] > _GIVEN_UP]
        if given_up:
            log.warning("leases of %d ended sessions stayed locked: they last for their full time", len(given_up))
        closed = [*(s for s in ended if s not in left), *given_up]
        await cluster.close_sessions(self._database, closed)
        for session_id in closed:
            del self._waiting[session_id]
        if not self._waiting:
            self._idle.set()
            return None
        if not left:
            return 0.0
        return _SKIPPED_PAUSE if now - max(self._waiting.values()) < _OFTEN_FOR else _RARELY


class Sweeper:
    """Finds leases that ran out and reports them, in bounded pages; each report is checked again under the locks."""

    def __init__(self, config: Config, database: Database, report: Callable[[Sequence[Report]], None]) -> None:
        self._config = config
        self._database = database
        self._report = report
        self._due = asyncio.get_running_loop().time()
        self.loop = Loop("sweep", self.run_once)

    def due_by(self, seconds: float) -> None:
        """A lease runs out in so many seconds, perhaps sooner than those known."""
        due = asyncio.get_running_loop().time() + seconds
        if due < self._due:
            self._due = due
            self.loop.wake()

    def due_in(self, seconds: float | None) -> None:
        """The probe knows when the next lease runs out; None: there is none."""
        now = asyncio.get_running_loop().time()
        self._due = now + 3600 if seconds is None else now + seconds
        self.loop.wake()

    async def run_once(self) -> float | None:
        """One sweep over all that is due."""
        now = asyncio.get_running_loop().time()
        if self._due > now:
            return self._due - now
        self._due = now + 3600  # before the look: whoever tells of an earlier expiry meanwhile is not overruled
        try:
            await self._sweep()
        except BaseException:
            self._due = now
            raise
        return max(0.0, self._due - asyncio.get_running_loop().time())

    async def _sweep(self) -> None:
        after: Expired | None = None
        for _ in range(_MAX_PAGES):
            page = await tasks.expired(self._database, after, self._config.sweep_batch)
            self._report(
                [Report(ReportKind.EXPIRE, e.run_id, e.task_id, e.token, e.namespace, b"expire") for e in page]
            )
            if len(page) < self._config.sweep_batch:
                break
            after = page[-1]
