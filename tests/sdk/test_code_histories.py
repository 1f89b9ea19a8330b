"""Histories and payloads of code runs that fit no frame, and questions to runs wherever they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from fencepost import AsyncClient, RunState, StepContext, StepFailed, Worker, WorkflowContext, step, workflow
from fencepost.v1 import run_service_pb2
from fencepost.v1.payload_pb2 import Payload
from tests.fixtures.api import Api
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually
from tests.sdk.running import running

StartServer = Callable[..., Any]
BIG = 400_000


@step("echo.length")
async def length(text: str, ctx: StepContext) -> int:
    return len(text)


def repeated(letter: str) -> str:
    return letter * BIG


async def test_commands_that_fit_no_frame_go_out_in_parts(server: InProcessServer) -> None:
    @workflow("large", compatibility_id="1")
    async def large(ctx: WorkflowContext) -> list[int]:
        texts = await asyncio.gather(*(ctx.run(repeated, letter) for letter in "abcdefghij"))
        lengths = await asyncio.gather(*(ctx.call("echo.length", text) for text in texts))
        return [*lengths, *(len(text) for text in texts)]

    worker = Worker(server.grpc_address, [length], workflows=[large], workflow_cache=0)
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handle = await client.start_run("large")
        assert await handle.result(timeout=60) == [BIG] * 20


async def test_what_is_decided_fits_the_frames_of_the_server_however_small(
    in_process_server: StartServer, dsn: str
) -> None:
    """One that is too large would end the stream, and be sent again over the next one, without end."""

    def echo(text: str) -> str:
        return text

    @workflow("narrow", compatibility_id="1")
    async def narrow(ctx: WorkflowContext) -> list[Any]:
        parts = await asyncio.gather(*(ctx.run(echo, str(number) * 10_000) for number in range(10)))
        try:
            await ctx.run(echo, "x" * 40_000, undo="take-back")
        except StepFailed as failed:
            return [failed.code, sum(len(part) for part in parts)]
        return []

    server = await in_process_server(dsn, max_payload_bytes=48 << 10, max_frame_bytes=64 << 10)
    worker = Worker(server.grpc_address, workflows=[narrow])
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handle = await client.start_run("narrow")
        assert await handle.result(timeout=30) == ["OUTPUT_NOT_RECORDABLE", 100_000]
    assert worker.stats().reconnects == 0


async def test_a_history_that_fits_no_frame_is_read_in_pages(server: InProcessServer) -> None:
    def plus(value: int) -> int:
        return value + 1

    @workflow("long", compatibility_id="1")
    async def long(ctx: WorkflowContext) -> list[int]:
        texts = [await ctx.run(repeated, letter) for letter in "abcdefghijkl"]
        numbers = await asyncio.gather(*(ctx.run(plus, number) for number in range(2500)))
        return [len("".join(texts)), sum(numbers), await ctx.signal("end", type=int)]

    async with AsyncClient(server.grpc_address) as client:
        async with running(Worker(server.grpc_address, workflows=[long])) as (run,):
            handle = await client.start_run("long")

            async def waits() -> bool:
                return (await handle.get()).state is RunState.WAITING

            await eventually(waits)
            assert run.worker.stats().released == 0
        await handle.signal("end", 7)
        async with running(Worker(server.grpc_address, workflows=[long])) as (run,):
            assert await handle.result(timeout=60) == [12 * BIG, sum(range(2501)), 7]
            await eventually(lambda: run.worker.stats().advanced == 1)  # its Ack may come after the caller's answer


@workflow("asked", compatibility_id="1")
async def asked(ctx: WorkflowContext) -> str:
    said = ["nothing"]
    ctx.on_query("said", lambda: said[-1])
    ctx.on_query("times", lambda factor: factor * len(said))

    def broken() -> None:
        raise KeyError("broken")

    ctx.on_query("broken", broken)
    while said[-1] != "end":
        said.append(await ctx.signal("say", type=str))
    return said[-1]


async def query(server: InProcessServer, run_id: str, name: str, input: str = "null") -> str:
    """The answer, as JSON text."""
    api = Api(server.grpc_address)
    try:
        request = run_service_pb2.QueryRunRequest(
            run_id=run_id, name=name, input=Payload(json=input), timeout=Duration(seconds=20)
        )
        response = await api.runs.QueryRun(request, timeout=30)
        return response.output.json
    finally:
        await api.close()


@pytest.mark.parametrize("cache", [0, 100])
async def test_a_run_answers_from_memory_or_by_a_replay_also_when_it_has_ended(
    server: InProcessServer, cache: int
) -> None:
    worker = Worker(server.grpc_address, workflows=[asked], workflow_cache=cache)
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handle = await client.start_run("asked")
        await eventually(lambda: worker.stats().advanced >= 1 and worker.stats().held == 0)
        assert await query(server, handle.run_id, "said") == '"nothing"'
        await handle.signal("say", "hello")
        # Whatever of it this worker has seen: the answer knows the signal.
        assert await query(server, handle.run_id, "said") == '"hello"'
        assert await query(server, handle.run_id, "times", "21") == "42"
        await handle.signal("say", "end")
        assert await handle.result(timeout=30) == "end"
        assert await query(server, handle.run_id, "said") == '"end"'
        assert worker.stats().cached == 0


@workflow("personal", compatibility_id="1")
async def personal(ctx: WorkflowContext) -> int:
    found = [0]
    ctx.on_query("found", lambda: [ctx.user_id, *found])
    await ctx.run(len, "", name=f"begin for {ctx.user_id}")
    found[0] = await ctx.call("echo.length", repeated("x") * 3)
    return found[0]


async def test_a_replay_for_a_question_has_the_runs_user_and_the_servers_limits(
    in_process_server: StartServer, dsn: str
) -> None:
    """Else it would differ from what the run has done."""
    server = await in_process_server(dsn, max_payload_bytes=2 << 20)
    worker = Worker(server.grpc_address, [length], workflows=[personal], workflow_cache=0)
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handle = await client.start_run("personal", user_id="ada")
        assert await handle.result(timeout=30) == 3 * BIG
        assert await query(server, handle.run_id, "found") == f'["ada",{3 * BIG}]'


async def test_a_question_that_has_no_answer_says_why_and_harms_nothing(server: InProcessServer) -> None:
    worker = Worker(server.grpc_address, workflows=[asked])
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handle = await client.start_run("asked")
        for name, said in (("broken", "broken"), ("unknown", "unknown")):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await query(server, handle.run_id, name)
            assert said in str(failed.value.details())
        await handle.signal("say", "end")
        assert await handle.result(timeout=30) == "end"
    assert worker.stats().failed == 0


async def test_sessions_that_are_asked_to_go_hand_their_runs_over(in_process_server: StartServer, dsn: str) -> None:
    server = await in_process_server(dsn, ping_interval=0.2, session_max_age=0.3)
    ran: list[int] = []

    async def note(number: int) -> int:
        await asyncio.sleep(0.02)
        ran.append(number)
        return number

    @workflow("moving", compatibility_id="1")
    async def moving(ctx: WorkflowContext) -> list[int]:
        return [await ctx.run(note, number) for number in range(60)]

    worker = Worker(server.grpc_address, workflows=[moving])
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handle = await client.start_run("moving")
        assert await handle.result(timeout=60) == list(range(60))
        assert worker.stats().reconnects >= 2
    assert ran == list(range(60)), "what was under way was recorded before the run was given back"
    assert worker.stats().lost == 0
