"""Code workflows end to end: a worker that decides them, against a real server."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
from typing import Any

import grpc
import pytest

import fencepost
from fencepost import (
    AsyncClient,
    AsyncRunHandle,
    ChildFailed,
    EventKind,
    FailureKind,
    PermanentError,
    Retry,
    RunFailed,
    RunState,
    Worker,
    WorkflowContext,
    step,
    workflow,
)
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually
from tests.sdk.running import running

QUICK = Retry(max_attempts=3, initial_delay=0.01, jitter=0)


async def twice(value: int) -> int:
    return 2 * value


def plus_one(value: int) -> int:
    return value + 1


async def later(value: int) -> int:
    await asyncio.sleep(0.01)
    return value + 100


@step("remote.triple")
async def triple(value: int) -> int:
    return 3 * value


@workflow("counting", compatibility_id="1")
async def counting(ctx: WorkflowContext, start: int) -> int:
    value = await ctx.run(twice, start)
    for _ in range(3):
        value = await ctx.run(plus_one, value)
    first, second, third = await asyncio.gather(ctx.run(twice, value), ctx.run(plus_one, value), ctx.run(later, value))
    return first + second + third


@workflow("mixed", compatibility_id="1")
async def mixed(ctx: WorkflowContext, start: int) -> list[int]:
    tripled = ctx.call("remote.triple", start)
    doubled = ctx.run(twice, start)
    await ctx.sleep(0.05)
    said = await ctx.signal("say", type=int)
    child = await ctx.child(counting, 1)
    return [await tripled, await doubled, said, child]


async def start(client: AsyncClient, flow: Any, input: Any = None, **fields: Any) -> AsyncRunHandle:
    return await client.start_run(flow.workflow_id, input, **fields)


async def test_a_run_goes_through_local_steps_of_every_kind(server: InProcessServer) -> None:
    worker = Worker(server.grpc_address, workflows=[counting])
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handle = await start(client, counting, 5)
        assert await handle.result(timeout=30) == 26 + 14 + 113
        # It is told of its end by the answer that the end of the run was told by.
        await eventually(lambda: worker.stats().cached == 0 and worker.stats().held == 0)
        events = [event.kind async for event in handle.history()]
    assert events.count(EventKind.LOCAL_STEP_ENDED) == 7


async def test_remote_steps_timers_signals_and_children_bring_a_run_on(server: InProcessServer) -> None:
    worker = Worker(server.grpc_address, [triple], workflows=[mixed, counting])
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handle = await start(client, mixed, 2)
        await handle.signal("say", 7)
        assert await handle.result(timeout=30) == [6, 4, 7, 10 + 6 + 105]


@pytest.mark.usefixtures("busy_collector")
async def test_many_runs_go_on_at_once_under_a_busy_collector(server: InProcessServer) -> None:
    worker = Worker(server.grpc_address, workflows=[counting], workflow_slots=7)
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handles = [await start(client, counting, number) for number in range(40)]
        outputs = [await handle.result(timeout=60) for handle in handles]
    assert outputs == [(4 * n + 6) + (2 * n + 4) + (2 * n + 103) for n in range(40)]


async def test_runs_that_wait_take_no_more_memory_than_the_cache_has(server: InProcessServer) -> None:
    @workflow("waiting", compatibility_id="1")
    async def waiting(ctx: WorkflowContext, number: int) -> int:
        before = await ctx.run(plus_one, number)
        return before + await ctx.signal("go", type=int)

    worker = Worker(server.grpc_address, workflows=[waiting], workflow_slots=5, workflow_cache=3)
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handles = [await start(client, waiting, number) for number in range(20)]
        await eventually(lambda: worker.stats().advanced >= 40 and worker.stats().held == 0)
        # The steps' thread hears of the last answers after the session's thread.
        await eventually(lambda: worker.stats().cached == 3)
        for handle in handles:
            await handle.signal("go", 100)
        assert [await handle.result(timeout=30) for handle in handles] == [101 + number for number in range(20)]


@pytest.mark.parametrize("cache", [0, 100])
async def test_a_run_that_waits_goes_on_from_memory_or_from_its_history(server: InProcessServer, cache: int) -> None:
    calls: list[str] = []

    @workflow("replaying", compatibility_id="1")
    async def replaying(ctx: WorkflowContext) -> list[str]:
        calls.append("called")
        return [await ctx.signal("say", type=str) for _ in range(3)]

    worker = Worker(server.grpc_address, workflows=[replaying], workflow_cache=cache)
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handle = await start(client, replaying)
        for wanted, text in enumerate(("a", "b", "c"), 1):

            def waits(wanted: int = wanted) -> bool:
                return worker.stats().advanced >= wanted and worker.stats().held == 0

            await eventually(waits)
            await handle.signal("say", text)
        assert await handle.result(timeout=30) == ["a", "b", "c"]
    assert len(calls) == (1 if cache else 4)


async def test_a_local_step_is_tried_as_often_as_its_policy_says(server: InProcessServer) -> None:
    attempts: list[int] = []

    def shaky(ctx: fencepost.StepContext) -> int:
        attempts.append(ctx.attempt)
        if ctx.attempt < 3:
            raise TimeoutError("not yet")
        return ctx.attempt

    async def hopeless() -> None:
        raise PermanentError("never", code="NEVER")

    @workflow("trying", compatibility_id="1")
    async def trying(ctx: WorkflowContext) -> list[object]:
        got = await ctx.run(shaky, retry=QUICK)
        try:
            await ctx.run(hopeless)
        except fencepost.StepFailed as error:
            return [got, error.code, error.attempts]
        return []

    async with running(Worker(server.grpc_address, workflows=[trying])), AsyncClient(server.grpc_address) as client:
        assert await (await start(client, trying)).result(timeout=30) == [3, "NEVER", 1]
    assert attempts == [1, 2, 3]


async def test_errors_of_users_code_are_theirs_also_if_they_look_like_the_workers(server: InProcessServer) -> None:
    def lost() -> None:
        raise grpc.RpcError("not ours")

    async def cancelled() -> None:
        raise asyncio.CancelledError

    def ends() -> None:
        raise SystemExit(3)

    async def unrecordable() -> float:
        return float("nan")

    once = Retry(max_attempts=1)

    @workflow("failing", compatibility_id="1")
    async def failing(ctx: WorkflowContext) -> list[str]:
        codes = []
        for function in (lost, cancelled, ends, unrecordable):
            try:
                await ctx.run(function, retry=once)
            except fencepost.StepFailed as error:
                codes.append(error.code)
        return codes

    async with running(Worker(server.grpc_address, workflows=[failing])), AsyncClient(server.grpc_address) as client:
        codes = await (await start(client, failing)).result(timeout=30)
    assert codes == ["RpcError", "CancelledError", "SystemExit", "OUTPUT_NOT_RECORDABLE"]


async def test_what_the_function_raises_is_what_the_run_fails_with(server: InProcessServer) -> None:
    @workflow("raising", compatibility_id="1")
    async def raising(ctx: WorkflowContext) -> None:
        try:
            raise PermanentError("the inner", code="INNER")
        except PermanentError as error:
            raise ValueError("the outer") from error

    async with running(Worker(server.grpc_address, workflows=[raising])), AsyncClient(server.grpc_address) as client:
        with pytest.raises(RunFailed) as failed:
            await (await start(client, raising)).result(timeout=30)
    assert failed.value.failure.kind is FailureKind.PERMANENT
    assert failed.value.failure.code == "INNER"


async def test_a_workflow_that_never_waits_is_interrupted_and_the_others_go_on(server: InProcessServer) -> None:
    gone = threading.Event()
    seen: list[str] = []

    @workflow("stuck", compatibility_id="1")
    async def stuck(ctx: WorkflowContext) -> str:
        while not gone.is_set():
            try:
                while not gone.is_set():
                    pass
            except Exception:  # noqa: BLE001 - the very thing that must not help it
                seen.append("caught")
        return "free"

    worker = Worker(server.grpc_address, workflows=[stuck, counting], deadlock_timeout=0.5)
    async with running(worker), AsyncClient(server.grpc_address) as client:
        handle = await start(client, stuck)
        await eventually(lambda: worker.stats().failed >= 1, 30)
        assert await (await start(client, counting, 5)).result(timeout=30) == 153
        gone.set()
        assert await handle.result(timeout=60) == "free"


async def test_a_cancelled_run_stops_its_local_step_and_cleans_up(server: InProcessServer) -> None:
    seen: list[str] = []

    async def long() -> None:
        seen.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("stopped")

    def clean(what: str) -> str:
        seen.append(what)
        return what

    @workflow("cancelled", compatibility_id="1")
    async def cancelled(ctx: WorkflowContext) -> None:
        try:
            await ctx.run(long)
        finally:
            with ctx.shielded():
                await ctx.run(clean, "cleaned")

    async with running(Worker(server.grpc_address, workflows=[cancelled])), AsyncClient(server.grpc_address) as client:
        handle = await start(client, cancelled)
        await eventually(lambda: "begun" in seen)
        await handle.cancel("enough")
        assert (await handle.wait(timeout=30)).state is RunState.CANCELLED
    assert sorted(seen) == ["begun", "cleaned", "stopped"]


async def test_a_stopped_worker_gives_its_runs_back_and_another_goes_on(server: InProcessServer) -> None:
    release = threading.Event()
    begun = threading.Event()
    counts = {"first": 0, "second": 0}

    def first() -> str:
        counts["first"] += 1
        begun.set()
        release.wait(30)
        return "first"

    def second() -> str:
        counts["second"] += 1
        return "second"

    @workflow("handed", compatibility_id="1")
    async def handed(ctx: WorkflowContext) -> list[str]:
        return [await ctx.run(first), await ctx.run(second)]

    async with AsyncClient(server.grpc_address) as client:
        async with running(Worker(server.grpc_address, workflows=[handed])) as (one,):
            handle = await start(client, handed)
            await asyncio.to_thread(begun.wait, 30)
            one.worker.stop()
            release.set()
            await one.end()
            # What was under way was recorded, and nothing was begun after it.
            assert counts == {"first": 1, "second": 0}
        assert (await handle.get()).state is RunState.RUNNING
        async with running(Worker(server.grpc_address, workflows=[handed])):
            assert await handle.result(timeout=30) == ["first", "second"]
    assert counts == {"first": 1, "second": 1}


async def test_a_timer_and_the_clock_of_a_run_are_those_of_its_events(server: InProcessServer) -> None:
    @workflow("timed", compatibility_id="1")
    async def timed(ctx: WorkflowContext) -> list[str]:
        before = ctx.now()
        await ctx.sleep(dt.timedelta(milliseconds=30))
        return [before.isoformat(), ctx.now().isoformat()]

    async with running(Worker(server.grpc_address, workflows=[timed])), AsyncClient(server.grpc_address) as client:
        handle = await start(client, timed)
        before, after = await handle.result(timeout=30)
        assert dt.datetime.fromisoformat(after) - dt.datetime.fromisoformat(before) >= dt.timedelta(milliseconds=30)
        times = {event.time for event in [event async for event in client.history(handle.run_id)]}
    assert dt.datetime.fromisoformat(after) in times


dug: list[int] = []


@workflow("burrow", compatibility_id="1")
async def burrow(ctx: WorkflowContext, depth: int) -> str:
    await ctx.run(dug.append, depth)
    try:
        return await ctx.child(burrow, depth + 1)
    except ChildFailed as failed:
        return f"{depth}: {failed.detail}"


async def test_a_child_that_would_be_too_deep_fails_where_its_parent_awaits_it(server: InProcessServer) -> None:
    dug.clear()
    async with running(Worker(server.grpc_address, workflows=[burrow])), AsyncClient(server.grpc_address) as client:
        told = await (await client.start_run(burrow, 0)).result(120)
    assert told.startswith(
        "32: the child could not be started: INVALID_REQUEST: more than 32 runs would be inside each"
    )
    assert dug == list(range(33)), "no step of them has run again"
