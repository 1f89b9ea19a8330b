"""Frames after Hello: what ends the stream, what is answered and lets it go on."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

import grpc
import pytest

from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import LEASE_LOST, OK, REFUSED, FrameRefused, RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer

ConnectWorker = Callable[..., Awaitable[RawWorker]]
Connect = Callable[[str], Api]
UNKNOWN_FRAME = bytes([0x08, 0, 0xFA, 0x01, 2, 0x08, 1])
"""Frame number (to be filled in) and field 31: content of a later release."""


@pytest.mark.parametrize("wrong", [0, 1, 3, 1 << 63])
async def test_a_frame_out_of_order_ends_the_stream(
    server: InProcessServer, connect_worker: ConnectWorker, wrong: int
) -> None:
    worker = await connect_worker(server.grpc_address)
    await worker.send(pb.Goodbye(), frame_id=wrong)
    error = await worker.ended()
    assert error is not None
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FRAME_OUT_OF_ORDER")
    assert str(wrong) in error.message
    assert "2" in error.message


async def test_bytes_that_are_no_frame_and_unknown_content_are_answered_and_the_stream_goes_on(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    worker = await connect_worker(server.grpc_address, auto_pong=False)
    unknown = bytearray(UNKNOWN_FRAME)
    frames: list[pb.SessionRequest | bytes] = [b"\xff\xff\xff", pb.SessionRequest(frame_id=3), b"\x0a\xff"]
    unknown[1] = 5
    frames += [bytes(unknown), b"\x12\x02\xff\xfe"]
    for frame_id, frame in enumerate(frames, 2):
        await worker.send_raw(frame)
        with pytest.raises(FrameRefused) as refused:
            await worker.results(frame_id, 0)
        assert refused.value.error.reason == error_pb2.ERROR_REASON_INVALID_FRAME
    await api.start()
    task = await worker.task()
    await worker.send_raw(pb.SessionRequest(frame_id=7, complete=pb.Complete(items=[pb.CompleteItem(task=task.task)])))
    [result] = await worker.results(7, 1)
    assert result.outcome == OK


async def test_a_frame_of_too_many_items_is_refused_as_a_whole_and_the_stream_goes_on(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """I12."""
    server = await in_process_server(dsn, max_frame_items=3)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    await api.start_many([api.start_request() for _ in range(4)])
    worker = await connect_worker(server.grpc_address)
    refs = [task.task for task in await worker.tasks(4)]
    frames: list[pb.Complete | pb.Fail | pb.Release | pb.Heartbeat] = [
        pb.Complete(items=[pb.CompleteItem(task=ref) for ref in refs]),
        pb.Fail(items=[pb.FailItem(task=ref) for ref in refs]),
        pb.Release(items=[pb.ReleaseItem(task=ref) for ref in refs]),
        pb.Heartbeat(tasks=refs),
    ]
    for frame in frames:
        with pytest.raises(FrameRefused) as refused:
            await worker.results(await worker.send(frame), 4)
        assert refused.value.error.reason == error_pb2.ERROR_REASON_FRAME_TOO_LARGE
    assert [r.outcome for r in await worker.complete_all([(ref, "1") for ref in refs[:3]])] == [OK] * 3
    assert (await worker.complete(refs[3])).outcome == OK


async def test_a_frame_may_have_as_many_bytes_as_the_limit_says_and_a_larger_one_ends_the_stream(
    in_process_server: StartInProcessServer, dsn: str, connect_worker: ConnectWorker
) -> None:
    """Row 28 of the field's failures."""
    limit = 64 << 10
    server = await in_process_server(dsn, max_payload_bytes=32 << 10, max_frame_bytes=limit)

    def frame(size: int) -> pb.SessionRequest:
        ref = pb.TaskRef(run_id=str(uuid.uuid4()), task_id=1, fencing_token=1)
        items = [pb.CompleteItem(task=ref, output=Payload(binary=b"\0" * 21_700)) for _ in range(3)]
        request = pb.SessionRequest(frame_id=2, complete=pb.Complete(items=items))
        items[0].output.binary = b"\0" * (21_700 + size - request.ByteSize())
        request = pb.SessionRequest(frame_id=2, complete=pb.Complete(items=items))
        assert request.ByteSize() == size
        return request

    for size in (limit - 1, limit):
        worker = await connect_worker(server.grpc_address)
        await worker.send_raw(frame(size))
        assert [r.outcome for r in await worker.results(2, 3)] == [LEASE_LOST] * 3
    for size in (limit + 1, 2 * limit):
        worker = await connect_worker(server.grpc_address)
        await worker.send_raw(frame(size))
        error = await worker.ended()
        assert error is not None
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FRAME_TOO_LARGE")
        assert str(limit) in error.message


async def test_a_malformed_item_is_refused_and_the_others_of_its_frame_count(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    await api.start()
    worker = await connect_worker(server.grpc_address)
    ref = (await worker.task()).task
    malformed = [
        pb.TaskRef(),
        pb.TaskRef(run_id="x", task_id=1, fencing_token=1),
        pb.TaskRef(run_id=ref.run_id.upper(), task_id=2, fencing_token=1),
        pb.TaskRef(run_id=ref.run_id, task_id=0, fencing_token=1),
        pb.TaskRef(run_id=ref.run_id, task_id=2, fencing_token=-1),
        pb.TaskRef(run_id=ref.run_id + "\0", task_id=2, fencing_token=1),
    ]
    heartbeat = await worker.send(pb.Heartbeat(tasks=[*malformed, ref, ref]))
    results = await worker.results(heartbeat, len(malformed) + 2)
    assert [r.outcome for r in results] == [REFUSED] * len(malformed) + [OK, OK]
    assert {r.reason for r in results[:-2]} == {error_pb2.ERROR_REASON_INVALID_FRAME}
    frames: list[pb.Release | pb.Fail | pb.Complete] = [
        pb.Release(items=[pb.ReleaseItem(task=bad) for bad in malformed]),
        pb.Fail(items=[pb.FailItem(task=bad, failure=run_pb2.Failure(code="x")) for bad in malformed]),
    ]
    for frame in frames:
        results = await worker.results(await worker.send(frame), len(malformed))
        assert [r.outcome for r in results] == [REFUSED] * len(malformed)
    items = [pb.CompleteItem(task=bad) for bad in malformed]
    items.insert(3, pb.CompleteItem(task=ref))
    items.append(pb.CompleteItem(task=ref, output=Payload(json="{")))
    results = await worker.results(await worker.send(pb.Complete(items=items)), len(items))
    assert [r.outcome for r in results] == [REFUSED] * 3 + [OK] + [REFUSED] * 4
    assert results[-1].reason == error_pb2.ERROR_REASON_INVALID_JSON


async def test_a_frame_without_items_is_acknowledged(server: InProcessServer, connect_worker: ConnectWorker) -> None:
    worker = await connect_worker(server.grpc_address)
    for frame in (pb.Complete(), pb.Fail(), pb.Release(), pb.Heartbeat()):
        assert await worker.results(await worker.send(frame), 0) == []
    assert worker.unread(pb.Ack) == []


async def test_a_capacity_out_of_range_is_refused_and_the_old_one_holds(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    worker = await connect_worker(server.grpc_address, capacity=1)
    for capacity in (-1, 10_001):
        with pytest.raises(FrameRefused) as refused:
            await worker.results(await worker.send(pb.Capacity(capacity=capacity)), 0)
        assert refused.value.error.reason == error_pb2.ERROR_REASON_INVALID_FRAME
    await api.start_many([api.start_request() for _ in range(2)])
    await worker.task()
    await worker.sync()
    assert worker.unread(pb.Tasks) == []


async def test_what_was_sent_before_the_worker_closed_its_side_is_answered(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    await api.start_many([api.start_request() for _ in range(5)])
    worker = await connect_worker(server.grpc_address)
    tasks = await worker.tasks(5)
    frames = [await worker.send(pb.Complete(items=[pb.CompleteItem(task=task.task)])) for task in tasks]
    frames.append(await worker.send(pb.Goodbye()))
    await worker.half_close()
    for frame_id in frames[:-1]:
        [result] = await worker.results(frame_id, 1)
        assert result.outcome == OK
    assert await worker.results(frames[-1], 0) == []
    assert await worker.ended() is None


async def test_a_session_that_waits_for_its_commits_is_read_no_further(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """I12: the items of one session that wait are bounded, and all of them are answered in the end."""
    server = await in_process_server(dsn, max_client_ops=3)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    await api.start_many([api.start_request() for _ in range(30)])
    worker = await connect_worker(server.grpc_address, capacity=30)
    tasks = await worker.tasks(30)
    frames = [await worker.send(pb.Complete(items=[pb.CompleteItem(task=task.task)])) for task in tasks]
    for frame_id in frames:
        [result] = await worker.results(frame_id, 1)
        assert result.outcome == OK
