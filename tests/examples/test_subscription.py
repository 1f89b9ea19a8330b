"""The subscription example over years, by skipped time: each month a run, one chain, and no signal lost on the way."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
import pytest_asyncio

from examples.subscription.workflow import MONTH, PRICES, STEPS, Subscription, subscription
from fencepost import AsyncClient, AsyncRunHandle, Run, RunState, StepContext, step
from fencepost.testing import AsyncEnvironment
from tests.fixtures.processes import Process
from tests.fixtures.waiting import eventually

A_MONTH = dt.timedelta(seconds=MONTH)
A_DAY = dt.timedelta(days=1)


def has_logged(program: Process, text: str) -> bool:
    return text in program.logs


async def chain(client: AsyncClient, run: AsyncRunHandle) -> list[Run]:
    """All runs of it, the first one first."""
    found = [await run.get()]
    while found[-1].next_run_id:
        found.append(await client.get_run(found[-1].next_run_id))
    return found


@pytest_asyncio.fixture(params=[False, True], ids=["kept", "replayed"])
async def run(env: AsyncEnvironment, request: pytest.FixtureRequest) -> AsyncIterator[AsyncRunHandle]:
    async with env.worker(STEPS, workflows=[subscription], always_replay=request.param):
        yield await env.client.start_run("subscription", Subscription("Ada", "basic"))


async def test_a_year_is_twelve_runs_with_short_histories(env: AsyncEnvironment, run: AsyncRunHandle) -> None:
    await env.skip(11 * A_MONTH + A_DAY)
    await run.signal("cancel")
    ended = await env.result(run, type=Subscription)
    assert ended == Subscription("Ada", "basic", months=12, paid=12 * PRICES["basic"])
    runs = await chain(env.client, run)
    assert [each.state for each in runs] == [RunState.CONTINUED] * 11 + [RunState.COMPLETED]
    assert max(each.last_seq for each in runs) < 20
    assert await env.now() >= runs[0].create_time + 12 * A_MONTH


async def test_an_upgrade_counts_from_the_next_month_on(env: AsyncEnvironment, run: AsyncRunHandle) -> None:
    await env.skip(A_DAY)
    await run.signal("upgrade", "no such plan")
    await run.signal("upgrade", "family")
    await env.settle()
    asked = await run.query("subscription", type=Subscription)
    assert asked == Subscription("Ada", "family", months=1, paid=PRICES["basic"])
    await env.skip(A_MONTH)
    assert await run.query("subscription", type=Subscription) == Subscription("Ada", "family", 2, 500 + 1400)
    assert [it.attributes["plan"] async for it in env.client.list_runs("subscription", attributes={"plan": "family"})]


async def test_signals_that_come_while_a_month_ends_are_not_lost(env: AsyncEnvironment) -> None:
    async with env.worker(workflows=[subscription]):  # and none that charges: the month is over before that is done
        run = await env.client.start_run("subscription", Subscription("Ada", "basic"))
        for plan in ("plus", "family"):
            await run.signal("upgrade", plan)
        await env.skip(A_MONTH + A_DAY)
    async with env.worker(STEPS, workflows=[subscription]):
        await env.skip(A_DAY)
        await run.signal("cancel")
        assert await env.result(run, type=Subscription) == Subscription("Ada", "family", 2, 500 + 1400)


async def test_a_cancelled_subscription_is_served_to_the_end_of_its_month(
    env: AsyncEnvironment, run: AsyncRunHandle
) -> None:
    await env.skip(A_DAY)
    began = (await run.get()).create_time
    await run.signal("cancel")
    await env.settle()
    assert (await run.get()).state is RunState.WAITING
    assert await env.result(run, type=Subscription) == Subscription("Ada", "basic", 1, 500)
    assert await env.now() >= began + A_MONTH


async def test_a_customer_who_can_not_be_charged_has_no_subscription(env: AsyncEnvironment) -> None:
    charged: list[str] = []

    @step("subscription.charge")
    def refuse(bill: dict[str, object], ctx: StepContext) -> str:
        charged.append(ctx.idempotency_key)
        if len(charged) > 3:
            raise ConnectionError("the provider is gone")
        return "paid"

    async with env.worker([refuse], workflows=[subscription]):
        ended = await env.run(subscription, Subscription("Ada", "plus"), type=Subscription)
    assert ended == Subscription("Ada", "plus", 3, 3 * 900)
    assert [charged.count(key) for key in dict.fromkeys(charged)] == [1, 1, 1, 10]


async def test_its_command_goes_through_a_year(env: AsyncEnvironment, python_process: Callable[..., Process]) -> None:
    """The months are skipped from here, so that the customer cancels in time however slow the machine is."""
    words = ("--address", env.address, "--months", "5", "--month", str(MONTH))
    program = python_process("-m", "examples.subscription", *words)

    async def has_cancelled() -> bool:
        async for newest in env.client.list_runs("subscription", limit=1):
            return "cancel" in [event.signal_name async for event in env.client.history(newest.run_id)]
        return False

    for month in range(1, 6):
        await eventually(partial(has_logged, program, f"month {month:2}: "), 90)
        if month == 5:
            await eventually(has_cancelled)
        await env.skip(A_MONTH)
    await eventually(lambda: not program.running, 90)
    assert program.returncode == 0, program.logs
    assert [f"month {month:2}: " in program.logs for month in range(1, 6)] == [True] * 5
    assert "'months': 5" in program.logs
