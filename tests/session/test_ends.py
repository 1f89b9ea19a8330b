"""How sessions end: asked to go, given up, cut off; and what many large tasks do not end."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.engine import engine, leases
from fencepost_server.session import pulse, stream
from fencepost_server.store import tasks as stored_tasks
from tests.engine.rows import count, fetch, holding
from tests.fixtures.api import Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import LEASE_LOST, OK, RawWorker, StreamEnded
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


def tries(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """What was left each time that leases of ended sessions were cut."""
    shorten, told = stored_tasks.shorten, []

    async def telling(*arguments: Any) -> set[str]:
        left = await shorten(*arguments)
        told.append(left)
        return left

    monkeypatch.setattr(stored_tasks, "shorten", telling)
    return told


async def test_a_server_that_stops_asks_its_workers_to_finish_and_takes_nothing_new(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Row 31 of the field's failures."""
    server = await in_process_server(dsn, shutdown_grace=40)
    api = connect_api(server.grpc_address)
    await api.register(manifest(2))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    task = await worker.task()
    stopping = asyncio.create_task(server.stop())
    drain = await worker.next(pb.Drain)
    assert drain.grace.ToTimedelta().total_seconds() == 40
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
    assert time.monotonic() - began < 20
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


async def test_a_stop_waits_until_the_leases_of_whom_it_has_cut_off_last_for_the_grace_alone(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else another server would go on with them only a minute later."""
    monkeypatch.setattr(engine, "_CLOSING", 30.0)
    monkeypatch.setattr(stream, "_ENDING", 30.0)
    server = await in_process_server(dsn, disconnect_grace=5)
    await started(connect_api(server.grpc_address))
    worker = await connect_worker(server.grpc_address)
    await worker.task()
    app, tried = server.app, tries(monkeypatch)

    async def drained() -> None:
        await app.grpc.streams.drain(0.01)
        await app.engine.flush(30)

    async with holding(dsn, "select from task for update"):
        draining = asyncio.create_task(drained())
        await eventually(lambda: len(tried) > 3, what="they are locked when it tries")
        assert not draining.done()
    await draining
    [(left,)] = await fetch(dsn, LEFT)
    assert left <= 5


async def test_leases_that_stay_locked_are_cut_when_they_are_free_and_hold_up_no_others(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long that takes, and although only so many are tried at a time."""
    monkeypatch.setattr(leases, "_OFTEN_FOR", 0.1)
    monkeypatch.setattr(leases, "_RARELY", 0.1)
    monkeypatch.setattr(leases, "_MAX_CLOSING", 1)
    server = await in_process_server(dsn, disconnect_grace=20)
    await started(connect_api(server.grpc_address), 2)
    locked, free = [await connect_worker(server.grpc_address, capacity=1) for _ in range(2)]
    run_id = (await locked.task()).task.run_id
    await free.task()
    closer, tried = server.app.engine.closer, tries(monkeypatch)
    async with holding(dsn, "select from task where run_id = %s for update", [run_id]):
        await locked.drop()
        await eventually(lambda: len(tried) > 5, what="it is tried again and again")
        await free.drop()
        await eventually(lambda: count(dsn, "task", "lease_expires_at < clock_timestamp() + interval '21 s'"))
        await eventually(lambda: list(closer._waiting) == locked.sessions)
    await closer.drain()
    assert await count(dsn, "task", "lease_expires_at < clock_timestamp() + interval '21 s'") == 2


async def test_a_stop_waits_for_a_process_that_is_being_welcomed(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its steps along to the next server, and has to be told to go there."""
    await started(api)
    worker = await connect_worker(server.grpc_address)
    await worker.task()
    adopt, tried, freed = stored_tasks.adopt, asyncio.Event(), asyncio.Event()

    async def when_it_is_free(*arguments: Any) -> Any:
        tried.set()
        await freed.wait()
        return await adopt(*arguments)

    monkeypatch.setattr(stored_tasks, "adopt", when_it_is_free)
    back = asyncio.create_task(worker.reconnect())
    await asyncio.wait_for(tried.wait(), 30)
    streams = server.app.grpc.streams
    await eventually(lambda: not streams._streams, what="its former stream has ended")
    draining = asyncio.create_task(streams.drain(30))
    await asyncio.sleep(0)
    assert not draining.done()
    freed.set()
    assert [result.kept for result in (await back).held] == [True]
    assert (await worker.next(pb.Drain)).grace.ToTimedelta().total_seconds() > 0
    await worker.drop()
    await draining


async def test_leases_of_whom_a_stop_has_not_seen_end_last_for_the_grace_alone(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as those of a process that is still being welcomed when the time is up."""
    monkeypatch.setattr(engine, "_CLOSING", 30.0)
    monkeypatch.setattr(stream, "_ENDING", 0.05)
    server = await in_process_server(dsn, disconnect_grace=5)
    await started(connect_api(server.grpc_address))
    worker = await connect_worker(server.grpc_address)
    await worker.task()
    adopted, freed = asyncio.Event(), asyncio.Event()
    opened = server.app.engine.open_session

    async def slow(*arguments: Any) -> Any:
        answer = await opened(*arguments)
        adopted.set()
        await freed.wait()
        return answer

    monkeypatch.setattr(server.app.engine, "open_session", slow)
    back = asyncio.create_task(worker.reconnect())
    await asyncio.wait_for(adopted.wait(), 30)
    await server.app.grpc.streams.drain(0.01)
    await server.app.engine.flush(30)
    [(left,)] = await fetch(dsn, LEFT)
    assert left <= 5
    freed.set()
    await asyncio.gather(back, return_exceptions=True)


def set_for(server: InProcessServer, worker: RawWorker, **settings: float) -> None:
    """Change settings for the stream of one worker: the others are to have time, however busy the machine is."""
    stream = server.app.grpc.streams._streams[worker.sessions[0]]
    stream._config = dataclasses.replace(stream._config, **settings)


async def test_a_session_of_a_certain_age_is_asked_to_go_and_its_next_one_may_come_before_it_has(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Make before break: the new stream names neither held leases nor previous sessions."""
    monkeypatch.setattr(pulse, "_UNANSWERED", 1000)  # only their ages matter, which are looked at with each ping
    server = await in_process_server(dsn, ping_interval=0.1)
    api = connect_api(server.grpc_address)
    await started(api)
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    set_for(server, worker, session_max_age=0.2)
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
    patient = await in_process_server(dsn, ping_interval=60)
    server = await in_process_server(dsn, ping_interval=0.1, disconnect_grace=0.1, poll_interval=0.05)
    api = connect_api(server.grpc_address)
    runs = await started(api, retry={"initial_delay": "0s"})
    worker = await connect_worker(patient.grpc_address, capacity=1)
    task = await worker.task()
    nonce = worker.hello().process_nonce
    deaf = await connect_worker(server.grpc_address, hello=False, process_nonce=nonce, auto_pong=False)
    await deaf.drop()
    await deaf.reconnect(held=[task.task], previous_session_ids=worker.sessions)
    await worker.close()
    error = await deaf.ended()
    assert error is not None
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "SESSION_TIMED_OUT")
    assert deaf.pings == 3
    await eventually(lambda: patient.app.grpc.streams.count == 0)
    other = await connect_worker(patient.grpc_address)
    assert (await other.complete(await other.task())).outcome == OK
    await api.wait(runs[0])


async def test_a_worker_that_does_not_read_is_cut_off_and_the_others_notice_nothing(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """I12: a write that blocks for too long ends the session."""
    server = await in_process_server(dsn, disconnect_grace=0.1, poll_interval=0.05)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1, queue="large"))
    await api.register(manifest(1, workflow_id="small"))
    slow = await connect_worker(server.grpc_address, handlers=[("s1", "large")], capacity=1000)
    set_for(server, slow, write_timeout=0.3)
    slow.pause_reading()
    large = '"' + "x" * 1_000_000 + '"'

    async def fed_until_it_is_cut_off() -> bool:
        await api.start_many([api.start_request(input=large) for _ in range(3)])
        return bool(server.app.grpc.streams.count == 1)

    quick = await connect_worker(server.grpc_address)
    small = (await api.start("small")).run_id
    assert (await quick.complete(await quick.task())).outcome == OK
    await api.wait(small)
    await eventually(fed_until_it_is_cut_off, 30, interval=0.1)
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
