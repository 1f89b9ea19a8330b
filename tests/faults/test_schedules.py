"""Schedules while servers stop, die and lose their database: each fire time starts its run once, whichever server does
it, and what is missed goes by the catch-up window.

Rows 12 and 17 of the field failures. I13.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fencepost.v1 import schedule_service_pb2 as pb
from tests.engine.scheduling import create, fire_now, get, keys, span, spec, stub, until, until_at_rest
from tests.faults.scene import QUICK, Scene, count, until_count
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.databases import database_address, redirected
from tests.fixtures.manifests import manifest
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually

ALLOW = pb.OVERLAP_POLICY_ALLOW
TIMES: dict[str, Any] = {**QUICK, "schedule_retry": 1.0, "lock_timeout": 4.0}
"""Who calls waits for a lock of a server that is slow for a moment."""
SECOND = timedelta(seconds=1)


async def until_fired(dsn: str, more: int) -> None:
    """Wait until so many more runs were started. The database is asked, whatever becomes of servers meanwhile."""
    await until_count(dsn, "run", await count(dsn, "run") + more, more=True)


async def fired(api: Api, dsn: str) -> list[datetime]:
    """Pause the schedule, let what was decided come to its end, and tell which fire times have started runs."""
    await stub(api).PauseSchedule(pb.PauseScheduleRequest(schedule_id="s"), timeout=DEADLINE)
    await until_at_rest(dsn)
    found = [datetime.fromisoformat(key.split(" ")[1]) for key in await keys(dsn)]
    assert await count(dsn, "run") == len(found) == (await get(api)).started_runs
    return found


def left_out(made: pb.Schedule, times: list[datetime]) -> int:
    """How many seconds between its first fire time, as it was made, and the last run have none."""
    assert times == sorted(set(times)), "none twice"
    return (times[-1] - made.next_fire_time.ToDatetime(UTC)) // SECOND + 1 - len(times)


async def test_servers_that_stop_and_come_back_in_turn_leave_out_no_fire_time_and_double_none(
    scene: Scene, server_process: StartServerProcess
) -> None:
    """Row 17. A schedule of each second; one server sleeps, wakes up and finds its work done, then the other one."""
    servers = [server_process(scene.dsn, wait=False, **TIMES) for _ in range(2)]
    for server in servers:
        server.wait_serving()
    api = scene.api(servers[0].grpc_address)
    await api.register(manifest(1))
    made = (await create(api, spec(interval=span(1), overlap=ALLOW, catch_up_window=span(60)))).schedule
    await until_fired(scene.dsn, 1)
    for sleeper in (servers[1], servers[0], servers[1]):
        sleeper.pause()
        await until_fired(scene.dsn, 3)
        sleeper.resume()
        await until_fired(scene.dsn, 1)
    times = await fired(api, scene.dsn)
    assert left_out(made, times) == 0
    assert (await get(api)).skipped_missed == 0


@pytest.mark.parametrize("window", [60, 2])
async def test_a_database_that_is_away_for_a_while_costs_only_what_the_window_gives_up(
    scene: Scene, window: int
) -> None:
    """Row 17: two servers, no reset, no answer. Within the window all is made up for; beyond it, it is counted."""
    database = scene.proxy(database_address(scene.dsn))
    settings = {**TIMES, "batch_timeout": 5.0, "dsn": redirected(scene.dsn, database.address)}
    servers = [await scene.serve(**settings) for _ in range(2)]
    api = scene.api(servers[0].grpc_address)
    await api.register(manifest(1))
    made = (await create(api, spec(interval=span(1), overlap=ALLOW, catch_up_window=span(window)))).schedule
    await until_fired(scene.dsn, 2)
    loop = asyncio.get_running_loop()
    began = loop.time()
    database.blackhole()
    await eventually(lambda: loop.time() - began > 6, 30)
    database.heal()
    await until_fired(scene.dsn, 3)
    times = await fired(api, scene.dsn)
    found = await get(api)
    assert left_out(made, times) == found.skipped_missed
    assert (found.skipped_missed > 0) is (window == 2)


@pytest.mark.parametrize(
    ("amid", "runs"),
    [
        (b"set next_fire_at = x.next_fire_at", 0),  # before the decision has committed
        (b"insert into run ", 0),  # decided, and not started
        (b"with settled as", 1),  # started, and not written down
    ],
    ids=["deciding", "starting", "settling"],
)
async def test_a_server_that_is_killed_while_it_fires_loses_nothing_and_doubles_nothing(
    scene: Scene, server_process: StartServerProcess, amid: bytes, runs: int
) -> None:
    """It never gets further than the statement; then it is killed, and another server comes."""
    database = scene.proxy(database_address(scene.dsn))
    killed = server_process(redirected(scene.dsn, database.address), prepared="off", **TIMES)
    api = scene.api(killed.grpc_address)
    await api.register(manifest(1))
    await create(api, spec())
    database.break_on(amid, "up", "blackhole")
    await fire_now(scene.dsn)
    await eventually(lambda: database.breaks)
    await until_count(scene.dsn, "run", runs)
    killed.kill()
    database.reset()  # the end of its connections, which the black hole has hidden
    assert await count(scene.dsn, "schedule where started_runs = 0") == 1
    other = await scene.serve(**TIMES)
    found = await until(scene.api(other.grpc_address), started_runs=1)
    await until_at_rest(scene.dsn)
    assert await count(scene.dsn, "run") == 1
    assert (await scene.api(other.grpc_address).get(found.last_run_id)).run_id == found.last_run_id


async def test_a_server_that_stops_amid_its_decision_holds_up_no_other_schedule(
    scene: Scene, server_process: StartServerProcess
) -> None:
    """The rows that it has locked come free when the database ends its transaction; the others fire at once."""
    database = scene.proxy(database_address(scene.dsn))
    behind = redirected(scene.dsn, database.address)
    stopped = server_process(behind, prepared="off", idle_in_transaction_timeout=1.0, **TIMES)
    other = await scene.serve(**TIMES)
    api = scene.api(other.grpc_address)
    await api.register(manifest(1))
    await create(api, spec(), "held")
    await create(api, spec(), "free")
    other.app.engine.firing.draining = True  # so that it is the stopped one that takes the first
    database.break_on(b"set next_fire_at = x.next_fire_at", "up", "blackhole")
    await fire_now(scene.dsn, "held")
    await eventually(lambda: database.breaks)
    stopped.pause()
    other.app.engine.firing.draining = False
    loop = other.app.engine.firing.loop
    passes = 0
    run_once: Callable[[], Awaitable[float | None]] = loop.run_once

    async def counting() -> float | None:
        nonlocal passes
        passes += 1
        return await run_once()

    loop.run_once = counting
    await fire_now(scene.dsn, "free")
    await until(api, schedule_id="free", started_runs=1)
    await until(api, schedule_id="held", started_runs=1)
    assert passes < 100, "it does not ask all the time for what is locked"
    database.heal()
    stopped.resume()
    await until_at_rest(scene.dsn)
    assert await count(scene.dsn, "run") == 2
