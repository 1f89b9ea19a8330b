"""Steps per second through everything, and how near that is to the statements alone: the benchmark `throughput`.

Runs of ten steps that do nothing, through a server and workers in processes of their own; see rounds.py for the parts
of a round. A smaller round before the first is not counted. Figures are medians of the rounds. Whether the statements
or the whole comes first alternates, so that a machine that gets slower, or a database that grows, meets both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import environment
from benchmarks.meter import DATABASE, DRIVER, SERVER, WORKER, Cost, Meter
from benchmarks.plan import STEPS, Plan
from benchmarks.replay import Replayer
from benchmarks.report import Figure, Report, Table, percentile, rounded, text
from benchmarks.rounds import Bench, Round
from benchmarks.stage import Stage
from benchmarks.workflow import manifest
from fencepost import AsyncClient
from fencepost_server.config import Config

_QUIET = 0.1


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `throughput`."""
    dsn = await stage.database("bench")
    config = stage.config(await stage.database("bench_sql"))
    server = await stage.server(dsn)
    workers = [await stage.worker(server.address) for _ in range(plan.workers)]
    connection = await stage.connection(dsn)
    parts = {DATABASE: [stage.postgres.pid], SERVER: [server.pid], WORKER: [worker.pid for worker in workers]}
    async with AsyncClient(server.address) as client, Replayer(config) as replayer:
        await client.register_definition(manifest())
        bench = Bench(config, client, workers, connection, replayer, Meter(connection, parts))
        rounds = await _rounds(stage, plan, bench)
    return _report(stage, plan, config, rounds)


async def _rounds(stage: Stage, plan: Plan, bench: Bench) -> list[Round]:
    stage.note(f"warming up: {plan.warm_up_runs} runs")
    last = await bench.round(plan, plan.warm_up_runs, None)
    rounds: list[Round] = []
    for number in range(plan.rounds):
        # A server makes smaller batches for fewer runs: the first round may not take those of the warm-up.
        batch_size = round(last.through.batches.mean) if number % 2 else None
        last = await bench.round(plan, plan.runs, batch_size)
        rounds.append(last)
        stage.note(_progress(plan, number, last))
    return rounds


# What is reported. Names are those of the JSON object.

_SPEEDS: Mapping[str, Callable[[Round], float]] = {
    "steps_per_second": lambda r: r.steps / r.through.seconds,
    "sql_steps_per_second": lambda r: r.steps / r.sql.replayed.seconds,
    "steps_per_second_with_starts": lambda r: r.steps / (r.through.submit_seconds + r.through.seconds),
    "submit_runs_per_second": lambda r: r.through.counts.runs_started / r.through.submit_seconds,
    "step_p50_ms": lambda r: percentile(r.latency.step, 0.5),
    "step_p99_ms": lambda r: percentile(r.latency.step, 0.99),
    "submit_p50_ms": lambda r: percentile(r.latency.submit, 0.5),
    "batch_mean": lambda r: r.through.batches.mean,
    "sql_batch_mean": lambda r: statistics.fmean(r.sql.replayed.sizes),
    "transactions_per_step": lambda r: r.through.cost.transactions / r.steps,
    "sql_transactions_per_step": lambda r: r.sql.cost.transactions / r.steps,
    "wal_bytes_per_step": lambda r: r.through.cost.wal_bytes / r.steps,
    "sql_wal_bytes_per_step": lambda r: r.sql.cost.wal_bytes / r.steps,
    "others_share": lambda r: max(r.through.cost.others, r.sql.cost.others),
}


def _report(stage: Stage, plan: Plan, config: Config, rounds: Sequence[Round]) -> Report:
    figures = {name: Figure(name, [value(r) for r in rounds]) for name, value in _SPEEDS.items()}
    ratio = figures["steps_per_second"].median / figures["sql_steps_per_second"].median
    cpu = _cpu_figures(rounds, lambda r: r.through.cost, (DATABASE, SERVER, WORKER))
    sql_cpu = _cpu_figures(rounds, lambda r: r.sql.cost, (DATABASE, DRIVER))
    result: dict[str, Any] = {"benchmark": "throughput"}
    result |= {name: rounded(figure.median) for name, figure in figures.items()}
    result["ratio"] = rounded(ratio)
    result["cpu_seconds_per_1000_steps"] = {f.name: rounded(f.median) for f in cpu}
    result["sql_cpu_seconds_per_1000_steps"] = {f.name: rounded(f.median) for f in sql_cpu}
    result |= {"runs": plan.runs, "steps_per_run": STEPS, "rounds": plan.rounds, "workers": plan.workers}
    result |= {"slots": plan.slots, "lanes": config.lanes, "latency_runs": plan.latency_runs}
    result["counts"] = {
        name: sum(asdict(r.through.counts)[name] for r in rounds) for name in asdict(rounds[0].through.counts)
    }
    result["by_round"] = {name: [rounded(value) for value in figure.values] for name, figure in figures.items()}
    result["versions"] = environment.versions(stage.facts.version)
    result["hardware"] = environment.hardware()
    result["database"] = stage.facts.as_json()
    tables = [_figures_table(plan, figures, ratio), _cpu_table(cpu, sql_cpu)]
    return Report(result, tables, _notes(stage, figures))


def _cpu_figures(rounds: Sequence[Round], cost: Callable[[Round], Cost], parts: Sequence[str]) -> list[Figure]:
    """Processor seconds per 1,000 steps by part."""
    return [Figure(part, [cost(r).cpu[part] / r.steps * 1000 for r in rounds]) for part in parts]


def _figures_table(plan: Plan, figures: Mapping[str, Figure], ratio: float) -> Table:
    rows = [figure.row() for figure in figures.values()]
    rows.insert(2, ("ratio", f"{ratio:.3f}", "", ""))
    size = (
        f"{plan.rounds} rounds of {plan.runs:,} runs of {STEPS} steps, {plan.workers} worker(s) of {plan.slots} slots"
    )
    return Table(f"throughput: {size}", ("", "median", "lowest", "highest"), rows)


def _cpu_table(cpu: Sequence[Figure], sql_cpu: Sequence[Figure]) -> Table:
    rows = [("through everything", *_cpu_cells(cpu)), ("statements alone", *_cpu_cells(sql_cpu))]
    return Table("processor seconds per 1,000 steps", ("", DATABASE, SERVER, WORKER, DRIVER, "all"), rows)


def _cpu_cells(figures: Sequence[Figure]) -> tuple[str, ...]:
    medians = {figure.name: figure.median for figure in figures}
    cells = [text(medians[part]) if part in medians else "" for part in (DATABASE, SERVER, WORKER, DRIVER)]
    return (*cells, text(sum(medians.values())))


def _notes(stage: Stage, figures: Mapping[str, Figure]) -> list[str]:
    facts, machine = stage.facts, environment.hardware()
    durable = ", ".join(f"{name}={value}" for name, value in facts.settings.items())
    notes = [
        f"PostgreSQL {facts.version}: {durable}",
        f"data on {facts.filesystem}, fdatasync of a page {facts.fdatasync_ms:.2f} ms",
        f"{machine['processors']} × {machine['processor']}, {machine['memory_gib']} GiB, {machine['system']}",
    ]
    if facts.in_memory:
        notes.append("The data is in memory: a sync costs nothing here. Set TMPDIR to a folder on a disk.")
    if (share := figures["others_share"].median) > _QUIET:
        notes.append(f"Others used {share:.0%} of this machine meanwhile: figures are lower than they could be.")
    return notes


def _progress(plan: Plan, number: int, last: Round) -> str:
    speeds = ", ".join(f"{name} {text(_SPEEDS[name](last))}" for name in ("steps_per_second", "sql_steps_per_second"))
    return f"round {number + 1} of {plan.rounds}: {speeds}"
