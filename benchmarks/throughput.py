"""Steps per second through everything, and how near that is to the statements alone: the benchmark `throughput`.

Runs of ten steps that do nothing, through a server and workers in processes of their own (load.py). Each round starts
as many runs for one worker process, for two and for four, which hold as many steps at a time together, and replays the
statements of as many others alone (sql.py), in batches of the size that the server had with the first. What comes first
alternates, so that a machine that gets slower, or a database that grows, meets all alike. A smaller round before the
first is not counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from benchmarks.load import Completed, Load
from benchmarks.plan import STEPS, Plan
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.sql import Sql, Statements, statements
from benchmarks.stage import Stage


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `throughput`."""
    load = await Load.on(stage, plan.slots, workers=max(plan.workers))
    results = Results(stage, "throughput", plan)
    async with statements(stage, plan.slots) as alone:
        rounds = _Rounds(plan, load, alone, results)
        stage.note("throughput: warming up")
        await rounds.warm_up()
        await results.rounds(rounds.one)
        lanes = alone.config.lanes
    size = f"{plan.rounds} rounds of {plan.runs:,} runs of {STEPS} steps, {plan.slots} slots"
    return results.report(
        size,
        runs=plan.runs,
        steps_per_run=STEPS,
        workers=list(plan.workers),
        slots=plan.slots,
        lanes=lanes,
        counts=dict(rounds.counts),
    )


class _Rounds:
    """What a round is made of."""

    def __init__(self, plan: Plan, load: Load, alone: Statements, results: Results) -> None:
        self.counts: Counter[str] = Counter()
        self._plan = plan
        self._load = load
        self._alone = alone
        self._results = results
        self._batch_size = 1

    async def warm_up(self) -> None:
        """A smaller round that is not counted."""
        through = await self._load.complete(self._plan.warm_up_runs)
        await self._alone.complete(self._plan.warm_up_runs, round(through.batches.mean))

    async def one(self, number: int) -> None:
        """Through everything, and the statements alone, once each."""
        first, *others = self._plan.workers
        # A server makes smaller batches for fewer runs: the first round can't take those of the warm-up.
        sql_first = number % 2 == 1
        sql = await self._sql() if sql_first else None
        through = await self._through(first)
        self._batch_size = round(through.batches.mean)
        sql = sql or await self._sql()
        self._results.add(_figures(through, sql))
        for workers in others:
            self._results.add({f"steps_per_second_{workers}_workers": (await self._through(workers)).rate})

    async def _through(self, workers: int) -> Completed:
        through = await self._load.complete(self._plan.runs, workers=workers)
        self.counts.update(asdict(through.counts))
        self._results.add_cost(f"{workers} worker(s)", through.cost, through.steps)
        return through

    async def _sql(self) -> Sql:
        sql = await self._alone.complete(self._plan.runs, self._batch_size)
        self._results.add_cost("statements alone", sql.cost, sql.steps)
        return sql


def _figures(through: Completed, sql: Sql) -> dict[str, float]:
    return {
        "steps_per_second": through.rate,
        "sql_steps_per_second": sql.rate,
        "ratio": through.rate / sql.rate,
        "steps_per_second_with_starts": through.steps / (through.submit_seconds + through.seconds),
        "submit_runs_per_second": through.counts.runs_started / through.submit_seconds,
        "batch_mean": through.batches.mean,
        "sql_batch_mean": sql.steps / len(sql.replayed.sizes),
    }
