"""Whatever a step returns or raises ends in a recorded result or failure, and payloads at the limits are taken or
refused at the edge: nothing is retried for ever, and the stream stays usable.

Rows 13 and 28 of the field failures. I12.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import grpc
import pytest

from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.faults.scene import ONE_ATTEMPT, STAYING, Scene
from tests.fixtures.api import kinds
from tests.fixtures.manifests import manifest
from tests.fixtures.processes import Process
from tests.fixtures.raw_worker import OK, REFUSED
from tests.fixtures.refusals import refused
from tests.fixtures.waiting import eventually

LIMIT = 1 << 20
NOT_RECORDABLE = "OUTPUT_NOT_RECORDABLE"

RETURNED = {
    '["nothing"]': "null",
    '["nul"]': '"\\u0000"',
    '["large-integer"]': str(2**3000),
    '["depth", 128]': "[" * 128 + "]" * 128,
    f'["text", {LIMIT - 1}]': '"' + "x" * (LIMIT - 3) + '"',
    f'["text", {LIMIT}]': '"' + "x" * (LIMIT - 2) + '"',
}
FAILED = {
    '["nan"]': NOT_RECORDABLE,
    '["infinity"]': NOT_RECORDABLE,
    '["bytes"]': NOT_RECORDABLE,
    '["set"]': NOT_RECORDABLE,
    '["cycle"]': NOT_RECORDABLE,
    '["surrogate"]': NOT_RECORDABLE,
    '["object"]': NOT_RECORDABLE,
    '["generator"]': NOT_RECORDABLE,
    '["depth", 129]': NOT_RECORDABLE,
    '["depth", 100000]': NOT_RECORDABLE,
    '["huge-integer"]': NOT_RECORDABLE,
    f'["text", {LIMIT + 1}]': NOT_RECORDABLE,
    f'["text", {10 * LIMIT}]': NOT_RECORDABLE,
    '["raise-nul"]': "ValueError",
    '["raise-surrogate"]': "ValueError",
    '["raise-long"]': "ValueError",
    '["raise-speechless"]': "Speechless",
    '["raise-exit"]': "SystemExit",
    '["raise-interrupt"]': "KeyboardInterrupt",
    '["raise-group"]': "NO",
    '["raise-odd-code"]': None,
}


async def test_whatever_a_step_returns_or_raises_is_recorded(
    scene: Scene, python_process: Callable[..., Process]
) -> None:
    """Rows 13 and 28: by one worker, which goes on with the next. There is one attempt, except for feedback."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(retry=ONE_ATTEMPT))
    worker = python_process("-m", "tests.faults.odd_outcomes_program", server.grpc_address)
    runs = {what: (await api.start(input=what)).run_id for what in (*RETURNED, *FAILED)}
    ended = {what: await api.wait(run_id, 30) for what, run_id in runs.items()}
    assert {what: ended[what].output.json for what in RETURNED} == RETURNED
    failures = {what: ended[what].failure for what in FAILED}
    assert {what: failure.code for what, failure in failures.items() if FAILED[what]} == {
        what: code for what, code in FAILED.items() if code
    }
    assert all(ended[what].state == run_pb2.RUN_STATE_FAILED for what in FAILED)
    assert all(failure.attempt == 1 for failure in failures.values())
    permanent = {what for what, failure in failures.items() if failure.kind == run_pb2.FAILURE_KIND_PERMANENT}
    assert permanent == {what for what in FAILED if "raise" not in what or "group" in what or "odd-code" in what}
    assert failures['["raise-nul"]'].message == "before\0after"
    assert failures['["raise-surrogate"]'].message == "before\ufffdafter"
    assert 1000 < len(failures['["raise-long"]'].message) <= 10_000
    assert await asyncio.to_thread(worker.terminate) == 0


def of_size(size: int) -> str:
    """JSON text of so many bytes, a third as many characters."""
    return '"' + "x" * ((size - 2) % 3) + "€" * ((size - 2) // 3) + '"'


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT, LIMIT + 1])
async def test_an_input_is_taken_up_to_the_limit_in_bytes(scene: Scene, size: int) -> None:
    """Row 28: by every call that starts runs; one item of a batch does no harm to the others."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest())
    for payload in (Payload(json=of_size(size)), Payload(binary=b"b" * size)):
        request = api.start_request()
        request.input.CopyFrom(payload)
        small = api.start_request()
        if size > LIMIT:
            with refused("PAYLOAD_TOO_LARGE", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
                await api.runs.StartRun(request)
            assert refusal.error.paths == [f"input.{payload.WhichOneof('data')}"]
            large, other = await api.start_many([request, small])
            assert large.error.reason == error_pb2.ERROR_REASON_PAYLOAD_TOO_LARGE
            assert other.started.created
        else:
            run_id = (await api.runs.StartRun(request)).run_id
            assert (await api.get(run_id)).input == payload
            assert [result.started.run_id for result in await api.start_many([request])] == [run_id]


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT, LIMIT + 1])
async def test_an_output_is_taken_up_to_the_limit_in_bytes_and_its_run_can_be_ended_in_any_case(
    scene: Scene, size: int
) -> None:
    """Row 28: the worker is told why, keeps its lease and its stream, and says what it can."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest())
    worker = await scene.raw(server.grpc_address)
    for output in (Payload(json=of_size(size)), Payload(binary=b"b" * size)):
        run_id = (await api.start()).run_id
        task = await worker.task()
        frame = pb.Complete(items=[pb.CompleteItem(task=task.task, output=output)])
        (result,) = await worker.results(await worker.send(frame), 1)
        if size <= LIMIT:
            assert result.outcome == OK
            assert (await api.get(run_id)).output == output
            continue
        assert (result.outcome, result.reason) == (REFUSED, error_pb2.ERROR_REASON_PAYLOAD_TOO_LARGE)
        assert [violation.path for violation in result.violations] == [f"output.{output.WhichOneof('data')}"]
        assert [renewed.outcome for renewed in await worker.heartbeat()] == [OK]
        assert (await worker.fail(task, run_pb2.FAILURE_KIND_PERMANENT, code="TOO_LARGE")).outcome == OK
        assert (await api.wait(run_id)).failure.code == "TOO_LARGE"


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT, LIMIT + 1])
async def test_a_feedback_is_taken_up_to_the_limit_and_comes_back_beside_an_input_of_that_size(
    scene: Scene, size: int
) -> None:
    """Row 28, I12."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest())
    worker = await scene.raw(server.grpc_address)
    run_id = (await api.start(input=of_size(LIMIT))).run_id
    task = await worker.task()
    failure = run_pb2.Failure(kind=run_pb2.FAILURE_KIND_CORRECTIVE, code="AGAIN", feedback=Payload(json=of_size(size)))
    frame = pb.Fail(items=[pb.FailItem(task=task.task, failure=failure)])
    (result,) = await worker.results(await worker.send(frame), 1)
    if size > LIMIT:
        assert (result.outcome, result.reason) == (REFUSED, error_pb2.ERROR_REASON_PAYLOAD_TOO_LARGE)
        assert (await worker.complete(task)).outcome == OK
        return
    assert result.outcome == OK
    again = await worker.task()
    assert (again.attempt, again.input.json, again.feedback.feedback) == (2, of_size(LIMIT), failure.feedback)
    assert (await worker.complete(again)).outcome == OK
    assert kinds(await api.history(run_id))[-1] == "run_completed"


async def test_a_task_that_fits_into_no_frame_of_its_worker_is_parked_and_the_stream_goes_on(scene: Scene) -> None:
    """Row 28: a frame past a client's limit would kill its stream, and again after each reconnect."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(retry=ONE_ATTEMPT))
    smallest = round(LIMIT * 1.25)
    worker = await scene.raw(server.grpc_address, max_frame_bytes=smallest)
    run_id = (await api.start(input=of_size(LIMIT))).run_id
    task = await worker.task()
    failure = run_pb2.Failure(kind=run_pb2.FAILURE_KIND_CORRECTIVE, code="AGAIN", feedback=Payload(json=of_size(LIMIT)))
    frame = pb.Fail(items=[pb.FailItem(task=task.task, failure=failure)])
    (result,) = await worker.results(await worker.send(frame), 1)
    assert result.outcome == OK
    other = (await api.start()).run_id
    assert (await worker.complete(await worker.task())).outcome == OK
    assert (await api.wait(other)).state == run_pb2.RUN_STATE_COMPLETED

    async def parked() -> bool:
        run = await api.get(run_id)
        return (run.state, run.failure.code) == (run_pb2.RUN_STATE_BLOCKED, "NOT_DELIVERED")

    await eventually(parked)
    await worker.sync()


async def test_steps_of_the_sdk_meet_the_limits_with_recorded_failures_and_feedback(
    scene: Scene, python_process: Callable[..., Process]
) -> None:
    """Row 28: a feedback that is too large is left out, and the failure says so."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    await api.register(manifest(nodes={"n1": {"step": "s2"}}))
    worker = python_process("-m", "tests.faults.odd_outcomes_program", server.grpc_address)
    sizes = (LIMIT - 1, LIMIT, LIMIT + 1)
    runs = [(await api.start(input=str(size))).run_id for size in sizes]
    outputs = [json.loads((await api.wait(run_id, 30)).output.json) for run_id in runs]
    assert outputs == [LIMIT - 1, LIMIT, None]
    retrying = (await api.history(runs[2]))[2].step_retrying
    assert "can't be recorded" in retrying.failure.message
    assert await asyncio.to_thread(worker.terminate) == 0
