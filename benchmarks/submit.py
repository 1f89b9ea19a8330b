"""How fast runs are started: the benchmark `submit`.

- `single`: StartRun, by so many callers that each wait for their answer before they ask again.
- `batched`: BatchStartRuns of many runs, several calls at a time.

No worker is there. The callers are the benchmark's own process, one Python program on one connection, and their share
of the processors is in the costs. Runs are counted in the database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from benchmarks import evidence, meter
from benchmarks.load import Load
from benchmarks.plan import Plan
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage
from benchmarks.workflow import INPUT, WORKFLOW

CALLERS = 64
BATCH, BATCHES_AT_A_TIME = 500, 4


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `submit`."""
    load = await Load.on(stage, plan.slots, workers=0)
    results = Results(stage, "submit", plan, unit="run")
    await _singly(load, plan.warm_up_runs)

    async def one(_number: int) -> None:
        for kind, start in (("single", _singly), ("batched", _batched)):
            results.add(await _measured(load, results, kind, plan.submit_runs, start(load, plan.submit_runs)))

    await results.rounds(one)
    size = f"{plan.rounds} rounds of {plan.submit_runs:,} runs by {CALLERS} callers, and as many in batches of {BATCH}"
    return results.report(
        size, runs=plan.submit_runs, callers=CALLERS, batch=BATCH, batches_at_a_time=BATCHES_AT_A_TIME
    )


async def _measured(load: Load, results: Results, kind: str, runs: int, starts: Awaitable[None]) -> dict[str, float]:
    since = await evidence.now(load.connection)
    before = await load.meter.read()
    began = time.perf_counter()
    await starts
    seconds = time.perf_counter() - began
    results.add_cost(kind, meter.cost(before, await load.meter.read()), runs)
    if (started := (await evidence.counts(load.connection, since)).runs_started) != runs:
        raise BenchmarkFailed(f"{started} of {runs} runs were started")
    return {f"{kind}_runs_per_second": runs / seconds}


async def _singly(load: Load, runs: int) -> None:
    numbers = iter(range(runs))

    async def caller() -> None:
        for _ in numbers:
            await load.client.start_run(WORKFLOW, INPUT)

    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(caller())


async def _batched(load: Load, runs: int) -> None:
    sizes = iter([min(BATCH, runs - first) for first in range(0, runs, BATCH)])

    async def caller() -> None:
        for size in sizes:
            await load.start(WORKFLOW, [INPUT] * size)

    async with asyncio.TaskGroup() as group:
        for _ in range(BATCHES_AT_A_TIME):
            group.create_task(caller())
