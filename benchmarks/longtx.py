"""What a snapshot that somebody holds costs: the benchmark `longtx`.

A transaction like that of a long dump keeps VACUUM from everything that was deleted or updated since. The same work is
done in turns on a database on which nobody holds one, and on one where one is held from the beginning, until that one
has been under load for as long as the plan says. ``rounds`` are the last ones, whose ratios are reported.
"""

from __future__ import annotations

import json
import statistics
from itertools import count

from benchmarks.compare import compare
from benchmarks.load import Load
from benchmarks.plan import STEPS, Plan
from benchmarks.report import Report, rounded
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage

_DEAD = "select coalesce(sum(n_dead_tup), 0)::bigint from pg_stat_user_tables where relname in ('run', 'task')"


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `longtx`."""
    free = await Load.on(stage, plan.slots)
    dsn = await stage.database()
    held = await Load.on(stage, plan.slots, dsn=dsn)
    circumstances = {"free": lambda: free.complete(plan.runs), "held": lambda: held.complete(plan.runs)}
    await free.complete(plan.warm_up_runs)
    await held.complete(plan.warm_up_runs)
    holder = await stage.connection(dsn)
    await holder.execute("begin isolation level repeatable read")
    [[before]] = await (await holder.execute("select count(*) from run")).fetchall()
    results = Results(stage, "longtx", plan)
    ratios: list[float] = []
    seconds = 0.0

    async def one(number: int) -> None:
        nonlocal seconds
        done = await compare(results, circumstances, number)
        seconds += done["held"].seconds
        ratios.append(done["held"].steady_rate / done["free"].steady_rate)

    for number in count():
        await results.round(f"{seconds:.0f} s under load", one(number))
        if seconds >= plan.snapshot_seconds and number + 1 >= plan.rounds:
            break
    [[after]] = await (await holder.execute("select count(*) from run")).fetchall()
    if after != before:
        raise BenchmarkFailed("the snapshot was not held")
    [[dead]] = await (await held.connection.execute(_DEAD)).fetchall()
    await holder.execute("rollback")
    last = statistics.median(ratios[-plan.rounds :])
    stage.note(f"longtx: {json.dumps({'dead_rows': dead, 'last_ratio': rounded(last)})}")
    results.add({"last_ratio": last, "dead_rows": float(dead)})
    size = f"a snapshot under load for {seconds:.0f} s; last_ratio is of the last {plan.rounds} rounds of {len(ratios)}"
    return results.report(
        size, runs=plan.runs, steps_per_run=STEPS, slots=plan.slots, snapshot_seconds=rounded(seconds)
    )
