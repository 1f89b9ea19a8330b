"""One run with very many steps side by side: the benchmark `fanout`.

From the opening of the first scope to the join of the last one, by the times in the run's history:

- `steps_per_second`: all steps are open at the same time. A map has 1,000 of its items under way at most, so there are
  several maps, in parallel.
- `few_ms_per_item`, `many_ms_per_item`: one map over few items and one over many, 100 under way at a time. The ratio is
  what a large map costs beyond a small one.
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
from benchmarks.workflow import ITEM
from fencepost_server.domain.model import EventType

FEW, AT_A_TIME, MOST = 100, 100, 1000
ONE_MAP, SIDE_BY_SIDE = "bench-map", "bench-maps"
_LIMIT = 300.0


def _map(name: str, at_a_time: int) -> dict[str, Any]:
    """A node with a step for each item of its input."""
    body = {"over": "", "do": [{"id": f"{name}-item", "step": ITEM}], "max_parallel": at_a_time}
    return {"id": name, "map": body}


def map_manifest() -> dict[str, Any]:
    """One map."""
    return {"id": ONE_MAP, "compatibility_id": "1", "sequence": [_map("map", AT_A_TIME)]}


def maps_manifest(maps: int) -> dict[str, Any]:
    """Several maps over the same items, in parallel."""
    branches = [[_map(f"map-{number}", MOST)] for number in range(maps)]
    return {"id": SIDE_BY_SIDE, "compatibility_id": "1", "sequence": [{"id": "maps", "parallel": branches}]}


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `fanout`."""
    load = await Load.on(stage, plan.slots)
    results = Results(stage, "fanout", plan)
    maps = -(-plan.fanout_items // MOST)
    each = plan.fanout_items // maps
    for manifest in (map_manifest(), maps_manifest(maps)):
        await load.client.register_definition(manifest)
    [worker] = load.workers
    await worker.work(plan.slots)
    await _seconds(load, ONE_MAP, FEW, FEW)

    async def one(_number: int) -> None:
        steps = each * maps
        before = await load.meter.read()
        results.add({"steps_per_second": steps / await _seconds(load, SIDE_BY_SIDE, each, steps)})
        results.add_cost("side by side", meter.cost(before, await load.meter.read()), steps)
        few = await _seconds(load, ONE_MAP, FEW, FEW) / FEW * 1000
        many = await _seconds(load, ONE_MAP, steps, steps) / steps * 1000
        results.add({"few_ms_per_item": few, "many_ms_per_item": many, "ratio": many / few})

    await results.rounds(one)
    await worker.stop()
    size = f"{plan.rounds} rounds of {each * maps:,} steps side by side"
    return results.report(size, steps=each * maps, few=FEW, at_a_time=AT_A_TIME, slots=plan.slots)


async def _seconds(load: Load, workflow: str, items: int, steps: int) -> float:
    """How long a run took over so many items. Raises BenchmarkFailed unless so many steps were done."""
    [run_id] = await load.start(workflow, [list(range(items))])
    await load.client.wait_run(run_id, _LIMIT)
    seconds, done = await span(
        load.connection, run_id, EventType.SCOPE_OPENED, EventType.SCOPE_CLOSED, EventType.STEP_COMPLETED
    )
    if done != steps:
        raise BenchmarkFailed(f"{done} of {steps} steps were done")
    return seconds
