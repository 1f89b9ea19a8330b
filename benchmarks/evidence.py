"""What a round has left in the database: that every step ran once, when, and in which transactions.

The histories say it all: each batch of the group commit is one transaction, and its id is in the rows that it wrote.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.plan import STEPS
from fencepost_server.domain.model import EventType, RunState

_NOW = b"select extract(epoch from clock_timestamp())::float8"
_OPEN = b"select count(*) from run where ended_at is null"
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
group by xmin order by min(at)
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
    """The transactions that completed steps, in order: how many steps each.

    ``ended_at`` is the time of the last one, in seconds by the database's clock.
    """

    sizes: Sequence[int]
    ended_at: float

    @property
    def mean(self) -> float:
        """Steps of one transaction."""
        return statistics.fmean(self.sizes)


async def now(connection: Connection) -> float:
    """The database's time in seconds."""
    return float((await _rows(connection, _NOW))[0][0])


async def open_runs(connection: Connection) -> int:
    """Runs that have not ended."""
    return int((await _rows(connection, _OPEN))[0][0])


async def counts(connection: Connection, since: float) -> Counts:
    """What became of the runs that were started from ``since`` on."""
    return Counts(*(await _rows(connection, _COUNTS, since))[0])


async def batches(connection: Connection, since: float) -> Batches:
    """The transactions from ``since`` on."""
    rows = await _rows(connection, _BATCHES, since)
    return Batches([size for size, _ in rows], max(at for _, at in rows))


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
