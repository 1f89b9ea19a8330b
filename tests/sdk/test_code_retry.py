"""Runs of code workflows that have failed go on by RetryRun, and what was done before is not done again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fencepost import (
    AsyncClient,
    EventKind,
    IllegalTransition,
    PermanentError,
    RunFailed,
    RunState,
    Step,
    StepFailed,
    Worker,
    Workflow,
    WorkflowContext,
    step,
    workflow,
)
from fencepost.testing import Replayer
from tests.fixtures.servers import InProcessServer
from tests.sdk.running import running


class Ward:
    """Steps that do not work until the ward is healed, and what was done in it."""

    def __init__(self) -> None:
        self.healed = False
        self.done: list[str] = []

    def do(self, what: str) -> str:
        self.done.append(what)
        return what

    def fail(self, what: str) -> str:
        if not self.healed:
            self.done.append(f"{what} failed")
            raise PermanentError("it is ill", code="ILL")
        return self.do(what)

    def remote(self) -> Step[..., Any]:
        @step("ward.fail")
        def remote(what: str) -> str:
            return self.fail(what)

        return remote


async def failed(client: AsyncClient, run_id: str, code: str) -> None:
    with pytest.raises(RunFailed) as raised:
        await client.handle(run_id).result(timeout=30)
    assert raised.value.failure is not None
    assert raised.value.failure.code == code


async def replays(client: AsyncClient, run_id: str, flow: Workflow[..., Any]) -> None:
    """What the run's history says is what its code does."""
    events = [event async for event in client.history(run_id)]
    assert EventKind.RUN_RETRIED in [event.kind for event in events]
    Replayer(flow, on_input_change="block").replay(events, run_id=run_id)


@pytest.mark.parametrize("cache", [0, 100])
@pytest.mark.parametrize("where", ["remote", "local"])
async def test_a_run_goes_on_at_the_step_that_failed(server: InProcessServer, where: str, cache: int) -> None:
    ward = Ward()

    @workflow("ward", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> list[str]:
        first = await ctx.run(ward.do, "first")
        second = await (ctx.run(ward.fail, "second") if where == "local" else ctx.call("ward.fail", "second", type=str))
        return [first, second, await ctx.run(ward.do, "third")]

    worker = Worker(server.grpc_address, [ward.remote()], workflows=[flow], workflow_cache=cache)
    async with running(worker), AsyncClient(server.grpc_address) as client:
        run_id = (await client.start_run("ward")).run_id
        await failed(client, run_id, "ILL")
        # Nothing is mended yet: it fails again, and can be retried again.
        await client.retry_run(run_id)
        await failed(client, run_id, "ILL")
        ward.healed = True
        await client.retry_run(run_id)
        assert await client.handle(run_id).result(timeout=30) == ["first", "second", "third"]
        assert ward.done == ["first", "second failed", "second failed", "second", "third"]
        await replays(client, run_id, flow)


async def test_a_run_that_failed_by_a_bug_goes_on_with_code_that_has_none(server: InProcessServer) -> None:
    ward = Ward()

    def flow(divide: Callable[[], float]) -> Workflow[..., Any]:
        @workflow("buggy", compatibility_id="1")
        async def function(ctx: WorkflowContext) -> list[str]:
            first = await ctx.run(ward.do, "first")
            divide()
            return [first, await ctx.call("ward.fail", "second", type=str)]

        return function

    ward.healed = True
    async with AsyncClient(server.grpc_address) as client:
        async with running(Worker(server.grpc_address, workflows=[flow(lambda: 1 / 0)])):
            run_id = (await client.start_run("buggy")).run_id
            await failed(client, run_id, "ZeroDivisionError")
        mended = flow(lambda: 1.0)
        async with running(Worker(server.grpc_address, [ward.remote()], workflows=[mended])):
            await client.retry_run(run_id)
            assert await client.handle(run_id).result(timeout=30) == ["first", "second"]
            await replays(client, run_id, mended)
    assert ward.done == ["first", "second"]


async def test_branches_that_went_on_beside_the_failure_are_kept(server: InProcessServer) -> None:
    ward = Ward()
    broken = asyncio.Event()

    async def slow() -> str:
        await asyncio.to_thread(lambda: None)
        await broken.wait()
        return ward.do("slow")

    async def ill() -> str:
        try:
            return ward.fail("ill")
        finally:
            broken.set()

    @workflow("branches", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> list[str]:
        word = ctx.signal("word", type=str)
        done = await asyncio.gather(ctx.run(slow), ctx.run(ill), ctx.call("ward.never", type=str))
        return [*done, await word]

    @step("ward.never")
    def never() -> str:
        return ward.do("never")

    async with AsyncClient(server.grpc_address) as client:
        async with running(Worker(server.grpc_address, workflows=[flow])):
            run_id = (await client.start_run("branches")).run_id
            await failed(client, run_id, "ILL")
            assert ward.done == ["ill failed", "slow"]
            ward.healed = True
            await client.retry_run(run_id)
            await client.signal_run(run_id, "word", "said")
        async with running(Worker(server.grpc_address, [never], workflows=[flow])):
            assert await client.handle(run_id).result(timeout=30) == ["slow", "ill", "never", "said"]
            await replays(client, run_id, flow)
    assert sorted(ward.done[2:]) == ["ill", "never"]


async def test_a_function_that_acted_on_the_failure_is_not_retried(server: InProcessServer) -> None:
    ward = Ward()

    @workflow("acting", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> None:
        try:
            await ctx.run(ward.fail, "it")
        except StepFailed:
            await ctx.run(ward.do, "cleaned up")
            raise

    async with running(Worker(server.grpc_address, workflows=[flow])), AsyncClient(server.grpc_address) as client:
        run_id = (await client.start_run("acting")).run_id
        await failed(client, run_id, "ILL")
        with pytest.raises(IllegalTransition, match="went on after the failure that it ended with: start"):
            await client.retry_run(run_id)
        assert (await client.get_run(run_id)).state is RunState.FAILED


async def test_a_function_that_ended_with_the_failure_of_a_child_is_not_retried(server: InProcessServer) -> None:
    ward = Ward()

    @workflow("ill-child", compatibility_id="1")
    async def child(ctx: WorkflowContext) -> None:
        await ctx.run(ward.fail, "it")

    @workflow("parent", compatibility_id="1")
    async def parent(ctx: WorkflowContext) -> None:
        await ctx.child(child)

    worker = Worker(server.grpc_address, workflows=[parent, child])
    async with running(worker), AsyncClient(server.grpc_address) as client:
        run_id = (await client.start_run("parent")).run_id
        await failed(client, run_id, "CHILD_FAILED")
        with pytest.raises(IllegalTransition, match="ended with the failure of a child, which is not tried again"):
            await client.retry_run(run_id)
