"""The hand-driven worker shows what it gets and sends what it is told, right or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
import pytest_asyncio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2, error_details_pb2, status_pb2

from fencepost.v1 import error_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.fixtures.raw_worker import METHOD, OK, FrameRefused, RawWorker, StreamEnded, seconds
from tests.fixtures.refusals import DETAILS, DOMAIN, decode, refused
from tests.fixtures.waiting import eventually

Script = Callable[["Stream"], Awaitable[None]]


class Stream:
    """The server's end of one stream, driven by a test's script. Frames are bytes, as on the wire."""

    def __init__(self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self.frames = frames
        self.context = context

    async def read(self) -> bytes:
        return await anext(self.frames)

    async def request(self) -> pb.SessionRequest:
        return pb.SessionRequest.FromString(await self.read())

    async def write(self, **frame: pb.Welcome | pb.Tasks | pb.Ack | pb.Ping | pb.Revoke) -> None:
        response = pb.SessionResponse()
        for name, content in frame.items():
            getattr(response, name).CopyFrom(content)
        await self.context.write(response.SerializeToString())

    async def welcome(self, session_id: str = "a", held: list[pb.HeldResult] | None = None) -> pb.Hello:
        hello = (await self.request()).hello
        await self.write(welcome=pb.Welcome(session_id=session_id, held=held))
        return hello


class Server(grpc.GenericRpcHandler):
    """Runs one script for each stream, in turn."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.address = ""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        assert details.method == METHOD

        async def serve(frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
            script = self.scripts.pop(0)
            await script(Stream(frames, context))

        return grpc.stream_stream_rpc_method_handler(serve)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    handler = Server()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([handler])
    handler.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield handler
    await server.stop(None)


@pytest_asyncio.fixture
async def worker(server: Server) -> AsyncIterator[RawWorker]:
    worker = RawWorker(server.address, handlers=["s1", ("s2", "slow")], capacity=3)
    yield worker
    await worker.close()


def task(task_id: int, token: int = 1) -> pb.Task:
    return pb.Task(task=pb.TaskRef(run_id="r", task_id=task_id, fencing_token=token))


async def test_it_introduces_itself_takes_tasks_and_completes_them(server: Server, worker: RawWorker) -> None:
    seen: list[pb.SessionRequest] = []

    async def script(stream: Stream) -> None:
        hello = await stream.welcome()
        assert [(h.name, h.queue) for h in hello.handlers] == [("s1", "default"), ("s2", "slow")]
        assert (hello.capacity, hello.protocol_version) == (3, 1)
        await stream.write(tasks=pb.Tasks(tasks_number=1, tasks=[task(2), task(3)]))
        await stream.write(tasks=pb.Tasks(tasks_number=2, tasks=[task(4)]))
        request = await stream.request()
        seen.append(request)
        for index in (2, 0, 1):  # in parts and in any order
            result = pb.ItemResult(index=index, outcome=OK, message=str(index))
            await stream.write(ack=pb.Ack(frame_id=request.frame_id, results=[result]))

    server.scripts.append(script)
    await worker.connect()
    first = await worker.task()
    others = await worker.tasks(2)
    assert [t.task.task_id for t in (first, *others)] == [2, 3, 4]
    assert worker.last_tasks_number == 2
    assert len(worker.held) == 3
    results = await worker.complete_all([(first, "1"), *((t, '{"x": 1}') for t in others)])
    assert [r.message for r in results] == ["0", "1", "2"]
    assert worker.held == {}
    assert seen[0].frame_id == 2
    assert [item.output.json for item in seen[0].complete.items] == ["1", '{"x": 1}', '{"x": 1}']
    assert await worker.ended() is None


async def test_pings_are_answered_by_themselves_or_left_to_the_test(server: Server) -> None:
    answers: list[pb.SessionRequest] = []

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.write(ping=pb.Ping(number=7))
        answers.append(await stream.request())

    for auto_pong in (True, False):
        server.scripts.append(script)
        worker = RawWorker(server.address, auto_pong=auto_pong)
        await worker.connect()
        if not auto_pong:
            ping = await worker.next(pb.Ping)
            await worker.send(pb.Pong(number=ping.number + 1))
        assert await worker.ended() is None
        await worker.close()
    assert [(a.frame_id, a.pong.number) for a in answers] == [(2, 7), (2, 8)]


async def test_it_comes_back_as_the_same_process_with_what_it_holds(server: Server, worker: RawWorker) -> None:
    hellos: list[pb.Hello] = []

    async def first(stream: Stream) -> None:
        hellos.append(await stream.welcome("a"))
        await stream.write(tasks=pb.Tasks(tasks_number=1, tasks=[task(2), task(3), task(4)]))
        await stream.write(revoke=pb.Revoke(tasks=[task(4).task]))
        await stream.read()

    async def second(stream: Stream) -> None:
        held = [pb.HeldResult(task=task(2).task, kept=True), pb.HeldResult(task=task(3).task)]
        hellos.append(await stream.welcome("b", held))

    server.scripts += [first, second]
    await worker.connect()
    await worker.tasks(3)
    await worker.next(pb.Revoke)
    await worker.reconnect()
    assert await worker.ended() is None
    assert hellos[0].process_nonce == hellos[1].process_nonce
    assert list(hellos[1].previous_session_ids) == ["a"]
    assert [ref.task_id for ref in hellos[1].held] == [2, 3]
    assert [ref.task_id for ref in worker.held.values()] == [2]
    assert worker.sessions == ["b", "a"]


async def test_bytes_that_are_no_frame_and_wrong_numbers_go_out_as_told(server: Server, worker: RawWorker) -> None:
    got: list[bytes] = []

    async def script(stream: Stream) -> None:
        got.extend([await stream.read(), await stream.read()])

    server.scripts.append(script)
    await worker.open()
    await worker.send_raw(b"\xff\xff")
    await worker.send(pb.Goodbye(), frame_id=99)
    assert await worker.ended() is None
    assert got[0] == b"\xff\xff"
    assert pb.SessionRequest.FromString(got[1]).frame_id == 99


async def test_a_refused_frame_and_a_refused_stream_are_told_with_all_details(
    server: Server, worker: RawWorker
) -> None:
    async def script(stream: Stream) -> None:
        await stream.welcome()
        request = await stream.request()
        error = pb.Ack(frame_id=request.frame_id)
        error.error.reason = error_pb2.ERROR_REASON_INVALID_FRAME
        await stream.write(ack=error)
        await stream.read()
        await abort(stream.context)

    server.scripts.append(script)
    await worker.connect()
    with pytest.raises(FrameRefused) as frame:
        await worker.goodbye()
    assert frame.value.error.reason == error_pb2.ERROR_REASON_INVALID_FRAME
    await worker.send(pb.Goodbye())
    with pytest.raises(StreamEnded) as ended:
        await worker.next(pb.Tasks)
    error = ended.value.error
    assert error is not None
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS")
    assert error.violations == (("capacity", "too large"), ("labels", "too many"))
    assert error.paths == ["capacity", "labels"]
    assert (error.metadata, error.retry_after) == ({"limit": "3"}, 1.5)


async def test_a_write_that_fails_while_a_pong_waits_behind_it_is_told_why(server: Server, worker: RawWorker) -> None:
    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.write(ping=pb.Ping(number=1))
        await abort(stream.context)

    server.scripts.append(script)
    await worker.open()
    await worker.send(worker.hello())
    async with worker._writing:
        sending = [asyncio.create_task(worker.send(pb.Goodbye())) for _ in range(3)]
        await eventually(lambda: worker.pings == 1)
        await eventually(worker._call.done)
    for task in sending:
        with pytest.raises(StreamEnded) as ended:
            await asyncio.wait_for(task, 10)
        assert ended.value.error is not None
        assert ended.value.error.reason == "TOO_MANY_SESSIONS"


async def abort(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    """End a call as the contract says, with all details that there are."""
    violation = error_details_pb2.BadRequest.FieldViolation
    details = [
        error_details_pb2.ErrorInfo(reason="TOO_MANY_SESSIONS", domain=DOMAIN, metadata={"limit": "3"}),
        error_details_pb2.BadRequest(
            field_violations=[
                violation(field="capacity", description="too large"),
                violation(field="labels", description="too many"),
            ]
        ),
        error_details_pb2.RetryInfo(retry_delay=seconds(1.5)),
    ]
    status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="no")
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    trailer = ((DETAILS, status.SerializeToString()),)
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no", trailer)


async def test_a_refusal_for_another_reason_is_not_the_expected_one(server: Server) -> None:
    async def script(stream: Stream) -> None:
        await abort(stream.context)

    for reason in ("TOO_MANY_SESSIONS", "OVERLOADED"):
        server.scripts.append(script)
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
            call = stub()
            if reason == "TOO_MANY_SESSIONS":
                with refused(reason, grpc.StatusCode.RESOURCE_EXHAUSTED) as refusal:
                    await call.read()
                assert refusal.error.message == "no"
            else:
                with pytest.raises(AssertionError, match="TOO_MANY_SESSIONS"), refused(reason):
                    await call.read()


async def test_an_unreachable_server_has_a_code_but_no_reason() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        stub: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub(b"")
        error = decode(failure.value)
    assert (error.code, error.reason, error.domain) == (grpc.StatusCode.UNAVAILABLE, "", "")
