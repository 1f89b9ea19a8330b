"""The load: programs made by chance from the seed, started, signalled, paused, cancelled and retried through proxies
that faults are at, each call again until it is answered. What was answered is kept, for the checker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import TypeVar

from fencepost import AsyncClient, FencepostError, IllegalTransition
from fencepost.errors import Unavailable
from fencepost_server.domain.model import RunState
from tests.determinism.programs import Program, program_of
from tests.faults.soak.conditional_sink import ConditionalSink
from tests.faults.soak.graphs import MANIFESTS, SIGNAL, SIGNALS, GraphProgram, graph_program
from tests.faults.soak.schedules import SPECS
from tests.faults.soak.watcher import Watcher
from tests.fixtures.waiting import eventually, paced

T = TypeVar("T")
MOST = 1_000_000
CODE_SHARE = 0.4
GRACE = 600.0
"""Of a code run that is cancelled: its clean-up is to come to its end."""
PATIENCE = 120.0
"""Of the client, in seconds: how long it repeats a call by itself."""
INSISTENCE = 600.0
"""How long a call is made again: longer than any fault lasts, and than some in a row that reach the client."""


@dataclass
class Acked:
    """What callers were told yes to."""

    starts: dict[str, str] = field(default_factory=dict)
    """Request keys and the runs that they are answered with."""
    signals: list[tuple[str, str]] = field(default_factory=list)
    """Runs, and request ids of signals to them."""
    controls: list[tuple[str, str, str]] = field(default_factory=list)
    """Runs, request ids, and what was asked for."""
    graphs: dict[str, GraphProgram] = field(default_factory=dict)
    """The graph program that a run plays."""
    codes: dict[str, Program] = field(default_factory=dict)
    """The code program that a chain plays, by its first run."""
    conflicts: list[str] = field(default_factory=list)
    """Starts of one key that were answered with two runs."""
    paused: dict[str, datetime] = field(default_factory=dict)
    """When the schedules were told to fire no more."""


class Load:
    """Keeps ``at_once`` programs under way until it is told to stop, then waits for those that are."""

    def __init__(self, target: str, watcher: Watcher, sink: ConditionalSink, seed: int, at_once: int) -> None:
        self.acked = Acked()
        self.ended = 0
        self.under_way: set[str] = set()
        """The programs that have begun and not come to their end."""
        self._client = AsyncClient(target, timeout=PATIENCE)
        self._watcher = watcher
        self._sink = sink
        self._seed = seed
        self._room = asyncio.Semaphore(at_once)
        self._stopped = asyncio.Event()

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()

    async def stop(self) -> None:
        """Start nothing more."""
        self._stopped.set()
        for name in SPECS:
            self.acked.paused[name] = datetime.now(UTC)
            await self._insist(partial(self._client.schedules.pause, name, "it is over"))

    async def prepare(self) -> None:
        """Register the graphs; waits for the code's workers to have registered theirs."""
        for manifest in MANIFESTS.values():
            await self._client.register_definition(dict(manifest))
        for name, spec in SPECS.items():
            await self._client.schedules.create(name, spec)
        await eventually(self._has_code, PATIENCE, interval=0.1)

    async def _has_code(self) -> bool:
        return bool([each async for each in self._client.list_definitions("det_program")])

    async def run(self, most: int = MOST) -> None:
        """Run programs, one number after the other, until it is stopped; so many at most."""
        async with asyncio.TaskGroup() as group:
            for number in range(most):
                await self._room.acquire()
                if self._stopped.is_set():
                    break
                group.create_task(self._one(number))

    async def _one(self, number: int) -> None:
        seed = self._seed * MOST + number
        rng = Random(f"load {seed}")
        self.under_way.add(f"program {seed}")
        try:
            if rng.random() < CODE_SHARE:
                await self._code(program_of(seed), rng)
            else:
                await self._graph(graph_program(seed), rng)
            self.ended += 1
            self.under_way.remove(f"program {seed}")
        finally:
            self._room.release()

    # Calls

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call again and again until it is answered; raises Unavailable when INSISTENCE is over."""
        end = time.monotonic() + INSISTENCE
        while True:
            try:
                return await call()
            except Unavailable:
                if time.monotonic() > end:
                    raise

    async def _start(self, key: str, workflow_id: str, given: object, rng: Random, delay: float = 0.0) -> str:
        """Start a run, sometimes by several calls at once; they must be answered with the same."""

        async def start() -> str:
            handle = await self._client.start_run(workflow_id, given, request_key=key, start_delay=delay)
            return handle.run_id

        times = rng.choice((1, 1, 1, 3))
        found = await asyncio.gather(*(self._insist(start) for _ in range(times)))
        if len(set(found)) > 1:
            self.acked.conflicts.append(f"{key}: {sorted(set(found))}")
        self.acked.starts[key] = found[0]
        return found[0]

    async def _signal(self, run_id: str, name: str, payload: object, request_id: str) -> bool:
        """Signal a run; False if it has ended."""
        try:
            await self._insist(lambda: self._client.signal_run(run_id, name, payload, request_id=request_id))
        except IllegalTransition:
            return False
        self.acked.signals.append((run_id, request_id))
        return True

    async def _control(self, run_id: str, what: str, request_id: str, call: Callable[[], Awaitable[object]]) -> None:
        try:
            await self._insist(call)
        except IllegalTransition:
            return
        except FencepostError as error:
            if error.reason != "ALREADY_UNDONE":
                raise
            return
        self.acked.controls.append((run_id, request_id, what))

    # Graph programs

    async def _graph(self, program: GraphProgram, rng: Random) -> None:
        key = f"graph-{program.seed}"
        run_id = await self._start(key, program.workflow_id, dict(program.input), rng, program.start_delay)
        self.acked.graphs[run_id] = program
        async with asyncio.TaskGroup() as group:
            group.create_task(self._graph_signals(run_id, key, rng))
            if program.action:
                group.create_task(self._act(run_id, key, program))
            await self._to_its_end(run_id, key, rng, retry=program.retry)

    async def _graph_signals(self, run_id: str, key: str, rng: Random) -> None:
        for number in range(SIGNALS):
            await paced(rng.random())
            if not await self._signal(run_id, "go", SIGNAL, f"{key}-go-{number}"):
                return

    async def _act(self, run_id: str, key: str, program: GraphProgram) -> None:
        await paced(program.after)
        client, request_id = self._client, f"{key}-{program.action}"
        if program.action == "cancel":
            await self._control(run_id, "cancel", request_id, lambda: client.cancel_run(run_id, request_id=request_id))
        elif program.action == "terminate":
            await self._control(
                run_id, "terminate", request_id, lambda: client.terminate_run(run_id, request_id=request_id)
            )
        else:
            await self._control(run_id, "pause", request_id, lambda: client.pause_run(run_id, request_id=request_id))
            await paced(1.0)
            again = f"{key}-resume"
            await self._control(run_id, "resume", again, lambda: client.resume_run(run_id, request_id=again))

    async def _to_its_end(self, run_id: str, key: str, rng: Random, *, retry: bool) -> None:
        """Wait until a run has ended. One whose undo failed is retried, and once one that has failed."""
        number = 0
        while True:
            state = await self._watcher.until(run_id, state=RunState.BLOCKED)
            if state is not RunState.BLOCKED and not (state is RunState.FAILED and retry):
                return
            retry = retry and state is RunState.BLOCKED
            number += 1
            self._sink.pardon(run_id)
            again = f"{key}-retry-{number}"
            await self._control(run_id, "retry", again, partial(self._client.retry_run, run_id, request_id=again))
            if state is RunState.FAILED:
                # A run that has failed takes no signals: what was meant for it comes now.
                await self._graph_signals(run_id, again, rng)

    # Code programs

    async def _code(self, program: Program, rng: Random) -> None:
        key = f"code-{program.seed}"
        run_id = await self._start(key, "det_program", {"seed": program.seed, "part": 0, "carry": program.seed}, rng)
        self.acked.codes[run_id] = program
        async with asyncio.TaskGroup() as group:
            signals = group.create_task(self._code_signals(run_id, key, program, rng))
            if program.seed % 4 == 0:
                group.create_task(self._cancel(run_id, key, rng.randint(2, 40)))
            await self._watcher.until(run_id)
            signals.cancel()

    async def _code_signals(self, run_id: str, key: str, program: Program, rng: Random) -> None:
        names = [node.signal for node in program.signals() for _ in range(node.count)]
        rng.shuffle(names)
        with contextlib.suppress(asyncio.CancelledError):
            for number, name in enumerate(names):
                await paced(rng.random() * 0.05)
                if not await self._signal(run_id, name, rng.randrange(10**6), f"{key}-{number}"):
                    return

    async def _cancel(self, run_id: str, key: str, after: int) -> None:
        await self._watcher.until(run_id, last_seq=after)
        request_id = f"{key}-cancel"
        await self._control(
            run_id,
            "cancel",
            request_id,
            lambda: self._client.cancel_run(run_id, grace=GRACE, request_id=request_id),
        )
