"""A long run that is undone: the benchmark `undo`.

A run of many steps, of which the last one fails for good: all others are undone, one at a time. From the event that
says that the run ends to its final one, by the times in its history.
"""

from __future__ import annotations

from typing import Any

from benchmarks import meter
from benchmarks.evidence import span
from benchmarks.load import Load
from benchmarks.plan import Plan
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage
from benchmarks.workflow import INPUT, REFUSE, UNDO, UNDONE
from fencepost_server.domain.model import EventType

_LIMIT = 300.0


def undo_manifest(steps: int) -> dict[str, Any]:
    """Steps that can be undone, and one that fails for good."""
    nodes = [{"id": f"n{n}", "step": UNDONE, "undo": {"step": UNDO}} for n in range(steps - 1)]
    return {"id": "bench-undo", "compatibility_id": "1", "sequence": [*nodes, {"id": "last", "step": REFUSE}]}


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `undo`."""
    load = await Load.on(stage, plan.slots)
    results = Results(stage, "undo", plan)
    await load.client.register_definition(undo_manifest(plan.undo_steps))
    [worker] = load.workers
    await worker.work(plan.slots)

    async def one(_number: int) -> None:
        before = await load.meter.read()
        [run_id] = await load.start("bench-undo", [INPUT])
        await load.client.wait_run(run_id, _LIMIT)
        seconds, undone = await span(
            load.connection, run_id, EventType.RUN_ENDING, EventType.RUN_FAILED, EventType.UNDO_COMPLETED
        )
        if undone != plan.undo_steps - 1:
            raise BenchmarkFailed(f"{undone} of {plan.undo_steps - 1} steps were undone")
        results.add({"undo_seconds": seconds, "undo_ms_per_step": seconds / undone * 1000})
        results.add_cost("step and undo", meter.cost(before, await load.meter.read()), undone)

    await results.rounds(one)
    await worker.stop()
    return results.report(f"{plan.rounds} rounds of a run of {plan.undo_steps:,} steps", steps=plan.undo_steps)
