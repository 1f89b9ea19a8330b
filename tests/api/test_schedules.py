"""ScheduleService at its edge: what it takes, what it refuses and where, and that repeats change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost.v1 import schedule_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.engine.rows import count, execute
from tests.engine.scheduling import create, get, now, span, spec, stamp, stub
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.refusals import refused
from tests.fixtures.servers import PATIENT, StartInProcessServer

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
async def api(in_process_server: StartInProcessServer, dsn: str, connect_api: Callable[[str], Api]) -> Api:
    """A caller of a server at which many calls may wait for one schedule."""
    return connect_api((await in_process_server(dsn, **PATIENT)).grpc_address)


async def test_a_schedule_is_given_back_as_it_was_made_with_its_defaults(api: Api, dsn: str) -> None:
    wanted = spec("0  6 * *\t1-5", input='{"b": 1.0,  "a": 1e400}', time_zone="Europe/Berlin", jitter=span(90))
    made = await create(api, wanted)
    assert made.created
    found = (await get(api)).spec
    assert found == made.schedule.spec
    assert (found.cron, found.time_zone, found.input.json) == (
        "0 6 * * 1-5",
        "Europe/Berlin",
        '{"b": 1.0,  "a": 1e400}',
    )
    assert (found.priority, found.overlap) == (3, pb.OVERLAP_POLICY_SKIP)
    assert found.catch_up_window == span(60)
    assert not found.HasField("run_timeout")
    assert made.schedule.next_fire_time.ToDatetime(UTC) > await now(dsn)
    assert made.schedule.HasField("create_time")
    again = await create(api, found, "copy")
    assert again.schedule.spec == found, "what was read can be sent again"


async def test_an_interval_is_given_back_to_the_microsecond(api: Api) -> None:
    wanted = spec(
        interval=Duration(seconds=90, nanos=1001),
        offset=span(3.5),
        attributes={"team": "a"},
        run_timeout=span(60),
        start_time=stamp(datetime(2027, 1, 1, 0, 0, 0, 1, tzinfo=UTC)),
        end_time=stamp(datetime(2028, 1, 1, tzinfo=UTC)),
        overlap=pb.OVERLAP_POLICY_CANCEL_RUNNING,
        catch_up_window=span(365 * 86400),
    )
    found = (await create(api, wanted)).schedule
    assert found.spec.interval == span(90.000001)
    for name in ("offset", "run_timeout", "start_time", "end_time", "overlap", "attributes"):
        assert getattr(found.spec, name) == getattr(wanted, name), name
    first = found.next_fire_time.ToNanoseconds()
    assert first >= wanted.start_time.ToNanoseconds()
    assert (first - 3_500_000_000) % 90_000_001_000 == 0


async def test_the_same_content_again_changes_nothing_and_another_one_is_refused(api: Api, dsn: str) -> None:
    """Also by many at once, and with the input spelled in another way."""
    made = await asyncio.gather(*(create(api, spec(input='{"a":1,"b":2}')) for _ in range(20)))
    assert sum(answer.created for answer in made) == 1
    assert len({answer.schedule.etag for answer in made}) == 1
    assert not (await create(api, spec(input='{"b": 2, "a": 1.0}'))).created
    for other in (spec(input="3"), spec("0 0 2 1 *", input='{"a":1,"b":2}'), spec(input='{"a":1,"b":2}', priority=2)):
        with refused("SCHEDULE_EXISTS", grpc.StatusCode.ALREADY_EXISTS):
            await create(api, other)
    assert await count(dsn, "schedule") == 1
    assert (await create(api, spec(input="3"), namespace="other")).created, "namespaces are walls (I14)"


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({"cron": "0 0 30 2 *"}, ["spec.cron"]),
        ({"cron": "* * * *"}, ["spec.cron"]),
        ({"cron": "61 * * * *", "time_zone": "Mars/Olympus"}, ["spec.time_zone", "spec.cron"]),
        ({"cron": "0 0 * * *", "offset": span(1)}, ["spec.offset"]),
        ({"interval": span(0.5)}, ["spec.interval"]),
        ({"interval": span(-3600)}, ["spec.interval"]),
        ({"interval": span(11 * 365 * 86400)}, ["spec.interval"]),
        ({"interval": Duration(seconds=1 << 62)}, ["spec.interval"]),
        ({"interval": span(60), "time_zone": "UTC"}, ["spec.time_zone"]),
        ({"interval": span(60), "offset": span(60)}, ["spec.offset"]),
        ({"interval": span(60), "offset": span(-1)}, ["spec.offset"]),
        ({}, ["spec.when"]),
        ({"cron": "0 0 * * *", "jitter": span(-1)}, ["spec.jitter"]),
        ({"cron": "0 0 * * *", "jitter": span(86401)}, ["spec.jitter"]),
        ({"cron": "0 0 * * *", "catch_up_window": span(0)}, ["spec.catch_up_window"]),
        ({"cron": "0 0 * * *", "catch_up_window": span(366 * 86400)}, ["spec.catch_up_window"]),
        ({"cron": "0 0 * * *", "run_timeout": span(0)}, ["spec.run_timeout"]),
        ({"cron": "0 0 * * *", "overlap": 99}, ["spec.overlap"]),
        ({"cron": "0 0 * * *", "priority": 6}, ["spec.priority"]),
        ({"cron": "0 0 * * *", "user_id": "x" * 201}, ["spec.user_id"]),
        ({"cron": "0 0 * * *", "attributes": {"": "x"}}, ["spec.attributes['']"]),
        ({"cron": "0 0 * * *", "workflow_id": ""}, ["spec.workflow_id"]),
        ({"cron": "0 0 * * *", "start_time": Timestamp(seconds=-1)}, ["spec.start_time"]),
        ({"cron": "0 0 * * *", "start_time": Timestamp(seconds=1 << 60)}, ["spec.start_time"]),
        ({"cron": "0 0 * * *", "end_time": Timestamp(seconds=250_000_000_000)}, ["spec.end_time"]),
        (
            {"cron": "0 0 * * *", "start_time": Timestamp(seconds=9), "end_time": Timestamp(seconds=9)},
            ["spec.end_time"],
        ),
    ],
)
async def test_what_is_impossible_or_absurd_is_refused_with_its_place(
    api: Api, dsn: str, fields: dict[str, Any], paths: list[str]
) -> None:
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await create(api, pb.ScheduleSpec(**{"workflow_id": "wf", **fields}))
    assert refusal.error.paths == paths
    assert await count(dsn, "schedule") == 0


async def test_every_fault_of_a_request_is_told_at_once(api: Api) -> None:
    wrong = pb.ScheduleSpec(cron="x", time_zone="y", jitter=span(-1), catch_up_window=span(-1), priority=9)
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await create(api, wrong, "a b", namespace="%", request_id="x" * 201)
    assert set(refusal.error.paths) == {
        "namespace",
        "schedule_id",
        "request_id",
        "spec.workflow_id",
        "spec.priority",
        "spec.time_zone",
        "spec.cron",
        "spec.catch_up_window",
        "spec.jitter",
    }
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await stub(api).CreateSchedule(pb.CreateScheduleRequest(schedule_id="s"), timeout=DEADLINE)
    assert "spec" in refusal.error.paths


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (Payload(json="{"), "INVALID_JSON"),
        (Payload(json='{"a":1,"a":2}'), "INVALID_JSON"),
        (Payload(json='"' + "x" * (1 << 20) + '"'), "PAYLOAD_TOO_LARGE"),
        (Payload(binary=b"x" * ((1 << 20) + 1)), "PAYLOAD_TOO_LARGE"),
    ],
    ids=["broken", "duplicate key", "large text", "large binary"],
)
async def test_an_input_that_no_run_could_have_is_refused(api: Api, payload: Payload, reason: str) -> None:
    """Row 28."""
    with refused(reason, INVALID) as refusal:
        await create(api, pb.ScheduleSpec(cron="0 0 * * *", workflow_id="wf", input=payload))
    assert all(path.startswith("spec.input") for path in refusal.error.paths)


async def test_inputs_at_the_limit_are_taken_and_pages_of_them_stay_small(api: Api) -> None:
    large = '"' + "x" * ((1 << 20) - 2) + '"'
    for n in range(5):
        await create(api, spec(input=large), f"s{n}")
    pages = [page async for page in list_pages(api, page_size=100)]
    assert [schedule.schedule_id for page in pages for schedule in page] == [f"s{n}" for n in range(5)]
    assert max(len(page) for page in pages) <= 3
    binary = pb.ScheduleSpec(cron="0 0 * * *", workflow_id="wf", input=Payload(binary=b"\0\xff" * (1 << 19)))
    assert (await create(api, binary, "b")).schedule.spec.input == binary.input


async def list_pages(api: Api, **fields: Any) -> Any:
    token = ""
    while True:
        request = pb.ListSchedulesRequest(page_token=token, **fields)
        page = await stub(api).ListSchedules(request, timeout=DEADLINE)
        yield list(page.schedules)
        token = page.next_page_token
        if not token:
            return


async def test_schedules_are_listed_by_id_in_pages_and_by_namespace(api: Api) -> None:
    for n in (3, 1, 2, 5, 4):
        await create(api, spec(), f"s{n}")
    await create(api, spec(), "other", namespace="elsewhere")
    for size, lengths in ((2, [2, 2, 1]), (5, [5]), (0, [5])):
        pages = [page async for page in list_pages(api, page_size=size)]
        assert [len(page) for page in pages] == lengths
        assert [s.schedule_id for page in pages for s in page] == ["s1", "s2", "s3", "s4", "s5"]
    [[only]] = [page async for page in list_pages(api, namespace="elsewhere")]
    assert (only.schedule_id, only.namespace) == ("other", "elsewhere")
    with refused("INVALID_PAGE_TOKEN", INVALID):
        await stub(api).ListSchedules(pb.ListSchedulesRequest(page_token="x"), timeout=DEADLINE)


async def update(api: Api, wanted: pb.ScheduleSpec, **fields: Any) -> pb.Schedule:
    request = pb.UpdateScheduleRequest(schedule_id="s", spec=wanted, **fields)
    return (await stub(api).UpdateSchedule(request, timeout=DEADLINE)).schedule


async def test_one_that_can_not_be_read_is_told_and_keeps_no_other_from_being_listed(api: Api, dsn: str) -> None:
    """As when a newer release has made it. It can be paused, and made good by an update."""
    for schedule_id in ("a", "b", "c"):
        await create(api, spec(), schedule_id)
    newer = """update schedule set spec = (spec::jsonb || '{"newer": 1}')::json where schedule_id = 'b'"""
    assert await execute(dsn, newer) == 1
    listed = (await stub(api).ListSchedules(pb.ListSchedulesRequest(), timeout=DEADLINE)).schedules
    assert [(found.schedule_id, found.HasField("spec")) for found in listed] == [("a", True), ("b", False), ("c", True)]
    assert listed[1].last_error.startswith("INTERNAL: ")
    assert await get(api, "b") == listed[1]
    pause = pb.PauseScheduleRequest(schedule_id="b")
    assert (await stub(api).PauseSchedule(pause, timeout=DEADLINE)).schedule.paused
    update = pb.UpdateScheduleRequest(schedule_id="b", spec=spec())
    assert (await stub(api).UpdateSchedule(update, timeout=DEADLINE)).schedule.spec == listed[0].spec


async def test_an_update_replaces_the_spec_and_moves_the_next_time(api: Api, dsn: str) -> None:
    before = (await create(api, spec())).schedule
    after = await update(api, spec(interval=span(3600), input="7"), etag=before.etag)
    assert after.etag != before.etag
    assert (after.spec.input.json, after.spec.WhichOneof("when")) == ("7", "interval")
    assert after.next_fire_time.ToDatetime(UTC) <= await now(dsn) + timedelta(hours=1)
    assert after == await get(api)
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await update(api, spec("0 0 30 2 *"))
    assert refusal.error.paths == ["spec.cron"]


async def test_of_updates_with_one_etag_one_wins_and_its_repeat_gets_its_answer(api: Api) -> None:
    etag = (await create(api, spec())).schedule.etag

    async def attempt(n: int) -> pb.Schedule | str:
        try:
            return await update(api, spec(priority=1 + n % 5), etag=etag, request_id=f"r{n}")
        except grpc.aio.AioRpcError as error:
            return error.code().name

    outcomes = await asyncio.gather(*(attempt(n) for n in range(10)))
    [winner] = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, pb.Schedule)]
    assert [outcome for outcome in outcomes if isinstance(outcome, str)] == ["ABORTED"] * 9
    assert await attempt(winner) == outcomes[winner], "I6"
    with refused("STALE_ETAG", grpc.StatusCode.ABORTED) as refusal:
        await update(api, spec(), etag=etag)
    assert refusal.error.metadata["etag"] == (await get(api)).etag
    assert (await update(api, spec(priority=5))).spec.priority == 5, "without an etag the last one wins"


async def test_an_update_of_a_paused_schedule_leaves_it_paused(api: Api) -> None:
    await create(api, spec(), paused=True)
    found = await update(api, spec(interval=span(60)))
    assert found.paused
    assert not found.HasField("next_fire_time")
    resumed = (await stub(api).ResumeSchedule(pb.ResumeScheduleRequest(schedule_id="s"), timeout=DEADLINE)).schedule
    assert resumed.HasField("next_fire_time")
    assert not resumed.paused


Call = Callable[[Api, str], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "get": lambda api, name: stub(api).GetSchedule(pb.GetScheduleRequest(schedule_id=name)),
    "update": lambda api, name: stub(api).UpdateSchedule(pb.UpdateScheduleRequest(schedule_id=name, spec=spec())),
    "pause": lambda api, name: stub(api).PauseSchedule(pb.PauseScheduleRequest(schedule_id=name)),
    "resume": lambda api, name: stub(api).ResumeSchedule(pb.ResumeScheduleRequest(schedule_id=name)),
    "trigger": lambda api, name: stub(api).TriggerSchedule(pb.TriggerScheduleRequest(schedule_id=name)),
    "backfill": lambda api, name: stub(api).BackfillSchedule(
        pb.BackfillScheduleRequest(schedule_id=name, from_time=Timestamp(seconds=1), to_time=Timestamp(seconds=2))
    ),
    "fire times": lambda api, name: stub(api).ListFireTimes(pb.ListFireTimesRequest(schedule_id=name)),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_schedule_that_is_not_there_is_told(api: Api, call: str) -> None:
    await create(api, spec(), namespace="elsewhere")
    with refused("SCHEDULE_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await CALLS[call](api, "s")
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await CALLS[call](api, "")
    assert refusal.error.paths == ["schedule_id"]


async def test_deleting_twice_is_no_error(api: Api) -> None:
    await create(api, spec())
    request = pb.DeleteScheduleRequest(schedule_id="s")
    assert (await stub(api).DeleteSchedule(request, timeout=DEADLINE)).deleted
    assert not (await stub(api).DeleteSchedule(request, timeout=DEADLINE)).deleted


async def test_pausing_and_resuming_twice_change_nothing(api: Api) -> None:
    await create(api, spec())
    pause, resume = pb.PauseScheduleRequest(schedule_id="s", reason="r"), pb.ResumeScheduleRequest(schedule_id="s")
    paused = [(await stub(api).PauseSchedule(pause, timeout=DEADLINE)).schedule for _ in range(2)]
    resumed = [(await stub(api).ResumeSchedule(resume, timeout=DEADLINE)).schedule for _ in range(2)]
    assert paused[0] == paused[1]
    assert resumed[0] == resumed[1]
    assert (resumed[0].paused, resumed[0].pause_reason) == (False, "")
    with refused("INVALID_REQUEST", INVALID) as refusal:
        long = pb.PauseScheduleRequest(schedule_id="s", reason="x" * 1001)
        await stub(api).PauseSchedule(long, timeout=DEADLINE)
    assert refusal.error.paths == ["reason"]


async def test_a_backfill_takes_a_past_range_of_a_bounded_number_of_times(api: Api, dsn: str) -> None:
    await create(api, spec(interval=span(1)), paused=True)
    at = await now(dsn)

    async def call(**fields: Any) -> list[str]:
        with refused("INVALID_REQUEST", INVALID) as refusal:
            await stub(api).BackfillSchedule(pb.BackfillScheduleRequest(schedule_id="s", **fields), timeout=DEADLINE)
        return refusal.error.paths

    hour = timedelta(hours=1)
    assert await call() == ["from_time", "to_time"]
    assert await call(from_time=stamp(at), to_time=stamp(at)) == ["to_time"]
    assert await call(from_time=stamp(at - hour), to_time=stamp(at + hour)) == ["to_time"]
    assert await call(from_time=stamp(at - hour), to_time=stamp(at)) == ["to_time"], "3,600 times are too many"
    assert await call(from_time=Timestamp(seconds=-5), to_time=stamp(at)) == ["from_time"]


async def test_a_trigger_and_a_backfill_are_refused_as_a_start_is(api: Api, dsn: str) -> None:
    await create(api, spec(interval=span(60)), paused=True)
    with refused("UNKNOWN_WORKFLOW", grpc.StatusCode.NOT_FOUND):
        await CALLS["trigger"](api, "s")
    at = await now(dsn)
    request = pb.BackfillScheduleRequest(schedule_id="s", from_time=stamp(at - timedelta(minutes=5)), to_time=stamp(at))
    with refused("UNKNOWN_WORKFLOW", grpc.StatusCode.NOT_FOUND):
        await stub(api).BackfillSchedule(request, timeout=DEADLINE)
    assert await count(dsn, "run_key") == 0


async def test_fire_times_are_told_over_a_switch_of_the_clocks(api: Api) -> None:
    await create(api, spec("30 2 * * *", time_zone="Europe/Berlin"))
    request = pb.ListFireTimesRequest(
        schedule_id="s", from_time=stamp(datetime(2027, 3, 27, 1, 30, tzinfo=UTC)), limit=3
    )
    found = await stub(api).ListFireTimes(request, timeout=DEADLINE)
    assert [at.ToJsonString() for at in found.fire_times] == [
        "2027-03-27T01:30:00Z",
        "2027-03-28T01:00:00Z",
        "2027-03-29T00:30:00Z",
    ]
    assert len((await stub(api).ListFireTimes(pb.ListFireTimesRequest(schedule_id="s"))).fire_times) == 10
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await stub(api).ListFireTimes(pb.ListFireTimesRequest(schedule_id="s", limit=1001))
    assert refusal.error.paths == ["limit"]
