"""What code runs cost beside speed: the benchmark `code`. Their speed is measured by `local`.

- `cold`: a run with a long history that no worker has in memory gets a signal: from that to its end.
- `replay`: the same history, replayed in this process: events a second, for each of several replays.
- `waiting`: runs that wait on timers: what they leave behind in the worker's memory.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import psutil

from benchmarks import evidence
from benchmarks.code_workflows import SLEEPER, cold, history_of, replayed_seconds
from benchmarks.load import Load
from benchmarks.local import IN_FLIGHT, register
from benchmarks.plan import Plan
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage
from fencepost_server.domain.model import EventType, RunState

_LIMIT = 180.0
_REPLAYS = 5
_WAITS = f"select state = {int(RunState.WAITING)} from run where run_id = %(run)s"
_SLEEP = f"""
select count(*) >= %(runs)s from event
where at >= to_timestamp(%(since)s) and type = {int(EventType.TIMER_STARTED)}
"""


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `code`."""
    load = await Load.on(stage, plan.slots)
    results = Results(stage, "code", plan)
    await register(load)

    async def one(_number: int) -> None:
        results.add(await _cold(load, plan.cold_events))

    async def waiting() -> None:
        results.add(await _waiting(load, plan.waiting_runs))

    await results.rounds(one)
    await results.round("waiting", waiting())
    size = f"{plan.rounds} rounds with a history of {plan.cold_events:,} steps; {plan.waiting_runs:,} runs that wait"
    return results.report(size, cold_events=plan.cold_events, waiting_runs=plan.waiting_runs)


async def _cold(load: Load, events: int) -> dict[str, float]:
    """The worker that makes the history ends; another session of it has nothing in memory."""
    [worker] = load.workers
    await worker.work(1, code=IN_FLIGHT)
    [run_id] = await load.start(cold.workflow_id, [events])
    await evidence.until(load.connection, _WAITS, {"run": run_id}, _LIMIT)
    await worker.stop()
    await worker.work(1, code=IN_FLIGHT)
    began = time.perf_counter()
    await load.client.signal_run(run_id, "go")
    ended = await load.client.wait_run(run_id, _LIMIT)
    seconds = time.perf_counter() - began
    await worker.stop()
    if ended.output is None or ended.output.decode(int) != events:
        raise BenchmarkFailed(f"the cold run ended with {ended.output!r}")
    history = await history_of(load.servers[0].address, run_id)
    replays = [replayed_seconds(run_id, history) for _ in range(_REPLAYS)]
    return {"cold_seconds": seconds, "replay_events_per_second": ended.last_seq / statistics.median(replays)}


async def _waiting(load: Load, runs: int) -> dict[str, float]:
    [worker] = load.workers
    process = psutil.Process(worker.pid)
    await worker.work(1, code=IN_FLIGHT, cache=1)
    await load.start(SLEEPER, [1.0] * IN_FLIGHT)
    since = await evidence.now(load.connection)
    await asyncio.sleep(1)
    before = process.memory_info().rss
    await load.start(SLEEPER, [86_400.0] * runs)
    await evidence.until(load.connection, _SLEEP, {"runs": runs, "since": since}, _LIMIT)
    await asyncio.sleep(1)
    after = process.memory_info().rss
    await worker.stop()
    return {"waiting_bytes_per_run": (after - before) / runs}
