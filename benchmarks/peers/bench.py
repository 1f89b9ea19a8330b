"""Fencepost and its peers on the same job, in the same run: the benchmark `peers`.

The job: runs of ten steps that do nothing, one after the other, the result of each durable before the next one starts,
200 runs in flight, one worker process. Fencepost does it twice: as a graph, whose steps go over the wire, and as code
with local steps, which run where the code runs, as those of most peers do. Peers on PostgreSQL get a database of their
own on the same server. A peer that can't be set up, or fails, has an error in place of figures, and the others go on.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

from benchmarks import local
from benchmarks.load import Load
from benchmarks.peers.workshop import Workshop, free_port
from benchmarks.plan import STEPS, Plan
from benchmarks.processes import ProcessFailed
from benchmarks.report import Report, Table, rounded, text
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage

IN_FLIGHT = local.IN_FLIGHT
OURS, OURS_LOCAL = "fencepost", "fencepost_local_steps"


@dataclass(frozen=True, slots=True)
class Peer:
    """``measure`` does the job once. ``share`` is how many runs it gets: each should take some seconds.

    ``remark`` says for people what has to be known to compare it.
    """

    measure: Callable[[Stage, Workshop, int], Awaitable[dict[str, Any]]]
    share: float
    remark: str


async def _absurd(stage: Stage, workshop: Workshop, runs: int) -> dict[str, Any]:
    return await workshop.python_job("absurd_job", _url(stage.empty_database()), runs, IN_FLIGHT)


async def _dbos(stage: Stage, workshop: Workshop, runs: int) -> dict[str, Any]:
    return await workshop.python_job("dbos_job", _url(stage.empty_database()), runs, IN_FLIGHT)


async def _procrastinate(stage: Stage, workshop: Workshop, runs: int) -> dict[str, Any]:
    return await workshop.python_job("procrastinate_job", _url(stage.empty_database()), runs, IN_FLIGHT)


async def _temporal(workshop: Workshop, runs: int, kind: str) -> dict[str, Any]:
    port = free_port()
    server = await workshop.temporal_server(port)
    try:
        return await workshop.python_job("temporal_job", f"127.0.0.1:{port}", runs, IN_FLIGHT, kind)
    finally:
        await server.end()


async def _temporal_activities(_stage: Stage, workshop: Workshop, runs: int) -> dict[str, Any]:
    return await _temporal(workshop, runs, "activities")


async def _temporal_local(_stage: Stage, workshop: Workshop, runs: int) -> dict[str, Any]:
    return await _temporal(workshop, runs, "local")


async def _restate(stage: Stage, workshop: Workshop, runs: int) -> dict[str, Any]:
    admin, ingress, service = free_port(), free_port(), free_port()
    async with AsyncExitStack() as stack:
        server = await workshop.restate_server(admin, ingress, stage.postgres.folder / f"restate-{admin}")
        stack.push_async_callback(server.end)
        steps = await workshop.restate_service(service)
        stack.push_async_callback(steps.end)
        return await workshop.node_job("restate_job", admin, ingress, service, runs, IN_FLIGHT)


PEERS: Mapping[str, Peer] = {
    "restate": Peer(_restate, 1.0, "a log of its own; steps run inline"),
    "absurd": Peer(_absurd, 0.5, "PL/pgSQL; one thread; steps run inline"),
    "dbos": Peer(_dbos, 0.2, "a library on PostgreSQL; steps run inline"),
    "procrastinate": Peer(_procrastinate, 0.2, "a task queue: single tasks, no runs"),
    "temporal_local_activities": Peer(_temporal_local, 0.2, "development server, in memory; steps run inline"),
    "temporal_activities": Peer(_temporal_activities, 0.1, "development server, in memory"),
}


class _Comparison:
    """The rounds, and what went wrong."""

    def __init__(self, stage: Stage, plan: Plan, load: Load, workshop: Workshop) -> None:
        self.results = Results(stage, "peers", plan)
        self.versions: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self._stage = stage
        self._plan = plan
        self._load = load
        self._workshop = workshop

    async def set_up(self) -> None:
        """Install what can be."""
        for kind, set_up, names in (
            ("Node", self._workshop.set_up_node, ["restate"]),
            ("Python", self._workshop.set_up_python, [name for name in PEERS if name != "restate"]),
        ):
            self._stage.note(f"peers: setting up {', '.join(names)} ({kind} packages)")
            try:
                await set_up()
            except ProcessFailed as error:
                self._failed(error, *names)

    async def one(self, number: int) -> None:
        """Fencepost first in one round, last in the next."""
        order = [self._ours, self._peers]
        for part in order if number % 2 == 0 else order[::-1]:
            await part()

    async def _ours(self) -> None:
        done = await self._load.complete(self._plan.runs)
        self.results.add({f"{OURS}_steps_per_second": done.rate})
        self.results.add_cost(OURS, done.cost, done.steps)
        rate = await local.complete(self._load, self.results, self._plan.runs)
        self.results.add({f"{OURS_LOCAL}_steps_per_second": rate})

    async def _peers(self) -> None:
        for name, peer in PEERS.items():
            if name in self.errors:
                continue
            runs = max(IN_FLIGHT, int(self._plan.runs * peer.share))
            try:
                found = await peer.measure(self._stage, self._workshop, runs)
            except ProcessFailed as error:
                self._failed(error, name)
                continue
            if found["steps"] != runs * STEPS:
                self._failed(ProcessFailed(f"{found['steps']} of {runs * STEPS} steps were done"), name)
                continue
            self.versions[name] = found["version"]
            self.results.add({f"{name}_steps_per_second": found["steps"] / found["seconds"]})

    def _failed(self, error: ProcessFailed, *names: str) -> None:
        for name in names:
            self._stage.note(json.dumps({"peer": name, "error": str(error)}))
            self.errors[name] = str(error)

    def rates(self) -> dict[str, float]:
        """Steps a second of each peer that was measured in every round."""
        names = [name for name in PEERS if name in self.versions and name not in self.errors]
        return {name: self.results.median(f"{name}_steps_per_second") for name in names}


async def measure(stage: Stage, plan: Plan, folder: Path | None = None) -> Report:
    """The benchmark `peers`. The peers are set up in ``folder``, which is kept, or in a temporary one."""
    workshop = Workshop(folder or stage.postgres.folder / "peers")
    load = await Load.on(stage, IN_FLIGHT)
    comparison = _Comparison(stage, plan, load, workshop)
    await comparison.set_up()
    await load.complete(plan.warm_up_runs)
    await local.register(load)
    await local.complete(load, Results(stage, "peers", plan), plan.warm_up_runs)
    await comparison.results.rounds(comparison.one)
    return _report(plan, comparison)


def _report(plan: Plan, comparison: _Comparison) -> Report:
    results, rates = comparison.results, comparison.rates()
    if not rates:
        raise BenchmarkFailed(f"no peer could be measured: {json.dumps(comparison.errors)}")
    ours = {name: results.median(f"{name}_steps_per_second") for name in (OURS, OURS_LOCAL)}
    fastest = max(rates, key=lambda name: rates[name])
    facts: dict[str, Any] = {
        "ratio_to_fastest_peer": rounded(ours[OURS] / rates[fastest]),
        "local_ratio_to_fastest_peer": rounded(ours[OURS_LOCAL] / rates[fastest]),
        "fastest_peer": fastest,
        "ratios": {name: rounded(ours[OURS] / rate) for name, rate in rates.items()},
        "local_ratios": {name: rounded(ours[OURS_LOCAL] / rate) for name, rate in rates.items()},
        "peer_versions": comparison.versions,
        "errors": comparison.errors,
    }
    size = (
        f"{plan.rounds} rounds of up to {plan.runs:,} runs of {STEPS} steps, {IN_FLIGHT} in flight, one worker process"
    )
    report = results.report(size, runs=plan.runs, steps_per_run=STEPS, in_flight=IN_FLIGHT, **facts)
    rows = [
        (name, text(rate), f"{ours[OURS] / rate:.2f}", f"{ours[OURS_LOCAL] / rate:.2f}", comparison.versions[name])
        for name, rate in sorted(rates.items(), key=lambda item: -item[1])
    ]
    columns = ("", "steps/s", "Fencepost ×", "its local steps ×", "version")
    notes = [f"{name}: {PEERS[name].remark}" for name in rates]
    notes += [f"{name} failed: {error}" for name, error in comparison.errors.items()]
    return Report(report.result, [*report.tables, Table("ratios", columns, rows)], [*report.notes, *notes])


def _url(dsn: str) -> str:
    """A connection string as a URL, which is the form that every peer takes."""
    parts = conninfo_to_dict(dsn)
    host = quote(str(parts["host"]), safe="/")
    return f"postgresql://{parts['user']}@/{parts['dbname']}?host={host}"
