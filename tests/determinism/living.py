"""Lets programs live: through a server and workers that are processes, which are killed all the while.

What is left is their histories. Nothing here looks into them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from fencepost import AsyncClient, AsyncRunHandle, IllegalTransition
from fencepost.v1 import run_pb2
from tests.determinism.programs import Program, program_of
from tests.faults.scene import count, until_count
from tests.fixtures.api import Api
from tests.fixtures.processes import Process
from tests.fixtures.servers import ServerProcess
from tests.fixtures.waiting import eventually, paced

QUICK: dict[str, Any] = {"heartbeat_interval": 0.5, "ping_interval": 0.5, "disconnect_grace": 0.5, "poll_interval": 0.1}
CACHES = ("2", "replay", "1000")
_ENDS = 90.0
_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class Lived:
    """One run that has ended; of a chain, each is one."""

    program: Program
    run: run_pb2.Run
    events: list[run_pb2.Event]
    children: dict[str, list[run_pb2.Event]]
    """The histories of its child runs that came to an end of their own."""


@dataclass
class Life:
    """What programs live through. ``start_worker(address, cache)`` starts a process."""

    server: ServerProcess
    dsn: str
    start_worker: Callable[[str, str], Process]
    rng: Random
    kills: dict[str, int] = field(default_factory=lambda: {"worker": 0, "server": 0})
    _workers: list[Process] = field(default_factory=list)
    _caches: Iterator[str] = field(default_factory=lambda: itertools.cycle(CACHES))
    _ended: int = 0

    async def live(self, seeds: Iterable[int], *, at_once: int = 20, kill_every: int = 3) -> list[list[Lived]]:
        """Let the programs of some seeds live, so many at once, with a kill after every few that have ended. Each has
        become a chain of runs.
        """
        for _ in CACHES:
            self._begin_worker()
        address = self.server.grpc_address
        room = asyncio.Semaphore(at_once)
        async with AsyncClient(address, timeout=60.0) as client:
            await self._connected()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(client, room, program_of(seed))) for seed in seeds]
                group.create_task(self._killing(len(tasks), kill_every))
        api = Api(address)
        try:
            lived = [await self._read(api, *task.result()) for task in tasks]
        finally:
            await api.close()
        for worker in self._workers:
            worker.kill()
        return lived

    def _begin_worker(self) -> None:
        self._workers.append(self.start_worker(self.server.grpc_address, next(self._caches)))

    async def _connected(self) -> None:
        await eventually(lambda: all(worker.events("connected") for worker in self._workers), 60)

    async def _killing(self, total: int, every: int) -> None:
        """Kill a worker or the server whenever so many have ended, as long as others are at it."""
        for wanted in range(every, total - every, every):
            await eventually(partial(self._have_ended, wanted), _ENDS, interval=0.02)
            if (wanted // every) % 4 == 2:
                self.kills["server"] += 1
                self.server.kill()
                sessions = await count(self.dsn, "session")
                self.server.start()
                await asyncio.to_thread(self.server.wait_serving)
                # Nobody notices the end of a worker that goes before it is back: what it had is its own for a minute.
                await until_count(self.dsn, "session", sessions + len(self._workers), more=True)
            else:
                self.kills["worker"] += 1
                self._workers.pop(self.rng.randrange(len(self._workers))).kill()
                self._begin_worker()

    def _have_ended(self, wanted: int) -> bool:
        return self._ended >= wanted

    async def _one(self, client: AsyncClient, room: asyncio.Semaphore, program: Program) -> tuple[Program, str]:
        async with room:
            given = {"seed": program.seed, "part": 0, "carry": program.seed}
            handle = await client.start_run("det_program", given)
            rng = Random(program.seed)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._signals(handle, program, rng))
                if program.seed % 4 == 0:
                    group.create_task(self._cancel(handle, rng.randint(2, 40)))
                try:
                    await handle.wait(_ENDS)
                except TimeoutError:
                    raise AssertionError(
                        f"{program.seed} stands still: {await _standing(client, handle.run_id)}"
                    ) from None
            self._ended += 1
            return program, handle.run_id

    async def _signals(self, handle: AsyncRunHandle, program: Program, rng: Random) -> None:
        names = [node.signal for node in program.signals() for _ in range(node.count)]
        rng.shuffle(names)
        with contextlib.suppress(IllegalTransition):  # it has ended
            for name in names:
                # When a signal comes is part of the chance.
                await paced(rng.random() * _PAUSE)
                await handle.signal(name, rng.randrange(10**6))

    async def _cancel(self, handle: AsyncRunHandle, after: int) -> None:
        while True:
            run = await handle.get()
            if run.state.is_final:
                return
            if run.last_seq >= after:
                break
            await paced(_PAUSE)
        with contextlib.suppress(IllegalTransition):  # it has ended
            await handle.cancel("by chance", grace=10 * _ENDS)

    async def _read(self, api: Api, program: Program, run_id: str) -> list[Lived]:
        """The chain of runs that a program went through, once its undo work is done, too."""
        chain = []
        while run_id:
            run = await api.get(run_id)
            events = await api.history(run_id)
            # One that was given up may never have been there.
            ended = [event.child_ended for event in events if event.HasField("child_ended")]
            there = [child.child_run_id for child in ended if child.state != run_pb2.RUN_STATE_CANCELLED]
            chain.append(Lived(program, run, events, {child: await api.history(child) for child in there}))
            run_id = run.next_run_id
        return chain


async def _standing(client: AsyncClient, run_id: str) -> str:
    """How the last run of a chain and the children that it waits for stand, for whoever looks into why it does."""
    run = await client.get_run(run_id)
    while run.next_run_id:
        run = await client.get_run(run.next_run_id)
    events = [f"{event.time:%T.%f} {event}" async for event in client.history(run.run_id)]
    children = [await _standing(client, wait.child_run_id) for wait in run.open_waits if wait.child_run_id]
    return "\n".join([str(run), *events, *children])
