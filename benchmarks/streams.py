"""Very many workers on one server: the benchmark `streams`.

One process connects them all (stream_worker.py), each on a connection of its own. `memory_mib` is the server's resident
set: before they come (`idle`), with all of them connected (`connected`), and while they hold very many tasks (`out`).
Then all of that is completed. A round begins with a server and a database of its own, because a process that has been
large stays so.
"""

from __future__ import annotations

import time

import psutil

from benchmarks import evidence, meter
from benchmarks.load import Load
from benchmarks.meter import DATABASE, SERVER, WORKER, Meter
from benchmarks.plan import STEPS, Plan
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage
from benchmarks.workflow import INPUT, WORKFLOW

_MIB = 2**20


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `streams`."""
    results = Results(stage, "streams", plan)

    async def one(_number: int) -> None:
        results.add(await _one(stage, results, plan))

    await results.rounds(one)
    size = f"{plan.rounds} rounds of {plan.streams:,} streams that hold {plan.tasks_out:,} tasks"
    return results.report(size, streams=plan.streams, tasks_out=plan.tasks_out, runs=plan.tasks_out)


async def _one(stage: Stage, results: Results, plan: Plan) -> dict[str, float]:
    load = await Load.on(stage, plan.slots, workers=0)
    [server] = load.servers
    workers = await stage.streams(server.address)
    reader = Meter(load.connection, {DATABASE: [stage.postgres.pid], SERVER: [server.pid], WORKER: [workers.pid]})
    process = psutil.Process(server.pid)
    figures = {"idle_memory_mib": process.memory_info().rss / _MIB}
    began = time.perf_counter()
    await workers.connect(plan.streams, -(-plan.tasks_out // plan.streams))
    figures["connects_per_second"] = plan.streams / (time.perf_counter() - began)
    figures["connected_memory_mib"] = process.memory_info().rss / _MIB
    since = await evidence.now(load.connection)
    await load.start(WORKFLOW, [INPUT] * plan.tasks_out)
    await workers.hold(plan.tasks_out)
    figures["out_memory_mib"] = process.memory_info().rss / _MIB
    await _check_held(load, plan)
    steps = plan.tasks_out * STEPS
    before = await reader.read()
    began = time.perf_counter()
    done = await workers.complete(steps)
    seconds = time.perf_counter() - began
    results.add_cost("completed", meter.cost(before, await reader.read()), steps)
    faults = (await evidence.counts(load.connection, since)).faults(plan.tasks_out)
    if faults or done != {"event": "completed", "acknowledged": steps, "lost": 0}:
        raise BenchmarkFailed(f"the runs did not go as they should: {'; '.join(faults)}, {done}")
    await workers.end()
    await server.end()
    return figures | {"steps_per_second": steps / seconds}


async def _check_held(load: Load, plan: Plan) -> None:
    question = "select count(*), count(distinct lease_session) from task where lease_session is not null"
    [[tasks, sessions]] = await (await load.connection.execute(question)).fetchall()
    if (tasks, sessions) != (plan.tasks_out, min(plan.streams, plan.tasks_out)):
        raise BenchmarkFailed(f"{sessions} of {plan.streams} workers hold {tasks} of {plan.tasks_out} tasks")
