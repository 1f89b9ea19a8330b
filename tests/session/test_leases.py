"""Leases over a session's life: heartbeats, capacity, reconnects, and the end of streams and servers."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.rows import count, execute, fetch, holding
from tests.fixtures.api import Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, RawWorker, StreamEnded
from tests.fixtures.refusals import refused
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

ConnectWorker = Callable[..., Awaitable[RawWorker]]
Connect = Callable[[str], Api]
LEFT = "select extract(epoch from lease_expires_at - clock_timestamp())::float8 from task order by run_id"


async def started(api: Api, n: int = 1, **overrides: Any) -> list[str]:
    """Runs of a workflow of one step."""
    await api.register(manifest(1, **overrides))
    return [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(n)])]


# Heartbeats


async def test_a_heartbeat_renews_what_is_held_and_tells_what_is_lost(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    await started(api, 3)
    worker = await connect_worker(server.grpc_address)
    first, second, third = await worker.tasks(3)
    await execute(dsn, "update task set lease_expires_at = clock_timestamp() + interval '5 s'")
    await worker.complete(first)
    await execute(
        dsn, "update task set token = token + 1 where run_id = %s", [second.task.run_id]
    )  # as another lease would
    renewed, lost, kept = await worker.heartbeat([first, second, third])
    assert [renewed.outcome, lost.outcome, kept.outcome] == [LEASE_LOST, LEASE_LOST, OK]
    assert {renewed.reason, lost.reason} == {error_pb2.ERROR_REASON_LEASE_LOST}
    assert 55 < kept.lease_duration.ToTimedelta().total_seconds() <= 60
    assert sum(left > 55 for (left,) in await fetch(dsn, LEFT)) == 1


async def test_a_stale_token_beside_the_current_one_is_told_apart_in_one_heartbeat_and_in_one_hello(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """I2: answers are by the whole reference, not by the task."""
    await started(api, retry={"initial_delay": "0s"})
    worker = await connect_worker(server.grpc_address)
    stale = await worker.task()
    await worker.fail(stale)
    current = await worker.task()
    results = await worker.heartbeat([stale, current, stale, current])
    assert [r.outcome for r in results] == [LEASE_LOST, OK, LEASE_LOST, OK]
    zombie = await connect_worker(server.grpc_address, handlers=["none"])
    both = await asyncio.gather(zombie.heartbeat([stale]), worker.heartbeat([current]))
    assert [result.outcome for [result] in both] == [LEASE_LOST, OK]
    welcome = await worker.reconnect(held=[stale.task, current.task])
    assert [held.kept for held in welcome.held] == [False, True]


async def test_a_lease_that_a_heartbeat_should_list_and_does_not_is_offered_again_free(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """It was sent in a Tasks frame up to the number that the worker has seen, so it was lost on the way."""
    runs = await started(api, 3, retry={"max_attempts": 1})
    worker = await connect_worker(server.grpc_address, capacity=3)
    tasks = await worker.tasks(3)
    lost, kept = tasks[0], tasks[1:]
    assert [r.outcome for r in await worker.heartbeat(kept)] == [OK, OK]
    again = await worker.task()
    assert (again.task.run_id, again.attempt) == (lost.task.run_id, 1)
    assert again.task.fencing_token > lost.task.fencing_token
    assert (await worker.complete(lost)).outcome == LEASE_LOST
    for task in (again, *kept):
        assert (await worker.complete(task)).outcome == OK
    for run_id in runs:
        assert (await api.wait(run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def test_a_lease_that_the_worker_cannot_have_seen_yet_is_not_taken_back(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    runs = await started(api)
    worker = await connect_worker(server.grpc_address)
    first = await worker.task()
    await api.start()
    second = await worker.task()
    assert await worker.heartbeat([first], last_tasks_number=1)
    assert await worker.heartbeat([], last_tasks_number=0) == []
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    assert (await worker.complete(second)).outcome == OK
    assert (await worker.complete(first)).outcome == OK
    await api.wait(runs[0])


async def test_a_heartbeat_in_several_frames_is_compared_after_its_last(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await started(api, 3)
    worker = await connect_worker(server.grpc_address)
    tasks = await worker.tasks(3)
    number = worker.last_tasks_number
    for task, more in zip(tasks[:2], (True, False), strict=True):
        frame = pb.Heartbeat(tasks=[task.task], last_tasks_number=number, more=more)
        [result] = await worker.results(await worker.send(frame), 1)
        assert result.outcome == OK
    again = await worker.task()
    assert again.task.run_id == tasks[2].task.run_id
    assert [r.outcome for r in await worker.heartbeat([tasks[0], tasks[1], again])] == [OK] * 3
    await worker.sync()
    assert worker.unread(pb.Tasks) == []


async def test_a_completion_under_way_is_not_taken_for_a_lost_lease(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    server = await in_process_server(dsn, lock_timeout=5)
    api = connect_api(server.grpc_address)
    runs = await started(api, retry={"max_attempts": 1})
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    async with holding(dsn, "select from run for update"):
        completing = asyncio.create_task(worker.complete(task))
        await worker.sync()
        assert await worker.heartbeat([]) == []
        await worker.sync()
    assert (await completing).outcome == OK
    assert (await api.wait(runs[0])).state == run_pb2.RUN_STATE_COMPLETED


async def test_a_lease_that_is_locked_just_now_is_renewed_as_soon_as_it_is_free(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """A skipped item is tried again, neither lost nor waited for: the other items are answered meanwhile."""
    await started(api, 2)
    worker = await connect_worker(server.grpc_address)
    first, second = await worker.tasks(2)
    async with holding(dsn, "select from task where run_id = %s for update", [first.task.run_id]):
        frame = await worker.send(pb.Heartbeat(tasks=[first.task, second.task], last_tasks_number=9))
        ack = await worker.next(pb.Ack)
        assert [(r.index, r.outcome) for r in ack.results] == [(1, OK)]
        assert ack.frame_id == frame
        await worker.sync()
    ack = await worker.next(pb.Ack)
    assert [(r.index, r.outcome) for r in ack.results] == [(0, OK)]
    assert ack.frame_id == frame


# Room


async def test_a_worker_never_has_more_out_than_its_capacity_said(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """Random capacities, several workers, steps handed on at once and claimed."""
    chance = random.Random(7)
    await api.register(manifest(3))
    runs = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(60)])]

    async def work(worker: RawWorker) -> None:
        allowed = worker.capacity_now
        while True:
            try:
                task = await worker.task(timeout=0.2)
            except (AssertionError, TimeoutError):
                before = worker.capacity_now
                await worker.capacity(chance.randint(1, 5))
                allowed = max(worker.capacity_now, before, len(worker.held))
                continue
            assert len(worker.held) <= allowed
            await worker.complete(task)
            if chance.random() < 0.2:
                before = worker.capacity_now
                await worker.capacity(chance.randint(0, 5))
                allowed = max(worker.capacity_now, before, len(worker.held))

    workers = [await connect_worker(server.grpc_address, handlers=handler_names(3), capacity=n) for n in (0, 1, 2, 3)]
    working = [asyncio.create_task(work(worker)) for worker in workers]
    ending = asyncio.gather(*(api.wait(run_id, 20) for run_id in runs))
    watched: list[asyncio.Future[Any]] = [ending, *working]
    done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    assert done == {ending}, done


async def test_capacity_0_pauses_and_more_goes_on(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    worker = await connect_worker(server.grpc_address, capacity=0)
    await started(api, 5)
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    await worker.capacity(2)
    tasks = await worker.tasks(2)
    await worker.capacity(0)
    assert [r.outcome for r in await worker.complete_all([(task, "1") for task in tasks])] == [OK, OK]
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    await worker.capacity(10)
    assert len(await worker.tasks(3)) == 3


async def test_after_goodbye_nothing_new_comes_and_what_is_held_may_be_finished(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """Also no next step at once."""
    await api.register(manifest(2))
    await api.start()
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    task = await worker.task()
    await worker.goodbye()
    await api.start()
    assert (await worker.complete(task)).outcome == OK
    await worker.capacity(10)
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    other = await connect_worker(server.grpc_address, handlers=handler_names(2))
    assert {task.node_id for task in await other.tasks(2)} == {"n1", "n2"}


# Reconnects


async def test_a_process_that_comes_back_keeps_what_it_holds_and_is_offered_again_what_it_never_got(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """To another server, at once, costing no attempt (rows 1 and 3 of the field's failures)."""
    servers = [await in_process_server(dsn) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    runs = await started(api, 4, retry={"max_attempts": 1})
    worker = await connect_worker(servers[0].grpc_address, capacity=4)
    tasks = await worker.tasks(4)
    moved = await connect_worker(
        servers[1].grpc_address, capacity=4, hello=False, process_nonce=worker.hello().process_nonce
    )
    await worker.drop()
    forged = pb.TaskRef(run_id=str(uuid.uuid4()), task_id=2, fencing_token=1)
    stale = pb.TaskRef(run_id=tasks[0].task.run_id, task_id=2, fencing_token=99)
    held = [tasks[0].task, tasks[1].task, forged, stale]
    await moved.drop()
    welcome = await moved.reconnect(held=held, previous_session_ids=worker.sessions)
    assert [result.kept for result in welcome.held] == [True, True, False, False]
    assert [result.task for result in welcome.held] == held
    assert all(55 < r.lease_duration.ToTimedelta().total_seconds() <= 60 for r in welcome.held[:2])
    again = await moved.tasks(2)
    assert {task.task.run_id for task in again} == {task.task.run_id for task in tasks[2:]}
    assert [task.attempt for task in again] == [1, 1]
    for task in (*tasks[:2], *again):
        assert (await moved.complete(task)).outcome == OK
    for run_id in runs:
        assert (await api.wait(run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def test_what_is_held_over_a_reconnect_takes_room(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await started(api, 5)
    worker = await connect_worker(server.grpc_address, capacity=2)
    tasks = await worker.tasks(2)
    await worker.reconnect()
    await worker.sync()
    assert worker.unread(pb.Tasks) == []
    await worker.complete(tasks[0])
    await worker.task()
    await worker.sync()
    assert worker.unread(pb.Tasks) == []


async def test_an_outcome_that_was_not_acknowledged_is_sent_again_on_the_next_stream(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Rows 5 and 49 of the field's failures: committed before the break or not, it counts once (I6)."""
    server = await in_process_server(dsn)
    api = connect_api(server.grpc_address)
    await api.register(manifest(2))
    for n, lost_after_commit in enumerate((True, False), 1):
        await api.start()
        worker = await connect_worker(server.grpc_address)
        task = await worker.task()
        if lost_after_commit:
            await worker.send(pb.Complete(items=[pb.CompleteItem(task=task.task)]))
            await eventually(lambda: count(dsn, "event", "type = 4"))
        welcome = await worker.reconnect(held=[task.task])
        assert [result.kept for result in welcome.held] == [not lost_after_commit]
        item = pb.Complete(items=[pb.CompleteItem(task=task.task)])
        [result] = await worker.results(await worker.send(item), 1)
        assert result.outcome == (ALREADY_DONE if lost_after_commit else OK)
        await worker.close()
        assert await count(dsn, "event", "type = 4") == n


async def test_somebody_elses_session_named_as_a_previous_one_keeps_its_leases(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """The process's nonce tells whose it was, not its word."""
    await started(api)
    owner = await connect_worker(server.grpc_address)
    task = await owner.task()
    thief = await connect_worker(server.grpc_address)
    await thief.reconnect(held=[], previous_session_ids=[*owner.sessions, str(uuid.uuid4())])
    await thief.sync()
    assert thief.unread(pb.Tasks) == []
    assert [r.outcome for r in await owner.heartbeat()] == [OK]
    assert (await owner.complete(task)).outcome == OK


async def test_a_newer_session_of_a_process_ends_its_older_one(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """As after a break that only one side has noticed."""
    await started(api)
    old = await connect_worker(server.grpc_address)
    task = await old.task()
    new = await connect_worker(server.grpc_address, hello=False, process_nonce=old.hello().process_nonce)
    await new.drop()
    welcome = await new.reconnect(held=[task.task], previous_session_ids=old.sessions)
    assert welcome.held[0].kept
    error = await old.ended()
    assert error is not None
    assert error.reason == "SESSION_TIMED_OUT"
    assert (await new.complete(task)).outcome == OK


async def test_a_held_lease_that_a_transaction_has_just_now_is_still_kept(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    await started(api)
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    async with holding(dsn, "select from task for update"):
        back = asyncio.create_task(worker.reconnect())
        await eventually(lambda: count(dsn, "session", "ended_at is null") if not back.done() else True)
    assert [result.kept for result in (await back).held] == [True]
    assert (await worker.complete(task)).outcome == OK


async def test_the_leases_of_a_stream_that_ended_last_for_the_grace_then_cost_an_attempt(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Row 3 of the field's failures. Until somebody took over, the late result counts; after that it is lost."""
    server = await in_process_server(dsn, disconnect_grace=0.5, poll_interval=0.05)
    api = connect_api(server.grpc_address)
    await started(api, 2, retry={"initial_delay": "0s"})
    worker = await connect_worker(server.grpc_address, capacity=2)
    first, second = await worker.tasks(2)
    await worker.drop()
    dropped = time.monotonic()
    await eventually(lambda: count(dsn, "task", "lease_expires_at < clock_timestamp() + interval '1 s'"))
    await worker.connect()
    assert (await worker.complete(first)).outcome == OK, "the lease of the former session lasts for the grace"
    again = await worker.task()
    assert time.monotonic() - dropped >= 0.4
    assert (again.task.run_id, again.attempt) == (second.task.run_id, 2)
    assert (await worker.complete(second)).outcome == LEASE_LOST


async def test_a_session_that_moved_on_is_not_touched_by_the_late_end_of_its_former_stream(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """The grace is of the stream's session, not of the process."""
    servers = [await in_process_server(dsn, disconnect_grace=0.2, poll_interval=0.05) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    await started(api)
    old = await connect_worker(servers[0].grpc_address)
    task = await old.task()
    new = await connect_worker(servers[1].grpc_address, hello=False, process_nonce=old.hello().process_nonce)
    await new.drop()
    await new.reconnect(held=[task.task], previous_session_ids=old.sessions)
    await old.drop()
    await eventually(lambda: count(dsn, "session", "ended_at is not null"))
    [(left,)] = await fetch(dsn, LEFT)
    assert left > 50
    assert (await new.complete(task)).outcome == OK


# Ends


async def test_a_server_that_stops_asks_its_workers_to_finish_and_takes_nothing_new(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Row 31 of the field's failures."""
    server = await in_process_server(dsn, shutdown_grace=10)
    api = connect_api(server.grpc_address)
    await api.register(manifest(2))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    task = await worker.task()
    stopping = asyncio.create_task(server.stop())
    drain = await worker.next(pb.Drain)
    assert drain.grace.ToTimedelta().total_seconds() == 10
    with refused("SERVER_DRAINING", grpc.StatusCode.UNAVAILABLE) as refusal:
        await api.start()
    assert refusal.error.retry_after is not None
    late = await connect_worker(server.grpc_address, hello=False)
    await late.send(late.hello())
    error = await late.ended()
    assert error is not None
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVER_DRAINING")
    assert (await api.get(run_id)).state == run_pb2.RUN_STATE_PENDING
    assert (await worker.complete(task)).outcome == OK
    error = await worker.ended()
    assert error is not None
    assert error.reason == "SERVER_DRAINING"
    assert worker.unread(pb.Tasks) == [], "the next step is for another server"
    began = time.monotonic()
    await stopping
    assert time.monotonic() - began < 5
    assert await fetch(dsn, "select node_index, lease_session from task") == [(1, None)]


async def test_a_worker_that_does_not_finish_in_time_is_cut_off_and_another_server_goes_on(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """I13."""
    first = await in_process_server(dsn, shutdown_grace=0.3, disconnect_grace=0.3)
    second = await in_process_server(dsn, disconnect_grace=0.3, poll_interval=0.05)
    runs = await started(connect_api(first.grpc_address), retry={"initial_delay": "0s"})
    worker = await connect_worker(first.grpc_address)
    task = await worker.task()
    await first.stop()
    error = await worker.ended()
    assert error is not None
    assert error.code is grpc.StatusCode.UNAVAILABLE
    other = await connect_worker(second.grpc_address)
    again = await other.task()
    assert again.attempt == 2
    assert (await other.complete(task)).outcome == LEASE_LOST
    assert (await other.complete(again)).outcome == OK
    await connect_api(second.grpc_address).wait(runs[0])


async def test_a_session_of_a_certain_age_is_asked_to_go_and_its_next_one_may_come_before_it_has(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Make before break: the new stream names neither held leases nor previous sessions."""
    server = await in_process_server(dsn, session_max_age=0.2, ping_interval=0.1)
    api = connect_api(server.grpc_address)
    await started(api)
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    await worker.next(pb.Drain)
    await api.start()
    new = await connect_worker(server.grpc_address, process_nonce=worker.hello().process_nonce)
    await new.task()
    assert worker.unread(pb.Tasks) == []
    assert [r.outcome for r in await worker.heartbeat()] == [OK]
    assert (await worker.complete(task)).outcome == OK
    error = await worker.ended()
    assert error is None or error.reason == "SERVER_DRAINING"


async def test_a_worker_that_answers_no_pings_is_given_up_and_its_leases_come_back(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Row 2 of the field's failures."""
    server = await in_process_server(dsn, ping_interval=0.1, disconnect_grace=0.1, poll_interval=0.05)
    api = connect_api(server.grpc_address)
    runs = await started(api, retry={"initial_delay": "0s"})
    deaf = await connect_worker(server.grpc_address, auto_pong=False)
    await deaf.task()
    error = await deaf.ended()
    assert error is not None
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "SESSION_TIMED_OUT")
    assert deaf.pings == 3
    other = await connect_worker(server.grpc_address)
    assert (await other.complete(await other.task())).outcome == OK
    await api.wait(runs[0])


async def test_a_worker_that_does_not_read_is_cut_off_and_the_others_notice_nothing(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """I12: a write that blocks for too long ends the session."""
    server = await in_process_server(dsn, write_timeout=0.3, disconnect_grace=0.1, poll_interval=0.05)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1, queue="large"))
    await api.register(manifest(1, workflow_id="small"))
    slow = await connect_worker(server.grpc_address, handlers=[("s1", "large")], capacity=1000)
    slow.pause_reading()
    large = '"' + "x" * 1_000_000 + '"'

    async def fed_until_it_is_cut_off() -> bool:
        await api.start_many([api.start_request(input=large) for _ in range(3)])
        return bool(server.app.grpc.streams.count == 1)

    quick = await connect_worker(server.grpc_address)
    small = (await api.start("small")).run_id
    assert (await quick.complete(await quick.task())).outcome == OK
    await api.wait(small)
    await eventually(fed_until_it_is_cut_off, 10, interval=0.1)
    slow.resume_reading()
    error = await slow.ended()
    assert error is not None
    assert error.reason in ("SESSION_TIMED_OUT", "")
    with pytest.raises(StreamEnded):
        await slow.sync()


async def test_many_workers_with_large_inputs_get_all_of_them(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Row 57 of the field's failures: more bytes at once than the outbox of a session holds, in frames that fit."""
    server = await in_process_server(dsn, outbox_bytes=1 << 20)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1, retry={"max_attempts": 1}))
    large = '"' + "x" * 900_000 + '"'
    for _ in range(4):
        await api.start_many([api.start_request(input=large) for _ in range(3)])
    worker = await connect_worker(server.grpc_address, capacity=12, max_frame_bytes=2 << 20)
    done = 0
    while done < 12:
        frame = await worker.next(pb.Tasks)
        assert frame.ByteSize() <= 2 << 20
        for task in frame.tasks:
            assert (await worker.complete(task)).outcome == OK
            done += 1
