"""How long it takes until everything goes on after a fault, by the database's clock.

After each fault: the time from its end to the next progress of any run that is in the database. And for those that have
a bound: the time until what it took is elsewhere. A bound holds only where nothing else is in the way, so what a
recovery needs is told, and no other fault begins at that meanwhile.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, LiteralString

from fencepost_server.domain.model import EventType, RunState
from tests.faults.soak.faults import BLACK_HOLE, DATABASE, Fault, server, worker
from tests.faults.soak.stage import GRACE, SERVERS, Stage
from tests.faults.soak.watcher import Watcher
from tests.fixtures.waiting import paced

LOOK = 0.05
LIMIT = 60.0
NO_PROGRESS = 300.0
"""After so long without an event of any run nothing goes on any more, whatever else has failed meanwhile."""
UNDER_WAY = [int(state) for state in (RunState.PENDING, RunState.RUNNING, RunState.WAITING, RunState.UNDOING)]
PROGRESS = [int(event) for event in (EventType.STEP_COMPLETED, EventType.LOCAL_STEP_ENDED, EventType.UNDO_COMPLETED)]

WORKER_KILLED = "killed worker's steps elsewhere"
DECIDER_KILLED = "killed worker's code runs elsewhere"
SERVER_KILLED = "killed server's workers on another"
BLACK_HOLED = "black-holed server's workers on another"
DATABASE_BACK = "database back to first step"
_BACKOFF = 1.2
"""Of an attempt to decide: a second, and a fifth of it by chance. Steps of the soak have next to none."""
BOUNDS = {
    WORKER_KILLED: GRACE + 2.0,
    DECIDER_KILLED: GRACE + 2.0 + _BACKOFF,
    SERVER_KILLED: 5.0,
    BLACK_HOLED: BLACK_HOLE,
    DATABASE_BACK: 5.0,
}
"""Seconds."""
OF_KIND: Mapping[str, tuple[str, ...]] = {
    "kill worker": (WORKER_KILLED, DECIDER_KILLED),
    "wrong clock of worker": (WORKER_KILLED, DECIDER_KILLED),
    "kill server": (SERVER_KILLED,),
    "wrong clock of server": (SERVER_KILLED,),
    "black hole around server": (BLACK_HOLED,),
    "kill database": (DATABASE_BACK,),
    "restart database": (DATABASE_BACK,),
}
"""Which bounds a kind of fault is held to. Kinds that are not here have none: the checker judges what came of them."""

_LEASED: LiteralString = """
select t.run_id::text as run_id, t.task_id, t.token, c.hold_until > clock_timestamp() as held
from task t join session s on s.session_id = t.lease_session join run r on r.run_id = t.run_id cross join cluster c
where s.worker_name = %(name)s and r.state = any(%(at_work)s) and t.cancel_reason is null
"""
_DECIDE = 1
"""The task of a code run that is decided; no step has it."""
# What its last report, which was on its way, gave back is nobody's: it may wait for an event, for its backoff, or be
# parked until the end of a pause, or until a person comes, however long.
_STILL: LiteralString = """
select count(*) as n
from unnest(%(run_ids)s::uuid[], %(task_ids)s::bigint[], %(tokens)s::bigint[]) as w(run_id, task_id, token)
join task t on t.run_id = w.run_id and t.task_id = w.task_id join run r on r.run_id = t.run_id
where (t.token = w.token or (t.token = w.token + 1 and t.lease_session is null and t.visible_at <= clock_timestamp()))
  and t.cancel_reason is null and r.state = any(%(at_work)s)
"""
_SESSIONS: LiteralString = """
select count(distinct worker_name) as n from session s
where s.worker_name = any(%(names)s) and s.ended_at is null and s.started_at > to_timestamp(%(since)s)
"""
_PROGRESS: LiteralString = """
select extract(epoch from min(e.at))::float as at from run r join event e using (run_id)
where r.last_event_at > to_timestamp(%(since)s) and e.at > to_timestamp(%(since)s)
  and (%(kinds)s::int[] is null or e.type = any(%(kinds)s))
"""


@dataclass
class Recoveries:
    """What was measured, in seconds: ``after`` each kind of fault, and ``bounded`` by the names in BOUNDS."""

    after: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    bounded: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    disturbed: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Like ``bounded``, where other faults were in the way: shown, and held to nothing."""
    none: list[str] = field(default_factory=list)
    """Faults after which nothing went on."""

    @property
    def longest(self) -> float:
        """Of all recoveries after faults."""
        return max((seconds for each in self.after.values() for seconds in each), default=0.0)

    def late(self) -> list[str]:
        """Those that took longer than they may."""
        return [
            f"{name}: {seconds:.1f} s, {BOUNDS[name]:g} s at most"
            for name, each in self.bounded.items()
            for seconds in each
            if seconds > BOUNDS[name]
        ]


def needs(stage: Stage, fault: Fault) -> frozenset[str]:
    """What has to be left alone while the recovery of a fault is measured."""
    bounds = OF_KIND.get(fault.kind, ())
    servers = {server(number) for number in range(SERVERS)}
    workers = {worker(number) for number in range(len(stage.workers))}
    if not bounds:
        return frozenset()
    if _LEAVE_A_SERVER & {*bounds}:
        there = {worker(number) for number in range(len(stage.workers)) if fault.target in stage.at(number)}
        return frozenset({DATABASE, *there, *servers})
    return frozenset({DATABASE, *servers, *workers})


_LEAVE_A_SERVER = frozenset({SERVER_KILLED, BLACK_HOLED})
Measured = Callable[[], Awaitable[float]]


async def measure(stage: Stage, watcher: Watcher, fault: Fault) -> dict[str, Measured]:
    """What to wait for after a fault that is about to begin, by the bound: seconds until it is made good."""
    bounds = OF_KIND.get(fault.kind, ())
    if WORKER_KILLED in bounds:
        return await _tasks_elsewhere(watcher, fault.target)
    moved = _workers_elsewhere(stage, watcher, fault.target) if _LEAVE_A_SERVER & {*bounds} else None
    return dict.fromkeys(bounds, moved) if moved is not None else {}


async def _tasks_elsewhere(watcher: Watcher, number: int) -> dict[str, Measured]:
    """Of a worker's steps, and of its code runs. Nothing while the database lets no lease run out after an outage."""
    leased = await watcher.fetch(_LEASED, name=f"worker-{number}", at_work=UNDER_WAY)
    found: dict[str, Measured] = {}
    for bound, decides in ((WORKER_KILLED, False), (DECIDER_KILLED, True)):
        rows = [row for row in leased if (row["task_id"] == _DECIDE) is decides and not row["held"]]
        if rows:
            found[bound] = _taken(watcher, rows)
    return found


def _taken(watcher: Watcher, rows: list[dict[str, Any]]) -> Measured:
    params = {f"{name}s": [row[name] for row in rows] for name in ("run_id", "task_id", "token")}

    async def taken() -> bool:
        [row] = await watcher.fetch(_STILL, **params, at_work=UNDER_WAY)
        return not row["n"]

    return lambda: _seconds_until(taken)


def _workers_elsewhere(stage: Stage, watcher: Watcher, number: int) -> Measured | None:
    # One that is about to move has connections to both, and its session is anywhere.
    there = [each for each in range(len(stage.workers)) if stage.at(each) == [number]]
    if not there:
        return None
    names, since = [f"worker-{each}" for each in there], time.time()

    async def moved() -> bool:
        [row] = await watcher.fetch(_SESSIONS, names=names, since=since)
        return bool(row["n"] == len(names))

    return lambda: _seconds_until(moved)


async def _seconds_until(reached: Callable[[], Awaitable[bool]]) -> float:
    begin = time.monotonic()
    while not await reached():
        if time.monotonic() - begin > LIMIT:
            return LIMIT
        await paced(LOOK)
    return time.monotonic() - begin


async def until_progress(watcher: Watcher, since: float, *, steps: bool = False) -> float | None:
    """Seconds from ``since`` (of this machine's clock) to the next event of any run, or (``steps``) end of a step.

    Other faults that come meanwhile are in it. None: there was none for NO_PROGRESS seconds.
    """
    begin = time.monotonic()
    while time.monotonic() - begin < NO_PROGRESS:
        [row] = await watcher.fetch(_PROGRESS, since=since, kinds=PROGRESS if steps else None)
        if row["at"] is not None:
            return max(0.0, float(row["at"]) - since)
        await paced(LOOK)
    return None
