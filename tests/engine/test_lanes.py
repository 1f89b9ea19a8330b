"""The group commit under all that can go wrong in it: poison, deadlocks, stopped peers, overload, lost answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import psycopg
import pytest

from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.engine import commit, steps
from fencepost_server.engine.context import RunContext
from fencepost_server.engine.operations import Answer, Report
from fencepost_server.store import connection as store_connection
from tests.engine.histories import check_run
from tests.engine.rows import count, execute, fetch, holding
from tests.fixtures.api import Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import OK, REFUSED, RawWorker
from tests.fixtures.refusals import decode, refused
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import until_blocked

ConnectWorker = Callable[..., Awaitable[RawWorker]]
Connect = Callable[[str], Api]


@pytest.fixture
async def server(in_process_server: StartInProcessServer, dsn: str) -> InProcessServer:
    """A server with one lane, so that operations meet in one batch."""
    return await in_process_server(dsn, lanes=1, lock_timeout=0.1, poll_interval=0.1)


# Poison


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> str:
    """An output that our own code trips over, as a bug would."""
    decide = steps.complete_plain

    def tripping(ctx: RunContext, report: Report) -> Answer | None:
        if report.output is not None and report.output.json == POISON:
            raise ZeroDivisionError("a bug")
        return decide(ctx, report)

    monkeypatch.setattr(steps, "complete_plain", tripping)
    return POISON


POISON = '"poison"'


async def test_an_operation_that_our_code_cannot_bear_fails_alone(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, poison: str, dsn: str
) -> None:
    """Its batch is halved until it stands alone; the others are committed, and the lane lives on."""
    await api.register(manifest())
    runs = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(21)])]
    worker = await connect_worker(server.grpc_address, capacity=21)
    tasks = await worker.tasks(21)
    results = await worker.complete_all([(t, poison if n in (3, 17) else "1") for n, t in enumerate(tasks)])
    for n, result in enumerate(results):
        if n in (3, 17):
            assert (result.outcome, result.reason) == (REFUSED, error_pb2.ERROR_REASON_INTERNAL)
            assert "incident" in result.message
            assert "bug" not in result.message
        else:
            assert result.outcome == OK
    left = [tasks[n] for n in (3, 17)]
    assert [r.outcome for r in await worker.heartbeat(left)] == [OK, OK], "the leases are left with the worker"
    for task in left:
        assert (await worker.complete(task, "2")).outcome == OK
    for run_id in runs:
        assert (await api.wait(run_id)).state == run_pb2.RUN_STATE_COMPLETED
        await check_run(api, dsn, run_id, ["n1"])


@pytest.fixture
async def picky(dsn: str) -> AsyncIterator[None]:
    """A database that refuses one value, as it would one that no edge has caught."""
    await execute(dsn, "alter table event add constraint no_poison check (payload::text is distinct from '\"poison\"')")
    yield
    await execute(dsn, "alter table event drop constraint no_poison")


@pytest.mark.usefixtures("picky")
async def test_an_operation_that_the_database_refuses_fails_alone_and_leaks_nothing_of_sql(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    server = await in_process_server(dsn, lanes=1)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    requests = [api.start_request(input=POISON if n == 5 else "1", request_key=f"{n}") for n in range(12)]
    results = await api.start_many(requests)
    for n, result in enumerate(results):
        if n == 5:
            assert result.error.reason == error_pb2.ERROR_REASON_INTERNAL
            for word in ("poison", "constraint", "event", "23514", "relation"):
                assert word not in result.error.message
        else:
            assert result.started.created
    with refused("INTERNAL", grpc.StatusCode.INTERNAL) as refusal:
        await api.start(input=POISON)
    assert "incident" in refusal.error.message
    worker = await connect_worker(server.grpc_address, capacity=12)
    tasks = await worker.tasks(11)
    outcomes = await worker.complete_all([(t, POISON if n == 0 else "1") for n, t in enumerate(tasks)])
    assert [r.outcome for r in outcomes] == [REFUSED] + [OK] * 10
    assert await count(dsn, "run") == 11
    assert await count(dsn, "run_key", "key = '5'") == 0


# Conflicts with other transactions


async def deadlocked(dsn: str, run_id: str, blocked: asyncio.Event) -> None:
    """Take a run's rows in the wrong order: the task first, then the run, which a batch holds by then."""
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        # The batch is the one that notices. It looks once, a second after it began to wait: if the circle is closed
        # later than that, it gives up at its lock_timeout, which comes before this.
        await connection.execute("set deadlock_timeout = '1min'")
        await connection.execute("select from task where run_id = %s for update", [run_id])
        blocked.set()
        await until_blocked(dsn)
        await connection.execute("select from run where run_id = %s for update", [run_id])
        await connection.rollback()


async def test_a_deadlock_with_somebody_who_locks_in_another_order_reaches_no_caller(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """40P01: the whole batch is tried again, reading and deciding anew."""
    server = await in_process_server(dsn, lanes=1, lock_timeout=10, statement_timeout=30, batch_timeout=40)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    blocked = asyncio.Event()
    rival = asyncio.create_task(deadlocked(dsn, run_id, blocked))
    await blocked.wait()
    assert (await worker.complete(task)).outcome == OK
    await rival
    await check_run(api, dsn, run_id, ["n1"])


@pytest.mark.parametrize("error", [psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure])
async def test_a_batch_that_lost_a_race_is_tried_again_a_bounded_number_of_times(
    server: InProcessServer,
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    error: type[psycopg.Error],
    dsn: str,
) -> None:
    """I12: a race that is never won is told as UNAVAILABLE; the lane goes on."""
    await api.register(manifest())
    losses = 3
    write = commit._write

    def losing(*arguments: Any) -> None:
        nonlocal losses
        losses -= 1
        if losses >= 0:
            raise error("lost")
        write(*arguments)

    monkeypatch.setattr(commit, "_write", losing)
    assert (await api.start(request_key="k")).created
    assert losses == -1
    losses = 1000
    with refused("DATABASE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE) as refusal:
        await api.start()
    assert refusal.error.retry_after
    assert losses > 900
    losses = 0
    assert (await api.start()).created
    assert await count(dsn, "run") == 2


async def test_a_run_that_another_transaction_holds_delays_no_other_run(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """I13, and row 46 of the field's failures: the batch goes on without it, and it comes again by itself."""
    await api.register(manifest(2))
    runs = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(10)])]
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2), capacity=10)
    tasks = {task.task.run_id: task for task in await worker.tasks(10)}
    async with holding(dsn, "select from run where run_id = any(%s) for update", [runs[:2]]):
        frame = await worker.send(pb.Complete(items=[pb.CompleteItem(task=tasks[run_id].task) for run_id in runs]))
        answered: set[int] = set()
        began = time.monotonic()
        while len(answered) < 8:
            ack = await worker.next(pb.Ack)
            assert ack.frame_id == frame
            assert {result.outcome for result in ack.results} == {OK}
            answered |= {result.index for result in ack.results}
        assert answered == set(range(2, 10))
        for task in await worker.tasks(8):
            assert (await worker.complete(task)).outcome == OK
        assert (await api.start()).created
        assert time.monotonic() - began < 15
        assert await fetch(
            dsn, "select distinct run_id::text from task where node_index = 0 and run_id = any(%s)", [runs]
        )
    while len(answered) < 10:
        ack = await worker.next(pb.Ack)
        answered |= {result.index for result in ack.results}
    for _ in range(4):  # the held ones, and both steps of the run that was started meanwhile
        await worker.complete(await worker.task())
    for run_id in runs:
        await api.wait(run_id)
        await check_run(api, dsn, run_id, ["n1", "n2"])


async def test_a_task_that_another_transaction_holds_delays_no_other_run(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """A server that stopped in the middle of a heartbeat holds tasks, and not their runs (I13)."""
    await api.register(manifest())
    runs = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(6)])]
    worker = await connect_worker(server.grpc_address)
    tasks = {task.task.run_id: task for task in await worker.tasks(6)}
    async with holding(dsn, "select from task where run_id = %s for update", [runs[0]]):
        held = asyncio.create_task(worker.complete(tasks[runs[0]]))
        await until_blocked(dsn)
        for run_id in runs[1:]:
            assert (await worker.complete(tasks[run_id])).outcome == OK
        assert (await api.start()).created
        assert not held.done()
    assert (await held).outcome == OK


# Lost connections


async def test_a_batch_whose_answer_was_lost_is_recognised_when_it_is_tried_again(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 48 of the field's failures: the connection dies after COMMIT was sent, before its answer came (I1, I6)."""
    await api.register(manifest(2, retry={"max_attempts": 1}))
    transaction = store_connection.transaction
    losses = 0

    @asynccontextmanager
    async def losing(*arguments: Any) -> AsyncIterator[Any]:
        nonlocal losses
        async with transaction(*arguments) as session:
            yield session
        if losses > 0:
            losses -= 1
            raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(commit, "transaction", losing)
    losses = 1
    started = await api.start(request_key="k", request_id="r")
    assert started.created
    assert losses == 0
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    task = await worker.task()
    losses = 1
    result = await worker.complete(task)
    assert losses == 0
    assert result.outcome in (OK, pb.ITEM_OUTCOME_ALREADY_DONE)
    second = await worker.task(timeout=30)
    assert (second.node_id, second.attempt) == ("n2", 1), "the lease that nobody was told of went back free"
    await worker.complete(second)
    await api.wait(started.run_id)
    await check_run(api, dsn, started.run_id, ["n1", "n2"])
    assert await count(dsn, "run") == 1


async def test_a_claim_whose_answer_was_lost_is_taken_back(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 48: leased in the database, and nobody was told. It costs no attempt."""
    await api.register(manifest(1, retry={"max_attempts": 1}))
    run_id = (await api.start()).run_id
    transaction = store_connection.transaction
    lost = 0

    @asynccontextmanager
    async def losing(*arguments: Any) -> AsyncIterator[Any]:
        nonlocal lost
        async with transaction(*arguments) as session:
            send = session.send
            claiming = False

            def watching(statement: bytes, params: Any = None) -> Any:
                nonlocal claiming
                claiming = claiming or b"-- locks: up to" in statement
                return send(statement, params)

            yield _Watched(session, watching)
        if claiming and not lost:
            lost += 1
            raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(store_connection, "transaction", losing)
    worker = await connect_worker(server.grpc_address)
    task = await worker.task(timeout=30)
    assert lost == 1
    assert task.attempt == 1
    assert (await worker.complete(task)).outcome == OK
    await api.wait(run_id)


class _Watched:
    """A transaction's session whose ``send`` is looked at."""

    def __init__(self, session: Any, send: Any) -> None:
        self._session = session
        self.send = send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def rows(self, statement: bytes, params: Any = None) -> Any:
        answer = self.send(statement, params)
        await self._session.sync()
        return answer.rows()


async def test_what_waits_for_a_database_that_is_away_is_given_up_in_time_and_the_lane_recovers(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller hears DATABASE_UNAVAILABLE with a delay; a later start finds the lane at work again."""
    server = await in_process_server(dsn, lanes=1, operation_timeout=0.5)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    transaction = store_connection.transaction
    away = True

    @asynccontextmanager
    async def failing(*arguments: Any) -> AsyncIterator[Any]:
        if away:
            raise psycopg.OperationalError("no route to host db.internal")
        async with transaction(*arguments) as session:
            yield session

    monkeypatch.setattr(commit, "transaction", failing)
    began = time.monotonic()
    results = await asyncio.gather(*(api.start() for _ in range(5)), return_exceptions=True)
    assert 0.4 < time.monotonic() - began < 9, "in the time that was set, and not in the default"
    for result in results:
        assert isinstance(result, grpc.aio.AioRpcError)
        error = decode(result)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DATABASE_UNAVAILABLE")
        assert error.retry_after
        assert "db.internal" not in error.message
    away = False
    assert (await api.start()).created
