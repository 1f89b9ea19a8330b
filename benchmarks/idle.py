"""What a server costs that has nothing to do: the benchmark `idle`.

- `alone_*`: nobody is connected.
- `worker_*`: a worker waits for work on it.

Queries are statements that the database was sent, begin and commit included, counted in PostgreSQL's own log: it logs
everything that the server sends for this benchmark. Memory is the server's resident set; `*_growth_mib` is how much of
it has come in the time that was watched.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import psutil

from benchmarks import meter
from benchmarks.load import Load
from benchmarks.meter import DATABASE, SERVER
from benchmarks.plan import Plan
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage

_STATEMENT = re.compile(rb"^[^\n]* LOG:  (?:statement|execute)", re.MULTILINE)
_SETTLE = 2.0
_HEARD = 30.0
_POLL = 0.1
_LOGGED = """
do $$ begin execute format('alter database %I set log_statement = %L', current_database(), 'all'); end $$
"""
_MIB = 2**20


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `idle`."""
    dsn = await stage.database()
    # For connections that are made from now on.
    await (await stage.connection(dsn)).execute(_LOGGED)
    load = await Load.on(stage, plan.slots, dsn=dsn)
    results = Results(stage, "idle", plan, unit="second")

    async def one(_number: int) -> None:
        results.add(await _watched(stage, load, results, "alone", plan.idle_seconds))
        [worker] = load.workers
        await worker.work(plan.slots)
        results.add(await _watched(stage, load, results, "worker", plan.idle_seconds))
        await worker.stop()

    await results.rounds(one)
    return results.report(f"{plan.rounds} times {plan.idle_seconds:g} s", seconds=plan.idle_seconds)


async def _watched(stage: Stage, load: Load, results: Results, part: str, seconds: float) -> dict[str, float]:
    await asyncio.sleep(min(_SETTLE, seconds))
    log, process = stage.postgres.log, psutil.Process(load.servers[0].pid)
    # The connection of the meter is logged too; its statements are left out.
    before = await load.meter.read()
    logged, memory = log.stat().st_size, process.memory_info().rss
    await asyncio.sleep(seconds)
    statements = await _statements(log, logged)
    memory_after = process.memory_info().rss
    cost = meter.cost(before, await load.meter.read())
    results.add_cost(part, cost, max(1, round(cost.seconds)))
    return {
        f"{part}_queries_per_second": statements / cost.seconds,
        f"{part}_memory_mib": memory_after / _MIB,
        f"{part}_growth_mib": (memory_after - memory) / _MIB,
        f"{part}_server_processor": cost.cpu[SERVER] / cost.seconds,
        f"{part}_database_processor": cost.cpu[DATABASE] / cost.seconds,
    }


async def _statements(log: Path, logged: int) -> int:
    """How many have been logged from the offset ``logged`` on.

    Waits for the first: in half a second a server with nothing to do may rightly send nothing.
    """
    limit = time.monotonic() + _HEARD
    while not (statements := _count(log, logged)):
        if time.monotonic() > limit:
            raise BenchmarkFailed("the server has sent nothing: it is not alive, or its statements are not logged")
        await asyncio.sleep(_POLL)
    return statements


def _count(log: Path, logged: int) -> int:
    return len(_STATEMENT.findall(log.read_bytes()[logged:]))
