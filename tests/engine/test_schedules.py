"""Schedules fire at their times, once each, and do at an overlap what their policy says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from fencepost.v1 import schedule_service_pb2 as pb
from tests.engine.rows import count, fetch
from tests.engine.scheduling import create, get, runs, set_back, span, spec
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.waiting import eventually

Connect = Callable[[str], Api]


async def test_an_interval_fires_on_its_grid_with_what_the_schedule_says(api: Api, dsn: str) -> None:
    await api.register(manifest(1))
    wanted = spec(interval=span(1), input='{"a":1}', user_id="u", priority=2, overlap=pb.OVERLAP_POLICY_ALLOW)
    made = await create(api, wanted)
    assert made.created

    async def twice() -> pb.Schedule | None:
        found = await get(api)
        return found if found.started_runs >= 2 else None

    found = await eventually(twice)
    run = await api.get(found.last_run_id)
    assert (run.input.json, run.user_id, run.priority) == ('{"a":1}', "u", 2)
    assert found.last_fire_time.nanos == 0
    assert found.last_error == ""
    keys = [key for _, key in await runs(dsn)]
    assert len(set(keys)) == len(keys) == await count(dsn, "run")


async def test_a_cron_that_was_due_fires_once_and_goes_on_with_the_next_time(api: Api, dsn: str) -> None:
    await api.register(manifest(1))
    await create(api, spec("* * * * *"))
    at = await set_back(dsn, timedelta(seconds=5))

    async def fired() -> pb.Schedule | None:
        found = await get(api)
        return found if found.started_runs else None

    found = await eventually(fired)
    assert found.last_fire_time.ToDatetime(at.tzinfo) == at
    assert found.next_fire_time.ToDatetime(at.tzinfo) > at

    async def at_rest() -> bool:
        return await fetch(dsn, "select starting_at is null and due_at = next_fire_at from schedule") == [(True,)]

    await eventually(at_rest)
    assert await count(dsn, "run") == 1
