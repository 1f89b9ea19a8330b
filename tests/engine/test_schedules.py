"""Schedules fire at their times, once each, and do at an overlap what their policy says."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from fencepost.v1 import schedule_service_pb2 as pb
from fencepost_server.store import schedules
from tests.engine.rows import count, execute, fetch
from tests.engine.scheduling import (
    MINUTE,
    backfill,
    create,
    fire_now,
    get,
    keys,
    move,
    now,
    span,
    spec,
    stamp,
    stub,
    trigger,
    until,
    until_at_rest,
)
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

Connect = Callable[[str], Api]
ConnectWorker = Callable[..., Awaitable[RawWorker]]
QUEUE_ONE, ALLOW = pb.OVERLAP_POLICY_QUEUE_ONE, pb.OVERLAP_POLICY_ALLOW


async def test_an_interval_fires_on_its_grid_with_what_the_schedule_says(api: Api, dsn: str) -> None:
    await api.register(manifest(1))
    await create(api, spec(interval=span(1), input='{"a":1}', user_id="u", priority=2, overlap=ALLOW))

    async def twice() -> pb.Schedule:
        found = await get(api)
        assert found.started_runs >= 2
        return found

    found = await eventually(twice)
    run = await api.get(found.last_run_id)
    assert (run.input.json, run.user_id, run.priority) == ('{"a":1}', "u", 2)
    assert found.last_fire_time.nanos == 0
    assert found.last_error == ""
    request = pb.PauseScheduleRequest(schedule_id="s")
    await stub(api).PauseSchedule(request, timeout=DEADLINE)
    await until_at_rest(dsn)
    assert len(set(await keys(dsn))) == await count(dsn, "run") == (await get(api)).started_runs


async def test_a_fire_time_starts_one_run_and_the_next_one_follows_from_the_spec(api: Api, dsn: str) -> None:
    await api.register(manifest(1))
    await create(api, spec())
    at = await fire_now(dsn)
    found = await until(api, started_runs=1)
    assert found.last_fire_time == stamp(at)
    next_at = found.next_fire_time.ToDatetime(at.tzinfo)
    assert (next_at.month, next_at.day, next_at.hour) == (1, 1, 0)
    await until_at_rest(dsn)
    assert await count(dsn, "run") == 1


async def test_two_servers_start_one_run_a_fire_time(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """Row 17. Twenty schedules come due at once, again and again."""
    servers = [await in_process_server(dsn, poll_interval=0.05) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    await api.register(manifest(1))
    for n in range(20):
        await create(api, spec(overlap=ALLOW), f"s{n}")
    for round_ in range(1, 4):
        at = await now(dsn) - timedelta(seconds=10 * (4 - round_))
        await execute(dsn, "update schedule set next_fire_at = %s, due_at = %s", [at, at])

        async def all_fired(expected: int = 20 * round_) -> bool:
            [(found,)] = await fetch(dsn, "select sum(started_runs)::int from schedule")
            return bool(found == expected)

        await eventually(all_fired)
        await until_at_rest(dsn)
    assert await count(dsn, "run") == 60 == len(set(await keys(dsn)))


async def test_both_servers_deciding_to_start_the_same_time_make_one_run(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """Each is made to believe that the other one has died between the decision and the start."""
    servers = [await in_process_server(dsn) for _ in range(3)]
    api = connect_api(servers[0].grpc_address)
    await api.register(manifest(1))
    await create(api, spec())
    at = await now(dsn)
    arrived: list[int] = []
    go = asyncio.Event()

    async def hold() -> None:
        arrived.append(1)
        await execute(dsn, "update schedule set due_at = clock_timestamp()")  # as if its time for the start had passed
        await asyncio.wait_for(go.wait(), DEADLINE)

    for server in servers:
        server.app.engine.firing.after_start = hold
    await move(dsn, at)
    await eventually(lambda: len(arrived) == 3)
    for server in servers:
        server.app.engine.firing.after_start = None
    go.set()
    found = await until(api, started_runs=1)
    await until_at_rest(dsn)
    assert await count(dsn, "run") == 1
    assert (await get(api)).started_runs == 1
    assert found.last_fire_time == stamp(at)


async def test_a_fire_time_during_a_run_is_left_out_and_counted(
    api: Api, dsn: str, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    """SKIP, the default."""
    await api.register(manifest(1))
    await create(api, spec())
    first = (await fire_and_wait(api, dsn, started_runs=1)).last_run_id
    found = await fire_and_wait(api, dsn, skipped_overlap=1)
    assert (found.started_runs, found.last_run_id) == (1, first)
    worker = await connect_worker(server.grpc_address, handlers=["s1"])
    await worker.complete(await worker.task(), "1")
    await api.wait(first)
    assert (await fire_and_wait(api, dsn, started_runs=2)).skipped_overlap == 1


async def fire_and_wait(api: Api, dsn: str, **fields: Any) -> pb.Schedule:
    """Let the schedule fire and wait until it says so."""
    await until_at_rest(dsn)
    await fire_now(dsn)
    return await until(api, **fields)


async def test_one_fire_time_waits_for_the_run_and_is_started_at_its_end(
    api: Api, dsn: str, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    """QUEUE_ONE: told by the commit of the end, not by a look."""
    await api.register(manifest(1))
    await create(api, spec(overlap=QUEUE_ONE))
    await fire_and_wait(api, dsn, started_runs=1)
    queued = await fire_now(dsn)
    await eventually(lambda: pending(dsn))
    await fire_and_wait(api, dsn, skipped_overlap=1)
    await execute(dsn, "update schedule set due_at = clock_timestamp() + interval '1 hour'")  # nobody looks by itself
    worker = await connect_worker(server.grpc_address, handlers=["s1"], capacity=1)
    await worker.complete(await worker.task(), "1")
    found = await until(api, started_runs=2)
    assert (await worker.task()).task.run_id == found.last_run_id
    assert f"{queued.isoformat()}" in (await keys(dsn))[-1]
    assert found.skipped_overlap == 1


async def pending(dsn: str) -> bool:
    return bool(await count(dsn, "schedule", "pending_at is not null"))


async def test_what_waits_is_started_although_nobody_tells_of_the_end(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """I10: the run is deleted behind everybody's back, and a missing run has ended."""
    server = await in_process_server(dsn)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1))
    await create(api, spec(overlap=QUEUE_ONE))
    found = await fire_and_wait(api, dsn, started_runs=1)
    await fire_now(dsn)
    await eventually(lambda: pending(dsn))
    await execute(dsn, "delete from run where run_id = %s", [found.last_run_id])
    await until(api, started_runs=2)


@pytest.mark.parametrize("leased", [True, False])
async def test_the_run_under_way_is_cancelled_and_the_next_one_starts_when_it_has_ended(
    api: Api, dsn: str, server: InProcessServer, connect_worker: ConnectWorker, leased: bool
) -> None:
    """CANCEL_RUNNING: with a step on lease the run has its grace first."""
    await api.register(manifest(1))
    await create(api, spec(overlap=pb.OVERLAP_POLICY_CANCEL_RUNNING))
    first = (await fire_and_wait(api, dsn, started_runs=1)).last_run_id
    worker = task = None
    if leased:
        worker = await connect_worker(server.grpc_address, handlers=["s1"], capacity=1)
        task = await worker.task()
    await until_at_rest(dsn)
    await fire_now(dsn)
    if worker is not None and task is not None:

        async def is_ending() -> bool:
            return (await api.get(first)).state == run_pb2.RUN_STATE_ENDING

        await eventually(is_ending)
        assert (await get(api)).started_runs == 1
        await worker.complete(task, "1")
    found = await until(api, started_runs=2)
    assert (await api.get(first)).state == run_pb2.RUN_STATE_CANCELLED
    assert (await api.get(found.last_run_id)).state == run_pb2.RUN_STATE_PENDING
    assert (found.skipped_overlap, found.last_error) == (0, "")


async def test_labels_and_the_timeout_of_a_run_are_those_of_its_schedule(api: Api, dsn: str) -> None:
    await api.register(manifest(1))
    await create(api, spec(attributes={"team": "a"}, run_timeout=span(1)))
    found = await fire_and_wait(api, dsn, started_runs=1)
    run = await api.wait(found.last_run_id)
    assert dict(run.attributes) == {"team": "a"}
    assert run.failure.code == "RUN_TIMEOUT"


async def test_schedules_that_wait_for_their_time_cost_no_statement_beside_the_probe(
    api: Api, dsn: str, server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 34."""
    engine = server.app.engine
    await eventually(lambda: engine.firing.loop.last_good)  # the look with which it begins is over
    await create(api, spec())
    await until_at_rest(dsn)
    looks: list[int] = []
    lock_due = schedules.lock_due

    async def counting(*arguments: Any) -> Any:
        looks.append(1)
        return await lock_due(*arguments)

    monkeypatch.setattr(schedules, "lock_due", counting)
    probes = engine.last_probe
    await eventually(lambda: engine.last_probe > probes + 1)
    assert looks == []
    assert engine.firing.loop.errors == 0


async def test_runs_may_be_under_way_at_once_if_the_policy_says_so(api: Api, dsn: str) -> None:
    await api.register(manifest(1))
    await create(api, spec(overlap=ALLOW))
    for n in range(1, 4):
        await fire_and_wait(api, dsn, started_runs=n)
    assert [run.state for run in await api.list_all()] == [run_pb2.RUN_STATE_PENDING] * 3


async def test_times_missed_by_more_than_the_window_are_left_out_and_counted(api: Api, dsn: str) -> None:
    """Catch-up. As after two years without any server; the last two minutes are made up for."""
    await api.register(manifest(1))
    await create(api, spec("* * * * *", overlap=ALLOW, catch_up_window=span(150)), paused=True)
    begin = (await now(dsn)).replace(second=0) - timedelta(days=730)
    await resume_at(dsn, begin)

    async def caught_up() -> pb.Schedule:
        found = await get(api)
        assert found.skipped_missed
        assert found.next_fire_time.ToDatetime(begin.tzinfo) > await now(dsn)
        return found

    await eventually(caught_up)

    async def all_counted() -> pb.Schedule:
        found = await get(api)  # amid a start, if a minute has begun just now
        handled = found.started_runs + found.skipped_missed
        assert handled == (found.next_fire_time.ToDatetime(begin.tzinfo) - begin) // MINUTE
        return found

    assert (await eventually(all_counted)).started_runs in {2, 3}


async def resume_at(dsn: str, at: datetime) -> None:
    """Let a schedule that was made as a paused one fire, beginning with that fire time. If it was not paused until
    then, it would fire at a minute that begins meanwhile.
    """
    await execute(dsn, "update schedule set paused = false")
    await move(dsn, at)


async def test_many_that_have_missed_much_catch_up_although_a_transaction_may_not_take_so_long(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """Counting what was missed takes longer for all of them than a transaction may."""
    server = await in_process_server(dsn)
    api = connect_api(server.grpc_address)
    await create(api, spec("* * * * *", time_zone="Europe/Berlin"))
    loops = server.app.engine.database
    loops.config = dataclasses.replace(loops.config, batch_timeout=2.0)
    await execute(
        dsn,
        """insert into schedule (namespace, schedule_id, uuid, spec, input, paused, next_fire_at, due_at)
           select namespace, 's' || n, gen_random_uuid(), spec, input, false, clock_timestamp() - interval '1 y', now()
           from schedule, generate_series(1, 40) n""",
    )

    async def caught_up() -> bool:
        return await count(dsn, "schedule", "skipped_missed > 500000") == 40

    await eventually(caught_up, 120, interval=0.1)


async def test_a_run_that_cannot_be_started_is_told_and_the_schedule_goes_on(api: Api, dsn: str) -> None:
    await create(api, spec())
    await fire_now(dsn)
    found = await until(api, last_error="UNKNOWN_WORKFLOW: no definition is registered for workflow 'wf'")
    assert found.started_runs == 0
    assert found.HasField("next_fire_time")
    await api.register(manifest(1, workflow={"input_schema": {"type": "string"}}))
    await until_at_rest(dsn)
    await fire_now(dsn)

    async def other_error() -> bool:
        return (await get(api)).last_error.startswith("INPUT_SCHEMA_MISMATCH: ")

    await eventually(other_error)
    await api.register(manifest(1, compatibility_id="2"))
    found = await fire_and_wait(api, dsn, started_runs=1)
    assert found.last_error == ""
    assert await fetch(dsn, "select failed_starts::int from schedule") == [(2,)]


async def test_a_row_that_cannot_be_read_keeps_no_other_from_firing(api: Api, dsn: str) -> None:
    """Row 12."""
    await api.register(manifest(1))
    await create(api, spec(), "broken")
    await create(api, spec(), "sound")
    at = await now(dsn) - timedelta(seconds=5)
    await execute(dsn, """update schedule set spec = '{"cron": 1}' where schedule_id = 'broken'""")
    await move(dsn, at - timedelta(seconds=1), "broken")
    await move(dsn, at, "sound")
    await until(api, started_runs=1, schedule_id="sound")
    [(error, later)] = await fetch(
        dsn, "select last_error, due_at > clock_timestamp() from schedule where schedule_id = 'broken'"
    )
    assert error.startswith("INTERNAL: internal error, incident ")
    assert later


async def test_a_paused_schedule_does_not_fire_and_makes_up_for_nothing(api: Api, dsn: str) -> None:
    await api.register(manifest(1))
    await create(api, spec("* * * * *"), paused=True)
    found = await get(api)
    assert found.paused
    assert not found.HasField("next_fire_time")
    before = await now(dsn)
    resumed = await stub(api).ResumeSchedule(pb.ResumeScheduleRequest(schedule_id="s"), timeout=DEADLINE)
    assert resumed.schedule.next_fire_time.ToDatetime(before.tzinfo) > before
    await move(dsn, before + timedelta(hours=1))
    await until_at_rest(dsn)  # if a minute began before that, there was a run to start
    request = pb.PauseScheduleRequest(schedule_id="s", reason="holidays")
    paused = (await stub(api).PauseSchedule(request, timeout=DEADLINE)).schedule
    assert (paused.paused, paused.pause_reason) == (True, "holidays")
    assert await fetch(dsn, "select due_at from schedule") == [(None,)]


async def test_a_trigger_starts_a_run_whatever_is_under_way_and_a_repeat_finds_it(api: Api, dsn: str) -> None:
    """I6. Also of a paused schedule."""
    await api.register(manifest(1))
    await create(api, spec(), paused=True)
    first = await trigger(api, "r1")
    answers = await asyncio.gather(*(trigger(api, "r1") for _ in range(20)))
    assert set(answers) == {first}
    other = {await trigger(api), await trigger(api), await trigger(api, "r2")}
    assert len(other | {first}) == 4
    assert await count(dsn, "run") == 4
    assert (await get(api)).started_runs == 4


async def test_a_backfill_starts_what_has_no_run_and_a_repeat_changes_nothing(api: Api, dsn: str) -> None:
    await api.register(manifest(1))
    await create(api, spec("* * * * *"), paused=True)
    end = (await now(dsn)).replace(second=0) - 10 * MINUTE
    begin = end - 10 * MINUTE
    await execute(dsn, "update schedule set spec = jsonb_set(spec::jsonb, '{catch_up}', '3600000000')::json")
    await resume_at(dsn, end - MINUTE)
    fired = (await until(api, started_runs=1)).last_run_id
    await stub(api).PauseSchedule(pb.PauseScheduleRequest(schedule_id="s"), timeout=DEADLINE)
    first = await backfill(api, begin, end)
    assert len(first) == 9
    assert fired not in first, "that fire time has its run"
    again = await asyncio.gather(*(backfill(api, begin, end) for _ in range(3)))
    assert again == [first] * 3
    assert await count(dsn, "run") == 10
    part = await backfill(api, begin - MINUTE, begin + MINUTE)
    assert part[1:] == first[:1]
    assert (await get(api)).started_runs == 11
    order = [row for (row,) in await fetch(dsn, "select run_id::text from run_key where kind = 4 order by key")]
    assert [run_id for run_id in order if run_id in first] == first


async def test_a_schedule_that_is_made_again_is_another_one(api: Api, dsn: str) -> None:
    """Its fire times have runs of their own."""
    await api.register(manifest(1))
    end = (await now(dsn)).replace(second=0)
    found = []
    for _ in range(2):
        await create(api, spec("* * * * *"), paused=True)
        found.append(await backfill(api, end - 2 * MINUTE, end))
        deleted = await stub(api).DeleteSchedule(pb.DeleteScheduleRequest(schedule_id="s"), timeout=DEADLINE)
        assert deleted.deleted
    assert len({run_id for runs in found for run_id in runs}) == 4


async def test_a_thousand_schedules_that_come_due_at_once_all_fire(api: Api, dsn: str) -> None:
    await api.register(manifest(1))
    await create(api, spec(), "s")
    await execute(
        dsn,
        """
        insert into schedule (namespace, schedule_id, uuid, spec, input, paused, next_fire_at, due_at)
        select namespace, 's' || n, gen_random_uuid(), spec, input, false, clock_timestamp(), clock_timestamp()
        from schedule, generate_series(1, 1000) n
        """,
    )

    async def all_fired() -> bool:
        return await count(dsn, "schedule", "started_runs = 1") == 1000

    await eventually(all_fired, 60)
    assert await count(dsn, "run") == 1000
