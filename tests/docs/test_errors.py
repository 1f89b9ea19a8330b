"""The examples on docs/errors.md are what the server says: each is provoked, and its message compared with the page's.

Ids, hashes and numbers differ each time; `…` stands for anything. The reasons that end a worker's stream are met in
tests/session.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from fencepost.v1 import definition_service_pb2 as definition_pb
from fencepost.v1 import run_pb2
from fencepost.v1 import run_service_pb2 as pb
from fencepost.v1 import schedule_service_pb2 as schedule_pb
from fencepost.v1 import worker_service_pb2 as worker_pb
from fencepost.v1.payload_pb2 import Payload
from fencepost.v1.schedule_service_pb2_grpc import ScheduleServiceStub
from fencepost_server.domain.code import op_node
from tests.docs.test_reference import rows
from tests.engine.code import BLOCK, CODE, MANIFEST, held, local
from tests.engine.flows import CORRECTIVE, ONCE, Scene, step, workflow
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.raw_worker import REFUSED, RawWorker
from tests.fixtures.refusals import ApiError, decode
from tests.fixtures.servers import StartInProcessServer
from tests.fixtures.waiting import eventually

NOBODY = "00000000-0000-7000-8000-000000000000"
GO: dict[str, Any] = {"id": "approval", "wait_signal": "approve"}
LATE: dict[str, Any] = {"id": "approval", "wait_signal": "approve", "timeout": "1ms"}


def examples() -> dict[str, str]:
    """The first message in code of each row's example, by reason."""
    found = {row[0]: re.search("`+ ?(.+?) ?`+(?!`)", row[3]) for row in rows("docs/errors.md", "[A-Z_]+")}
    return {reason: match[1] for reason, match in found.items() if match is not None}


def fits(shown: str, said: str) -> bool:
    """Whether ``said`` is what the page shows."""
    plain = re.sub(r"\d+", "0", re.sub(r"[0-9a-f-]*…", "…", shown))
    pattern = re.escape(plain).replace("…", ".*").replace("0", r"\d+(\.\d+)?")
    return re.fullmatch(pattern, said, re.DOTALL) is not None


def check(said: dict[str, str]) -> None:
    """The page shows what was said."""
    shown = examples()
    wrong = {
        reason: (shown.get(reason), text) for reason, text in said.items() if not fits(shown.get(reason, ""), text)
    }
    assert wrong == {}


@pytest.fixture
async def scene(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Callable[[str], Api],
    connect_worker: Callable[..., Awaitable[RawWorker]],
) -> Scene:
    server = await in_process_server(dsn, poll_interval=0.05, max_pending_signals=1, heartbeat_interval=0.5)
    worker = await connect_worker(server.grpc_address, handlers=["price", "charge", "undo-charge", "ship"], capacity=10)
    return Scene(server, connect_api(server.grpc_address), worker, dsn)


async def refusal(call: Awaitable[object]) -> ApiError:
    """What a call was refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return decode(caught.value)


async def refusals(*calls: Awaitable[object]) -> dict[str, str]:
    """What calls were refused with, by reason."""
    return {error.reason: error.message for error in [await refusal(call) for call in calls]}


def test_messages_are_compared_but_for_what_differs_each_time() -> None:
    assert fits("run 01a2280a-… is FAILED: X", "run 01a2280a-49e9-7f04-89ba-0f3a026c699a is FAILED: X")
    assert fits("has 3 faults", "has 17 faults")
    assert fits("longer than 30 s", "longer than 0.5 s")
    assert not fits("has 3 faults", "has no faults")


async def test_what_a_request_is_refused_with_is_what_the_page_shows(scene: Scene) -> None:
    api = scene.api
    schema = {"type": "object", "required": ["name"]}
    await api.register(workflow(GO, workflow_id="welcome", input_schema=schema))
    ada = {"request_key": "ada", "request_id": "q1"}
    await api.start("welcome", '{"name": "Ada"}', dedupe_key="nightly", **ada)
    said = await refusals(
        api.start("", priority=9),
        api.start("welcome", '{"a": 1, "a": 2}'),
        api.start("welcome", "{}"),
        api.start("welcome", json.dumps("x" * (1 << 20))),
        api.register('{"id": 1}'),
        api.runs.ListRuns(pb.ListRunsRequest(page_token="x"), timeout=DEADLINE),
        api.start("welcom"),
        api.start("welcome", '{"name": "Ada"}', definition_hash="0" * 64),
        api.get(NOBODY),
        api.start("welcome", '{"name": "Bob"}', request_key="ada"),
        api.start("welcome", '{"name": "Bob"}', request_id="q1"),
        api.start("welcome", '{"name": "Bob"}', dedupe_key="nightly"),
        api.register(workflow({**GO, "timeout": "5s"}, workflow_id="welcome")),
    )
    assert len(said) == 13
    check(said)


async def test_what_a_call_on_a_run_is_refused_with_is_what_the_page_shows(scene: Scene) -> None:
    run_id = await scene.run(GO)
    await scene.signal(run_id, "other")
    said = await refusals(scene.signal(run_id, "other"))
    run_id = await scene.start()
    await scene.signal(run_id, "approve")
    await scene.output(run_id)
    said |= await refusals(scene.call("Cancel", run_id))

    await scene.api.register(workflow(LATE, workflow_id="welcome"))
    await scene.api.register(workflow({"id": "kid", "workflow": "welcome"}, workflow_id="parent"))
    failed = await scene.start(workflow_id="welcome", dedupe_key="nightly")
    await scene.failure(failed)
    held = await scene.start(workflow_id="welcome", dedupe_key="nightly", start_delay={"seconds": 60})
    said |= await refusals(scene.call("Retry", failed))
    await scene.call("Terminate", held)
    parent = await scene.start(workflow_id="parent")
    await scene.failure(parent)
    (kid,) = await scene.api.list_all(parent_run_id=parent)
    said |= await refusals(scene.call("Retry", kid.run_id))

    undone = {**LATE, "id": "then"}
    await scene.api.register(workflow(step("charge", undo=True), undone, workflow_id="undone"))
    run_id = await scene.start(workflow_id="undone")
    await scene.do("charge", "undo-charge")
    await scene.failure(run_id)
    said |= await refusals(scene.call("Retry", run_id))

    hash_ = (await scene.api.get(failed)).definition_hash
    request = definition_pb.RemoveDefinitionRequest(workflow_id="welcome", definition_hash=hash_)
    await scene.api.definitions.RemoveDefinition(request, timeout=DEADLINE)
    said |= await refusals(scene.start(workflow_id="welcome"))
    assert len(said) == 6
    check(said)


async def test_what_a_call_on_a_schedule_is_refused_with_is_what_the_page_shows(scene: Scene) -> None:
    schedules = ScheduleServiceStub(scene.api.channel)

    async def create(cron: str) -> None:
        spec = schedule_pb.ScheduleSpec(workflow_id="wf", cron=cron)
        await schedules.CreateSchedule(
            schedule_pb.CreateScheduleRequest(schedule_id="nightly", spec=spec), timeout=DEADLINE
        )

    async def update(etag: str) -> None:
        spec = schedule_pb.ScheduleSpec(workflow_id="wf", cron="0 3 * * *")
        await schedules.UpdateSchedule(
            schedule_pb.UpdateScheduleRequest(schedule_id="nightly", spec=spec, etag=etag), timeout=DEADLINE
        )

    said = await refusals(schedules.GetSchedule(schedule_pb.GetScheduleRequest(schedule_id="nightly")))
    await create("0 1 * * *")
    said |= await refusals(create("0 2 * * *"), update("other"))
    assert len(said) == 3
    check(said)


async def test_what_runs_without_workers_fail_with_is_what_the_page_shows(scene: Scene) -> None:
    said: dict[str, str] = {}

    async def failed(*nodes: dict[str, Any], data: Any = None, **fields: Any) -> None:
        workflow_id = f"wf{len(said)}"
        await scene.api.register(workflow(*nodes, workflow_id=workflow_id))
        failure = await scene.failure(await scene.start(data, workflow_id, **fields))
        said[failure.code] = failure.message

    absent: dict[str, Any] = {"step": "absent"}
    await failed({"id": "price", **absent, "queue_timeout": "10ms"})
    await failed({"id": "price", **absent, "total_timeout": "10ms"})
    await failed(GO, run_timeout={"nanos": 10_000_000})
    await failed(LATE)
    await failed({"id": "price", **absent, "input": {"$from": "#/order/lines"}}, data={})
    await failed({"id": "kid", "workflow": "wf3"})
    run_id = await scene.run(GO)
    await scene.call("Cancel", run_id, reason="the customer changed their mind")
    said["RUN_CANCELLED"] = (await scene.failure(run_id, "CANCELLED")).message
    run_id = await scene.run(GO)
    await scene.call("Terminate", run_id, reason="started by mistake")
    said["RUN_TERMINATED"] = (await scene.failure(run_id, "TERMINATED")).message
    assert len(said) == 8
    check(said)


async def test_what_attempts_fail_with_is_what_the_page_shows(scene: Scene) -> None:
    said = {}
    schema = {"type": "object", "required": ["net"]}
    run_id = await scene.run(step("price", output_schema=schema, retry={"max_attempts": 2, "initial_delay": "0s"}))
    result = await scene.worker.complete(await scene.task("price"), "{}")
    assert result.outcome == REFUSED
    said["OUTPUT_SCHEMA_MISMATCH"] = result.message
    task = await scene.task("price")
    assert task.feedback.kind == CORRECTIVE
    await scene.expire(task)
    await scene.task("price")
    (open_step,) = (await scene.api.get(run_id)).open_steps
    said["LEASE_EXPIRED"] = open_step.last_failure.message
    said["LEASE_LOST"] = (await scene.worker.complete(task, "{}")).message
    await scene.call("Terminate", run_id)

    await scene.api.register(workflow(step("ship", timeout="1s", retry=ONCE), workflow_id="slow"))
    run_id = await scene.start(workflow_id="slow")
    await scene.task("ship")
    said["ATTEMPT_TIMEOUT"] = (await scene.failure(run_id)).message

    await scene.api.register(workflow(step("ship", retry=ONCE), workflow_id="never"))
    run_id = await scene.start(workflow_id="never")
    for _ in range(4):
        await scene.worker.release(await scene.task("ship"))
    said["NOT_DELIVERED"] = (await scene.until(run_id, "BLOCKED")).failure.message
    assert len(said) == 5
    check(said)


async def test_what_blocks_a_run_that_is_undone_is_what_the_page_shows(scene: Scene) -> None:
    run_id = await scene.run(step("charge", undo={"retry": ONCE}), GO)
    await scene.do("charge")
    await scene.call("Cancel", run_id)
    await scene.fail(await scene.task("undo-charge"), code="PROVIDER_GONE", message="the provider is gone")
    failure = (await scene.until(run_id, "BLOCKED")).failure
    check({failure.code: failure.message})


async def test_a_signal_that_no_wait_could_take_is_refused_as_the_page_shows(scene: Scene) -> None:
    run_id = await scene.run({**GO, "output_schema": {"type": "object"}})
    request = pb.SignalRunRequest(run_id=run_id, signal_name="approve", payload=Payload(json="1"))
    error = await refusal(scene.api.runs.SignalRun(request, timeout=DEADLINE))
    shown = next(row[3] for row in rows("docs/errors.md", "INPUT_SCHEMA_MISMATCH"))
    assert any(fits(text, error.message) for text in re.findall("`(.+?)`", shown)), error.message


async def test_what_is_said_of_code_runs_is_what_the_page_shows(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Callable[[str], Api],
    connect_worker: Callable[..., Awaitable[RawWorker]],
) -> None:
    """Of queries, of an Advance that comes out of order, and of runs that are BLOCKED."""
    server = await in_process_server(dsn, poll_interval=0.05, max_history_events=100)
    api = connect_api(server.grpc_address)
    await api.register(MANIFEST)
    run_id = (await api.start("code")).run_id
    query = pb.QueryRunRequest(run_id=run_id, name="progres")
    said = await refusals(api.runs.QueryRun(query, timeout=DEADLINE))
    worker = await connect_worker(server.grpc_address, handlers=(), capacity=0, workflows=[CODE], workflow_capacity=10)
    asking = asyncio.create_task(refusals(api.runs.QueryRun(query, timeout=DEADLINE)))
    failure = run_pb2.Failure(code="UNKNOWN_QUERY", message="the workflow has no query 'progres'")
    await worker.answer(await worker.next(worker_pb.Query), failure=failure)
    said |= await asking
    run = held(worker, await worker.task())
    run.advance_no = 6
    refused = await run.advance()
    assert refused.outcome == REFUSED
    said["ADVANCE_OUT_OF_ORDER"] = refused.message
    run.advance_no = 0
    await run.advance(*(local(n) for n in range(1, 101)))
    said |= {run.failure.code: run.failure.message for run in [await blocked(api, run_id)]}
    for code in ("NONDETERMINISM", "DEADLOCK"):
        run_id = (await api.start("code")).run_id
        text = "op 7: history has step charge, code asks for sleep 30s"
        if code == "NONDETERMINISM":
            failure = run_pb2.Failure(code=code, message=text)
            await held(worker, await worker.task()).advance(outcome=BLOCK, failure=failure)
        else:
            work = op_node("decide", "decide", "").work
            assert work is not None
            for _ in range(work.retry.max_attempts):
                task = await worker.task()
                await worker.fail(task, code=code, message="a turn took longer than 2 s", retry_after=0.001)
        said |= {run.failure.code: run.failure.message for run in [await blocked(api, run_id)]}
    assert set(said) == {
        "NO_WORKER",
        "QUERY_FAILED",
        "ADVANCE_OUT_OF_ORDER",
        "HISTORY_TOO_LONG",
        "NONDETERMINISM",
        "DECIDER_FAILING",
    }
    check(said)


async def blocked(api: Api, run_id: str) -> run_pb2.Run:
    """The run when it is BLOCKED."""

    async def is_blocked() -> bool:
        return (await api.get(run_id)).state == run_pb2.RUN_STATE_BLOCKED

    await eventually(is_blocked)
    return await api.get(run_id)
