"""One run with very many steps side by side: the benchmark `fanout`.

A map, from its opening to its join, by the times in its history:

- `steps_per_second`: over many items, as many of them under way at a time as a manifest can ask for.
- `few_ms_per_item`, `many_ms_per_item`: over few items and over many, 100 under way at a time. Their `ratio` is what a
  large map costs beyond a small one.
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
_LIMIT = 300.0


def map_manifest(at_a_time: int) -> dict[str, Any]:
    """A step for each item."""
    body = {"over": "", "do": [{"id": "item", "step": ITEM}], "max_parallel": at_a_time}
    return {"id": _name(at_a_time), "compatibility_id": "1", "sequence": [{"id": "map", "map": body}]}


def _name(at_a_time: int) -> str:
    return f"bench-map-{at_a_time}"


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `fanout`."""
    load = await Load.on(stage, plan.slots)
    results = Results(stage, "fanout", plan)
    for at_a_time in (AT_A_TIME, MOST):
        await load.client.register_definition(map_manifest(at_a_time))
    [worker] = load.workers
    await worker.work(plan.slots)
    await _map(load, FEW, AT_A_TIME)

    async def one(_number: int) -> None:
        before = await load.meter.read()
        seconds = await _map(load, plan.fanout_items, MOST)
        results.add({"steps_per_second": plan.fanout_items / seconds})
        results.add_cost("map", meter.cost(before, await load.meter.read()), plan.fanout_items)
        few = await _map(load, FEW, AT_A_TIME) / FEW * 1000
        many = await _map(load, plan.fanout_items, AT_A_TIME) / plan.fanout_items * 1000
        results.add({"few_ms_per_item": few, "many_ms_per_item": many, "ratio": many / few})

    await results.rounds(one)
    await worker.stop()
    size = f"{plan.rounds} rounds of a map over {plan.fanout_items:,} items"
    return results.report(size, items=plan.fanout_items, few=FEW, at_a_time=AT_A_TIME, most=MOST, slots=plan.slots)


async def _map(load: Load, items: int, at_a_time: int) -> float:
    """Seconds that a map took. Raises BenchmarkFailed unless each of its items was done."""
    [run_id] = await load.start(_name(at_a_time), [list(range(items))])
    await load.client.wait_run(run_id, _LIMIT)
    seconds, done = await span(
        load.connection, run_id, EventType.SCOPE_OPENED, EventType.SCOPE_CLOSED, EventType.STEP_COMPLETED
    )
    if done != items:
        raise BenchmarkFailed(f"{done} of {items} items were done")
    return seconds
