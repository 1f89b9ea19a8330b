"""How long a step takes to come: the benchmark `latency`.

A step's time is when its handler is entered in the worker; the clock is the machine's monotonic one, which all
processes share. From one step to the next is therefore the whole way: the handler returns, its outcome goes to the
server, is committed, and the next task comes back.

- `idle`: one run in flight, nothing else going on.
- `half_load`: runs arrive evenly, at half of the rate at which the same server and worker completed them just before;
  every one of them is timed. Arrivals are gathered for 20 ms into one call.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks import evidence, meter
from benchmarks.load import Load
from benchmarks.plan import STEPS, Plan
from benchmarks.report import Report, percentile
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage
from benchmarks.workflow import INPUT, WORKFLOW

_TICK = 0.02
_END_TIMEOUT = 30.0
_LATE = 60.0
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_WARM_UP = 0.1


@dataclass(slots=True)
class _Latencies:
    """Milliseconds, a value for each run or each step after the first."""

    submit: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)

    def add(self, submitted: float, entered: Sequence[float]) -> None:
        """One run: when its start was asked for, and when its steps were entered, in seconds."""
        self.submit.append((entered[0] - submitted) * 1000)
        self.step.extend((after - before) * 1000 for before, after in pairwise(entered))

    def figures(self, prefix: str) -> dict[str, float]:
        """Percentiles."""
        kinds = {"submit": self.submit, "step": self.step}
        return {
            f"{prefix}_{kind}_{name}_ms": percentile(values, share)
            for kind, values in kinds.items()
            for name, share in _SHARES.items()
        }


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `latency`."""
    load = await Load.on(stage, plan.slots)
    results = Results(stage, "latency", plan)
    await load.complete(plan.warm_up_runs)

    async def one(_number: int) -> None:
        results.add((await _idle(load, plan.latency_runs)).figures("idle"))
        full = await load.complete(plan.runs)
        results.add({"full_steps_per_second": full.rate})
        results.add(await _half_load(load, results, full.rate / STEPS / 2, plan.load_seconds))

    await results.rounds(one)
    size = f"{plan.rounds} rounds of {plan.latency_runs} runs alone and {plan.load_seconds:g} s of half the load"
    return results.report(size, latency_runs=plan.latency_runs, load_seconds=plan.load_seconds, slots=plan.slots)


async def _idle(load: Load, runs: int) -> _Latencies:
    """Runs one after the other. The first one is not counted: it warms up."""
    found = _Latencies()
    [worker] = load.workers
    await worker.work(load.slots, timed=True)
    for number in range(runs + 1):
        submitted = time.monotonic()
        handle = await load.client.start_run(WORKFLOW, {**INPUT, "run": number})
        entered = (await worker.event("run"))["entered"]
        if number:
            found.add(submitted, entered)
        # The commit of its last step is no part of any time, but would be in the way of the next run's start.
        await handle.wait(_END_TIMEOUT)
    await worker.stop()
    return found


async def _half_load(load: Load, results: Results, runs_per_second: float, seconds: float) -> dict[str, float]:
    """Runs that arrive evenly. Those of the first tenth are not counted."""
    total = max(1, math.ceil(runs_per_second * seconds))
    submitted: list[float] = []
    entered: dict[int, Sequence[float]] = {}
    [worker] = load.workers
    since = await evidence.now(load.connection)
    await worker.work(load.slots, timed=True)
    before = await load.meter.read()
    async with asyncio.timeout(seconds + _LATE), asyncio.TaskGroup() as group:
        group.create_task(_arrive(load, group, runs_per_second, total, submitted))
        while len(entered) < total:
            event = await worker.event("run")
            entered[event["run"]] = event["entered"]
    cost = meter.cost(before, await load.meter.read())
    await worker.stop()
    if faults := (await evidence.counts(load.connection, since)).faults(total):
        raise BenchmarkFailed(f"the runs did not go as they should: {'; '.join(faults)}")
    results.add_cost("half load", cost, total * STEPS)
    found = _Latencies()
    for number in range(int(total * _WARM_UP), total):
        found.add(submitted[number], entered[number])
    return {"half_load_steps_per_second": runs_per_second * STEPS} | found.figures("half_load")


async def _arrive(
    load: Load, group: asyncio.TaskGroup, runs_per_second: float, total: int, submitted: list[float]
) -> None:
    """Start runs at a rate, whether or not those before are done; ``submitted`` gets the time of each."""
    began = time.monotonic()
    while len(submitted) < total:
        now = time.monotonic()
        due = min(total, math.ceil((now - began) * runs_per_second))
        numbers = range(len(submitted), due)
        if numbers:
            submitted.extend([now] * len(numbers))
            group.create_task(load.start(WORKFLOW, [{**INPUT, "run": number} for number in numbers]))
        await asyncio.sleep(_TICK)
