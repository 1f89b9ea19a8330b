"""Who gets which task: order, steps handed on without a claim, and the cost of looking."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.store import tasks as stored_tasks
from tests.engine.rows import execute, holding, until_listening
from tests.engine.tasks import end
from tests.fixtures.api import Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import OK, RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

ConnectWorker = Callable[..., Awaitable[RawWorker]]
Connect = Callable[[str], Api]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks each claim of this process found."""
    found: list[int] = []
    claim = stored_tasks.claim

    async def counting(*arguments: Any) -> Any:
        claimed, histories = await claim(*arguments)
        found.append(len(claimed))
        return claimed, histories

    monkeypatch.setattr(stored_tasks, "claim", counting)
    return found


async def test_tasks_are_claimed_by_priority_then_in_the_order_in_which_they_became_ready(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    expected: dict[int, list[str]] = {}
    for priority in (3, 5, 1, 4, 2, 0, 5, 1, 3):
        run_id = (await api.start(priority=priority)).run_id
        expected.setdefault(priority or 3, []).append(run_id)
    worker = await connect_worker(server.grpc_address, capacity=1)
    order = []
    for _ in range(9):
        task = await worker.task()
        order.append(task.task.run_id)
        await worker.complete(task)
    assert order == list(itertools.chain(*(expected[priority] for priority in sorted(expected))))


async def test_a_worker_of_several_queues_takes_the_highest_priority_of_all(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    for n, queue in enumerate(("a", "b", "c"), 1):
        await api.register(manifest(1, workflow_id=queue, queue=queue, nodes={"n1": {"step": f"h{n}"}}))
    for queue, priority in (("a", 3), ("b", 1), ("c", 2), ("a", 1)):
        await api.start(queue, priority=priority)
    worker = await connect_worker(server.grpc_address, capacity=1, handlers=[("h1", "a"), ("h2", "b"), ("h3", "c")])
    order = []
    for _ in range(4):
        task = await worker.task()
        order.append(task.workflow_id)
        await worker.complete(task)
    assert sorted(order[:2]) == ["a", "b"]
    assert order[2:] == ["c", "a"]


async def test_the_next_step_goes_to_the_session_that_completed_the_one_before_without_a_claim(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, claims: list[int]
) -> None:
    await api.register(manifest(5))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=handler_names(5))
    for n in range(1, 6):
        task = await worker.task()
        assert (task.node_id, task.attempt) == (f"n{n}", 1)
        await worker.complete(task)
    await api.wait(run_id)
    assert sum(claims) == 1


async def test_a_slot_gets_so_many_tasks_in_a_row_then_stands_in_line_again(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    claims: list[int],
) -> None:
    """Else one long run would keep its slot while others of its priority wait."""
    server = await in_process_server(dsn, eager_limit=3)
    api = connect_api(server.grpc_address)
    await api.register(manifest(9))
    first, second = [(await api.start()).run_id for _ in range(2)]
    worker = await connect_worker(server.grpc_address, handlers=handler_names(9), capacity=1)
    order = []
    for _ in range(18):
        task = await worker.task()
        order.append("ab"[[first, second].index(task.task.run_id)])
        await worker.complete(task)
    assert "".join(order) == "aaaabbbbaaaabbbbab"
    assert sum(claims) == 6


@pytest.mark.parametrize("limit", [0, 16])
async def test_the_default_limit_is_16_and_0_hands_nothing_on(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    claims: list[int],
    limit: int,
) -> None:
    server = await in_process_server(dsn, **({} if limit else {"eager_limit": 0}))
    api = connect_api(server.grpc_address)
    await api.register(manifest(18))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=handler_names(18))
    for _ in range(18):
        await worker.complete(await worker.task())
    await api.wait(run_id)
    assert sum(claims) == (2 if limit else 18)


async def test_nothing_is_handed_on_while_work_of_a_higher_priority_waits(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(3))
    low = (await api.start(priority=4)).run_id
    worker = await connect_worker(server.grpc_address, handlers=handler_names(3), capacity=1)
    task = await worker.task()
    assert task.task.run_id == low
    same = (await api.start(priority=4)).run_id
    high = (await api.start(priority=2)).run_id
    order: list[str] = []
    for _ in range(9):
        await worker.complete(task)
        if len(order) == 8:
            break
        task = await worker.task()
        order.append({low: "low", same: "same", high: "high"}[task.task.run_id])
    assert order[:3] == ["high"] * 3
    assert Counter(order[3:]) == {"low": 2, "same": 3}


async def test_work_of_a_higher_priority_that_the_session_could_not_do_does_not_matter(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, claims: list[int]
) -> None:
    await api.register(manifest(3))
    await api.register(manifest(1, workflow_id="other", queue="other"))
    await api.register(manifest(3), namespace="elsewhere")
    await api.start()
    worker = await connect_worker(server.grpc_address, handlers=handler_names(3))
    task = await worker.task()
    await api.start("other", priority=1)
    await api.start(priority=1, namespace="elsewhere")
    for _ in range(2):
        await worker.complete(task)
        task = await worker.task()
    assert sum(claims) == 1


async def test_a_step_that_the_session_cannot_do_goes_to_one_that_can(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(3, nodes={"n2": {"queue": "other"}}))
    run_id = (await api.start()).run_id
    one = await connect_worker(server.grpc_address, handlers=["s1", "s2", "s3"])
    other = await connect_worker(server.grpc_address, handlers=[("s2", "other")])
    await one.complete(await one.task())
    await other.complete(await other.task())
    await one.complete(await one.task())
    await api.wait(run_id)


async def test_work_is_spread_over_the_sessions_that_have_room(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    await api.start_many([api.start_request() for _ in range(12)])
    workers = [await connect_worker(server.grpc_address, capacity=0) for _ in range(3)]
    paused = await connect_worker(server.grpc_address, capacity=0)
    for worker, capacity in zip(workers, (1, 5, 6), strict=True):
        await worker.capacity(capacity)
    assert [len(await w.tasks(n)) for w, n in zip(workers, (1, 5, 6), strict=True)] == [1, 5, 6]
    await paused.sync()
    assert paused.unread(pb.Tasks) == []


async def test_work_of_another_server_is_found_by_polling_alone(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """I10: no LISTEN here. A run goes on over servers, step by step."""
    servers = [await in_process_server(dsn, poll_interval=0.05) for _ in range(3)]
    api = connect_api(servers[0].grpc_address)
    await api.register(manifest(6))
    run_id = (await api.start()).run_id
    workers = [
        await connect_worker(servers[n % 3].grpc_address, handlers=[f"s{n + 1}"], worker_name=str(n)) for n in range(6)
    ]
    for worker in workers:
        await worker.complete(await worker.task())
    await api.wait(run_id)


async def test_hints_between_servers_save_the_wait_for_the_next_poll(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Both servers poll so rarely that only a notification can have brought the work in time."""
    slow = {"poll_interval": 60, "outage_gap": 120, "server_timeout": 120, "listen_dsn": dsn}
    servers = [await in_process_server(dsn, **slow) for _ in range(2)]
    await eventually(lambda: all(server.app.engine.last_probe for server in servers))
    api = connect_api(servers[0].grpc_address)
    await until_listening(dsn, 2)
    await servers[0].app.engine.probe_once()  # it knows of the other one now
    await api.register(manifest())
    worker = await connect_worker(servers[1].grpc_address)
    for _ in range(3):
        waiting = connect_api(servers[1].grpc_address)
        run_id = (await api.start()).run_id
        ended = asyncio.create_task(waiting.wait(run_id))
        task = await worker.task()
        await worker.complete(task)
        await ended


async def test_a_claim_passes_by_tasks_that_somebody_else_has_locked(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    await api.register(manifest())
    runs = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(4)])]
    async with holding(dsn, "select from task where run_id = any(%s) for update", [runs[:3]]):
        worker = await connect_worker(server.grpc_address)
        assert (await worker.task()).task.run_id == runs[3]
    assert {task.task.run_id for task in await worker.tasks(3)} == set(runs[:3])


async def test_what_waits_for_room_is_claimed_as_soon_as_a_report_frees_it(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """The server polls so rarely that only the commit of the report can have made it look again."""
    server = await in_process_server(dsn, poll_interval=60, outage_gap=120)
    await eventually(lambda: server.app.engine.last_probe)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    worker = await connect_worker(server.grpc_address, capacity=1)
    runs = [(await api.start()).run_id for _ in range(3)]
    for run_id in runs:
        task = await worker.task()
        assert task.task.run_id == run_id
        await worker.complete(task)


async def test_two_servers_never_lease_the_same_task_twice(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    servers = [await in_process_server(dsn, poll_interval=0.05) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    await api.register(manifest())
    workers = [await connect_worker(servers[n % 2].grpc_address, capacity=7) for n in range(4)]
    seen: list[tuple[str, int]] = []

    async def work(worker: RawWorker) -> None:
        while True:
            task = await worker.task(timeout=30)
            seen.append((task.task.run_id, task.attempt))
            assert (await worker.complete(task)).outcome == OK

    working = [asyncio.create_task(work(worker)) for worker in workers]
    runs = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(300)])]
    for run_id in runs:
        await api.wait(run_id)
    await end(working)
    assert sorted(seen) == sorted((run_id, 1) for run_id in runs)


async def test_a_parked_task_hides_no_other_of_its_handler(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """Nor do tasks in backoff."""
    await api.register(manifest())
    first = (await api.start()).run_id
    await execute(dsn, "update task set visible_at = '9999-01-01' where run_id = %s", [first])
    await execute(
        dsn,
        "insert into task select gen_random_uuid(), 2, namespace, queue, handler, priority, 0, 1, 4,"
        " clock_timestamp() + interval '1 h', 1, 1, 0, 0, 1, 1000 from task, generate_series(1, 500)",
    )
    second = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address)
    assert (await worker.task()).task.run_id == second
    assert (await api.get(first)).open_steps[0].attempt == 0
