"""The code workflows that are measured, and the replay of one in this process."""

from __future__ import annotations

import time

import grpc

from benchmarks.plan import STEPS
from fencepost import WorkflowContext, workflow
from fencepost.code_run import CodeRun
from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1.run_service_pb2_grpc import RunServiceStub

ALONE_STEPS = 300
SLEEPER = "bench-sleeper"

first_step: list[float] = []
"""When the first local step was entered, by the system's clock."""


async def add(value: int) -> int:
    """A local step that does nothing but count."""
    if not first_step:
        first_step.append(time.time())
    return value + 1


async def entered(_number: int) -> float:
    """When it was entered. That clock is the same in all processes."""
    return time.monotonic()


@workflow("bench-code", compatibility_id="1")
async def code_workflow(ctx: WorkflowContext, value: int) -> int:
    """Local steps, each durable before the next."""
    for _ in range(STEPS):
        value = await ctx.run(add, value)
    return value


@workflow("bench-alone", compatibility_id="1")
async def alone(ctx: WorkflowContext, steps: int) -> list[float]:
    """When each of its local steps was entered."""
    return [await ctx.run(entered, number) for number in range(steps)]


@workflow("bench-cold", compatibility_id="1")
async def cold(ctx: WorkflowContext, events: int) -> int:
    """Many local steps, and then a signal."""
    value = 0
    while value < events:
        value = await ctx.run(add, value)
    await ctx.signal("go")
    return value


@workflow(SLEEPER, compatibility_id="1")
async def sleeper(ctx: WorkflowContext, seconds: float) -> None:
    """A timer."""
    await ctx.sleep(seconds)


WORKFLOWS = (code_workflow, alone, cold, sleeper)


async def history_of(address: str, run_id: str) -> list[bytes]:
    """A run's events as they come over the wire, each serialized: reading them is a part of a replay."""
    events: list[bytes] = []
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        request = run_service_pb2.GetHistoryRequest(run_id=run_id, page_size=1000)
        while True:
            page = await RunServiceStub(channel).GetHistory(request)
            events += [event.SerializeToString() for event in page.events]
            if not page.next_page_token:
                return events
            request.page_token = page.next_page_token


def replayed_seconds(run_id: str, history: list[bytes]) -> float:
    """How long it takes to read the events of a run of ``cold`` and to replay its function over them."""
    began = time.perf_counter()
    run = CodeRun(cold, run_id, seen_seq=len(history) - 1, advance_no=1)
    run.feed([run_pb2.Event.FromString(event) for event in history])
    seconds = time.perf_counter() - began
    run.evict()
    return seconds
