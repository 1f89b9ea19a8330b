"""A database with servers and workers on it, ready for rounds of the same work: runs of ten steps that do nothing.

`Load.complete` starts runs, then lets the workers connect and work all of them off. `Load.work_off` works on runs that
wait already, and leaves when enough steps are done. Both count in the database what was done, and raise BenchmarkFailed
if it is not what was asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks import evidence, meter
from benchmarks.evidence import Batches, Connection, Counts
from benchmarks.meter import DATABASE, SERVER, WORKER, Cost, Meter
from benchmarks.plan import STEPS
from benchmarks.processes import Server, Worker
from benchmarks.stage import BenchmarkFailed, Stage
from benchmarks.workflow import INPUT, WORKFLOW, manifest
from fencepost import AsyncClient, FencepostError, StartRun

Process = TypeVar("Process", Server, Worker)
STALLED = 30.0
_POLL = 0.1
_MEASURED = 0.9


@dataclass(frozen=True, slots=True)
class Work:
    """What was done. Times in seconds; ``seconds`` are from the first step that a worker entered to the last commit.

    ``steady_rate`` is in steps a second, over the first nine tenths: without the time when work runs out.
    """

    seconds: float
    steps: int
    steady_rate: float
    cost: Cost
    batches: Batches


@dataclass(frozen=True, slots=True)
class Completed(Work):
    """The same, of runs that were started for it."""

    submit_seconds: float
    counts: Counts

    @property
    def rate(self) -> float:
        """Steps a second."""
        return self.steps / self.seconds


@dataclass(frozen=True, slots=True)
class Load:
    """Servers on one database, and their workers; ``slots`` are those of all workers together."""

    client: AsyncClient
    servers: Sequence[Server]
    workers: Sequence[Worker]
    connection: Connection
    meter: Meter
    slots: int

    @classmethod
    async def on(cls, stage: Stage, slots: int, *, servers: int = 1, workers: int = 1, dsn: str | None = None) -> Load:
        """Make it, on a new database unless there is one. Workers are dealt out to the servers in turn."""
        dsn = dsn or await stage.database()
        serving = await _together(stage.server(dsn) for _ in range(servers))
        working = await _together(stage.worker(serving[number % servers].address) for number in range(workers))
        client = await stage.client(serving[0].address)
        await client.register_definition(manifest())
        connection = await stage.connection(dsn)
        parts = {
            DATABASE: [stage.postgres.pid],
            SERVER: [server.pid for server in serving],
            WORKER: [worker.pid for worker in working],
        }
        return cls(client, serving, working, connection, Meter(connection, parts), slots)

    async def start(self, workflow: str, inputs: Sequence[Any]) -> list[str]:
        """Start runs; returns their ids. Raises BenchmarkFailed if one is refused."""
        ids = []
        for outcome in await self.client.start_runs([StartRun(workflow, value) for value in inputs]):
            if isinstance(outcome, FencepostError):
                raise BenchmarkFailed(f"a start was refused: {outcome}")
            ids.append(outcome.run_id)
        return ids

    async def complete(self, runs: int, value: Any = INPUT, workers: int | None = None) -> Completed:
        """Start ``runs`` runs, then let the workers, or the first ``workers`` of them, complete them."""
        since = await evidence.now(self.connection)
        began = time.perf_counter()
        await self.start(WORKFLOW, [value] * runs)
        submit_seconds = time.perf_counter() - began
        work = await self._work(since, runs * STEPS, self.workers[:workers])
        counts = await evidence.counts(self.connection, since)
        if faults := counts.faults(runs):
            raise BenchmarkFailed(f"the runs did not go as they should: {'; '.join(faults)}")
        return Completed(
            work.seconds, work.steps, work.steady_rate, work.cost, work.batches,
            submit_seconds=submit_seconds, counts=counts,
        )  # fmt: skip

    async def work_off(self, steps: int) -> Work:
        """Let the workers complete at least so many steps of runs that wait."""
        return await self._work(await evidence.now(self.connection), steps, self.workers)

    async def _work(self, since: float, steps: int, workers: Sequence[Worker]) -> Work:
        before = await self.meter.read()
        await asyncio.gather(*(worker.work(max(1, self.slots // len(workers))) for worker in workers))
        completed = await _until_completed(workers, steps)
        after = await self.meter.read()
        stats = await asyncio.gather(*(worker.stop() for worker in workers))
        batches = await evidence.batches(self.connection, since)
        if (recorded := sum(batches.sizes)) < completed:
            raise BenchmarkFailed(f"{completed} steps were acknowledged, and {recorded} are recorded")
        first = min(stat["first_step_time"] for stat in stats if stat["first_step_time"] is not None)
        return Work(
            seconds=batches.ended_at - first,
            steps=completed,
            steady_rate=batches.rate(first, round(steps * _MEASURED)),
            cost=meter.cost(before, after),
            batches=batches,
        )


async def _together(starts: Iterable[Coroutine[Any, Any, Process]]) -> list[Process]:
    """Start processes side by side."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(start) for start in starts]
    return [task.result() for task in tasks]


async def _until_completed(workers: Sequence[Worker], steps: int) -> int:
    """Wait until so many steps are acknowledged to the workers; returns how many. A stall raises BenchmarkFailed."""
    completed, moved_at = 0, time.monotonic()
    while completed < steps:
        await asyncio.sleep(_POLL)
        stats = await asyncio.gather(*(worker.stats() for worker in workers))
        now_completed = sum(stat["completed"] for stat in stats)
        if now_completed > completed:
            completed, moved_at = now_completed, time.monotonic()
        elif time.monotonic() - moved_at > STALLED:
            raise BenchmarkFailed(f"no step was completed for {STALLED:g} s, after {completed} of {steps}: {stats}")
    return completed
