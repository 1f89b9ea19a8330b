"""Who gets which ready task: claims by demand, and the decision to hand on the next step without a claim.

Hints say where ready work is: from this server's commits, from other servers' notifications, from the probe.
They only save looking; a hint too many costs one lookup, one too few is repaired by the next probe (I10).
Sessions of one namespace with the same handlers are served by one claim; room is reserved before the claim, so
that a session never has more out than its capacity.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fencepost_server.config import Config
from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.domain.graph import Graph
from fencepost_server.domain.model import Failure, LeasedTask, RunRow, TaskKind
from fencepost_server.domain.ops import Decide
from fencepost_server.domain.rows import Control, Decider, TaskExtra
from fencepost_server.engine.catalog import Catalog
from fencepost_server.engine.changes import Ready
from fencepost_server.engine.deciding import history_event
from fencepost_server.engine.loops import Loop
from fencepost_server.engine.operations import Report, ReportKind, WorkerSession
from fencepost_server.store import tasks
from fencepost_server.store.connection import Database
from fencepost_server.store.tasks import Claimed, History, Want

log = logging.getLogger("fencepost.dispatch")

Place = tuple[str, str, str, int]
"""namespace, queue, handler, priority."""

DECIDE_SIDE = "/decide"
"""What the key of a session's side for DECIDE tasks has behind the session's id."""
_NO_LEVEL = 1 << 15
_FEW_PLACES, _ASKED = 16, 8
"""What a task that nobody reported costs at most to hand on: it is one of many in a batch."""
_UNREADABLE = (ValueError, KeyError, TypeError)
"""What rows raise that another release has written otherwise."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """One claim to make."""

    namespace: str
    wants: list[Want]
    seen: dict[Place, int]
    slots: list[WorkerSession]


class Dispatcher:
    """Keeps the sessions of this server supplied. ``report`` takes reports about tasks that could not be sent."""

    def __init__(
        self, config: Config, database: Database, catalog: Catalog, report: Callable[[Sequence[Report]], None]
    ) -> None:
        self._config = config
        self._database = database
        self._catalog = catalog
        self._sessions: dict[str, WorkerSession] = {}
        self._takers: dict[tuple[str, str, str], deque[WorkerSession]] = {}
        """By namespace, queue and handler."""
        self._ready: dict[Place, int] = {}
        self._ready_at: Counter[int] = Counter()
        """How many places have ready work, by priority."""
        self._top = _NO_LEVEL
        """The highest priority that has ready work: most of the time that settles the question."""
        self._due: dict[Place, float] = {}
        self._hints = 0
        self.draining = False
        self._claiming = asyncio.Lock()
        self._report = report
        self.on_ambiguous: Callable[[], None] | None = None
        """Called when it is not known whether a claim was committed."""
        self.on_decider: Callable[[], None] | None = None
        """Called when a session comes that decides code runs."""
        self.loop = Loop("dispatch", self.run_once)

    # What there is

    def add(self, session: WorkerSession) -> None:
        """A session that may take tasks."""
        self._sessions[session.key] = session
        for handler in session.handlers:
            self._takers.setdefault((session.namespace, *handler), deque()).append(session)
        if self.on_decider is not None and session.key.endswith(DECIDE_SIDE):
            self.on_decider()
        self.loop.wake()

    def remove(self, session: WorkerSession) -> None:
        """A session that takes no more."""
        if self._sessions.get(session.key) is not session:
            return
        del self._sessions[session.key]
        for handler in session.handlers:
            place = (session.namespace, *handler)
            takers = self._takers[place]
            takers.remove(session)
            if not takers:
                del self._takers[place]

    @property
    def sessions(self) -> Sequence[WorkerSession]:
        """Those that may take tasks."""
        return list(self._sessions.values())

    @property
    def deciders(self) -> Sequence[WorkerSession]:
        """The sides of sessions that take DECIDE tasks, while this server leases any."""
        return [] if self.draining else [s for s in self._sessions.values() if s.key.endswith(DECIDE_SIDE)]

    def session(self, session_id: str) -> WorkerSession | None:
        """The session of that id, if it is this server's."""
        return self._sessions.get(session_id)

    def sticky(self, session_id: str) -> WorkerSession | None:
        """The session that decided a run last, if it can take the run's DECIDE task."""
        session = self._sessions.get(session_id + DECIDE_SIDE)
        return session if session is not None and not self.draining and session.open and session.room() > 0 else None

    def hint(self, ready: Iterable[Ready]) -> None:
        """Work became ready, or will be."""
        now = asyncio.get_running_loop().time()
        for work in ready:
            place = (work.namespace, work.queue, work.handler, work.priority)
            if work.delay <= 0:
                self._mark(place)
            elif work.delay < 86_400:
                due = now + work.delay
                self._due[place] = min(due, self._due.get(place, due))
        self.loop.wake()

    @property
    def mark(self) -> int:
        """A moment, for ``forget``."""
        return self._hints

    def forget(self, mark: int) -> None:
        """Drop what was known before that moment: a probe that began then is about to tell all that is there."""
        for place in [place for place, hint in self._ready.items() if hint <= mark]:
            self._unmark(place)

    def wake(self) -> None:
        """Room became free."""
        self.loop.wake()

    def higher_waits(self, session: WorkerSession, priority: int) -> bool:
        """Does work of a higher priority wait that this session could do?"""
        if priority <= self._top:
            return False
        return any(
            place[3] < priority and place[0] == session.namespace and (place[1], place[2]) in session.handlers
            for place in self._ready
        )

    def _mark(self, place: Place) -> None:
        if place not in self._ready:
            self._ready_at[place[3]] += 1
            self._top = min(self._top, place[3])
        self._hints += 1
        self._ready[place] = self._hints

    def _unmark(self, place: Place) -> None:
        if self._ready.pop(place, None) is not None:
            self._ready_at[place[3]] -= 1
            self._top = min((level for level, places in self._ready_at.items() if places), default=_NO_LEVEL)

    def eager(self, report: Report, run: RunRow, queue: str, handler: str) -> int | None:
        """May the session that completed a step take the next one at once? See engine.changes.Eager."""
        session = report.session
        if session is None or self.draining or (queue, handler) not in session.handlers:
            return None
        depth = session.eager_depth(report.run_id, report.task_id)
        if depth is None or depth >= self._config.eager_limit or self.higher_waits(session, run.priority):
            return None
        return depth + 1

    def taker(self, run: RunRow, queue: str, handler: str) -> WorkerSession | None:
        """See engine.changes.Taker. Sessions take turns. What no claim has looked for yet, or has left behind, comes
        first: then the task waits with it.
        """
        takers = self._takers.get((run.namespace, queue, handler))
        if not takers or self.draining or not self._config.eager_limit or len(self._ready) > _FEW_PLACES:
            return None
        for _ in range(min(len(takers), _ASKED)):
            takers.rotate(-1)
            session = takers[0]
            if session.open and session.room() > 0 and not self._anything_waits(session):
                return session
        return None

    def _anything_waits(self, session: WorkerSession) -> bool:
        return any(p[0] == session.namespace and (p[1], p[2]) in session.handlers for p in self._ready)

    # Claims

    async def run_once(self) -> float | None:
        """Claim until nobody has room for what is ready. Returns the seconds until known work falls due."""
        self._ripen()
        while not self.draining and (demands := self._demands()):
            for demand in demands:
                async with self._claiming:
                    await self._claim(demand)
        if self.draining or not self._due:
            return None
        return max(0.0, min(self._due.values()) - asyncio.get_running_loop().time())

    async def claimed(self) -> None:
        """Wait until the claim that is under way, if one is, has been delivered or given back."""
        async with self._claiming:
            pass

    def _ripen(self) -> None:
        now = asyncio.get_running_loop().time()
        ripe = [place for place, due in self._due.items() if due <= now]
        for place in ripe:
            del self._due[place]
            self._mark(place)

    def _demands(self) -> list[_Demand]:
        """One demand a group of sessions with the same handlers, for what is ready and fits."""
        if not self._ready:
            return []
        groups: dict[tuple[str, frozenset[tuple[str, str]]], list[WorkerSession]] = {}
        for session in self._sessions.values():
            if session.room() > 0:
                groups.setdefault((session.namespace, session.handlers), []).append(session)
        demands = []
        for (namespace, handlers), sessions in groups.items():
            seen = {p: n for p, n in self._ready.items() if p[0] == namespace and (p[1], p[2]) in handlers}
            if seen:
                wants = [Want(p[1], p[2], p[3]) for p in sorted(seen, key=lambda p: (p[3], seen[p]))]
                demands.append(_Demand(namespace, wants, seen, self._slots(sessions)))
        return demands

    def _slots(self, sessions: Sequence[WorkerSession]) -> list[WorkerSession]:
        """Free slots, one of each session in turn, up to the size of a claim."""
        rooms = [(session, session.room()) for session in sessions]
        slots: list[WorkerSession] = []
        turn = 0
        while rooms and len(slots) < self._config.claim_batch:
            slots.extend(session for session, _ in rooms)
            turn += 1
            rooms = [(session, room) for session, room in rooms if room > turn]
        return slots[: self._config.claim_batch]

    async def _claim(self, demand: _Demand) -> None:
        """One claim: reserve, lease, deliver."""
        slots = []
        for slot in demand.slots:
            if slot.open and slot.room() > 0:  # asked slot by slot: room may have shrunk since the demand was made
                slot.reserve(1)
                slots.append(slot)
        if not slots:
            return
        frames = {slot.session_id: slot.last_frame() for slot in slots}
        try:
            claimed, histories = await tasks.claim(
                self._database,
                demand.namespace,
                demand.wants,
                [slot.session_id for slot in slots],
                self._config.claim_batch_bytes,
                _histories_wanted,
            )
        except DatabaseUnavailable:
            if self.on_ambiguous is not None:
                self.on_ambiguous()
            raise
        finally:
            for slot in slots:
                slot.reserve(-1)
        if len(claimed) < len(slots) and sum(task.input.size for task in claimed) < self._config.claim_batch_bytes:
            for place, hint in demand.seen.items():
                if self._ready.get(place) == hint:
                    self._unmark(place)
        if claimed:
            sessions = {slot.session_id: slot for slot in slots}
            await self._deliver(demand.namespace, claimed, sessions, frames, histories)

    async def _deliver(
        self,
        namespace: str,
        claimed: list[Claimed],
        sessions: dict[str, WorkerSession],
        frames: dict[str, int],
        histories: dict[str, History],
    ) -> None:
        """Send what was claimed; what can't be sent goes back."""
        given: dict[str, list[LeasedTask]] = {}
        unsent: list[Claimed | LeasedTask] = []
        try:
            for task in claimed:
                graph = await self._catalog.graph(self._database, task.definition_hash)
                if graph.broken:  # its run is blocked when the task comes back
                    unsent.append(task)
                    continue
                try:
                    leased = _leased(task, namespace, graph, frames[task.session_id], histories)
                except _UNREADABLE:
                    # A newer release has written it: when its lease has run out, a server that knows it may have it.
                    log.exception("task %d of run %s can't be read", task.task_id, task.run_id)
                    continue
                given.setdefault(task.session_id, []).append(leased)
        except Exception:
            self.give_back(namespace, claimed)
            raise
        for session_id, some in given.items():
            unsent.extend(sessions[session_id].settle((), some))
        if unsent:
            self.give_back(namespace, unsent)

    def give_back(self, namespace: str, unsent: Iterable[Claimed | LeasedTask]) -> None:
        """Tasks that were leased but are on no stream become ready again, and get their attempt back."""
        self._report([Report(ReportKind.UNDELIVERED, t.run_id, t.task_id, t.token, namespace) for t in unsent])


def _histories_wanted(claimed: Sequence[Claimed]) -> list[tuple[str, int]]:
    """A DECIDE task comes with what its session does not know."""
    wanted = []
    for task in claimed:
        with suppress(*_UNREADABLE):  # it is not delivered
            if (known := _known(task)[1]) is not None:
                wanted.append((task.run_id, known))
    return wanted


def _known(task: Claimed) -> tuple[Decider, int | None]:
    """Of a DECIDE task, where its function is, and up to which event its session knows the run; of others None."""
    if task.control is not None and TaskExtra.from_json(task.extra).kind is TaskKind.DECIDE:
        decider = Control.from_json(task.control).decider
        if decider is not None:
            return decider, decider.known if decider.session == task.session_id else 0
    return Decider(), None


def _leased(task: Claimed, namespace: str, graph: Graph, frame_id: int, histories: dict[str, History]) -> LeasedTask:
    extra = TaskExtra.from_json(task.extra)
    node_id = graph.node_id(task.node_index) if extra.plan is None else extra.plan[1]
    decide = None
    if extra.kind is TaskKind.DECIDE and graph.code is not None:
        decider, known = _known(task)
        assert known is not None  # as its history was wanted
        events = tuple(history_event(row) for row in histories[task.run_id])
        last = max(
            task.last_seq, events[-1].seq if events else 0
        )  # a page may be less than all, or later than the claim
        decide = Decide(events, known, last, decider.advance_no, decider.seen_seq, graph.code.compatibility_id)
    return LeasedTask(
        task.run_id, task.task_id, task.token, namespace, task.workflow_id, task.definition_hash, task.handler,
        task.queue, task.priority, node_id, task.attempt, task.lease_ms / 1000,
        None if task.timeout_ms is None else task.timeout_ms / 1000, task.input,
        None if task.feedback is None else Failure.from_json(task.feedback), task.user_id, 0, frame_id,
        extra.kind, task.checkpoint, None if extra.output_seq is None else task.undo_output, extra.unfinished,
        extra.step_key(task.run_id), decide,
    )  # fmt: skip
