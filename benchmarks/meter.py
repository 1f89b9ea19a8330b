"""What a stretch of work costs: processor time by part, transactions, write-ahead log, and what others took.

Read before and after; the difference is a `Cost`. Processor time comes from /proc in ticks of 10 ms and includes the
kernel's on behalf of a process. Transactions are those that got a transaction id, which every one that locks or
writes a row does: the counters of pg_stat_database lag by up to ten seconds. The log is that of the whole cluster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import psycopg

DATABASE, SERVER, WORKER, DRIVER = "database", "server", "worker", "driver"
"""The parts that cost is split over; the driver is the benchmark's own process."""

_COUNTERS = b"""
select pg_snapshot_xmax(pg_current_snapshot())::text::bigint, (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at a moment. Times in seconds."""

    at: float
    cpu: Mapping[str, float]
    machine: float
    transactions: int
    wal_bytes: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The difference of two readings. ``others`` is the share of all processors that went to others' work."""

    seconds: float
    cpu: Mapping[str, float]
    transactions: int
    wal_bytes: int
    others: float


class Meter:
    """Reads the counters of ``parts`` (name → process ids) through a connection of its own."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], parts: Mapping[str, Sequence[int]]) -> None:
        self._connection = connection
        self._parts = parts

    async def read(self) -> Reading:
        """The counters, now."""
        row = await (await self._connection.execute(_COUNTERS)).fetchone()
        assert row is not None  # it has no condition
        cpu = {part: sum(_tree_seconds(pid) for pid in pids) for part, pids in self._parts.items()}
        # Without its children: those are the other parts.
        cpu[DRIVER] = time.process_time()
        return Reading(time.monotonic(), cpu, _machine_seconds(), row[0], row[1])


def cost(before: Reading, after: Reading) -> Cost:
    """What happened between two readings."""
    seconds = after.at - before.at
    cpu = {part: after.cpu[part] - before.cpu[part] for part in after.cpu}
    foreign = (after.machine - before.machine) - sum(cpu.values())
    return Cost(
        seconds=seconds,
        cpu=cpu,
        transactions=after.transactions - before.transactions,
        wal_bytes=after.wal_bytes - before.wal_bytes,
        others=max(0.0, foreign / (seconds * (psutil.cpu_count() or 1))),
    )


def _tree_seconds(pid: int) -> float:
    """Processor time of a process, its children, and those children that have ended."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    total: float = times.user + times.system + times.children_user + times.children_system
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            own = child.cpu_times()
            total += own.user + own.system
    return total


def _machine_seconds() -> float:
    """Processor time of the whole machine, interrupts and what a hypervisor took included."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
