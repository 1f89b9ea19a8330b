"""Checkpoints and progress against a real server: what the next attempt, and people, get to see."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fencepost import AsyncClient, InvalidJson, LeaseLost, OperationalError, StepContext, Worker, step
from tests.fixtures.manifests import manifest
from tests.fixtures.proxy import Proxy
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually
from tests.sdk.running import running

AT_ONCE = {"max_attempts": 3, "initial_delay": "10ms", "jitter": 0}
OFTEN = {"max_attempts": 20, "initial_delay": "10ms", "multiplier": 1, "jitter": 0}
"""For attempts that may also end because the machine holds them up."""


async def result_of(server: InProcessServer, handler: Callable[..., Any], **node: Any) -> Any:
    """What a run of one step ends with."""
    async with running(Worker(server.grpc_address, [step("s1")(handler)])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(1, **{"retry": AT_ONCE, **node}))
        return await (await client.start_run("wf", 1)).result(timeout=30)


def sync_saver(ctx: StepContext) -> Any:
    seen = ctx.last_checkpoint
    ctx.checkpoint({"attempt": ctx.attempt})
    if ctx.attempt < 3:
        raise OperationalError("again")
    return seen


async def async_saver(ctx: StepContext) -> Any:
    seen = ctx.last_checkpoint
    await ctx.checkpoint({"attempt": ctx.attempt})
    if ctx.attempt < 3:
        raise OperationalError("again")
    return seen


@pytest.mark.parametrize("handler", [sync_saver, async_saver])
async def test_the_next_attempt_sees_what_the_one_before_has_saved(
    server: InProcessServer, handler: Callable[..., Any]
) -> None:
    assert await result_of(server, handler) == {"attempt": 2}


@pytest.mark.parametrize("wait", [True, False])
async def test_of_four_checkpoints_right_before_a_failure_the_next_attempt_sees_the_fourth(
    server: InProcessServer, wait: bool
) -> None:
    def fail_after_four(ctx: StepContext) -> Any:
        if ctx.attempt == 1:
            for number in range(1, 5):
                ctx.checkpoint(number, wait=wait)
            raise OperationalError("right after the fourth")
        return ctx.last_checkpoint

    async def fail_after_four_on_the_loop(ctx: StepContext) -> Any:
        if ctx.attempt == 1:
            for number in range(1, 5):
                saved = ctx.checkpoint(number)
                if wait:
                    await saved
            raise OperationalError("right after the fourth")
        return ctx.last_checkpoint

    for handler in (fail_after_four, fail_after_four_on_the_loop):
        assert await result_of(server, handler) == 4


async def test_checkpoints_are_not_the_next_steps(server: InProcessServer) -> None:
    @step("s1")
    def save(ctx: StepContext) -> None:
        ctx.checkpoint("mine")

    @step("s2")
    def look(x: Any, ctx: StepContext) -> Any:
        return ctx.last_checkpoint

    async with running(Worker(server.grpc_address, [save, look])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(2))
        assert await (await client.start_run("wf")).result(timeout=30) is None


async def test_a_checkpoint_over_a_break_is_saved_when_the_worker_is_back(
    in_process_server: StartInProcessServer, dsn: str, new_proxy: Callable[[str], Proxy]
) -> None:
    server = await in_process_server(dsn, disconnect_grace=30.0)  # however long the worker takes to come back
    proxy = new_proxy(server.grpc_address)
    begun, broken = threading.Event(), threading.Event()

    def save(ctx: StepContext) -> Any:
        if ctx.attempt == 2:
            return ctx.last_checkpoint
        begun.set()
        assert broken.wait(30)
        ctx.checkpoint("over the break")
        raise OperationalError("again")

    async with (
        running(Worker(proxy.address, [step("s1")(save)])) as (run,),
        AsyncClient(server.grpc_address) as client,
    ):
        await client.register_definition(manifest(1, retry=AT_ONCE))
        started = await client.start_run("wf")
        await eventually(begun.is_set)
        proxy.blackhole("up")
        broken.set()
        await eventually(lambda: run.worker.stats().held == 1)
        proxy.heal()
        proxy.cut()
        assert await started.result(timeout=30) == "over the break"


async def test_a_checkpoint_that_only_the_server_can_not_record_is_an_error_of_its_saver(
    server: InProcessServer,
) -> None:
    def save(ctx: StepContext) -> str:
        deep: list[Any] = []
        for _ in range(200):
            deep = [deep]
        with pytest.raises(InvalidJson):
            ctx.checkpoint(deep)
        ctx.checkpoint("flat")
        return "went on"

    assert await result_of(server, save) == "went on"


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_zombie_saves_nothing_and_is_told_that_its_lease_is_lost(
    in_process_server: StartInProcessServer, dsn: str, new_proxy: Callable[[str], Proxy], kind: str
) -> None:
    server = await in_process_server(dsn, ping_interval=0.2, disconnect_grace=0.3, heartbeat_interval=0.3)
    proxy = new_proxy(server.grpc_address)
    errors: list[str] = []
    begun, taken = threading.Event(), threading.Event()

    def zombie(ctx: StepContext) -> None:
        begun.set()
        assert taken.wait(30)
        try:
            ctx.checkpoint("the zombie's")
        except LeaseLost as error:
            errors.append(error.reason)
            raise

    async def async_zombie(ctx: StepContext) -> None:
        begun.set()
        while not taken.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        try:
            await ctx.checkpoint("the zombie's")
        except LeaseLost as error:
            errors.append(error.reason)
            raise
        except asyncio.CancelledError:  # the same news, if it comes while the step waits
            errors.append(str(ctx.cancel_reason))
            raise

    @step("s1")
    def heir(ctx: StepContext) -> Any:
        taken.set()
        while not errors:
            ctx.wait_cancelled(0.01)
        return ctx.last_checkpoint

    handler = step("s1")(zombie if kind == "sync" else async_zombie)
    async with running(Worker(proxy.address, [handler])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(1, retry=OFTEN))
        started = await client.start_run("wf")
        await eventually(begun.is_set)
        proxy.blackhole("both")
        async with running(Worker(server.grpc_address, [heir])):
            await eventually(taken.is_set, 30)
            proxy.heal()
            proxy.cut()
            assert await started.result(timeout=30) is None
    assert set(errors) == {"LEASE_LOST"}


async def test_an_attempt_that_times_out_leaves_what_it_has_saved(server: InProcessServer) -> None:
    async def hang(ctx: StepContext) -> Any:
        if ctx.last_checkpoint is not None:
            return ctx.last_checkpoint
        ctx.checkpoint("before it hung")
        return await asyncio.Event().wait()

    assert await result_of(server, hang, timeout="300ms", retry=OFTEN) == "before it hung"


async def test_people_see_the_newest_checkpoint_and_the_progress(
    in_process_server: StartInProcessServer, dsn: str
) -> None:
    server = await in_process_server(dsn, heartbeat_interval=0.3)
    seen = threading.Event()

    @step("s1")
    def work(ctx: StepContext) -> None:
        ctx.checkpoint("a")
        ctx.checkpoint("b")
        ctx.progress("1 of 2")
        ctx.progress("2 of 2")
        assert seen.wait(30)

    async with running(Worker(server.grpc_address, [work])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(1))
        started = await client.start_run("wf")

        async def shown() -> bool:
            (open_step,) = (await started.get()).open_steps or (None,)
            assert open_step is not None
            assert open_step.progress is not None
            return (open_step.progress.decode(), open_step.checkpoint_number) == ("2 of 2", 2)

        await eventually(shown)  # a heartbeat between the two may tell of the first one before
        seen.set()
        await started.result(timeout=30)
