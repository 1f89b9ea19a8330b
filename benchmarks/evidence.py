"""What a round has left in the database: that every step ran once, when, and in which transactions.

The histories say it all: each batch of the group commit is one transaction, and its id is in the rows that it wrote.
"""

from __future__ import annotations

import asyncio
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import psycopg

from benchmarks.plan import STEPS
from benchmarks.stage import BenchmarkFailed
from fencepost_server.domain.model import EventType, RunState

_POLL = 0.05
_NOW = b"select extract(epoch from clock_timestamp())::float8"
_COUNTS = b"""
select (select count(*) from run where created_at >= to_timestamp(%(since)s)),
       (select count(*) from run where created_at >= to_timestamp(%(since)s) and state = %(completed)s),
       (select count(*) from event where at >= to_timestamp(%(since)s) and type = %(step_completed)s),
       (select count(*) from run r join event e on e.run_id = r.run_id and e.seq = r.output_seq
        where r.created_at >= to_timestamp(%(since)s) and (e.payload ->> 'n')::int = %(steps)s)
"""
_BATCHES = b"""
select count(*), extract(epoch from max(at))::float8
from event where at >= to_timestamp(%(since)s) and type = %(step_completed)s
group by xmin order by max(at)
"""
_ENDED_SINCE = b"""
select count(*) filter (where state = %(completed)s), extract(epoch from max(ended_at))::float8
from run where created_at >= to_timestamp(%(since)s)
"""
_EVENTS_SINCE = b"select count(*) from event where at >= to_timestamp(%(since)s) and type = %(type)s"
_SPAN = b"""
select extract(epoch from (select max(at) from event where run_id = %(run)s and type = %(last)s)
                        - (select min(at) from event where run_id = %(run)s and type = %(first)s))::float8,
       (select count(*) from event where run_id = %(run)s and type = %(counted)s)
"""

Connection = psycopg.AsyncConnection[Any]


@dataclass(frozen=True, slots=True)
class Counts:
    """How many runs were started and completed, how many steps completed, how many outputs are right."""

    runs_started: int
    runs_completed: int
    steps_completed: int
    outputs_right: int

    def faults(self, runs: int) -> list[str]:
        """Where it differs from what ``runs`` runs should have left."""
        expected = Counts(runs, runs, runs * STEPS, runs)
        names = Counts.__slots__
        return [
            f"{name}: {getattr(self, name)} instead of {getattr(expected, name)}"
            for name in names
            if getattr(self, name) != getattr(expected, name)
        ]


@dataclass(frozen=True, slots=True)
class Batches:
    """The transactions that completed steps, in order: how many steps each, and when, in seconds of the database."""

    sizes: Sequence[int]
    times: Sequence[float]

    @property
    def mean(self) -> float:
        """Steps of one transaction."""
        return statistics.fmean(self.sizes)

    @property
    def ended_at(self) -> float:
        """When the last one was."""
        return self.times[-1]

    def rate(self, first: float, steps: int) -> float:
        """Steps a second, from ``first`` to the transaction with which ``steps`` steps were complete."""
        done = list(accumulate(self.sizes))
        last = min(bisect_left(done, steps), len(done) - 1)
        return done[last] / (self.times[last] - first)


async def now(connection: Connection) -> float:
    """The database's time in seconds."""
    return float((await _rows(connection, _NOW))[0][0])


async def counts(connection: Connection, since: float) -> Counts:
    """What became of the runs that were started from ``since`` on."""
    return Counts(*(await _rows(connection, _COUNTS, since))[0])


async def batches(connection: Connection, since: float) -> Batches:
    """The transactions from ``since`` on."""
    rows = await _rows(connection, _BATCHES, since)
    return Batches([size for size, _ in rows], [at for _, at in rows])


async def ended(connection: Connection, since: float) -> tuple[int, float]:
    """How many of the runs that were started from ``since`` on completed, and when the last one did."""
    parameters = {"since": since, "completed": int(RunState.COMPLETED)}
    [(count, at)] = await (await connection.execute(_ENDED_SINCE, parameters)).fetchall()
    return int(count), float(at or since)


async def events(connection: Connection, since: float, kind: EventType) -> int:
    """How many events of a kind there are from ``since`` on."""
    [(count,)] = await (await connection.execute(_EVENTS_SINCE, {"since": since, "type": int(kind)})).fetchall()
    return int(count)


async def until(connection: Connection, question: str, parameters: Mapping[str, Any], limit: float) -> None:
    """Wait until the database says true. Raises BenchmarkFailed if it does not within ``limit`` seconds."""
    try:
        async with asyncio.timeout(limit):
            while True:
                [(answer,)] = await (await connection.execute(question.encode(), parameters)).fetchall()
                if answer:
                    return
                await asyncio.sleep(_POLL)
    except TimeoutError:
        raise BenchmarkFailed(f"not within {limit:g} s: {question}") from None


async def span(
    connection: Connection, run_id: str, first: EventType, last: EventType, counted: EventType
) -> tuple[float, int]:
    """Seconds from a run's first event of one kind to its last of another, and how many it has of a third.

    Raises BenchmarkFailed without them.
    """
    parameters = {"run": run_id, "first": int(first), "last": int(last), "counted": int(counted)}
    [(seconds, count)] = await (await connection.execute(_SPAN, parameters)).fetchall()
    if seconds is None:
        raise BenchmarkFailed(f"run {run_id} has not come to {last.name}")
    return seconds, count


async def _rows(connection: Connection, statement: bytes, since: float | None = None) -> list[tuple[Any, ...]]:
    parameters: dict[str, Any] | None = None
    if since is not None:
        parameters = {
            "since": since,
            "steps": STEPS,
            "completed": int(RunState.COMPLETED),
            "step_completed": int(EventType.STEP_COMPLETED),
        }
    return await (await connection.execute(statement, parameters)).fetchall()
