"""Both clients steer runs, definitions and schedules of a real server."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest

import fencepost
from fencepost import OverlapPolicy, PermanentError, RunState, ScheduleSpec, StartRun, TimerKind, Worker, step
from tests.fixtures.manifests import manifest
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually
from tests.sdk.either import Either
from tests.sdk.running import running

UNKNOWN = "00000000-0000-7000-8000-000000000000"
UTC = dt.UTC


def sequence(*nodes: dict[str, Any]) -> str:
    return json.dumps({"id": "wf", "compatibility_id": "1", "sequence": nodes})


@step("s1")
async def same(x: Any) -> Any:
    return x


async def test_a_signal_ends_a_wait_and_counts_once_however_often_it_is_sent(ask: Either) -> None:
    await ask("register_definition", sequence({"id": "approval", "wait_signal": "approve"}))
    run = await ask("start_run", "wf")
    waiting = await ask("get", on=run)
    (wait,) = waiting.open_waits
    assert (waiting.state, wait.node_id, wait.signal_name) == (RunState.WAITING, "approval", "approve")
    first = await ask("signal", "approve", {"by": "ann"}, on=run, request_id="once")
    assert await ask("signal_run", run.run_id, "approve", {"by": "ann"}, request_id="once") == first
    assert await ask("result", on=run, timeout=30) == {"by": "ann"}
    events = {event.kind.value: event for event in await ask.all("history", on=run)}
    received, taken = events["signal_received"], events["signal_taken"]
    assert (received.seq, received.signal_name, received.request_id) == (first.seq, "approve", "once")
    assert taken.signal_seq == first.seq
    with pytest.raises(fencepost.RequestIdConflict):
        await ask("signal", "approve", {"by": "bob"}, on=run, request_id="once")
    with pytest.raises(fencepost.IllegalTransition) as illegal:
        await ask("signal", "approve", on=run)
    assert illegal.value.state == "COMPLETED"


async def test_a_paused_run_begins_nothing_until_it_is_resumed(ask: Either, server: InProcessServer) -> None:
    await ask("register_definition", manifest(1))
    run = await ask("start_run", "wf", 5)
    assert await ask("pause", "wait a moment", on=run) is RunState.PAUSED
    async with running(Worker(server.grpc_address, [same])):
        other = await ask("start_run", "wf", 6)
        assert await ask("result", on=other, timeout=30) == 6
        assert (await ask("get", on=run)).state is RunState.PAUSED
        assert not (await ask("resume", on=run)).is_final
        assert await ask("result", on=run, timeout=30) == 5
    reasons = [event.reason for event in await ask.all("history", on=run) if event.kind == "run_paused"]
    assert reasons == ["wait a moment"]


async def test_a_failed_run_goes_on_from_where_it_failed(ask: Either, server: InProcessServer) -> None:
    repaired: list[bool] = []

    @step("s2")
    def picky(x: Any) -> Any:
        if not repaired:
            raise PermanentError("broken")
        return x

    await ask("register_definition", manifest(2))
    async with running(Worker(server.grpc_address, [same, picky])):
        run = await ask("start_run", "wf", 5)
        with pytest.raises(fencepost.RunFailed):
            await ask("result", on=run, timeout=30)
        repaired.append(True)
        assert not (await ask("retry", "repaired", on=run)).is_final
        assert await ask("result", on=run, timeout=30) == 5
        kinds = [event.kind.value for event in await ask.all("events", on=run)]
    assert [kind for kind in kinds if kind.startswith("run_")] == [
        "run_started",
        *(["run_ending"] if "run_ending" in kinds else []),
        "run_failed",
        "run_retried",
        "run_completed",
    ]
    assert kinds.count("step_completed") == 2, "the first step was not run again"
    with pytest.raises(fencepost.IllegalTransition):
        await ask("retry", on=run)


async def test_cancel_and_terminate_end_runs_that_nobody_works_on(ask: Either) -> None:
    await ask("register_definition", manifest(1))
    cancelled, terminated = [await ask("start_run", "wf") for _ in range(2)]
    await ask("cancel", "enough", on=cancelled)
    with pytest.raises(fencepost.RunCancelled, match="was cancelled"):
        await ask("result", on=cancelled, timeout=30)
    assert await ask("terminate", "now", on=terminated) is RunState.TERMINATED
    with pytest.raises(fencepost.RunTerminated, match="was terminated"):
        await ask("result", on=terminated, timeout=30)
    last = (await ask.all("events", on=terminated))[-1]
    assert (last.kind, last.reason) == ("run_terminated", "now")
    with pytest.raises(fencepost.IllegalTransition):
        await ask("pause", on=cancelled)
    for method in ("cancel_run", "terminate_run", "pause_run", "resume_run", "retry_run"):
        with pytest.raises(fencepost.RunNotFound):
            await ask(method, UNKNOWN)
    with pytest.raises(fencepost.RunNotFound):
        await ask("signal_run", UNKNOWN, "approve")


async def test_a_retry_whose_dedupe_key_another_run_holds_names_that_run(ask: Either, server: InProcessServer) -> None:
    @step("s1")
    def refuse() -> None:
        raise PermanentError("no")

    await ask("register_definition", manifest(1))
    async with running(Worker(server.grpc_address, [refuse])):
        failed = await ask("start_run", "wf", dedupe_key="d")
        assert (await ask("wait", on=failed, timeout=30)).state is RunState.FAILED
    holder = await ask("start_run", "wf", dedupe_key="d")
    with pytest.raises(fencepost.KeyTaken) as taken:
        await ask("retry", on=failed)
    assert taken.value.existing_run_id == holder.run_id


async def test_a_start_is_delayed_labelled_and_limited(ask: Either) -> None:
    await ask("register_definition", manifest(1))
    late = await ask("start_run", "wf", start_delay=3600, attributes={"zone": "a"})
    found = await ask("get", on=late)
    assert (found.state, found.attributes) == (RunState.WAITING, {"zone": "a"})
    (wait,) = found.open_waits
    assert 3500 < (wait.fire_time - found.create_time).total_seconds() < 3700
    short = await ask("start_run", "wf", run_timeout=0.2)
    with pytest.raises(fencepost.RunFailed) as caught:
        await ask("result", on=short, timeout=30)
    assert caught.value.failure.code == "RUN_TIMEOUT"
    timers = [event.timer_kind for event in await ask.all("history", on=short) if event.kind == "timer_fired"]
    assert timers == [TimerKind.RUN_TIMEOUT]


async def test_runs_are_listed_by_all_that_is_asked_for(ask: Either, server: InProcessServer) -> None:
    @step("s1")
    def refuse() -> None:
        raise PermanentError("no", code="REFUSED")

    await ask("register_definition", manifest(1))
    first = await ask("start_run", "wf", user_id="ann", attributes={"zone": "a", "size": "1"})
    async with running(Worker(server.grpc_address, [refuse])):
        assert (await ask("wait", on=first, timeout=30)).failure.code == "REFUSED"
    middle = (await ask("get", on=first)).create_time + dt.timedelta(microseconds=1)
    await ask("start_runs", [StartRun("wf", attributes={"zone": "a"}), StartRun("wf", user_id="bob")])

    async def listed(**chosen: Any) -> int:
        return len(await ask.all("list_runs", **chosen))

    assert await listed() == 3
    assert await listed(user_id="ann") == 1
    assert await listed(attributes={"zone": "a"}) == 2
    assert await listed(attributes={"zone": "a", "size": "1"}) == 1
    assert await listed(failure_code="REFUSED") == 1
    assert await listed(created_before=middle) == 1
    assert await listed(created_after=middle) == 2
    assert await listed(created_after=middle, user_id="bob", limit=5) == 1
    assert await listed(parent_run_id=first.run_id) == 0


async def test_a_definition_is_activated_again_and_removed(ask: Either) -> None:
    older = await ask("register_definition", manifest(1))
    newer = await ask("register_definition", manifest(2, compatibility_id="2"))
    run = await ask("start_run", "wf")
    assert run.definition_hash == newer.definition_hash
    activation = await ask("activate_definition", "wf", older.definition_hash)
    assert (activation.definition.state, activation.previous_hash) == ("ACTIVE", newer.definition_hash)
    assert (await ask("start_run", "wf")).definition_hash == older.definition_hash

    async def removed() -> bool:
        removal = await ask("remove_definition", "wf", newer.definition_hash)
        assert removal.definition.state == "REMOVED"
        remaining: int = removal.remaining_runs
        return remaining == 0

    await eventually(removed)
    with pytest.raises(fencepost.RunFailed) as caught:
        await ask("result", on=run, timeout=30)
    assert caught.value.failure.code == "DEFINITION_REMOVED"
    with pytest.raises(fencepost.DefinitionRemoved):
        await ask("start_run", "wf", definition_hash=newer.definition_hash)
    with pytest.raises(fencepost.UnknownDefinition):
        await ask("activate_definition", "wf", "0" * 64)


# Schedules.


async def test_a_schedule_is_made_read_changed_and_deleted(ask: Either) -> None:
    schedules = ask.client.schedules
    spec = ScheduleSpec(
        "wf", cron="30 2 * * *", time_zone="Europe/Berlin", input={"n": 1}, overlap=OverlapPolicy.ALLOW, jitter=5.0
    )
    made = await ask("create", "nightly", spec, on=schedules, paused=True)
    assert (made.created, made.paused, made.schedule_id) == (True, True, "nightly")
    assert (await ask("create", "nightly", spec, on=schedules, paused=True)).created is False
    with pytest.raises(fencepost.ScheduleExists):
        await ask("create", "nightly", ScheduleSpec("wf", interval=60), on=schedules)
    read = await ask("get", "nightly", on=schedules)
    assert (read.spec.cron, read.spec.overlap, read.spec.jitter) == ("30 2 * * *", OverlapPolicy.ALLOW, 5.0)
    assert read.spec.input.decode() == {"n": 1}
    assert (await ask("resume", "nightly", on=schedules)).next_fire_time is not None
    paused = await ask("pause", "nightly", "holidays", on=schedules)
    assert (paused.paused, paused.pause_reason) == (True, "holidays")
    updated = await ask("update", "nightly", ScheduleSpec("wf", interval=3600), on=schedules, etag=paused.etag)
    assert (updated.spec.interval, updated.spec.cron) == (3600.0, "")
    with pytest.raises(fencepost.StaleEtag):
        await ask("update", "nightly", spec, on=schedules, etag=read.etag)
    assert [found.schedule_id for found in await ask.all("list", on=schedules)] == ["nightly"]
    assert [await ask("delete", "nightly", on=schedules) for _ in range(2)] == [True, False]
    for method in ("get", "pause", "resume", "trigger", "fire_times"):
        with pytest.raises(fencepost.ScheduleNotFound):
            await ask(method, "nightly", on=schedules)


async def test_a_schedule_tells_its_times_and_is_triggered_and_made_up_for(ask: Either) -> None:
    schedules = ask.client.schedules
    await ask("register_definition", manifest(1))
    spec = ScheduleSpec("wf", cron="0 * * * *", overlap=OverlapPolicy.ALLOW)
    await ask("create", "hourly", spec, on=schedules, paused=True)
    noon = dt.datetime(2026, 1, 1, 12, tzinfo=UTC)
    times = await ask("fire_times", "hourly", noon, 2, on=schedules)
    assert times == [noon, noon + dt.timedelta(hours=1)]
    assert len(await ask("fire_times", "hourly", on=schedules)) == 10
    first = await ask("trigger", "hourly", on=schedules, request_id="once")
    assert (await ask("trigger", "hourly", on=schedules, request_id="once")).run_id == first.run_id
    past = dt.datetime.now(UTC).replace(minute=30, second=0, microsecond=0) - dt.timedelta(days=2)
    made_up = await ask("backfill", "hourly", past, past + dt.timedelta(hours=3), on=schedules)
    again = await ask("backfill", "hourly", past, past + dt.timedelta(hours=3), on=schedules)
    assert len(made_up) == 3
    assert [run.run_id for run in again] == [run.run_id for run in made_up]
    assert len(await ask.all("list_runs", "wf")) == 4
    with pytest.raises(fencepost.InvalidRequest):
        await ask("create", "never", ScheduleSpec("wf", cron="0 0 31 2 *"), on=schedules)
