"""Code workflows: the benchmark `code`.

- `local`: runs of ten local steps, each durable before the next, 200 of them in flight in one worker process. All are
  started, then the worker connects and works them off: from the first step that it enters to the last run's end.
- `alone`: one run of local steps, nothing else going on: the time between two of them.
- `cold`: a run with a history of 10,000 events that no worker has in memory gets a signal: from that to its end.
- `replay`: the same history, replayed in this process: events a second, for each of several replays.
- `waiting`: runs that wait on timers: what they leave behind in the worker's memory.

What was done is counted in the database afterwards: a figure of work that did not happen is an error.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import psutil

from benchmarks import environment, meter
from benchmarks.code_workflows import (
    ALONE_STEPS,
    COLD_EVENTS,
    SLEEPER,
    code_workflow,
    cold,
    history_of,
    replayed_seconds,
)
from benchmarks.evidence import Connection, now
from benchmarks.meter import DATABASE, SERVER, WORKER, Meter
from benchmarks.plan import STEPS, Plan
from benchmarks.processes import Server, Worker
from benchmarks.report import Figure, Report, Table, percentile, rounded
from benchmarks.stage import BenchmarkFailed, Stage
from fencepost import AsyncClient, FencepostError, StartRun

IN_FLIGHT = 200
WAITING = 10_000
_BATCH = 1000
_LIMIT = 180.0
_POLL = 0.05
_LOCAL_STEP_ENDED, _TIMER_STARTED = 34, 9
_REPLAYS = 5


@dataclass(frozen=True, slots=True)
class _Bench:
    """What the parts work with."""

    address: str
    client: AsyncClient
    worker: Worker
    connection: Connection
    meter: Meter


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `code`."""
    dsn = await stage.database("bench")
    server: Server = await stage.server(dsn)
    worker = await stage.worker(server.address)
    connection = await stage.connection(dsn)
    parts = {DATABASE: [stage.postgres.pid], SERVER: [server.pid], WORKER: [worker.pid]}
    figures: dict[str, list[float]] = {}
    async with AsyncClient(server.address) as client:
        bench = _Bench(server.address, client, worker, connection, Meter(connection, parts))
        await worker.work(1, code=IN_FLIGHT)  # which registers the workflows
        await worker.stop()
        await _local(bench, plan.warm_up_runs)
        for number in range(plan.rounds):
            async with asyncio.timeout(_LIMIT):
                found = await _local(bench, plan.runs)
                found |= await _alone(bench)
                found |= await _cold(bench)
            stage.note(f"round {number + 1} of {plan.rounds}: {json.dumps(found)}")
            for figure, value in found.items():
                figures.setdefault(figure, []).append(value)
        async with asyncio.timeout(_LIMIT):
            waiting = await _waiting(bench)
        stage.note(f"waiting: {json.dumps(waiting)}")
        figures |= {name: [value] for name, value in waiting.items()}
    return _report(stage, plan, figures)


def _report(stage: Stage, plan: Plan, figures: dict[str, list[float]]) -> Report:
    result: dict[str, Any] = {"benchmark": "code", "rounds": plan.rounds, "runs": plan.runs, "in_flight": IN_FLIGHT}
    result |= {name: rounded(statistics.median(values)) for name, values in figures.items()}
    result["by_round"] = {name: [rounded(value) for value in values] for name, values in figures.items()}
    result["hardware"] = environment.hardware()
    result["database"] = stage.facts.as_json()
    rows = [Figure(name, values).row() for name, values in figures.items()]
    title = f"code: {plan.rounds} rounds of {plan.runs:,} runs of {STEPS} local steps, {IN_FLIGHT} in flight"
    durable = ", ".join(f"{name}={value}" for name, value in stage.facts.settings.items())
    return Report(result, [Table(title, ("", "median", "lowest", "highest"), rows)], [durable])


async def _start(client: AsyncClient, workflow: str, inputs: Sequence[Any]) -> list[str]:
    """Start runs; returns their ids."""
    ids: list[str] = []
    for first in range(0, len(inputs), _BATCH):
        starts = [StartRun(workflow, value) for value in inputs[first : first + _BATCH]]
        for outcome in await client.start_runs(starts):
            if isinstance(outcome, FencepostError):
                raise BenchmarkFailed(f"a start was refused: {outcome}")
            ids.append(outcome.run_id)
    return ids


async def _local(bench: _Bench, runs: int) -> dict[str, float]:
    since = await now(bench.connection)
    await _start(bench.client, code_workflow.workflow_id, [0] * runs)
    before = await bench.meter.read()
    await bench.worker.work(1, code=IN_FLIGHT)
    await _ended(bench.connection, since, runs)
    cost = meter.cost(before, await bench.meter.read())
    stats = await bench.worker.stop()
    steps = await _count(bench.connection, since, _LOCAL_STEP_ENDED)
    if steps != runs * STEPS:
        raise BenchmarkFailed(f"{steps} of {runs * STEPS} local steps were recorded")
    cursor = await bench.connection.execute(
        "select extract(epoch from max(ended_at))::float8, count(*) filter (where state = 3) from run"
        " where created_at >= to_timestamp(%s)",
        (since,),
    )
    [(ended_at, completed)] = await cursor.fetchall()
    if completed != runs:
        raise BenchmarkFailed(f"{completed} of {runs} runs completed")
    seconds = ended_at - stats["first_step_time"]
    found = {"local_steps_per_second": steps / seconds}
    found |= {f"{part}_cpu_ms_per_1000_steps": value / steps * 1e6 for part, value in cost.cpu.items()}
    return found | {"transactions_per_step": cost.transactions / steps, "others_share": cost.others}


async def _ended(connection: Connection, since: Any, runs: int) -> None:
    while True:
        cursor = await connection.execute(
            "select count(*) from run where created_at >= to_timestamp(%s) and ended_at is null", (since,)
        )
        [[left]] = await cursor.fetchall()
        if not left:
            return
        await asyncio.sleep(_POLL)


async def _count(connection: Connection, since: Any, kind: int) -> int:
    cursor = await connection.execute(
        "select count(*) from event where at >= to_timestamp(%s) and type = %s", (since, kind)
    )
    [[count]] = await cursor.fetchall()
    return int(count)


async def _until(bench: _Bench, question: str, parameter: Any) -> None:
    """Wait until the database says yes."""
    while True:
        cursor = await bench.connection.execute(question, (parameter,))
        [[answer]] = await cursor.fetchall()
        if answer:
            return
        await asyncio.sleep(_POLL)


async def _alone(bench: _Bench) -> dict[str, float]:
    await bench.worker.work(1, code=IN_FLIGHT)
    [run_id] = await _start(bench.client, "bench-alone", [ALONE_STEPS])
    run = await bench.client.wait_run(run_id, _LIMIT)
    await bench.worker.stop()
    entered = run.output.decode(Any) if run.output is not None else None
    if not isinstance(entered, list) or len(entered) != ALONE_STEPS:
        raise BenchmarkFailed(f"the run alone ended with {entered!r}")
    times = [(later - earlier) * 1000 for earlier, later in pairwise(entered)]
    return {"alone_p50_ms": percentile(times, 0.5), "alone_p99_ms": percentile(times, 0.99)}


async def _cold(bench: _Bench) -> dict[str, float]:
    """The worker that makes the history ends; another session of it has nothing in memory."""
    await bench.worker.work(1, code=IN_FLIGHT)
    [run_id] = await _start(bench.client, cold.workflow_id, [COLD_EVENTS])
    await _until(bench, "select state = 6 from run where run_id = %s", run_id)
    await bench.worker.stop()
    await bench.worker.work(1, code=IN_FLIGHT)
    began = time.perf_counter()
    await bench.client.signal_run(run_id, "go")
    ended = await bench.client.wait_run(run_id, _LIMIT)
    seconds = time.perf_counter() - began
    await bench.worker.stop()
    if ended.output is None or ended.output.decode(int) != COLD_EVENTS:
        raise BenchmarkFailed(f"the cold run ended with {ended.output!r}")
    history = await history_of(bench.address, run_id)
    replays = [replayed_seconds(run_id, history) for _ in range(_REPLAYS)]
    return {
        "cold_seconds": seconds,
        "replay_events_per_second": ended.last_seq / statistics.median(replays),
    }


async def _waiting(bench: _Bench) -> dict[str, float]:
    process = psutil.Process(bench.worker.pid)
    await bench.worker.work(1, code=IN_FLIGHT, cache=1)
    await _start(bench.client, SLEEPER, [1.0] * IN_FLIGHT)
    since = await now(bench.connection)
    await asyncio.sleep(1)
    before = process.memory_info().rss
    await _start(bench.client, SLEEPER, [86_400.0] * WAITING)
    await _until(
        bench,
        f"select count(*) >= {WAITING} from event where at >= to_timestamp(%s) and type = {_TIMER_STARTED}",
        since,
    )
    await asyncio.sleep(1)
    after = process.memory_info().rss
    await bench.worker.stop()
    return {"waiting_bytes_per_run": (after - before) / WAITING}
