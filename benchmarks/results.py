"""What the rounds of a benchmark have found, and the report that is made of it: the same for every benchmark.

A *figure* has a value of each round and is reported as their median. A *cost* is what a part of a round has used for
each unit of work (a step, unless the benchmark says otherwise): processor time of database, server, worker and the
benchmark's own process, transactions, and bytes of write-ahead log.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from benchmarks import environment
from benchmarks.meter import DATABASE, DRIVER, SERVER, WORKER, Cost
from benchmarks.plan import Plan
from benchmarks.report import Figure, Report, Row, Table, rounded, text
from benchmarks.stage import BenchmarkFailed, Stage

ROUND_LIMIT = 900.0  # beyond what it is told to watch
"""Seconds that a round may take: a benchmark that hangs ends."""
_QUIET = 0.1
_PARTS = (DATABASE, SERVER, WORKER, DRIVER)


class Results:
    """Figures and costs of one benchmark, round by round. ``unit`` is what costs are counted for."""

    def __init__(self, stage: Stage, benchmark: str, plan: Plan, unit: str = "step") -> None:
        self._stage = stage
        self._benchmark = benchmark
        self._plan = plan
        self._unit = unit
        self._figures: dict[str, list[float]] = {}
        self._costs: dict[str, dict[str, list[float]]] = {}
        self._others: list[float] = []

    def add(self, figures: Mapping[str, float]) -> None:
        """What a round, or a part of one, has found."""
        for name, value in figures.items():
            self._figures.setdefault(name, []).append(value)

    def add_cost(self, part: str, cost: Cost, units: int) -> None:
        """What ``units`` units of work have cost in one round."""
        found = self._costs.setdefault(part, {})
        for name, value in cost.cpu.items():
            found.setdefault(f"{name}_cpu_ms_per_1000_{self._unit}s", []).append(value / units * 1e6)
        found.setdefault(f"transactions_per_{self._unit}", []).append(cost.transactions / units)
        found.setdefault(f"wal_bytes_per_{self._unit}", []).append(cost.wal_bytes / units)
        self._others.append(cost.others)

    def median(self, figure: str) -> float:
        """The median of a figure so far."""
        return statistics.median(self._figures[figure])

    async def rounds(self, one: Callable[[int], Awaitable[None]]) -> None:
        """Make the plan's rounds: ``one`` measures the one of a number, from 0. A late one raises BenchmarkFailed."""
        for number in range(self._plan.rounds):
            await self.round(f"round {number + 1} of {self._plan.rounds}", one(number))

    async def round(self, title: str, work: Awaitable[None]) -> None:
        """Await one round within its limit, and tell what it has found."""
        limit = ROUND_LIMIT + 2 * self._plan.idle_seconds
        try:
            async with asyncio.timeout(limit):
                await work
        except TimeoutError:
            raise BenchmarkFailed(f"{self._benchmark}: {title} took longer than {limit:g} s") from None
        last = {name: rounded(values[-1]) for name, values in self._figures.items()}
        self._stage.note(f"{self._benchmark}: {title}: {json.dumps(last)}")

    def report(self, size: str, **facts: Any) -> Report:
        """All of it. ``size`` says for people how much was measured, ``facts`` go into the JSON object."""
        result: dict[str, Any] = {"benchmark": self._benchmark, "rounds": self._plan.rounds}
        result |= {name: rounded(statistics.median(values)) for name, values in self._figures.items()}
        result["costs"] = {
            part: {name: rounded(statistics.median(values)) for name, values in found.items()}
            for part, found in self._costs.items()
        }
        if self._others:
            result["others_share"] = rounded(statistics.median(self._others))
        result |= facts
        result["by_round"] = {name: [rounded(value) for value in values] for name, values in self._figures.items()}
        result["versions"] = environment.versions(self._stage.facts.version)
        result["hardware"] = environment.hardware()
        result["database"] = self._stage.facts.as_json()
        rows = [Figure(name, values).row() for name, values in self._figures.items()]
        tables = [Table(f"{self._benchmark}: {size}", ("", "median", "lowest", "highest"), rows)]
        if self._costs:
            tables.append(self._cost_table())
        return Report(result, tables, self._notes())

    def _cost_table(self) -> Table:
        columns = (*_PARTS, "all", "transactions", "bytes of log")
        title = f"of one {self._unit}: processor time in microseconds, transactions, write-ahead log"
        return Table(title, ("", *columns), [self._cost_row(part, found) for part, found in self._costs.items()])

    def _cost_row(self, part: str, found: Mapping[str, Sequence[float]]) -> Row:
        medians = {name: statistics.median(values) for name, values in found.items()}
        # Milliseconds of a thousand are microseconds of one.
        cpu = [medians.get(f"{name}_cpu_ms_per_1000_{self._unit}s") for name in _PARTS]
        cells = ["" if value is None else text(value) for value in cpu]
        total = sum(value for value in cpu if value is not None)
        rest = (medians[f"transactions_per_{self._unit}"], medians[f"wal_bytes_per_{self._unit}"])
        return (part, *cells, text(total), *map(text, rest))

    def _notes(self) -> list[str]:
        facts, machine = self._stage.facts, environment.hardware()
        durable = ", ".join(f"{name}={value}" for name, value in facts.settings.items())
        notes = [
            f"PostgreSQL {facts.version}: {durable}",
            f"data on {facts.filesystem}, fdatasync of a page {facts.fdatasync_ms:.2f} ms",
            f"{machine['processors']} × {machine['processor']}, {machine['memory_gib']} GiB, {machine['system']}",
        ]
        if facts.in_memory:
            notes.append("The data is in memory: a sync costs nothing here. Set TMPDIR to a folder on a disk.")
        if self._others and (share := statistics.median(self._others)) > _QUIET:
            notes.append(f"Others used {share:.0%} of this machine meanwhile: figures are lower than they could be.")
        return notes
