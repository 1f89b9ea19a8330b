"""One round of measuring: the same amount of work through everything, by statements alone, and one run at a time.

- `through`: all runs are started, then the workers connect and work them off. Measured from the first step that a
  worker enters to the last run's end by the database's clock.
- `sql`: the same statements for as many other runs, without gRPC and decisions (replay.py).
- `latency`: one run in flight (latency.py).

throughput.py makes several and reports them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import evidence, meter
from benchmarks.decided import decide_runs
from benchmarks.evidence import Batches, Connection, Counts
from benchmarks.latency import Latencies, one_by_one
from benchmarks.meter import Cost, Meter
from benchmarks.plan import STEPS, Plan
from benchmarks.processes import Worker
from benchmarks.replay import Replayed, Replayer
from benchmarks.stage import BenchmarkFailed
from benchmarks.workflow import INPUT, WORKFLOW
from fencepost import AsyncClient, FencepostError, StartRun
from fencepost_server.config import Config

STALLED = 30.0
_POLL = 0.1


@dataclass(frozen=True, slots=True)
class Through:
    """The part that goes through everything. Times in seconds."""

    submit_seconds: float
    seconds: float
    cost: Cost
    batches: Batches
    counts: Counts


@dataclass(frozen=True, slots=True)
class Sql:
    """The part that is only statements."""

    replayed: Replayed
    cost: Cost


@dataclass(frozen=True, slots=True)
class Round:
    """All three parts."""

    through: Through
    sql: Sql
    latency: Latencies

    @property
    def steps(self) -> int:
        """Steps of each of the two large parts."""
        return self.through.counts.steps_completed


class Bench:
    """A server, its workers and a replayer, ready for rounds."""

    def __init__(
        self,
        config: Config,
        client: AsyncClient,
        workers: Sequence[Worker],
        connection: Connection,
        replayer: Replayer,
        reader: Meter,
    ) -> None:
        self._config = config
        self._client = client
        self._workers = workers
        self._connection = connection
        self._replayer = replayer
        self._meter = reader

    async def round(self, plan: Plan, runs: int, batch_size: int | None) -> Round:
        """One round. With a ``batch_size`` the statements come first, else last and with that of the other part."""
        if batch_size is not None:
            sql = await self.sql(plan, runs, batch_size)
            through = await self.through(plan, runs)
        else:
            through = await self.through(plan, runs)
            sql = await self.sql(plan, runs, round(through.batches.mean))
        latency = await one_by_one(self._client, self._workers[0], plan.latency_runs, plan.slots)
        return Round(through, sql, latency)

    async def through(self, plan: Plan, runs: int) -> Through:
        """Start ``runs`` runs, then let the workers complete them. Raises BenchmarkFailed unless each step ran once."""
        since = await evidence.now(self._connection)
        began = time.perf_counter()
        starts = [StartRun(WORKFLOW, INPUT) for _ in range(runs)]
        outcomes = await self._client.start_runs(starts)
        submit_seconds = time.perf_counter() - began
        if refused := [outcome for outcome in outcomes if isinstance(outcome, FencepostError)]:
            raise BenchmarkFailed(f"{len(refused)} of {runs} starts were refused: {refused[0]}")
        before = await self._meter.read()
        await asyncio.gather(*(worker.work(plan.slots) for worker in self._workers))
        await self._all_completed(runs * STEPS)
        after = await self._meter.read()
        stats = await asyncio.gather(*(worker.stop() for worker in self._workers))
        counts = await evidence.counts(self._connection, since)
        if faults := counts.faults(runs):
            raise BenchmarkFailed(f"the runs did not go as they should: {'; '.join(faults)}")
        batches = await evidence.batches(self._connection, since)
        first = min(stat["first_step_time"] for stat in stats if stat["first_step_time"] is not None)
        return Through(submit_seconds, batches.ended_at - first, meter.cost(before, after), batches, counts)

    async def _all_completed(self, steps: int) -> None:
        """Wait until the server has acknowledged every step to the workers. Raises BenchmarkFailed if nothing moves."""
        completed, moved_at = 0, time.monotonic()
        while completed < steps:
            await asyncio.sleep(_POLL)
            stats = await asyncio.gather(*(worker.stats() for worker in self._workers))
            now_completed = sum(stat["completed"] for stat in stats)
            if now_completed > completed:
                completed, moved_at = now_completed, time.monotonic()
            elif time.monotonic() - moved_at > STALLED:
                raise BenchmarkFailed(f"no step was completed for {STALLED:g} s, after {completed} of {steps}: {stats}")

    async def sql(self, plan: Plan, runs: int, batch_size: int) -> Sql:
        """Replay as many runs as the other part has."""
        slots = plan.slots * plan.workers
        decided = decide_runs(self._config, runs, slots)
        await self._replayer.seed(decided)
        before = await self._meter.read()
        replayed = await self._replayer.replay(decided, slots, batch_size)
        return Sql(replayed, meter.cost(before, await self._meter.read()))
