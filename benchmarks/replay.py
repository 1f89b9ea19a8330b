"""The same statements without gRPC and without decisions: how fast the database alone would be.

A replay does to the database what a server does for a number of runs, from the first claim to the last commit: claims,
and batches that lock, read the clock, update runs, delete and insert tasks, append events and commit, through the
server's own functions of `fencepost_server.store`, on as many lanes, in batches of the size that a server made on
average in a round before. The rows come from decided.py. Left out are gRPC, frames, the worker, and deciding. Still in
it is the Python that lays out parameters and reads rows, in one process, as in the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from benchmarks.decided import NAMESPACE, SESSION_ID, DecidedRun, DecidedStep
from fencepost_server.config import Config
from fencepost_server.store import batch, tasks
from fencepost_server.store.connection import Database, connect, transaction
from fencepost_server.store.pipeline import Connection
from fencepost_server.store.tasks import Want

_SEED_BATCH = 500


@dataclass(slots=True)
class _Lane:
    """What waits on one lane: runs, each with the number of its next step."""

    connection: Connection
    left: int = 0
    waiting: deque[tuple[DecidedRun, int]] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, run: DecidedRun, index: int) -> None:
        """A step that could be completed now."""
        self.waiting.append((run, index))
        self.wake.set()


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replay: how long it took in seconds, and the steps of each batch."""

    seconds: float
    sizes: Sequence[int]


class Replayer:
    """Replays on one database, whose connections it keeps from round to round, as a server does."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._database = Database(config, "benchmark", config.loop_pool_size)
        self._connections: list[Connection] = []
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await self._database.open()
            stack.push_async_callback(self._database.close)
            for _ in range(self._config.lanes):
                self._connections.append(await connect(self._config))
                stack.push_async_callback(self._connections[-1].close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def seed(self, runs: Sequence[DecidedRun]) -> None:
        """Start the runs: they wait for their first step to be claimed."""
        for start in range(0, len(runs), _SEED_BATCH):
            some = runs[start : start + _SEED_BATCH]
            async with transaction(self._connections[0], self._config) as session:
                batch.insert_runs(session, [(run.run, "", None, None, None) for run in some])
                batch.insert_tasks(session, [(run.task.row, run.task.namespace) for run in some])
                batch.insert_events(session, [event for run in some for event in run.events])

    async def replay(self, runs: Sequence[DecidedRun], slots: int, batch_size: int) -> Replayed:
        """Bring runs that were seeded to their end, ``slots`` at a time, ``batch_size`` steps in a transaction.

        There are more slots if a lane could find less than a full batch otherwise: no worker holds steps meanwhile, but
        chance does not deal the runs out to the lanes evenly.
        """
        slots = max(slots, 2 * batch_size * len(self._connections))
        replay = _Replay(self._config, self._database, self._connections, runs, slots, batch_size)
        # What was decided is much and stays until the end: a collector that looks through it again and again would
        # be measured with the rest.
        gc.collect()
        gc.freeze()
        try:
            began = time.perf_counter()
            await replay.run()
            return Replayed(time.perf_counter() - began, replay.sizes)
        finally:
            gc.unfreeze()


class _Replay:
    """One replay under way."""

    def __init__(
        self,
        config: Config,
        database: Database,
        connections: Sequence[Connection],
        runs: Sequence[DecidedRun],
        slots: int,
        batch_size: int,
    ) -> None:
        self.sizes: list[int] = []
        self._config = config
        self._database = database
        self._runs = {run.run.run_id: run for run in runs}
        self._unclaimed = len(runs)
        self._free = slots
        self._batch_size = batch_size
        self._freed = asyncio.Event()
        self._lanes = [_Lane(connection) for connection in connections]

    async def run(self) -> None:
        """Claim and complete everything."""
        for run in self._runs.values():
            self._lane(run).left += len(run.steps)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._claim())
            for lane in self._lanes:
                group.create_task(self._complete(lane))

    def _lane(self, run: DecidedRun) -> _Lane:
        """The one that a server has for the run."""
        return self._lanes[zlib.crc32(run.run.run_id.encode()) % len(self._lanes)]

    async def _claim(self) -> None:
        """Claim for slots that are free, as soon as there are some."""
        row = next(iter(self._runs.values())).task.row
        wants = [Want(row.queue, row.handler, row.priority)]
        while self._unclaimed:
            slots = min(self._free, self._config.claim_batch)
            if not slots:
                self._freed.clear()
                await self._freed.wait()
                continue
            self._free -= slots
            sessions = [SESSION_ID] * slots
            claimed, _ = await tasks.claim(
                self._database, NAMESPACE, wants, sessions, self._config.claim_batch_bytes, lambda _claimed: ()
            )
            self._free += slots - len(claimed)
            self._unclaimed -= len(claimed)
            for task in claimed:
                run = self._runs[task.run_id]
                self._lane(run).put(run, 0)

    async def _complete(self, lane: _Lane) -> None:
        """Write batch after batch until the lane's last step."""
        while lane.left:
            if not lane.waiting:
                lane.wake.clear()
                await lane.wake.wait()
            items = [lane.waiting.popleft() for _ in range(min(self._batch_size, len(lane.waiting)))]
            await self._write(lane.connection, [run.steps[index] for run, index in items])
            self.sizes.append(len(items))
            lane.left -= len(items)
            for run, index in items:
                if index + 1 < len(run.steps):
                    lane.put(run, index + 1)
                else:
                    self._free += 1
                    self._freed.set()

    async def _write(self, connection: Connection, steps: Sequence[DecidedStep]) -> None:
        """One transaction, in the order of engine.commit: lock and read, then write."""
        async with transaction(connection, self._config) as session:
            keys = [step.key for step in steps]
            await batch.lock_and_read(session, (), {key[0] for key in keys}, keys, (), skip_locked=False)
            batch.update_runs(session, [step.run for step in steps])
            batch.delete_tasks(session, keys)
            new_tasks = [(new.row, new.namespace) for step in steps if (new := step.new_task) is not None]
            if new_tasks:
                batch.insert_tasks(session, new_tasks)
            batch.insert_events(session, [event for step in steps for event in step.events])
