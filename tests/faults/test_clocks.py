"""The clocks of servers and workers are wrong by ten minutes, to either side, and jump: no lease runs out, no timer and
no schedule fires at another time, because only the database's clock decides (row 27 of the field's failures; I11).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from tests.engine import scheduling
from tests.engine.flows import ONCE, state_of, step, workflow
from tests.faults.conftest import StartWorker
from tests.faults.scene import STAYING, Scene, fetch, until_count, until_printed
from tests.faults.sink import Sink
from tests.fixtures.api import kinds
from tests.fixtures.processes import Process
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually

SHIFTED = str(Path(__file__).with_name("shifted_clock"))
MINUTES = 60.0
RUNS = 10


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
        step("s1", lease="1s", retry=ONCE),
        {"id": "wait", "wait_signal": "go", "timeout": "1s"},
    )
    await api.register(workflow(*nodes))
    now = await database_time(scene.dsn)
    await scheduling.create(api, scheduling.spec(interval=scheduling.span(3600)))
    next_time = (await scheduling.get(api)).next_fire_time.ToDatetime(UTC)
    assert 0 < (next_time - now).total_seconds() <= 3605
    results = await api.start_many([api.start_request() for _ in range(RUNS)])
    await until_printed(worker, "begun", RUNS)
    await until_count(scene.dsn, "task where lease_expires_at > clock_timestamp()", RUNS)
    begun = await database_time(scene.dsn)

    async def three_leases_later() -> bool:
        return (await database_time(scene.dsn) - begun).total_seconds() > 3

    await eventually(three_leases_later, 30)
    sink.open("held")
    for result in results:
        run = await api.wait(result.started.run_id, 30)
        assert (state_of(run), run.failure.code) == ("FAILED", "SIGNAL_TIMEOUT")
        _check(await api.history(run.run_id), now, await database_time(scene.dsn))
    assert len(worker.events("begun")) == RUNS
    assert (await scheduling.get(api)).next_fire_time.ToDatetime(UTC) == next_time
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
    assert await asyncio.to_thread(caller.wait, 30) == 0, caller.logs


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
    assert all(0 <= seconds < 5 for seconds in late), late


def _assert_that_the_clock_was_wrong(server: Any) -> None:
    away = [abs((at - datetime.now(UTC)).total_seconds()) for at in told_times(server)]
    assert max(away) > 9 * MINUTES, away
