"""The engine of one server: lanes and loops put together, and the use cases that the edges call.

It holds no truth: everything here can be lost at any moment, and another server goes on (I13).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from fencepost_server.config import Config
from fencepost_server.domain.errors import FencepostError, Internal, ServerDraining, SessionTimedOut
from fencepost_server.domain.model import LeasedTask
from fencepost_server.engine import leases
from fencepost_server.engine.backlog import Backlog
from fencepost_server.engine.blocked import BlockedRuns
from fencepost_server.engine.catalog import Catalog
from fencepost_server.engine.changes import Ready, by_session
from fencepost_server.engine.commit import Committer, Decided
from fencepost_server.engine.dispatch import Dispatcher
from fencepost_server.engine.firing import Firing
from fencepost_server.engine.leases import Adopted, Closer, Renewer, Sweeper
from fencepost_server.engine.loops import Loop
from fencepost_server.engine.notify import Listener, News, Notifier, Stop
from fencepost_server.engine.offers import Offers
from fencepost_server.engine.operations import (
    Command,
    CommandKind,
    Deliver,
    Fire,
    Operation,
    Report,
    ReportKind,
    Start,
    Started,
    WorkerSession,
)
from fencepost_server.engine.reconcile import Reconciler
from fencepost_server.engine.removal import Remover
from fencepost_server.engine.retention import Retention
from fencepost_server.engine.starting import StartRequest, make_start
from fencepost_server.engine.timers import Outbox, Timers
from fencepost_server.engine.watch import Watches
from fencepost_server.store import cluster
from fencepost_server.store.cluster import SessionRow
from fencepost_server.store.connection import Database
from fencepost_server.store.lane import Lane
from fencepost_server.store.tasks import Ref

log = logging.getLogger("fencepost.engine")

_HOUSEKEEPING = 60.0
_CLOSING = 2.0


class Engine:
    """See the module. ``start`` before use; ``drain`` then ``stop`` at the end."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.server_id = str(uuid.uuid4())
        self.database = Database(config, "loops", config.loop_pool_size)
        self.reads = Database(config, "reads", config.read_pool_size)
        self.catalog = Catalog()
        self.events: Counter[int] = Counter()
        """How many events this server has committed, by type."""
        self.dispatcher = Dispatcher(config, self.database, self.catalog, self.report)
        self.committer = Committer(
            config,
            self.catalog,
            self.dispatcher.eager,
            self.dispatcher.taker,
            self.dispatcher.sticky,
            self._told,
        )
        self.lanes = [Lane[Operation](str(n), config, self.committer.work) for n in range(config.lanes)]
        self.watches = Watches(config, self.database)
        self.renewer = Renewer(config, self.database)
        self.sweeper = Sweeper(config, self.database, self.report)
        self.closer = Closer(config, self.database, self.sweeper.due_by)
        self.reconciler = Reconciler(self.database, self.dispatcher, self.report)
        self.timers = Timers(config, self.database, self._found)
        self.outbox = Outbox(config, self.database, self._found)
        self.notifier = Notifier(config, self.database, self.server_id)
        self.firing = Firing(config, self.database, self.start_run, self.submit)
        self.listener = Listener(config, self.server_id, self.dispatcher.hint, self._ended, self._stop, self._news)
        self.offers = Offers(self.database, self.dispatcher, self.submit)
        self.dispatcher.on_decider = self.offers.wake
        self.remover = Remover(self.database, self.reads, self.submit)
        self.retention = Retention(config, self.database)
        self.blocked = BlockedRuns()
        self.backlog = Backlog(self.reads)
        self.draining = False
        self.loops = [
            self.dispatcher.loop,
            self.watches.loop,
            self.renewer.loop,
            self.closer.loop,
            self.reconciler.loop,
            self.sweeper.loop,
            self.notifier.loop,
            self.listener.loop,
            self.timers.loop,
            self.outbox.loop,
            self.firing.loop,
            self.remover.loop,
            self.offers.loop,
            self.retention.loop,
            Loop("probe", self.probe_once),
            Loop("housekeeping", self.housekeep_once),
        ]
        self.last_probe = 0.0
        """Monotonic time of the last good probe: how the server knows that it has a database."""
        for lane in self.lanes:
            lane.on_recovery = self.reconciler.request
        self.dispatcher.on_ambiguous = self.reconciler.request

    # Life

    async def start(self) -> None:
        """Begin to work; does not wait for the database."""
        await self.database.open()
        await self.reads.open()
        for lane in self.lanes:
            lane.start()
        for loop in self.loops:
            loop.start()

    def drain(self) -> None:
        """Lease nothing more; starts are refused from now on."""
        self.draining = True
        self.dispatcher.draining = True
        self.firing.draining = True

    async def flush(self, timeout: float) -> None:
        """Wait until the lanes are empty and the leases of workers that were cut off last for no more than the grace,
        at most so many seconds. Before that for a claim under way: its sessions have ended, so its tasks go back by the
        lanes. Cut off it would be committed all the same, and cost attempts.
        """
        late = "operations still wait for the database"
        try:
            async with asyncio.timeout(timeout):
                await self.dispatcher.claimed()
                await asyncio.gather(*(lane.drain() for lane in self.lanes))
                late = "leases of workers that were cut off may last for their full time"
                async with asyncio.timeout(_CLOSING):
                    await self.closer.drain()
        except TimeoutError:
            log.warning("stopping although %s", late)

    async def stop(self) -> None:
        """End everything at once."""
        await asyncio.gather(*(loop.stop() for loop in self.loops))
        await asyncio.gather(*(lane.stop() for lane in self.lanes))
        self.blocked.flush()
        await asyncio.gather(self.database.close(), self.reads.close())

    @property
    def healthy(self) -> bool:
        """Whether the database answered lately."""
        return time.monotonic() - self.last_probe < max(5.0, 5 * self.config.poll_interval)

    # Use cases

    def _lane(self, run_id: str) -> Lane[Operation]:
        return self.lanes[zlib.crc32(run_id.encode()) % len(self.lanes)]

    async def start_run(self, request: StartRequest) -> Started:
        """Start a run; returns after its commit (I1). Raises what a start can be refused with."""
        outcome = await self.submit_start(request)
        if isinstance(outcome, FencepostError):
            raise outcome
        return outcome

    def submit_start(self, request: StartRequest) -> asyncio.Future[Started | FencepostError]:
        """As ``start_run``, with the outcome as a future. Raises Overloaded, ServerDraining at once."""
        if self.draining:
            raise ServerDraining("this server is shutting down")
        start: Start = make_start(request)
        self._lane(start.run_id).submit_one(start)
        return start.result

    def submit(self, command: Command) -> None:
        """Queue something asked of a run; its ``result`` is set after the commit. Raises Overloaded, ServerDraining."""
        if self.draining:
            raise ServerDraining("this server is shutting down")
        if not command.request_id and command.kind < CommandKind.REMOVE:
            # A lane repeats it when its commit got no answer: a signal would be two, a retry would be refused.
            command.request_id, command.unnamed = f"~{uuid.uuid4()}", True
        self._lane(command.run_id).submit_one(command)

    def report(self, reports: Sequence[Report]) -> None:
        """Queue reports on tasks. Their sessions are told after the commit."""
        self._spread(reports)

    def _found(self, operations: Sequence[Fire | Deliver]) -> None:
        """Queue what the loops have found to do."""
        self._spread(operations, of_loop=True)

    def _spread(self, operations: Sequence[Report | Fire | Deliver], *, of_loop: bool = False) -> None:
        """Queue what workers and loops bring, each in the lane of its run."""
        by_lane: dict[int, list[Operation]] = {}
        for operation in operations:
            by_lane.setdefault(zlib.crc32(operation.run_id.encode()) % len(self.lanes), []).append(operation)
        for lane, some in by_lane.items():
            self.lanes[lane].submit(some, of_loop=of_loop)

    async def open_session(
        self, row: SessionRow, previous: Sequence[str], held: Sequence[Ref]
    ) -> tuple[datetime, Adopted]:
        """Write a worker's stream down and move its process's leases to it. Returns the database's time and the
        leases.
        """
        now, own = await cluster.open_session(self.database, row, previous)
        adopted = await leases.adopt(self.database, row, own, held)
        self.reconciler.follow(row.namespace, own, held)
        orphans = [
            Report(ReportKind.UNDELIVERED, *ref, row.namespace, done=asyncio.get_running_loop().create_future())
            for ref, _session in adopted.orphans
        ]
        self.report(orphans)
        # Before the Welcome: the worker then forgets its former sessions, and nobody would name these tasks again.
        for report in orphans:
            if report.done is not None and (error := await report.done) is not None:
                raise error
        return now, adopted

    def close_session(self, session: WorkerSession) -> None:
        """A worker's stream has ended."""
        self.dispatcher.remove(session)
        self.closer.submit(session.session_id)

    # After a commit

    def _told(self, decided: Decided) -> None:
        """Tell everybody what was committed: callers, workers, waiters, other servers."""
        changes = decided.changes
        self.events.update(changes.events)
        for start, started in changes.starts:
            start.settle(started)
        for start, outcome in decided.answered:
            start.settle(outcome)
        for command, answer in changes.commands:
            command.settle(answer)
        for handled in changes.handled:
            handled.done(handled)  # type: ignore[arg-type]  # each has a callback for its own kind
        for report, _answer in changes.reports:
            if report.done is not None and not report.done.done():
                report.done.set_result(None)
        unsent: list[LeasedTask] = []
        for session, (answers, leased) in by_session(changes).items():
            try:
                unsent.extend(session.settle(answers, leased))
            except Exception:  # committed is committed: one session's fault ends that session
                incident = uuid.uuid4().hex[:12]
                log.exception("incident %s: a session can't be told", incident)
                session.end(Internal(f"internal error, incident {incident}"))
                self.reconciler.request()
        if unsent:  # of several sessions, and so perhaps of several namespaces
            self.report([Report(ReportKind.UNDELIVERED, t.run_id, t.task_id, t.token, t.namespace) for t in unsent])
        stops: list[Stop] = [(*revoked, None) for revoked in changes.revoked]
        stops += changes.cancelled
        elsewhere = [stop for stop in stops if not self._stop(stop)]
        news: list[News] = []
        for session_id, run_id, task_id, token, after_seq, events in changes.pushed:
            if (holder := self.dispatcher.session(session_id)) is not None:
                holder.push_events((run_id, task_id, token), after_seq, events)
            else:
                news.append((session_id, run_id, task_id, token, after_seq, after_seq + len(events)))
        if changes.ready:
            self.dispatcher.hint(changes.ready)
        else:
            self.dispatcher.wake()  # reports have freed room, and so have starts that kept some and took none
        if changes.timers:
            self.timers.due_in((min(changes.timers) - changes.now).total_seconds())
        if changes.messages:
            self.outbox.wake()
        self.watches.changed(changes.changed)
        self.blocked.add(changes.blocked)
        if changes.blocked:
            self.offers.wake()
        self._ended(changes.ended)
        self.notifier.add(changes.ready, changes.ended, elsewhere, news)

    def _stop(self, stop: Stop) -> bool:
        """Tell the holder of a lease that it has ended, or is about to. False if it is not connected here."""
        session_id, run_id, task_id, token, reason, remaining = stop
        holder = self.dispatcher.session(session_id)
        if holder is None:
            return False
        if remaining is None:
            holder.revoke((run_id, task_id, token), reason)
        else:
            holder.cancel((run_id, task_id, token), reason, remaining)
        return True

    def _news(self, news: News) -> None:
        """Another server has events for a run that a worker of this one holds: it is told of them, and reads them."""
        session_id, run_id, task_id, token, after_seq, last_seq = news
        if (holder := self.dispatcher.session(session_id)) is not None:
            holder.push_events((run_id, task_id, token), after_seq, (), last_seq)

    def _ended(self, run_ids: Sequence[str]) -> None:
        """Runs have ended, here or at another server."""
        self.watches.ended(run_ids)
        self.firing.ended(run_ids)

    # Loops

    async def probe_once(self) -> float:
        """Ask the database what there is to do."""
        mark = self.dispatcher.mark
        found = await cluster.probe(self.database, self.config, self.server_id)
        self.last_probe = time.monotonic()
        self.notifier.others = found.other_servers
        self.backlog.saw(found.ready)
        if len(found.ready) < cluster.MAX_READY_PLACES:
            self.dispatcher.forget(mark)
        self.dispatcher.hint([Ready(w.namespace, w.queue, w.handler, w.priority, w.due_in) for w in found.ready])
        self.sweeper.due_in(found.first_expiry_in)
        self.timers.due_in(found.first_timer_in)
        if found.messages:
            self.outbox.wake()
        self.firing.due_in(found.first_schedule_in)
        for session_id in found.ended_sessions:
            if (left := self.dispatcher.session(session_id)) is not None:
                left.end(SessionTimedOut("the process has a newer session"))
                self.dispatcher.remove(left)
        return self.config.poll_interval

    async def housekeep_once(self) -> float:
        """Forget what is past its time."""
        await cluster.forget(self.database)
        return _HOUSEKEEPING
