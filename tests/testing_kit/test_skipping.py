"""Time skips to what comes next, in order, and never while something is under way."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import itertools
import re
import threading
import time
from typing import Any

import psycopg
import pytest

from fencepost import EventKind, OperationalError, RunFailed, RunState, ScheduleSpec, StepContext, WorkflowContext, step
from fencepost import workflow as code_workflow
from fencepost.testing import AsyncEnvironment, Stalled
from fencepost_server.config import Config
from fencepost_server.store import shifted_clock
from tests.docs.pages import ROOT
from tests.fixtures.waiting import eventually, until_blocked
from tests.testing_kit.conftest import Start

DAY = dt.timedelta(days=1)
YEAR = 365 * DAY
A_MOMENT = dt.timedelta(minutes=5)  # more than any of these tests takes


def workflow(*nodes: dict[str, Any], id: str = "wf") -> dict[str, Any]:
    return {"id": id, "compatibility_id": "1", "sequence": list(nodes)}


@step("note")
async def note(value: object) -> object:
    return value


@step("remind")
def remind(value: object) -> str:
    return "reminded"


def about(found: dt.datetime, expected: dt.datetime) -> bool:
    """Not earlier, and later by no more than the test itself takes."""
    return expected <= found < expected + A_MOMENT


async def test_a_sleep_of_a_year_and_a_wait_of_a_week_take_no_time(env: AsyncEnvironment) -> None:
    nodes = ({"id": "nap", "sleep": "365d"}, {"id": "approval", "wait_signal": "approve", "timeout": "7d"})
    await env.client.register_definition(workflow({"id": "n", "step": "note"}, *nodes))
    async with env.worker([note]):
        before, began = await env.now(), time.monotonic()
        with pytest.raises(RunFailed) as failed:
            await env.run("wf", 1)
        took, after = time.monotonic() - began, await env.now()
    assert failed.value.failure is not None
    assert failed.value.failure.code == "SIGNAL_TIMEOUT"
    assert about(after, before + YEAR + 7 * DAY)
    assert took < 40


async def test_events_have_the_times_that_were_skipped_to(env: AsyncEnvironment) -> None:
    await env.client.register_definition(workflow({"id": "nap", "sleep": "30d"}, {"id": "n", "step": "note"}))
    async with env.worker([note]):
        handle = await env.client.start_run("wf", {"a": 1})
        await env.result(handle)
    run = await handle.get()
    history = [event async for event in handle.history()]
    by_kind = {event.kind: event for event in history}
    fired, started = by_kind[EventKind.TIMER_FIRED], by_kind[EventKind.RUN_STARTED]
    assert about(fired.time, started.time + 30 * DAY)
    assert run.end_time is not None
    assert about(run.end_time, run.create_time + 30 * DAY)
    assert [event.time for event in history] == sorted(event.time for event in history)


async def test_a_signal_before_its_time_out_is_in_time_however_long_the_test_takes_to_send_it(start: Start) -> None:
    async with start(auto_skip=False) as env:
        await env.client.register_definition(workflow({"id": "w", "wait_signal": "go", "timeout": "1d"}))
        handle = await env.client.start_run("wf")
        await env.skip(DAY - A_MOMENT)
        assert (await handle.get()).state is RunState.WAITING
        await handle.signal("go", "now")
        assert await env.result(handle) == "now"


async def test_timers_fire_in_their_order_each_at_its_own_time(env: AsyncEnvironment) -> None:
    """Also those that only begin when another has fired, on the way to where one skip goes."""
    for n in (30, 10, 20):
        nodes = [{"id": f"s{m}", "sleep": f"{n}d"} for m in range(3)]
        await env.client.register_definition(workflow(*nodes, id=f"every-{n}"))
    handles = [await env.client.start_run(f"every-{n}") for n in (30, 10, 20)]
    began = await env.now()
    after = await env.skip(100 * DAY)
    assert about(after, began + 100 * DAY)
    fired = [
        (event.time, n)
        for n, handle in zip((30, 10, 20), handles, strict=True)
        async for event in handle.history()
        if event.kind is EventKind.TIMER_FIRED
    ]
    in_order = sorted(fired)
    days = [round((time - began) / DAY) for time, _ in in_order]
    assert days == [10, 20, 20, 30, 30, 40, 60, 60, 90]
    assert {n for _, n in in_order[:1]} == {10}


async def test_schedules_fire_in_order_while_time_skips(env: AsyncEnvironment) -> None:
    await env.client.register_definition(workflow({"id": "n", "step": "note"}, id="daily"))
    await env.client.register_definition(workflow({"id": "n", "step": "note"}, id="weekly"))
    for name, cron in (("daily", "0 6 * * *"), ("weekly", "30 5 * * 1")):
        await env.client.schedules.create(name, ScheduleSpec(workflow_id=name, cron=cron))
    began = await env.now()
    async with env.worker([note]):
        await env.skip(28 * DAY)
    runs = [run async for run in env.client.list_runs()]
    runs.reverse()
    daily = [run.create_time for run in runs if run.workflow_id == "daily"]
    weekly = [run.create_time for run in runs if run.workflow_id == "weekly"]
    assert (len(daily), len(weekly)) == (28, 4)
    assert all(run.state is RunState.COMPLETED for run in runs)
    assert [run.create_time for run in runs] == sorted(run.create_time for run in runs)
    assert all((at.hour, at.minute) == (6, 0) for at in daily)
    assert all((at.weekday(), at.hour, at.minute) == (0, 5, 30) for at in weekly)
    assert daily[0] > began


async def test_a_skip_waits_for_a_step_that_is_under_way(env: AsyncEnvironment) -> None:
    go, begun = asyncio.Event(), asyncio.Event()
    times = []

    @step("slow")
    async def slow(value: object, ctx: StepContext) -> float:
        times.append(await env.now())
        begun.set()
        await go.wait()
        times.append(await env.now())
        return ctx.lease_remaining

    await env.client.register_definition(workflow({"id": "n", "step": "slow"}, {"id": "nap", "sleep": "1d"}))
    async with env.worker([slow]):
        handle = await env.client.start_run("wf")
        await begun.wait()
        skip = asyncio.create_task(env.skip(YEAR))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(skip), 0.5)
        go.set()
        after = await skip
        assert await env.result(handle) > 0
    assert times[1] - times[0] < A_MOMENT
    assert about(after, times[1] + YEAR - A_MOMENT)
    assert [e.attempt async for e in handle.history() if e.kind is EventKind.STEP_COMPLETED] == [1]


LEASE = """
insert into task (run_id, task_id, namespace, queue, handler, priority, node_index, input_seq, visible_at, attempt,
                  operational_failures, corrective_failures, redeliveries, token, lease_ms, lease_session,
                  lease_expires_at)
values ('0190e4f2-0000-7000-8000-000000000001', 1, 'default', 'q', 'h', 3, 0, 1, clock_timestamp(), 1,
        0, 0, 0, 1, 60000, '0190e4f2-0000-7000-8000-000000000002',
        clock_timestamp() + interval '1 minute')
"""


async def test_a_skip_waits_for_transactions_that_have_read_the_clock_and_looks_again_then(
    env: AsyncEnvironment,
) -> None:
    """A lease that is being given, at the time before the skip, while the skip has seen none."""
    before = await env.now()
    async with await psycopg.AsyncConnection.connect(env.dsn) as connection:
        # As each batch begins, before it reads the clock.
        await connection.execute("select from run for no key update")
        await connection.execute("select from task for update")
        skip = asyncio.create_task(env.skip(DAY))
        await until_blocked(env.dsn)
        await connection.execute(LEASE)
        await connection.commit()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(skip), 0.5)
        assert await env.now() < before + A_MOMENT
        await connection.execute("delete from task")
        await connection.commit()
        assert about(await skip, before + DAY)


async def test_no_lease_is_lost_by_skips_amid_work(env: AsyncEnvironment) -> None:
    """Steps and sleeps of many runs overlap, while two tasks skip as fast as they can."""
    nodes: list[dict[str, Any]] = []
    for n in range(4):
        nodes += [{"id": f"n{n}", "step": "note"}, {"id": f"s{n}", "sleep": f"{n + 1}h"}]
    await env.client.register_definition(workflow(*nodes))
    async with env.worker([note]):
        handles = [await env.client.start_run("wf", n) for n in range(10)]
        skips = [asyncio.create_task(env.skip(5 * DAY)) for _ in range(2)]
        assert await asyncio.gather(*(env.result(handle) for handle in handles)) == list(range(10))
        await asyncio.gather(*skips)
    for handle in handles:
        kinds = [event.kind async for event in handle.history()]
        assert EventKind.STEP_RETRYING not in kinds
        assert kinds.count(EventKind.STEP_COMPLETED) == 4


async def test_the_delays_of_retries_are_skipped(env: AsyncEnvironment) -> None:
    attempts: list[dt.datetime] = []

    @step("flaky")
    async def flaky(value: object, ctx: StepContext) -> int:
        attempts.append(await env.now())
        if ctx.attempt < 4:
            raise OperationalError("not yet", retry_after=3600 * 10**ctx.attempt / 10)
        return ctx.attempt

    await env.client.register_definition(workflow({"id": "n", "step": "flaky", "retry": {"max_attempts": 4}}))
    began = time.monotonic()
    async with env.worker([flaky]):
        assert await env.run("wf") == 4
    assert time.monotonic() - began < 40
    hours = [round((b - a) / dt.timedelta(hours=1)) for a, b in itertools.pairwise(attempts)]
    assert hours == [1, 10, 100]


async def test_a_step_that_nobody_serves_is_waited_for_until_its_queue_timeout(env: AsyncEnvironment) -> None:
    await env.client.register_definition(workflow({"id": "n", "step": "nobody", "queue_timeout": "2h"}))
    with pytest.raises(RunFailed):
        await env.run("wf")


async def test_a_run_that_nothing_moves_any_more_says_what_it_waits_for(start: Start) -> None:
    async with start(patience=0.3) as env:
        await env.client.register_definition(workflow({"id": "n", "step": "forgotten"}))
        await env.client.register_definition(workflow({"id": "w", "wait_signal": "approve"}, id="waits"))
        with pytest.raises(Stalled, match=r"no worker is connected that serves forgotten on the queue default"):
            await env.run("wf")
        with pytest.raises(Stalled, match=r"run \S+ of waits is WAITING and waits for the signal approve"):
            await env.run("waits")


async def test_whoever_waits_for_a_chain_is_told_what_its_last_run_waits_for(start: Start) -> None:
    @code_workflow("chain", compatibility_id="1")
    async def chain(ctx: WorkflowContext, left: int) -> None:
        if left:
            ctx.continue_as_new(left - 1)
        await ctx.signal("approve")

    async with start(patience=0.3) as env, env.worker(workflows=[chain]):
        first = await env.client.start_run(chain, 2)
        with pytest.raises(Stalled, match=r"run \S+ of chain is WAITING and waits for the signal approve") as stalled:
            await env.result(first)
    assert first.run_id not in str(stalled.value)


async def test_whatever_takes_longer_than_the_patience_but_is_under_way_is_waited_for(start: Start) -> None:
    """Also after a time in which there was nothing to do."""
    begun, end = threading.Event(), threading.Event()

    @step("slow")
    def slow(value: object) -> object:
        begun.set()
        end.wait(30)
        return value

    async with start(patience=60) as env:
        await env.client.register_definition(workflow({"id": "w", "wait_signal": "go"}, {"id": "n", "step": "slow"}))
        async with env.worker([slow]):
            handle = await env.client.start_run("wf")
            result = asyncio.create_task(env.result(handle))
            pilot = env._kit._server.pilot
            await eventually(lambda: pilot.idle_for > 0.01)
            await handle.signal("go", 1)
            await eventually(begun.is_set)
            await eventually(lambda: pilot.idle_for == 0.0, what="it has seen that there is something to do")
            env._kit._patience = 0.5  # only now: until here, and from the step's end on, the machine may take longer
            done, _ = await asyncio.wait({result}, timeout=1)
            assert not done
            env._kit._patience = 60
            end.set()
            assert await result == 1


async def test_a_step_that_does_not_return_is_named_when_a_skip_gives_up(env: AsyncEnvironment) -> None:
    begun, end = threading.Event(), threading.Event()

    @step("stuck")
    def stuck(value: object) -> None:
        begun.set()
        end.wait(30)

    await env.client.register_definition(workflow({"id": "n", "step": "stuck"}))
    async with env.worker([stuck]):
        handle = await env.client.start_run("wf")
        await eventually(begun.is_set)
        with pytest.raises(Stalled, match=rf"a worker has stuck of run {handle.run_id}"):
            await env.skip(DAY, timeout=0.3)
        end.set()
        await env.result(handle)


async def test_without_auto_skip_only_skip_lets_time_pass(start: Start) -> None:
    async with start(auto_skip=False) as env:
        await env.client.register_definition(workflow({"id": "nap", "sleep": "1h"}))
        handle = await env.client.start_run("wf", 7)
        with pytest.raises(Stalled, match="WAITING and waits for"):
            await env.result(handle, timeout=0.5)
        with pytest.raises(TimeoutError, match=r"it is \w+; this wait lets no time skip: use result\(run\)"):
            await handle.result(0.01)
        assert (await handle.get()).state is RunState.WAITING
        await env.skip(dt.timedelta(minutes=59))
        await env.settle()
        assert (await handle.get()).state is RunState.WAITING
        await env.skip(dt.timedelta(minutes=1))
        assert (await handle.get()).state is RunState.COMPLETED


async def test_time_goes_forward_only(env: AsyncEnvironment) -> None:
    with pytest.raises(ValueError, match="time goes forward only"):
        await env.skip(-DAY)
    with pytest.raises(ValueError, match="skip: -5 is no length of time"):
        await env.skip(-5)
    wrong: Any = "5s"
    with pytest.raises(TypeError, match="skip: '5s' is no length of time: give seconds as a number, or a timedelta"):
        await env.skip(wrong)
    before = await env.now()
    assert about(await env.skip(DAY.total_seconds()), before + DAY)
    first = await env.now()
    await env.skip(dt.timedelta())
    assert first <= await env.now() < first + A_MOMENT


def test_without_a_loop_it_is_the_same(start: Start) -> None:
    with start() as env:
        env.client.register_definition(workflow({"id": "nap", "sleep": "365d"}, {"id": "n", "step": "remind"}))
        with env.worker([remind]):
            before = env.now()
            handle = env.client.start_run("wf")
            with pytest.raises(TimeoutError, match=r"it is \w+; this wait lets no time skip: use result\(run\)"):
                handle.wait(0.01)
            assert env.result(handle, type=str) == "reminded"
            assert about(env.now(), before + YEAR)
            before = env.now()
            assert env.run("wf", type=str) == "reminded"
            assert about(env.now(), before + YEAR)
            env.settle()
            assert about(env.skip(DAY), before + YEAR + DAY)


async def test_environments_have_times_of_their_own(start: Start) -> None:
    async with start() as one, start() as other:
        await one.skip(YEAR)
        assert await one.now() - await other.now() > YEAR - A_MOMENT


async def test_every_time_that_the_database_fills_in_is_the_skipped_one(env: AsyncEnvironment) -> None:
    await env.skip(YEAR)
    now = await env.now()
    await env.client.register_definition(workflow({"id": "n", "step": "note"}))
    query = "select max(started_at), (select max(created_at) from definition) from session"
    async with env.worker([note]), await psycopg.AsyncConnection.connect(env.dsn) as connection:
        row = await (await connection.execute(query)).fetchone()
    assert row is not None
    assert all(now <= at < now + A_MOMENT for at in row)


async def test_whoever_connects_as_in_production_sees_the_real_time(env: AsyncEnvironment) -> None:
    await env.skip(YEAR)
    async with await psycopg.AsyncConnection.connect(env.dsn) as connection:
        cursor = await connection.execute("select clock_timestamp()")
        row = await cursor.fetchone()
    assert row is not None
    assert await env.now() - row[0] > YEAR - A_MOMENT


async def test_settings_of_the_server_can_be_given_but_for_where_it_is(start: Start) -> None:
    async with start(max_payload_bytes=2048) as env:
        await env.client.register_definition(workflow({"id": "n", "step": "note"}))
        with pytest.raises(Exception, match="2048"):
            await env.client.start_run("wf", "x" * 4000)
    with pytest.raises(ValueError, match="chooses dsn itself"):
        async with start(dsn="postgresql://elsewhere/x"):
            pass


def test_nothing_of_production_leads_to_a_clock_that_can_be_put_forward() -> None:
    server = ROOT / "server" / "fencepost_server"
    kits = [server / "testkit", server / "store" / "shifted_clock.py"]
    found = [
        path.relative_to(ROOT).as_posix()
        for path in server.rglob("*.py")
        if not any(kit == path or kit in path.parents for kit in kits)
        and re.search(r"shifted_clock|testkit|fencepost_test|search_path", path.read_text("utf-8"))
    ]
    assert found == []
    settings = [field.name for field in dataclasses.fields(Config)]
    assert [name for name in settings if re.search(r"clock|skip|shift|search_path", name)] == []


async def test_a_database_that_is_not_named_as_the_kits_are_does_not_get_it(admin_dsn: str) -> None:
    for call in (shifted_clock.install, shifted_clock.create, shifted_clock.seal, shifted_clock.drop):
        with pytest.raises(ValueError, match="production is no database of the test kit"):
            await call(admin_dsn, "production")
