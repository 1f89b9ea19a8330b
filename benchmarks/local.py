"""Code runs with local steps: the benchmark `local`.

- `steps_per_second`: runs of ten local steps, each durable before the next, 200 of them in flight in one worker
  process. All are started, then the worker connects and works them off: from the first step that it enters to the last
  run's end.
- `alone_*`: one run of local steps, nothing else going on: the time between two of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from benchmarks import evidence, meter
from benchmarks.code_workflows import ALONE_STEPS, alone, code_workflow
from benchmarks.load import Load
from benchmarks.plan import STEPS, Plan
from benchmarks.report import Report, percentile
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage
from fencepost_server.domain.model import EventType

IN_FLIGHT = 200
_LIMIT = 180.0
_ALL_ENDED = "select not exists (select from run where ended_at is null)"


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `local`."""
    load = await Load.on(stage, plan.slots)
    results = Results(stage, "local", plan)
    await register(load)
    await complete(load, Results(stage, "local", plan), plan.warm_up_runs)

    async def one(_number: int) -> None:
        results.add({"steps_per_second": await complete(load, results, plan.runs)})
        results.add(await _alone(load))

    await results.rounds(one)
    size = f"{plan.rounds} rounds of {plan.runs:,} runs of {STEPS} local steps, {IN_FLIGHT} in flight"
    return results.report(size, runs=plan.runs, steps_per_run=STEPS, in_flight=IN_FLIGHT)


async def register(load: Load) -> None:
    """Make the workflows known: a worker does that when it connects."""
    [worker] = load.workers
    await worker.work(1, code=IN_FLIGHT)
    await worker.stop()


async def complete(load: Load, results: Results, runs: int) -> float:
    """Complete so many runs; returns local steps a second. Raises BenchmarkFailed unless each was recorded once."""
    [worker] = load.workers
    since = await evidence.now(load.connection)
    await load.start(code_workflow.workflow_id, [0] * runs)
    before = await load.meter.read()
    await worker.work(1, code=IN_FLIGHT)
    await evidence.until(load.connection, _ALL_ENDED, {}, _LIMIT)
    cost = meter.cost(before, await load.meter.read())
    stats = await worker.stop()
    steps = await evidence.events(load.connection, since, EventType.LOCAL_STEP_ENDED)
    completed, ended_at = await evidence.ended(load.connection, since)
    if (steps, completed) != (runs * STEPS, runs):
        raise BenchmarkFailed(
            f"{steps} of {runs * STEPS} local steps were recorded, {completed} of {runs} runs completed"
        )
    results.add_cost("local steps", cost, steps)
    return steps / float(ended_at - stats["first_step_time"])


async def _alone(load: Load) -> dict[str, float]:
    [worker] = load.workers
    await worker.work(1, code=IN_FLIGHT)
    [run_id] = await load.start(alone.workflow_id, [ALONE_STEPS])
    run = await load.client.wait_run(run_id, _LIMIT)
    await worker.stop()
    entered = run.output.decode(Any) if run.output is not None else None
    if not isinstance(entered, list) or len(entered) != ALONE_STEPS:
        raise BenchmarkFailed(f"the run alone ended with {entered!r}")
    times = [(later - earlier) * 1000 for earlier, later in pairwise(entered)]
    return {"alone_p50_ms": percentile(times, 0.5), "alone_p99_ms": percentile(times, 0.99)}
