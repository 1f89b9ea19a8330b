"""Fires schedules: decides under the rows' locks, then starts runs, then writes down what came of it.

Any server may stop between the three. What it had decided is in the row, and after ``schedule_retry`` seconds another
one starts the same fire time under the same key, so that there is one run (see domain/firing.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from fencepost_server.config import Config
from fencepost_server.domain.errors import (
    FencepostError,
    IllegalTransition,
    Internal,
    ResourceExhausted,
    RunNotFound,
    Unavailable,
)
from fencepost_server.domain.firing import Decision, Patience, decide
from fencepost_server.domain.jsontext import parse
from fencepost_server.domain.schedule import Spec
from fencepost_server.engine.loops import Loop
from fencepost_server.engine.operations import Command, Commanded, CommandKind, Started
from fencepost_server.engine.starting import StartRequest
from fencepost_server.store import schedules
from fencepost_server.store.connection import Database
from fencepost_server.store.schedules import ScheduleRow, Settled

log = logging.getLogger("fencepost.schedules")

FIRE, BACKFILL, CALL = "fire", "backfill", "call"
"""What starts a schedule's run. The first two share their keys: a fire time has one run, whoever asks for it."""

MAX_ERROR = 1000
_LATER = 3600.0
_LOCKED_PAUSE = 0.1
_DECIDING = 0.2  # seconds that the decisions of one transaction take, or one decision: nothing else is done meanwhile
_UNREADABLE = timedelta(minutes=1)
_MAX_AWAITED = 10_000
_STOP = hashlib.sha256(b"schedule").digest()

Start = Callable[[StartRequest], Awaitable[Started]]
Submit = Callable[[Command], None]


def fire_key(row_uuid: str, at: datetime) -> str:
    """The key of the run of one fire time."""
    return f"{row_uuid} {at.isoformat()}"


def call_key(row_uuid: str, request_id: str) -> str:
    """The key of the run that a call started."""
    return f"{row_uuid} call {request_id}"


def start_request(row: ScheduleRow, spec: Spec, key: str, origin: str) -> StartRequest:
    """The start of a run of a schedule, with the definition that is active then."""
    return StartRequest(
        row.namespace,
        spec.workflow_id,
        None,
        spec.input,
        None if spec.input.binary is not None else parse(spec.input.json or "null"),
        spec.user_id,
        "",
        "",
        spec.priority,
        attributes=spec.attributes,
        run_timeout=spec.run_timeout,
        schedule_key=key,
        schedule_origin=origin,
    )


@dataclass(frozen=True, slots=True)
class _Taken:
    """A schedule that something is to be done for."""

    row: ScheduleRow
    spec: Spec
    decision: Decision
    running: str
    """The run that it started last, or what that has become by continuing as new; empty if it has ended."""


class Firing:
    """The loop. ``due_in`` and ``due_by`` tell when the first schedule is due, ``ended`` which runs have ended."""

    def __init__(self, config: Config, database: Database, start: Start, submit: Submit) -> None:
        self._config = config
        self._database = database
        self._start = start
        self._submit = submit
        self._patience = Patience(
            timedelta(seconds=config.schedule_retry), timedelta(seconds=config.schedule_look_interval)
        )
        self._due = asyncio.get_running_loop().time()
        self._awaited: dict[str, str] = {}
        """Runs whose end schedules wait for, and the schedules' uuids: as far as this server has seen."""
        self._hurried: set[str] = set()
        self.draining = False
        self.failures = 0
        """Fire times that could not start a run."""
        self.after_start: Callable[[], Awaitable[None]] | None = None
        """Called between the start of runs and what is written down of it, when set: where tests cut."""
        self.loop = Loop("schedules", self.run_once)

    def due_by(self, seconds: float) -> None:
        """A schedule is due in so many seconds, perhaps sooner than those known."""
        due = asyncio.get_running_loop().time() + seconds
        if due < self._due:
            self._due = due
            self.loop.wake()

    def due_in(self, seconds: float | None) -> None:
        """The probe knows when the next schedule is due; None: none is."""
        now = asyncio.get_running_loop().time()
        self._due = now + (_LATER if seconds is None else seconds)
        if self._due <= now:
            self.loop.wake()
        elif seconds is not None and seconds < self._config.poll_interval * 2:
            self.loop.wake()  # to sleep until then and not until the next probe

    def ended(self, run_ids: Iterable[str]) -> None:
        """Runs have ended, here or elsewhere."""
        if self._awaited:
            waiting = [self._awaited.pop(run_id) for run_id in run_ids if run_id in self._awaited]
            if waiting:
                self._hurried.update(waiting)
                self.loop.wake()

    async def run_once(self) -> float | None:
        """Fire what is due, in bounded batches."""
        if self.draining:
            return None
        clock = asyncio.get_running_loop()
        if self._hurried:
            hurried = list(self._hurried)
            await schedules.hurry(self._database, hurried)
            self._hurried.difference_update(hurried)
            self._due = clock.time()
        now = clock.time()
        if self._due > now:
            return self._due - now
        self._due = now + _LATER  # before the look: whoever tells of an earlier one meanwhile is not overruled
        try:
            await self._pass()
        except BaseException:
            self._due = now
            raise
        return max(0.0, self._due - clock.time())

    async def _pass(self) -> None:
        taken = await self._decide()
        outcomes = await asyncio.gather(
            *(self._fire(t) for t in taken if t.decision.start),
            *(self._stop_running(t) for t in taken if t.decision.cancel),
        )
        settled = [outcome for outcome in outcomes if outcome is not None]
        if not settled:
            return
        if self.after_start is not None:
            await self.after_start()
        await schedules.settle(self._database, settled)
        self.due_by(0.0)  # what comes next for them is not decided yet

    async def _decide(self) -> list[_Taken]:
        """Lock, then read, then decide, then write, as in every transaction."""
        taken: list[_Taken] = []
        async with self._database.transaction() as session:
            rows = await schedules.lock_due(session, self._config.schedule_batch)
            last_runs = [row.last_run_id for row in rows if row.last_run_id is not None]
            # Before they are read: one that ends after the read is told of after this.
            self._await({row.last_run_id: row.uuid for row in rows if row.last_run_id is not None})
            now, running = await schedules.running(session, last_runs)
            self._await({running[r.last_run_id]: r.uuid for r in rows if r.last_run_id in running})
            clock = asyncio.get_running_loop().time
            end = clock() + _DECIDING
            for row in rows:
                if taken and clock() >= end:
                    break  # the others are due yet, and nobody's after this
                try:
                    spec = row.spec()
                    decision = decide(
                        spec, row.uuid, row.state, now, running=row.last_run_id in running, patience=self._patience
                    )
                except Exception:  # one that can't be read harms no other: it is put off, and says so
                    incident = uuid.uuid4().hex[:12]
                    log.exception("incident %s: schedule %s can't be read", incident, row.schedule_id)
                    error = Internal(f"internal error, incident {incident}")
                    schedules.park(session, row.uuid, now + _UNREADABLE, f"{error.reason}: {error}")
                    continue
                taken.append(_Taken(row, spec, decision, running.get(row.last_run_id or "", "")))
            if taken:
                schedules.advance(session, [(t.row.uuid, t.decision.state) for t in taken])
            first = await schedules.first_due(session)
        for t in taken:
            if t.decision.state.pending_at is None and t.row.last_run_id is not None:
                self._awaited.pop(t.row.last_run_id, None)
                self._awaited.pop(t.running, None)
        if first is not None:
            # What is due and was not taken is locked by somebody: a moment, so as not to ask all the time.
            self.due_by(first if taken else max(first, _LOCKED_PAUSE))
        return taken

    def _await(self, runs: dict[str, str]) -> None:
        self._awaited.update(runs)
        for run_id in list(self._awaited)[: max(0, len(self._awaited) - _MAX_AWAITED)]:
            del self._awaited[run_id]

    async def _fire(self, taken: _Taken) -> Settled | None:
        """Start the run. None: nobody knows whether it was started, so it is tried again."""
        row, at = taken.row, taken.decision.state.starting_at
        assert at is not None  # else there is nothing to start
        try:
            started = await self._start(start_request(row, taken.spec, fire_key(row.uuid, at), FIRE))
        except (Unavailable, ResourceExhausted) as error:
            log.info("schedule %s: the start for %s will be tried again: %s", row.schedule_id, at, error)
            return None
        except FencepostError as error:
            self.failures += 1
            text = f"{error.reason}: {error.message}"[:MAX_ERROR]
            log.warning("schedule %s in %s did not start a run for %s: %s", row.schedule_id, row.namespace, at, text)
            return Settled(row.uuid, at, None, text)
        return Settled(row.uuid, at, started.run_id, "")

    async def _stop_running(self, taken: _Taken) -> None:
        """Cancel the run that a fire time waits for. The next look does it again if that is lost."""
        row, at = taken.row, taken.decision.state.pending_at
        assert at is not None  # else nothing waits
        reason = f"schedule {row.schedule_id} starts another run"
        command = Command(
            CommandKind.CANCEL, taken.running, row.namespace, fire_key(row.uuid, at), _STOP, reason=reason
        )
        outcome: Commanded | FencepostError
        try:
            self._submit(command)
            outcome = await command.result
        except FencepostError as error:
            outcome = error
        if isinstance(outcome, FencepostError) and not isinstance(outcome, IllegalTransition | RunNotFound):
            log.warning("schedule %s could not cancel run %s: %s", row.schedule_id, taken.running, outcome)
