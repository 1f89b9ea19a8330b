"""Several servers on one database: the benchmark `servers`.

One database for each number of servers, in turns. A worker connects to one server, so there are as many worker
processes as servers, one on each, which hold as many steps together; all runs are started through the first server.
The statements alone (sql.py) are measured in the same rounds: what the database could do on these processors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from benchmarks.compare import compare
from benchmarks.load import Load, Work
from benchmarks.plan import STEPS, Plan
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.sql import statements
from benchmarks.stage import Stage


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `servers`."""
    results = Results(stage, "servers", plan)
    circumstances: dict[str, Callable[[], Awaitable[Work]]] = {}
    for number in plan.servers:
        load = await Load.on(stage, plan.slots, servers=number, workers=number)
        await load.complete(plan.warm_up_runs)
        circumstances[f"{number}_server" + "s" * (number > 1)] = _complete(load, plan.runs)
    async with statements(stage, plan.slots) as alone:

        async def one(number: int) -> None:
            done = await compare(results, circumstances, number)
            first, *_ = done.values()
            sql = await alone.complete(plan.runs, round(first.batches.mean))
            results.add_cost("statements alone", sql.cost, sql.steps)
            results.add({"sql_steps_per_second": sql.rate})
            results.add({f"{name}_of_sql": work.steady_rate / sql.rate for name, work in done.items()})

        await results.rounds(one)
    size = f"{plan.rounds} rounds of {plan.runs:,} runs of {STEPS} steps, as many workers as servers"
    return results.report(size, runs=plan.runs, slots=plan.slots, servers=list(plan.servers))


def _complete(load: Load, runs: int) -> Callable[[], Awaitable[Work]]:
    return lambda: load.complete(runs)
