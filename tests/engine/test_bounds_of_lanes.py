"""What a lane takes, holds and costs: its queue, its transactions, and their statements."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.engine import commit
from fencepost_server.engine.operations import Start
from fencepost_server.store import lane as lanes
from fencepost_server.store import pipeline
from fencepost_server.store.lane import Lane
from tests.engine.rows import count, holding
from tests.fixtures.api import Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import OK, RawWorker
from tests.fixtures.refusals import refused
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually, until_blocked

ConnectWorker = Callable[..., Awaitable[RawWorker]]
Connect = Callable[[str], Api]
HELD_UP = {"lanes": 1, "lock_timeout": 20, "statement_timeout": 30, "batch_timeout": 40}
"""One lane, whose transaction waits for a lock as long as a test keeps it."""


@pytest.fixture
async def server(in_process_server: StartInProcessServer, dsn: str) -> InProcessServer:
    """A server with one lane, so that operations meet in one batch."""
    return await in_process_server(dsn, lanes=1, lock_timeout=0.1, poll_interval=0.1)


async def test_a_full_queue_refuses_callers_with_a_delay_and_loses_nothing_that_it_took(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """I12."""
    server = await in_process_server(dsn, lane_queue=10, **HELD_UP)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    async with holding(dsn, "select from deployment for update"):
        first = asyncio.create_task(api.start())
        await until_blocked(dsn)
        requests = [api.start_request() for _ in range(30)]
        waiting = asyncio.create_task(api.start_many(requests))
        await eventually(lambda: server.app.engine.lanes[0].depth == 10)
        with refused("OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED) as refusal:
            await api.start()
        assert refusal.error.retry_after
    assert (await first).created
    results = await waiting
    assert Counter(result.WhichOneof("outcome") for result in results) == {"started": 10, "error": 20}
    assert {r.error.reason for r in results if r.HasField("error")} == {error_pb2.ERROR_REASON_OVERLOADED}
    assert await count(dsn, "run") == 11


def watched(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The operations of each transaction from now on, of servers that are started after this."""
    batches: list[list[Any]] = []
    work = commit.Committer.work

    async def seen(self: Any, connection: Any, operations: list[Any], skip_locked: bool) -> Any:
        batches.append(list(operations))
        return await work(self, connection, operations, skip_locked)

    monkeypatch.setattr(commit.Committer, "work", seen)
    return batches


async def test_a_transaction_has_no_more_operations_and_bytes_than_may_be(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12."""
    batches = watched(monkeypatch)
    server = await in_process_server(dsn, lane_batch=7, lane_batch_bytes=1 << 20, **HELD_UP)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    large = '"' + "x" * 400_000 + '"'
    async with holding(dsn, "select from deployment for update"):
        first = asyncio.create_task(api.start())
        await until_blocked(dsn)
        requests = [api.start_request() for _ in range(20)]
        small = asyncio.create_task(api.start_many(requests))
        heavy = [asyncio.create_task(api.start(input=large)) for _ in range(5)]
        await eventually(lambda: server.app.engine.lanes[0].depth == 25)
    await asyncio.gather(first, small, *heavy)
    assert max(map(len, batches)) == 7
    for batch in batches:
        sizes = [op.size for op in batch if isinstance(op, Start)]
        assert len(batch) == 1 or sum(sizes) <= 1 << 20
    assert await count(dsn, "run") == 26


async def test_a_transaction_takes_half_of_what_is_under_way(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it took all of it, and everybody waited in turn for one lump that went round."""
    batches = watched(monkeypatch)
    server = await in_process_server(dsn, **HELD_UP)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    async with holding(dsn, "select from deployment for update"):
        first = asyncio.create_task(api.start())
        await until_blocked(dsn)
        requests = [api.start_request() for _ in range(400)]
        others = asyncio.create_task(api.start_many(requests))
        await eventually(lambda: server.app.engine.lanes[0].depth == 400)
    await asyncio.gather(first, others)
    assert list(map(len, batches)) == [1, 200, 200]


async def test_callers_that_come_one_after_the_other_share_a_transaction(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC lets them in one by one: at 64 callers there were two starts in a transaction."""
    batches = watched(monkeypatch)
    server = await in_process_server(dsn, lanes=1)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    coming = 3

    async def moment(_: float) -> None:
        """As long as it takes until all are there, on a machine however slow."""
        await eventually(lambda: server.app.engine.lanes[0].depth == coming)

    monkeypatch.setattr(lanes, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": moment}))
    await api.start_many([api.start_request() for _ in range(3)])
    assert list(map(len, batches)) == [3]
    coming = 30
    await asyncio.gather(*(api.start() for _ in range(30)))
    assert list(map(len, batches)) == [3, 30]


async def test_a_caller_alone_and_workers_do_not_wait_for_others(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "_MOMENT", 3600.0)
    server = await in_process_server(dsn, lanes=1)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    for _ in range(3):
        await api.start()
    worker = await connect_worker(server.grpc_address, capacity=3)
    results = await worker.complete_all([(task, "1") for task in await worker.tasks(3)])
    assert {result.outcome for result in results} == {OK}


async def statements_of(server: InProcessServer, monkeypatch: pytest.MonkeyPatch, work: Awaitable[Any]) -> Counter[int]:
    """How many statements each transaction of the lanes sent while ``work`` was awaited, by transaction."""
    sent: Counter[int] = Counter()
    kept = []  # so that no transaction gets the id of one before it
    send = pipeline.Session.send

    def counting(self: Any, statement: bytes, params: Any = None) -> Any:
        if any(lane._connection is self._connection for lane in server.app.engine.lanes):
            kept.append(self)
            sent[id(self)] += 1
        return send(self, statement, params)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.Session, "send", counting)
        await work
    return sent


async def start_one(api: Api, worker: RawWorker) -> pb.Task:
    await api.start()
    return await worker.task()


async def test_the_number_of_statements_of_a_batch_does_not_grow_with_the_batch(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = await in_process_server(dsn, lanes=1)
    api = connect_api(server.grpc_address)
    await api.register(manifest(2))
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2), capacity=200)
    await worker.fail(await start_one(api, worker), run_pb2.FAILURE_KIND_PERMANENT)  # definitions are in memory now
    most: dict[str, list[int]] = {"starts": [], "completions": [], "failures": []}
    for n in (1, 150):
        requests = [api.start_request(request_key=f"{n} {i}") for i in range(n)]
        counted = await statements_of(server, monkeypatch, api.start_many(requests))
        most["starts"].append(max(counted.values()))
        tasks = await worker.tasks(n)
        done = worker.complete_all([(task, "1") for task in tasks])
        most["completions"].append(max((await statements_of(server, monkeypatch, done)).values()))
        tasks = await worker.tasks(n)
        items = [pb.FailItem(task=t.task, failure=run_pb2.Failure(kind=run_pb2.FAILURE_KIND_PERMANENT)) for t in tasks]

        async def fail(items: list[pb.FailItem] = items) -> None:
            await worker.results(await worker.send(pb.Fail(items=items)), len(items))

        most["failures"].append(max((await statements_of(server, monkeypatch, fail())).values()))
    for what, (one, many) in most.items():
        assert one == many <= 12, (what, most)


async def test_a_lane_ends_what_waits_when_it_is_stopped(dsn: str, in_process_server: StartInProcessServer) -> None:
    """Whoever waits is told, and does not hang."""
    server = await in_process_server(dsn)
    given_up: list[Exception] = []

    class Op:
        again, deadline, size, wanted = False, 0.0, 1, True

        def give_up(self, error: Exception) -> None:
            given_up.append(error)

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    lane: Lane[Op] = Lane("x", server.app.config, never)
    lane.submit([Op() for _ in range(3)])
    await lane.stop()
    assert [getattr(error, "reason", "") for error in given_up] == ["DATABASE_UNAVAILABLE"] * 3
