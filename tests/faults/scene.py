"""What fault tests are played with: a database, servers in the test's loop, callers, raw workers and proxies, all of
them gone with the test; short times; and questions to the database itself, past every server and proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from psycopg.rows import dict_row

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.model import EventType
from fencepost_server.engine.loops import Loop
from tests.fixtures.api import Api
from tests.fixtures.processes import Process
from tests.fixtures.proxy import Proxy
from tests.fixtures.raw_worker import OK, RawWorker
from tests.fixtures.servers import InProcessServer, Setting, StartInProcessServer
from tests.fixtures.waiting import TIMEOUT, eventually

COMPLETED: LiteralString = f"event where type = {EventType.STEP_COMPLETED:d}"
ENDED: LiteralString = "run where ended_at is not null"
WRITING: LiteralString = "pg_stat_activity where datname = current_database() and backend_xid is not null"
"""Transactions that have written or locked something."""

QUICK: dict[str, Any] = {
    "heartbeat_interval": 0.5,
    "ping_interval": 0.5,
    "disconnect_grace": 1.0,
    "poll_interval": 0.1,
}
"""Settings of a server with which faults are noticed and mended soon."""

STAYING: dict[str, Any] = {**QUICK, "disconnect_grace": 60.0, "ping_interval": 5.0}
"""The same, but nothing happens within a test only because time passes: what comes back does so for another reason."""

ONE_ATTEMPT = {"max_attempts": 1}
SOON = {"max_attempts": 3, "initial_delay": "10ms", "jitter": 0}


@dataclass(frozen=True, slots=True)
class Scene:
    """The fixture `scene`. ``dsn`` is a clean database; servers get it unless their settings have another ``dsn``."""

    dsn: str
    api: Callable[[str], Api]
    """Connects a caller: ``api(address)``."""
    raw: Callable[..., Awaitable[RawWorker]]
    """Connects a worker driven by hand: ``await raw(address, handlers=["s1"])``."""
    proxy: Callable[[str], Proxy]
    """Puts a proxy before an address."""
    _start: StartInProcessServer

    async def serve(self, **settings: Setting) -> InProcessServer:
        """Start a server in the test's event loop."""
        return await self._start(**{"dsn": self.dsn, **settings})


@contextlib.asynccontextmanager
async def asleep(loop: Loop) -> AsyncIterator[None]:
    """Keep a background loop of a server from doing anything within the block, as if it hung between two passes."""
    run_once = loop.run_once
    entered = asyncio.Event()

    async def sleep() -> None:
        entered.set()

    loop.run_once = sleep
    loop.wake()
    await asyncio.wait_for(entered.wait(), TIMEOUT)
    yield
    loop.run_once = run_once
    loop.wake()


@contextlib.asynccontextmanager
async def all_connections(dsn: str, most: int, *, alone: bool = False) -> AsyncIterator[None]:
    """Keep all connections that a database has left within the block; it gives ``most`` in all. Raises AssertionError
    if it gives more. ``alone``: whoever else had any has left, so wait for those that the database has not ended yet:
    they would come free within the block.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def one_more() -> bool:
            try:
                connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True, connect_timeout=30)
            except psycopg.OperationalError:
                return False
            await stack.enter_async_context(connection)
            return True

        for number in range(most + 1):
            if alone and number < most:
                await eventually(one_more, what="the database has ended the connections of all others")
            elif not await one_more():
                break
        else:
            raise AssertionError(f"the database gives more than {most} connections")
        yield


@dataclass(frozen=True, slots=True)
class TaskState:
    """A row of the table task, as far as tests look at it. ``session`` has the lease; "": nobody."""

    run_id: str
    task_id: int
    token: int
    attempt: int
    session: str


async def fetch(dsn: str, statement: LiteralString, **params: Any) -> list[dict[str, Any]]:
    """Ask a database."""
    async with await psycopg.AsyncConnection.connect(
        dsn, autocommit=True, connect_timeout=30, row_factory=dict_row
    ) as connection:
        cursor = await connection.execute(statement, params)
        return await cursor.fetchall() if cursor.description else []


async def count(dsn: str, rows: LiteralString) -> int:
    """How many rows there are: ``await count(dsn, "task where attempt > 1")``."""
    found: int = (await fetch(dsn, "select count(*) as n from " + rows))[0]["n"]
    return found


async def until_count(dsn: str, rows: LiteralString, n: int, timeout: float = TIMEOUT, *, more: bool = False) -> None:
    """Wait until there are so many rows; ``more``: or more."""

    async def reached() -> bool:
        found = await count(dsn, rows)
        assert found == n or (more and found > n), found
        return True

    await eventually(reached, timeout, interval=0.02, what=f"there are {n} {rows}")


async def start_all(api: Api, runs: int) -> int:
    """Start so many runs with keys, each again until the server says that it has it; returns how many were made."""
    created = 0
    for number in range(0, runs, 20):
        todo = [api.start_request(request_key=str(key)) for key in range(number, min(number + 20, runs))]
        while todo:
            results = await api.start_many(todo)
            created += sum(result.started.created for result in results)
            todo = [start for start, result in zip(todo, results, strict=True) if result.HasField("error")]
    return created


async def task_states(dsn: str) -> list[TaskState]:
    """All open tasks, in order."""
    statement: LiteralString = """
        select run_id::text, task_id, token, attempt, coalesce(lease_session::text, '') as session
        from task order by run_id, task_id
    """
    return [TaskState(**row) for row in await fetch(dsn, statement)]


async def leased_to(dsn: str, session_id: str) -> list[TaskState]:
    """What one session has on lease, as the database sees it."""
    return [state for state in await task_states(dsn) if state.session == session_id]


async def until_printed(process: Process, event: str, n: int = 1, timeout: float = 60) -> None:
    """Wait until a worker program has said something so many times; it may only be starting, beside others."""
    await eventually(lambda: len(process.events(event)) >= n, timeout, what=f"{event} is printed {n} times")


async def until_accepted(worker: RawWorker, frame: int, n: int) -> list[int]:
    """Wait until so many more items of a frame are acknowledged, all OK; returns their places in it."""
    places: list[int] = []
    while len(places) < n:
        ack = await worker.next(pb.Ack, 30)
        assert ack.frame_id == frame
        assert {result.outcome for result in ack.results} == {OK}
        places.extend(result.index for result in ack.results)
    return places


def attempts(events: Iterable[run_pb2.Event]) -> list[int]:
    """The attempts that completed the steps of a history, in order."""
    return [event.step_completed.attempt for event in events if event.WhichOneof("kind") == "step_completed"]


async def samples(http_address: str) -> list[Sample]:
    """The metrics of a server."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=30) as response:
            text: str = response.read().decode()
            return text

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    return [sample for family in families for sample in family.samples]


async def metrics(http_address: str) -> dict[str, float]:
    """The metrics of a server that have no labels, by name."""
    return {sample.name: sample.value for sample in await samples(http_address) if not sample.labels}
