"""How fast the statements alone are, for batches of several sizes: the benchmark `sql`.

The limit that a server is held against; see replay.py for what is in it and what is not. `throughput` and `servers`
measure the same with the batches that their servers made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks import meter
from benchmarks.decided import decide_runs
from benchmarks.meter import DATABASE, Cost, Meter
from benchmarks.plan import STEPS, Plan
from benchmarks.replay import Replayed, Replayer
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.stage import Stage
from fencepost_server.config import Config

BATCH_SIZES = (10, 50, 100, 200)


@dataclass(frozen=True, slots=True)
class Sql:
    """One replay, and what it cost."""

    replayed: Replayed
    steps: int
    cost: Cost

    @property
    def rate(self) -> float:
        """Steps a second."""
        return self.steps / self.replayed.seconds


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements alone, on a database of their own. ``slots`` is how many steps are under way."""

    config: Config
    replayer: Replayer
    meter: Meter
    slots: int

    async def complete(self, runs: int, batch_size: int) -> Sql:
        """As many steps as ``runs`` runs have."""
        decided = decide_runs(self.config, runs, self.slots)
        await self.replayer.seed(decided)
        before = await self.meter.read()
        replayed = await self.replayer.replay(decided, self.slots, batch_size)
        return Sql(replayed, runs * STEPS, meter.cost(before, await self.meter.read()))


@asynccontextmanager
async def statements(stage: Stage, slots: int) -> AsyncIterator[Statements]:
    """Make a database for them."""
    dsn = await stage.database()
    config = stage.config(dsn)
    connection = await stage.connection(dsn)
    async with Replayer(config) as replayer:
        yield Statements(config, replayer, Meter(connection, {DATABASE: [stage.postgres.pid]}), slots)


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `sql`."""
    results = Results(stage, "sql", plan)
    async with statements(stage, plan.slots) as alone:
        await alone.complete(plan.warm_up_runs, BATCH_SIZES[-1])

        async def one(_number: int) -> None:
            rates = {}
            for size in BATCH_SIZES:
                found = await alone.complete(plan.runs, size)
                rates[f"batch_{size}_steps_per_second"] = found.rate
                results.add_cost(f"batches of {size}", found.cost, found.steps)
            results.add({"steps_per_second": max(rates.values())} | rates)

        await results.rounds(one)
        lanes = alone.config.lanes
    size = f"{plan.rounds} rounds of {plan.runs:,} runs of {STEPS} steps, {lanes} lanes, each size of batches"
    return results.report(size, runs=plan.runs, steps_per_run=STEPS, slots=plan.slots, lanes=lanes)
