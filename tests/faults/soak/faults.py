"""The faults: each a coroutine that does something bad to one part of the stage, and ends when it has been mended.

`KINDS` has them all. What a fault touches is told before it begins, so that no two are at the same part at a time, and
so that a recovery is only held to its bound while nothing else is in its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import LiteralString, cast

import psycopg

from tests.faults.scene import all_connections
from tests.faults.soak.stage import POSTGRES, SERVERS, WORKERS, Stage
from tests.fixtures.proxy import Direction, Directions, HowToBreak, Proxy
from tests.fixtures.waiting import eventually, paced

DATABASE = "database"
BLACK_HOLE = 20.0
"""How long a server whose workers are cut off without a word stays so: they are to be elsewhere by then."""
MINUTES = 60.0
START_LIMIT = 300.0
"""How long a server may take to start, on a machine that has no time, while the database fails as well."""
HEAVY: LiteralString = "select count(*) from generate_series(1, 3000) a, generate_series(1, 10000) b"


def worker(number: int) -> str:
    """The name of a worker among what is touched."""
    return f"worker {number}"


def server(number: int) -> str:
    """The name of a server."""
    return f"server {number}"


@dataclass(frozen=True, slots=True)
class Fault:
    """``target`` is the number of a worker or server, ``rng`` decides everything else."""

    kind: str
    target: int
    seed: int
    touches: frozenset[str]

    @property
    def rng(self) -> Random:
        """Its own chance, the same each time."""
        return Random(f"{self.kind} {self.seed}")


Act = Callable[[Stage, Fault], Awaitable[None]]


# Workers


async def kill_worker(stage: Stage, fault: Fault) -> None:
    """SIGKILL; another process takes its place after a while, before the grace is over or behind it."""
    process = stage.workers[fault.target]
    stage.note_end(process)
    process.kill()
    await paced(fault.rng.uniform(0.5, 4.0))
    process.start()


async def freeze_worker(stage: Stage, fault: Fault) -> None:
    """SIGSTOP, for less or for longer than its leases last; then SIGCONT."""
    process = stage.workers[fault.target]
    process.signal(signal.SIGSTOP)
    await paced(fault.rng.choice((1.0, 4.0, 11.0, 14.0)))
    process.resume()


async def stop_worker(stage: Stage, fault: Fault) -> None:
    """SIGTERM; it gives back what it has not begun, and another one takes its place."""
    process = stage.workers[fault.target]
    stage.note_end(process)
    process.signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait, 30.0)
    process.start()


async def worker_clock(stage: Stage, fault: Fault) -> None:
    """SIGKILL; who takes its place has a clock that is off by ten minutes, or jumps."""
    process = stage.workers[fault.target]
    stage.note_end(process)
    process.kill()
    process.clock(*_offsets(fault.rng))
    process.start()


def _offsets(rng: Random) -> tuple[float, ...]:
    return rng.choice(((-10 * MINUTES,), (10 * MINUTES,), (10 * MINUTES, -10 * MINUTES), (0.0,)))


# Servers


async def kill_server(stage: Stage, fault: Fault) -> None:
    """SIGKILL, and a start on the same port after a while."""
    process = stage.servers[fault.target]
    stage.note_end(process)
    process.kill()
    await paced(fault.rng.uniform(0.2, 6.0))
    await _serve(stage, fault.target)


async def _serve(stage: Stage, number: int) -> None:
    """Start a server; again if it ends, as it does where it can't reach its database: so does a process manager."""
    process = stage.servers[number]

    async def serves() -> bool:
        if not process.running:
            process.start()
        try:
            await asyncio.to_thread(process.wait_serving)
        except RuntimeError:
            return False
        return True

    await eventually(serves, START_LIMIT, interval=0.2)


async def freeze_server(stage: Stage, fault: Fault) -> None:
    """SIGSTOP and SIGCONT; its workers wait for it, or leave it."""
    process = stage.servers[fault.target]
    process.signal(signal.SIGSTOP)
    await paced(fault.rng.choice((1.0, 4.0, 9.0, BLACK_HOLE)))
    process.resume()


async def kill_worker_and_server(stage: Stage, fault: Fault) -> None:
    """SIGKILL to a server and to a worker of it: nobody is there to tell that the worker's stream has ended."""
    worker_process, server_process = stage.workers[companion(stage, fault)], stage.servers[fault.target]
    for process in (server_process, worker_process):
        stage.note_end(process)
        process.kill()
    await paced(fault.rng.uniform(0.5, 6.0))
    worker_process.start()
    await _serve(stage, fault.target)


def companion(stage: Stage, fault: Fault) -> int:
    """The worker that is killed together with its server; any, where the server has none."""
    everyone = range(len(stage.workers))
    there = [number for number in everyone if stage.at(number) == [fault.target]]
    return fault.rng.choice(there or list(everyone))


async def stop_server(stage: Stage, fault: Fault) -> None:
    """SIGTERM: it lets its workers go, and ends; then it is started again."""
    process = stage.servers[fault.target]
    stage.note_end(process)
    process.signal(signal.SIGTERM)
    await asyncio.to_thread(process.wait, 30.0)
    await _serve(stage, fault.target)


async def server_clock(stage: Stage, fault: Fault) -> None:
    """SIGKILL; it comes back with a clock that is off by ten minutes, or jumps."""
    process = stage.servers[fault.target]
    stage.note_end(process)
    process.kill()
    process.offsets = _offsets(fault.rng)
    await _serve(stage, fault.target)


async def black_hole_server(stage: Stage, fault: Fault) -> None:
    """Nothing passes between a server and any worker or client, and nobody is told."""
    proxies = [proxy for (_, number), proxy in stage.links.items() if number == fault.target]
    direction = fault.rng.choice(cast("tuple[Directions, ...]", ("both", "down", "up")))
    for proxy in proxies:
        proxy.blackhole(direction)
    await paced(BLACK_HOLE)
    for proxy in proxies:
        proxy.heal()


# Links


def _link(stage: Stage, fault: Fault) -> Proxy:
    """Of a worker or a client to one of the servers, or of a server to the database; chosen by the seed."""
    if fault.kind.endswith("database link"):
        return stage.database_links[fault.target]
    connected = stage.at(fault.target) or list(range(SERVERS))
    return stage.links[fault.target, fault.rng.choice(connected)]


async def cut_link(stage: Stage, fault: Fault) -> None:
    """FIN, both ways."""
    _link(stage, fault).cut()


async def reset_link(stage: Stage, fault: Fault) -> None:
    """RST, both ways; for a while nobody listens."""
    proxy = _link(stage, fault)
    if fault.rng.random() < 0.5:
        proxy.reset()
        return
    proxy.refuse()
    proxy.reset()
    await paced(fault.rng.uniform(0.5, 4.0))
    proxy.heal()


async def black_hole_link(stage: Stage, fault: Fault) -> None:
    """Nothing passes one way, or both ways."""
    proxy = _link(stage, fault)
    proxy.blackhole(fault.rng.choice(cast("tuple[Directions, ...]", ("both", "down", "up"))))
    await paced(fault.rng.choice((2.0, 8.0, 12.0)))
    proxy.heal()


async def slow_link(stage: Stage, fault: Fault) -> None:
    """Everything comes later, or little at a time."""
    proxy = _link(stage, fault)
    if fault.rng.random() < 0.5:
        proxy.delay(fault.rng.choice((0.05, 0.3, 1.0)))
    else:
        proxy.throttle(fault.rng.choice((4_000.0, 40_000.0)))
    await paced(fault.rng.uniform(3.0, 6.0))
    proxy.heal()


async def break_link(stage: Stage, fault: Fault) -> None:
    """It breaks in the middle of a message, after so many bytes."""
    proxy, rng = _link(stage, fault), fault.rng
    how = rng.choice(cast("tuple[HowToBreak, ...]", ("cut", "reset", "blackhole")))
    before = proxy.breaks
    proxy.break_after(rng.randint(1, 20_000), rng.choice(cast("tuple[Direction, ...]", ("up", "down"))), how)
    with contextlib.suppress(AssertionError):  # so little may pass that it holds
        await eventually(lambda: proxy.breaks > before, 8.0)
        await paced(rng.uniform(0.0, 6.0))
    proxy.heal()


# The database


async def _start_database(stage: Stage) -> None:
    """Not in the loop, which has other faults to mend meanwhile. The thread that starts it outlives the stage."""
    await asyncio.to_thread(stage.postgres.start)


async def kill_database(stage: Stage, fault: Fault) -> None:
    """SIGKILL to all of its processes, and a start with recovery."""
    await asyncio.to_thread(stage.postgres.kill)
    await paced(fault.rng.uniform(0.0, 6.0))
    await _start_database(stage)


async def restart_database(stage: Stage, fault: Fault) -> None:
    """An immediate shutdown, and a start."""
    await asyncio.to_thread(stage.postgres.stop, "immediate")
    await _start_database(stage)


async def freeze_database(stage: Stage, fault: Fault) -> None:
    """SIGSTOP and SIGCONT to all of its processes: connections stay up and nothing answers."""
    await asyncio.to_thread(stage.postgres.pause)
    await paced(fault.rng.choice((1.0, 4.0, 8.0)))
    await asyncio.to_thread(stage.postgres.resume)


async def take_connections(stage: Stage, fault: Fault) -> None:
    """Break the servers' connections, and take up all that the database gives before they are back."""
    for proxy in stage.database_links:
        proxy.refuse()
        proxy.reset()
    async with all_connections(stage.dsn, int(POSTGRES["max_connections"])):
        for proxy in stage.database_links:
            proxy.heal()
        await paced(fault.rng.uniform(1.0, 4.0))


async def hold_locks(stage: Stage, fault: Fault) -> None:
    """Somebody holds a lock that everybody needs, or the rows of some runs."""
    statement: LiteralString = fault.rng.choice(
        cast(
            "tuple[LiteralString, ...]",
            (
                "lock table task in access exclusive mode",
                "lock table event in access exclusive mode",
                "select from run where ended_at is null for update",
            ),
        )
    )
    async with await psycopg.AsyncConnection.connect(stage.dsn, connect_timeout=5) as connection:
        await connection.execute("set local lock_timeout = '2s'")
        with contextlib.suppress(psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            await connection.execute(statement)
            await paced(fault.rng.uniform(1.0, 6.0))
        await connection.rollback()


async def heavy_queries(stage: Stage, fault: Fault) -> None:
    """Queries that take the machine's processors."""

    async def query() -> None:
        async with await psycopg.AsyncConnection.connect(stage.dsn, connect_timeout=5) as connection:
            await connection.execute("set local statement_timeout = '5s'")
            with contextlib.suppress(psycopg.errors.QueryCanceled):
                await connection.execute(HEAVY)

    await asyncio.gather(*(query() for _ in range(3)))


_LINKS: Mapping[str, Act] = {
    "cut": cut_link,
    "reset": reset_link,
    "black hole on": black_hole_link,
    "slow": slow_link,
    "break": break_link,
}
KINDS: Mapping[str, Act] = {
    "kill worker": kill_worker,
    "freeze worker": freeze_worker,
    "stop worker": stop_worker,
    "wrong clock of worker": worker_clock,
    "kill server": kill_server,
    "freeze server": freeze_server,
    "stop server": stop_server,
    "kill worker and its server": kill_worker_and_server,
    "wrong clock of server": server_clock,
    "black hole around server": black_hole_server,
    "kill database": kill_database,
    "restart database": restart_database,
    "freeze database": freeze_database,
    "take connections": take_connections,
    "hold locks": hold_locks,
    "heavy queries": heavy_queries,
    **{f"{name} worker link": act for name, act in _LINKS.items()},
    **{f"{name} client link": act for name, act in _LINKS.items()},
    **{f"{name} database link": act for name, act in _LINKS.items()},
}
"""What each kind does, by its name in the report."""
ENDS_ITS_SERVER = frozenset({"kill server", "stop server", "wrong clock of server", "kill worker and its server"})


_OF_DATABASE = frozenset((
    "kill database", "restart database", "freeze database", "take connections", "hold locks", "heavy queries",
    "fill disk",
))  # fmt: skip


def touched(kind: str, target: int) -> frozenset[str]:
    """The parts of the stage that a fault is at."""
    if kind in _OF_DATABASE:
        return frozenset({DATABASE})
    if kind.endswith("client link"):
        return frozenset({"client"})
    if kind == "kill worker and its server":
        return frozenset({server(target), *(worker(number) for number in range(len(WORKERS)))})
    if kind.endswith(("server", "database link")):
        return frozenset({server(target)})
    return frozenset({worker(target)})
