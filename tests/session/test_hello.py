"""How a session begins: Hello first, once, right in every field, or an end that says why."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.store import cluster
from tests.engine.rows import count, fetch
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import OK, RawWorker
from tests.fixtures.refusals import ApiError
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

ConnectWorker = Callable[..., Awaitable[RawWorker]]


async def end_of(worker: RawWorker) -> ApiError:
    """Why the server ended the stream."""
    error = await worker.ended()
    assert error is not None, "it ended with OK"
    return error


async def ended_by(connect_worker: ConnectWorker, address: str, *frames: Any, **fields: Any) -> ApiError:
    """Open a stream, send frames (or messages that are put into frames), and return its end."""
    worker = await connect_worker(address, hello=False, **fields)
    for frame in frames:
        if isinstance(frame, bytes | pb.SessionRequest):
            await worker.send_raw(frame)
        else:
            await worker.send(frame)
    return await end_of(worker)


async def test_a_stream_that_does_not_begin_with_hello_is_ended(
    server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    greeting = RawWorker(server.grpc_address)
    hello = greeting.hello()
    await greeting.close()
    beginnings: list[tuple[Any, str]] = [
        (pb.Heartbeat(), "Heartbeat with frame_id 1"),
        (pb.Complete(), "Complete with frame_id 1"),
        (pb.Fail(), "Fail with frame_id 1"),
        (pb.Release(), "Release with frame_id 1"),
        (pb.Capacity(capacity=1), "Capacity with frame_id 1"),
        (pb.Goodbye(), "Goodbye with frame_id 1"),
        (pb.Pong(), "Pong with frame_id 1"),
        (pb.QueryResult(), "QueryResult with frame_id 1"),
        (b"\xff", "bytes that are no frame"),
        (b"", "no content with frame_id 0"),
        (pb.SessionRequest(frame_id=2, hello=hello), "Hello with frame_id 2"),
        (pb.SessionRequest(frame_id=0, hello=hello), "Hello with frame_id 0"),
        (pb.SessionRequest(frame_id=1), "no content with frame_id 1"),
    ]
    for beginning, came in beginnings:
        error = await ended_by(connect_worker, server.grpc_address, beginning)
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "HELLO_REQUIRED"), beginning
        assert error.message == f"the first frame must be Hello with frame_id 1, not {came}"
    silent = await connect_worker(server.grpc_address, hello=False)
    await silent.half_close()
    assert (await end_of(silent)).reason == "HELLO_REQUIRED"


async def test_a_stream_without_a_word_is_ended_after_a_while(
    in_process_server: StartInProcessServer, dsn: str, connect_worker: ConnectWorker
) -> None:
    """I12."""
    server = await in_process_server(dsn, hello_timeout=0.1)
    worker = await connect_worker(server.grpc_address, hello=False)
    error = await end_of(worker)
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "SESSION_TIMED_OUT")


async def test_hello_is_told_all_of_its_faults_at_once(
    server: InProcessServer, connect_worker: ConnectWorker, dsn: str
) -> None:
    worker = await connect_worker(server.grpc_address, hello=False)
    too_long = "x" * 201
    await worker.send(
        worker.hello(
            namespace=too_long,
            worker_name="",
            process_nonce="short",
            sdk_name=too_long,
            sdk_version=too_long,
            max_frame_bytes=1000,
            capacity=-1,
            handlers=[pb.Handler(name="", queue=too_long), pb.Handler(name=too_long), pb.Handler(name="code@1")],
            labels={str(n): "" for n in range(33)},
            previous_session_ids=["no uuid", str(uuid.uuid4()).upper()],
            held=[pb.TaskRef(run_id=str(uuid.uuid4()), task_id=1), pb.TaskRef()],
        )
    )
    error = await end_of(worker)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_HELLO")
    assert sorted(error.paths) == sorted(
        [
            "namespace",
            "worker_name",
            "process_nonce",
            "sdk_name",
            "sdk_version",
            "max_frame_bytes",
            "capacity",
            "handlers[0].name",
            "handlers[0].queue",
            "handlers[1].name",
            "handlers[2].name",
            "labels",
            "previous_session_ids[0]",
            "previous_session_ids[1]",
            "held[0]",
            "held[1]",
        ]
    )
    assert await count(dsn, "session") == 0


async def test_more_in_a_hello_than_may_be_is_refused(server: InProcessServer, connect_worker: ConnectWorker) -> None:
    """I12."""
    many: dict[str, dict[str, Any]] = {
        "handlers": {"handlers": []},
        "handlers ": {"handlers": [pb.Handler(name=str(n)) for n in range(1001)]},
        "previous_session_ids": {"previous_session_ids": [str(uuid.uuid4()) for _ in range(17)]},
        "held": {"held": [pb.TaskRef(run_id=str(uuid.uuid4()), task_id=1, fencing_token=1)] * 20_001},
        "capacity": {"capacity": 10_001},
        "max_frame_bytes": {"max_frame_bytes": (1 << 31) + 1},
        "": {"worker_name": "a\0b"},
    }
    for path, fields in many.items():
        worker = await connect_worker(server.grpc_address, hello=False)
        await worker.send(worker.hello(**fields))
        error = await end_of(worker)
        assert (error.reason, error.paths) == ("INVALID_HELLO", [path.strip()])
    huge = await connect_worker(server.grpc_address, hello=False)
    await huge.send(huge.hello(labels={"x": "y" * (4 << 20)}))
    error = await end_of(huge)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FRAME_TOO_LARGE")


async def test_another_protocol_version_is_refused_whatever_else_is_wrong(
    server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    for version in (0, 2, -1):
        worker = await connect_worker(server.grpc_address, hello=False)
        await worker.send(pb.Hello(protocol_version=version))
        error = await end_of(worker)
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED_PROTOCOL")
        assert "1" in error.message


async def test_a_second_hello_ends_the_stream(server: InProcessServer, connect_worker: ConnectWorker) -> None:
    worker = await connect_worker(server.grpc_address)
    await worker.send(worker.hello())
    error = await end_of(worker)
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "DUPLICATE_HELLO")


async def test_welcome_tells_the_limits_and_the_session_is_written_down(
    in_process_server: StartInProcessServer, dsn: str, connect_worker: ConnectWorker
) -> None:
    server = await in_process_server(dsn, heartbeat_interval=7.5, max_frame_items=17, disconnect_grace=3)
    worker = await connect_worker(server.grpc_address, worker_name="name", sdk_name="sdk", sdk_version="1")
    welcome = worker.welcome
    assert welcome is not None
    assert welcome.server_id == server.app.engine.server_id
    assert welcome.heartbeat_interval.ToTimedelta().total_seconds() == 7.5
    assert welcome.ping_interval.ToTimedelta().total_seconds() == 5
    assert welcome.disconnect_grace.ToTimedelta().total_seconds() == 3
    assert (welcome.max_payload_bytes, welcome.max_frame_bytes, welcome.max_frame_items) == (1 << 20, 3 << 20, 17)
    assert welcome.database_time.seconds > 0
    row = "select session_id::text, worker_name, sdk, process_nonce, ended_at is null from session"
    nonce = worker.hello().process_nonce
    assert await fetch(dsn, row) == [(welcome.session_id, "name", "sdk 1", nonce, True)]
    await worker.drop()
    await eventually(lambda: count(dsn, "session", "ended_at is not null"))


async def test_no_more_sessions_are_taken_than_may_be_and_one_that_ends_makes_room(
    in_process_server: StartInProcessServer, dsn: str, connect_worker: ConnectWorker
) -> None:
    """I12."""
    server = await in_process_server(dsn, max_sessions=2)
    workers = [await connect_worker(server.grpc_address) for _ in range(2)]
    third = await connect_worker(server.grpc_address, hello=False)
    await third.send(third.hello())
    error = await end_of(third)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS")
    assert error.retry_after
    await workers[0].drop()
    await eventually(lambda: server.app.grpc.streams.count == 1)
    await connect_worker(server.grpc_address)


async def test_streams_that_say_nothing_keep_no_worker_out(
    in_process_server: StartInProcessServer, dsn: str, connect_worker: ConnectWorker
) -> None:
    """Only sessions count, and each as soon as it is being opened."""
    server = await in_process_server(dsn, max_sessions=1)
    for _ in range(3):
        await connect_worker(server.grpc_address, hello=False)
    await connect_worker(server.grpc_address)
    assert server.app.grpc.streams.count == 1


async def test_a_session_that_cannot_be_written_down_is_told_to_come_again(
    server: InProcessServer, connect_worker: ConnectWorker, monkeypatch: Any
) -> None:
    async def away(*_: Any) -> Any:
        raise DatabaseUnavailable("the database can't be reached")

    monkeypatch.setattr(cluster, "open_session", away)
    worker = await connect_worker(server.grpc_address, hello=False)
    await worker.send(worker.hello())
    error = await end_of(worker)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DATABASE_UNAVAILABLE")
    assert error.retry_after
    monkeypatch.undo()
    await eventually(lambda: server.app.grpc.streams.count == 0)


async def test_one_workers_fault_does_not_reach_another(
    server: InProcessServer, api: Any, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    good = await connect_worker(server.grpc_address)
    for beginning in (b"\xff\xff", pb.Hello(protocol_version=9)):
        await ended_by(connect_worker, server.grpc_address, beginning)
    bad = await connect_worker(server.grpc_address, handlers=["other"])
    await bad.send(pb.Goodbye(), frame_id=77)
    assert (await end_of(bad)).reason == "FRAME_OUT_OF_ORDER"
    await api.start()
    assert (await good.complete(await good.task())).outcome == OK
