"""The clocks of servers and workers are wrong by ten minutes, to either side, and jump: no lease runs out, no timer and
no schedule fires at another time, because only the database's clock decides (row 27 of the field's failures; I11).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from tests.engine import scheduling
from tests.engine.flows import ONCE, state_of, step, workflow
from tests.faults.conftest import StartWorker
from tests.faults.scene import STAYING, Scene, fetch, until_printed
from tests.faults.sink import Sink
from tests.fixtures.api import kinds
from tests.fixtures.processes import Process
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually

SHIFTED = str(Path(__file__).with_name("shifted_clock"))
MINUTES = 60.0
RUNS = 10
LEASE = 30
"""Seconds: long enough for whoever stands still for a while, and short beside ten minutes."""
RENEWED = 3


def shift(monkeypatch: pytest.MonkeyPatch, *offsets: float) -> None:
    """Let the processes that are started next have a clock that is off by so many seconds, one after the other."""
    monkeypatch.setenv("PYTHONPATH", SHIFTED)
    monkeypatch.setenv("CLOCK_OFFSETS", ",".join(map(str, offsets)))
    monkeypatch.setenv("CLOCK_STEP", "0.4")


def told_times(process: Process) -> list[datetime]:
    """The times in what a process has logged, by its own clock."""
    times = [str(event["time"]) for event in process.events() if "time" in event]
    return [datetime.fromisoformat(time.replace(",", ".")).replace(tzinfo=UTC) for time in times]


async def database_time(dsn: str) -> datetime:
    [row] = await fetch(dsn, "select clock_timestamp() as now")
    now: datetime = row["now"]
    return now


@pytest.mark.parametrize(
    "offsets",
    [(-10 * MINUTES,), (10 * MINUTES,), (10 * MINUTES, -10 * MINUTES)],
    ids=["behind", "ahead", "jumping"],
)
async def test_wrong_clocks_move_no_lease_no_timer_and_no_schedule(
    scene: Scene,
    server_process: StartServerProcess,
    worker_process: StartWorker,
    sink: Sink,
    monkeypatch: pytest.MonkeyPatch,
    offsets: tuple[float, ...],
) -> None:
    shift(monkeypatch, *offsets)
    wrong = server_process(scene.dsn, wait=False, **{**STAYING, "heartbeat_interval": 0.3})
    shift(monkeypatch, *(-offset for offset in offsets))
    other_way = server_process(scene.dsn, wait=False, **{**STAYING, "heartbeat_interval": 0.3})
    for server in (wrong, other_way):
        await asyncio.to_thread(server.wait_serving)
    worker = worker_process(wrong.grpc_address, other_way.grpc_address, gate="held", slots=RUNS)
    api = scene.api(wrong.grpc_address)
    nodes = (
        {"id": "nap", "sleep": "1s"},
        step("s1", lease=f"{LEASE}s", retry=ONCE),
        {"id": "wait", "wait_signal": "go", "timeout": "1s"},
    )
    await api.register(workflow(*nodes))
    now = await database_time(scene.dsn)
    # Due in five minutes, for whom the time is what it is: neither now nor next by a clock that is off by ten.
    due = now.replace(microsecond=0) + timedelta(minutes=5)
    every, offset = scheduling.span(10 * MINUTES), scheduling.span(due.timestamp() % (10 * MINUTES))
    await scheduling.create(api, scheduling.spec(interval=every, offset=offset))
    assert (await scheduling.get(api)).next_fire_time.ToDatetime(UTC) == due
    results = await api.start_many([api.start_request() for _ in range(RUNS)])
    await until_printed(worker, "begun", RUNS)
    await _until_renewed(scene.dsn)
    sink.open("held")
    for result in results:
        run = await api.wait(result.started.run_id, 30)
        assert (state_of(run), run.failure.code) == ("FAILED", "SIGNAL_TIMEOUT")
        _check(await api.history(run.run_id), now, await database_time(scene.dsn))
    assert len(worker.events("begun")) == RUNS
    assert (await scheduling.get(api)).next_fire_time.ToDatetime(UTC) == due
    _assert_that_the_clock_was_wrong(wrong)


async def test_a_caller_whose_clock_is_behind_gets_its_answer(
    scene: Scene, python_process: Callable[..., Process]
) -> None:
    """Deadlines are so many seconds from now, whatever the time is thought to be. So workers with such a clock can name
    their workflows, too.
    """
    server = await scene.serve()
    code = f"from fencepost import Client; print(len(list(Client({server.grpc_address!r}).list_definitions())))"
    caller = python_process("-c", code, PYTHONPATH=SHIFTED, CLOCK_OFFSETS=str(-10 * MINUTES))
    assert await asyncio.to_thread(caller.wait, 60) == 0, caller.logs


async def _until_renewed(dsn: str) -> None:
    """Wait until every lease was renewed some times, each time for as long as it is to last by the database's clock."""
    ends: dict[str, set[float]] = {}

    async def renewed() -> bool:
        rows = await fetch(
            dsn,
            "select run_id::text, extract(epoch from lease_expires_at)::float8 as at,"
            " extract(epoch from lease_expires_at - clock_timestamp())::float8 as left from task",
        )
        assert len(rows) == RUNS
        for row in rows:
            assert 0 < row["left"] <= LEASE, row
            ends.setdefault(row["run_id"], set()).add(row["at"])
        return min(map(len, ends.values())) > RENEWED

    await eventually(renewed, 30)


def _check(events: list[run_pb2.Event], earliest: datetime, latest: datetime) -> None:
    """Everything happened when the database says it did: one attempt, timers in their time."""
    times = [event.event_time.ToDatetime(UTC) for event in events]
    assert earliest <= times[0]
    assert times[-1] <= latest
    assert "step_retrying" not in kinds(events)
    due = [event.timer_started.fire_time for event in events if event.HasField("timer_started")]
    due += [event.signal_awaited.timeout_time for event in events if event.HasField("signal_awaited")]
    fired = [event.event_time for event in events if event.HasField("timer_fired")]
    late: list[float] = [(f.ToDatetime() - d.ToDatetime()).total_seconds() for d, f in zip(due, fired, strict=True)]
    assert all(0 <= seconds < MINUTES for seconds in late), late


def _assert_that_the_clock_was_wrong(server: Any) -> None:
    away = [abs((at - datetime.now(UTC)).total_seconds()) for at in told_times(server)]
    assert max(away) > 9 * MINUTES, away
