"""What large values cost: the benchmark `payload`.

Runs whose value of a given size goes through all ten steps: in with each task, out with each completion, and into the
history each time. It is random text, which neither PostgreSQL nor gRPC can make smaller. Fewer runs of large ones: the
bytes of a round are bounded.
"""

from __future__ import annotations

import base64
import os

from benchmarks.load import Load
from benchmarks.plan import STEPS, Plan
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.stage import Stage
from benchmarks.workflow import INPUT

SIZES = {"100_b": 100, "1_kb": 1000, "32_kb": 32_000, "1_mb": 1_000_000}
"""Bytes; the limit of a payload is 1 MiB."""


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `payload`."""
    load = await Load.on(stage, plan.slots)
    results = Results(stage, "payload", plan)
    runs = {name: max(1, min(plan.runs, plan.payload_bytes // (size * STEPS))) for name, size in SIZES.items()}
    await load.complete(plan.warm_up_runs)

    async def one(_number: int) -> None:
        for name, size in SIZES.items():
            data = base64.b64encode(os.urandom(size)).decode()[:size]
            done = await load.complete(runs[name], {**INPUT, "data": data})
            results.add({f"{name}_steps_per_second": done.rate, f"{name}_mb_per_second": done.rate * size / 1e6})
            results.add_cost(name, done.cost, done.steps)

    await results.rounds(one)
    size_text = f"{plan.rounds} rounds of {', '.join(f'{count:,} runs of {name}' for name, count in runs.items())}"
    return results.report(size_text, runs=runs, sizes=SIZES, slots=plan.slots)
