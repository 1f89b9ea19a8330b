"""A worker that replays a run at each of its events comes to what one comes to that has it in memory."""

from __future__ import annotations

import asyncio
import datetime as dt
import random

import pytest

import fencepost
from fencepost import EventKind, RunState, WorkflowContext, step, workflow
from fencepost.testing import AsyncEnvironment
from fencepost.testing.always_replaying import AlwaysReplaying

DAY = 86_400.0

bills: list[int] = []
turns: list[str] = []


async def bill(month: int) -> int:
    bills.append(month)
    return 100 + month


def discount(cents: int) -> int:
    return cents - 10


@step("kit.mail")
async def mail(text: str) -> str:
    return f"sent {text}"


@workflow("kit.subscription", compatibility_id="1")
async def subscription(ctx: WorkflowContext, months: int) -> list[str]:
    turns.append(ctx.run_id)
    said = []
    for month in range(months):
        cents = await ctx.run(discount, await ctx.run(bill, month))
        first, second = await asyncio.gather(ctx.run(discount, cents), ctx.call(mail, f"bill of {cents}"))
        said.append(f"{second}, {first}, {ctx.now():%Y-%m}")
        await ctx.sleep(30 * DAY)
    return said


@workflow("kit.approval", compatibility_id="1")
async def approval(ctx: WorkflowContext, request: str) -> str:
    for reminder in range(3):
        try:
            answer = await ctx.signal("answer", type=str, timeout=DAY)
        except fencepost.SignalTimeout:
            await ctx.run(discount, reminder)
        else:
            return f"{request}: {answer} after {reminder}"
    return f"{request}: nobody answered"


async def test_months_of_local_and_remote_steps_and_timers(env: AsyncEnvironment) -> None:
    async with env.worker([mail], workflows=[subscription]):
        before = await env.now()
        plain = await env.run(subscription, 3)
        assert await env.now() > before + dt.timedelta(days=90)
    turns.clear()
    bills.clear()
    async with env.worker([mail], workflows=[subscription], always_replay=True):
        handle = await env.client.start_run("kit.subscription", 3)
        replayed = await env.result(handle)
    assert [text.rpartition(", ")[0] for text in replayed] == [text.rpartition(", ")[0] for text in plain]
    assert bills == [0, 1, 2], "no local step ran twice"
    kinds = [event.kind async for event in handle.history()]
    inputs = sum(
        kind in {EventKind.LOCAL_STEP_ENDED, EventKind.STEP_COMPLETED, EventKind.TIMER_FIRED} for kind in kinds
    )
    # At the beginning, and then once an event, but for those that came while a local step of the gather was under way.
    assert inputs - 3 <= len(turns) <= inputs + 3


async def test_a_wait_with_a_time_out_that_passes_twice(env: AsyncEnvironment) -> None:
    async with env.worker(workflows=[approval], always_replay=True):
        handle = await env.client.start_run("kit.approval", "holiday")
        await env.skip(dt.timedelta(days=2, hours=1))
        await handle.signal("answer", "yes")
        assert await env.result(handle, type=str) == "holiday: yes after 2"
        assert await env.run(approval, "raise") == "raise: nobody answered"


async def test_code_that_depends_on_chance_is_found_out(env: AsyncEnvironment) -> None:
    tossed: list[int] = []
    chance = random.Random(7)

    @workflow("kit.chancy", compatibility_id="1")
    async def chancy(ctx: WorkflowContext, _: None) -> int:
        tossed.append(chance.getrandbits(1))
        if len(tossed) % 2:  # what a flag in a module does: another way at each call
            return await ctx.run(bill, 1)
        return await ctx.run(discount, 1) + await ctx.run(discount, 2)

    async with env.worker(workflows=[chancy], always_replay=True):
        handle = await env.client.start_run("kit.chancy")
        await env.settle()
        run = await handle.get()
    assert run.state is RunState.BLOCKED
    assert run.failure is not None
    assert run.failure.code == "NONDETERMINISM"
    assert run.failure.message == "op 1: history has local step bill, code asks for local step discount"
    assert len(tossed) == 2


async def test_the_same_code_is_not_found_out_by_a_worker_that_has_the_run_in_memory(env: AsyncEnvironment) -> None:
    """Which is why the mode is there."""
    calls: list[int] = []

    @workflow("kit.chancy", compatibility_id="1")
    async def chancy(ctx: WorkflowContext, _: None) -> int:
        calls.append(1)
        return await ctx.run(bill if len(calls) == 1 else discount, 1)

    async with env.worker(workflows=[chancy]):
        assert await env.run(chancy) == 101


def test_the_mode_is_the_kits_alone() -> None:
    with pytest.raises(TypeError):
        fencepost.Worker("127.0.0.1:1", workflows=[approval], always_replay=True)  # type: ignore[call-arg]
    assert AlwaysReplaying.__mro__[1].__name__ == "Decider"
