"""What the step engine has to bear, beside speed: the benchmark `engine`.

- `undo`: a run of as many steps as a manifest may have nodes; the last one fails for good, and all others are undone,
  one at a time. From the event that says that the run ends to its final one, by the database's clock.
- `timers`: runs that sleep, brought to be due at the same instant; from then to the end of the last one.
- `map`: a map over few items and one over many, with the same number of them under way at a time; from the opening of
  the map to its join, for each item.

What was done is counted in the database afterwards: a figure of work that did not happen is an error.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import environment
from benchmarks.evidence import Connection
from benchmarks.plan import Plan
from benchmarks.report import Figure, Report, Table, rounded
from benchmarks.stage import BenchmarkFailed, Stage
from benchmarks.workflow import ITEM, REFUSE, UNDO, UNDONE
from fencepost import AsyncClient, StartRun

STEPS = 1000
TIMERS = 10_000
FEW, MANY, AT_A_TIME = 100, 10_000, 100
_LIMIT = 180.0
_BATCH = 1000

_SPAN = """
select extract(epoch from (select at from event where run_id = %(run)s and type = %(last)s)
                        - (select at from event where run_id = %(run)s and type = %(first)s))::float8,
       (select count(*) from event where run_id = %(run)s and type = %(counted)s)
"""
_RUN_FAILED, _SCOPE_OPENED, _SCOPE_CLOSED, _RUN_ENDING, _UNDO_COMPLETED, _STEP_COMPLETED = 7, 14, 16, 22, 26, 4


def undo_manifest() -> dict[str, Any]:
    """Steps that can be undone, and one that fails for good."""
    steps = [{"id": f"n{n}", "step": UNDONE, "undo": {"step": UNDO}} for n in range(STEPS - 1)]
    return {"id": "bench-undo", "compatibility_id": "1", "sequence": [*steps, {"id": "last", "step": REFUSE}]}


def timer_manifest() -> dict[str, Any]:
    """A run that only sleeps."""
    return {"id": "bench-timer", "compatibility_id": "1", "sequence": [{"id": "sleep", "sleep": "1d"}]}


def map_manifest() -> dict[str, Any]:
    """A step for each item."""
    body = {"over": "", "do": [{"id": "item", "step": ITEM}], "max_parallel": AT_A_TIME}
    return {"id": "bench-map", "compatibility_id": "1", "sequence": [{"id": "map", "map": body}]}


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `engine`."""
    dsn = await stage.database("bench")
    server = await stage.server(dsn)
    worker = await stage.worker(server.address)
    connection = await stage.connection(dsn)
    await worker.work(plan.slots)
    figures: dict[str, list[float]] = {}
    parts: dict[str, Callable[[AsyncClient, Connection], Awaitable[dict[str, float]]]] = {
        "undo": _undo,
        "timers": _timers,
        "map": _maps,
    }
    async with AsyncClient(server.address) as client:
        for manifest in (undo_manifest(), timer_manifest(), map_manifest()):
            await client.register_definition(manifest)
        for number in range(plan.rounds):
            for name, part in parts.items():
                async with asyncio.timeout(_LIMIT):
                    found = await part(client, connection)
                stage.note(f"round {number + 1} of {plan.rounds}: {name} {json.dumps(found)}")
                for figure, value in found.items():
                    figures.setdefault(figure, []).append(value)
    await worker.stop()
    result: dict[str, Any] = {"benchmark": "engine", "rounds": plan.rounds, "slots": plan.slots}
    result |= {name: rounded(statistics.median(values)) for name, values in figures.items()}
    result["hardware"] = environment.hardware()
    result["database"] = stage.facts.as_json()
    rows = [Figure(name, values).row() for name, values in figures.items()]
    return Report(result, [Table("engine", ("", "median", "lowest", "highest"), rows)])


async def _undo(client: AsyncClient, connection: Connection) -> dict[str, float]:
    handle = await client.start_run("bench-undo", {"n": 0})
    run = await client.wait_run(handle.run_id, _LIMIT)
    seconds, undone = await _span(connection, run.run_id, _RUN_ENDING, _RUN_FAILED, _UNDO_COMPLETED)
    if undone != STEPS - 1:
        raise BenchmarkFailed(f"{undone} of {STEPS - 1} steps were undone")
    return {"undo_seconds": seconds}


async def _timers(client: AsyncClient, connection: Connection) -> dict[str, float]:
    for start in range(0, TIMERS, _BATCH):
        await client.start_runs(StartRun("bench-timer", start + n) for n in range(_BATCH))
    # One instant for all of them: starting them takes longer than firing them.
    cursor = await connection.execute("update timer set fire_at = clock_timestamp() returning clock_timestamp()")
    if cursor.rowcount != TIMERS:
        raise BenchmarkFailed(f"{cursor.rowcount} of {TIMERS} timers wait")
    [[began]] = await (await connection.execute("select clock_timestamp()")).fetchall()
    while True:
        cursor = await connection.execute("select count(*) from timer")
        [[left]] = await cursor.fetchall()
        if not left:
            break
        await asyncio.sleep(0.05)
    cursor = await connection.execute(
        "select count(*), extract(epoch from max(ended_at) - %s)::float8 from run"
        " where workflow_id = 'bench-timer' and state = 3 and ended_at >= %s",
        (began, began),
    )
    [[ended, seconds]] = await cursor.fetchall()
    if ended > TIMERS or ended < TIMERS * 0.5:
        raise BenchmarkFailed(f"{ended} of {TIMERS} runs ended")
    return {"timers_seconds": seconds}


async def _maps(client: AsyncClient, connection: Connection) -> dict[str, float]:
    each = {}
    for items in (FEW, MANY):
        handle = await client.start_run("bench-map", list(range(items)))
        run = await client.wait_run(handle.run_id, _LIMIT)
        seconds, done = await _span(connection, run.run_id, _SCOPE_OPENED, _SCOPE_CLOSED, _STEP_COMPLETED)
        if done != items:
            raise BenchmarkFailed(f"{done} of {items} items were done")
        each[items] = seconds / items * 1000
    return {f"map_{n}_ms_per_item": value for n, value in each.items()} | {"map_ratio": each[MANY] / each[FEW]}


async def _span(connection: Connection, run_id: str, first: int, last: int, counted: int) -> tuple[float, int]:
    """Seconds between two events of a run, and how many of a third kind it has."""
    cursor = await connection.execute(_SPAN, {"run": run_id, "first": first, "last": last, "counted": counted})
    [(seconds, count)] = await cursor.fetchall()
    if seconds is None:
        raise BenchmarkFailed(f"run {run_id} has not come to event {last}")
    return seconds, count
