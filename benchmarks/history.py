"""What a long past costs: the benchmark `history`.

The same work on an empty database and on one that holds many events of runs that have ended, in turns.
"""

from __future__ import annotations

from benchmarks import seeding
from benchmarks.compare import compare
from benchmarks.load import Load
from benchmarks.plan import STEPS, Plan
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage

_ORIGINAL = "select run_id::text, count(*) from event group by run_id limit 1"
_SIZES = """
select (select count(*) from event), (select count(*) from run),
       pg_total_relation_size('event') + pg_total_relation_size('run')
"""


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `history`."""
    empty = await Load.on(stage, plan.slots)
    dsn = await stage.database()
    full = await Load.on(stage, plan.slots, dsn=dsn)
    await full.complete(1)
    [[run_id, events_of_run]] = await (await full.connection.execute(_ORIGINAL)).fetchall()
    await seeding.multiply(stage, dsn, run_id, plan.history_events // events_of_run)
    [[events, runs, size]] = await (await full.connection.execute(_SIZES)).fetchall()
    if events < plan.history_events * 0.99 - events_of_run:
        raise BenchmarkFailed(f"{events} of {plan.history_events} events are there")
    stage.note(f"history: {events:,} events of {runs:,} runs, {size / 2**20:,.0f} MiB")
    results = Results(stage, "history", plan)
    await empty.complete(plan.warm_up_runs)
    await full.complete(plan.warm_up_runs)
    circumstances = {"empty": lambda: empty.complete(plan.runs), "history": lambda: full.complete(plan.runs)}

    async def one(number: int) -> None:
        await compare(results, circumstances, number)

    await results.rounds(one)
    size_text = f"{plan.rounds} rounds of {plan.runs:,} runs of {STEPS} steps, {events:,} events present"
    return results.report(size_text, runs=plan.runs, slots=plan.slots, events=events, ended_runs=runs, bytes=size)
