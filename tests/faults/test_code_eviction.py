"""Runs that a worker drops from its memory do nothing any more, and those that it has in memory are not collected.

Rows 43 and 15 of the field failures.
"""

from __future__ import annotations

import asyncio
import json
from typing import LiteralString

import pytest

from fencepost.v1 import run_service_pb2
from fencepost_server.domain.model import EventType
from tests.engine.flows import state_of
from tests.faults.conftest import StartCodeWorker
from tests.faults.scene import ENDED, STAYING, Scene, count, fetch, until_count, until_printed
from tests.faults.sink import ONCE, Sink
from tests.fixtures.api import DEADLINE, Api

RUNS, WAYS, OTHERS = 1_000, 5, 20
COMPLETED_RUNS: LiteralString = f"event where type = {EventType.RUN_COMPLETED:d}"
_EVENTS = "select type, count(*) as n from event group by type order by type"
_ALL_IDLE = "task where lease_session is null"


async def signal(api: Api, run_id: str) -> None:
    request = run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go")
    request.payload.json = "1"
    await api.runs.SignalRun(request, timeout=DEADLINE)


async def test_a_thousand_evicted_runs_issue_nothing_from_what_their_functions_do_at_their_end(
    scene: Scene, code_process: StartCodeWorker, sink: Sink
) -> None:
    """Row 43: ``finally: await ctx.run(…)`` in its forms, in runs that were dropped, under a busy collector."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    worker = code_process(server.grpc_address, workflow_cache=0, collect=True)
    await until_printed(worker, "connected")
    requests = [api.start_request("dropped", str(number % WAYS)) for number in range(RUNS)]
    run_ids = [result.started.run_id for result in await api.start_many(requests)]
    await until_count(scene.dsn, "wait", RUNS, 60)
    await until_count(scene.dsn, _ALL_IDLE, RUNS)
    before = await fetch(scene.dsn, _EVENTS)
    # Something to do for the worker, so that what it may still have to say is said before it.
    for run_id in [(await api.start("plain", "1")).run_id for _ in range(OTHERS)]:
        assert state_of(await api.wait(run_id)) == "COMPLETED"
    waiting = {row["type"]: row["n"] for row in before}
    assert sum(waiting.values()) == 2 * RUNS + RUNS // WAYS, "started, and waits; and the timer of a timeout"
    assert sink.effects() == {}
    # Each goes on from its history, and only now acts; once.
    for first in range(0, RUNS, 50):
        await asyncio.gather(*(signal(api, run_id) for run_id in run_ids[first : first + 50]))
    await until_count(scene.dsn, ENDED, RUNS + OTHERS, 60)
    assert await count(scene.dsn, COMPLETED_RUNS) == RUNS + OTHERS
    assert len(sink.effects()) == RUNS
    assert set(sink.effects().values()) == {ONCE}
    assert await asyncio.to_thread(worker.terminate) == 0
    (did,) = worker.events("did")
    (stats,) = worker.events("ended")
    assert {key: n for key, n in did["acts"].items() if key.startswith("refused")}, "__del__ tried, too"
    assert (stats["failed"], stats["lost"]) == (0, 0)
    for complaint in ("was destroyed", "never awaited", "never retrieved", "Exception ignored", "Traceback"):
        assert complaint not in worker.logs


@pytest.mark.usefixtures("busy_collector")
async def test_nothing_is_lost_of_runs_at_work_while_garbage_is_collected_all_the_time(
    scene: Scene, code_process: StartCodeWorker
) -> None:
    """Row 15: in the server and in the worker, where tasks of the functions are known to their loop only."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    worker = code_process(server.grpc_address, collect=True, slots=50)
    await until_printed(worker, "connected")
    results = await api.start_many([api.start_request("busy", "5") for _ in range(100)])
    for result in results:
        ended = await api.wait(result.started.run_id, 60)
        assert state_of(ended) == "COMPLETED", ended.failure
        assert json.loads(ended.output.json) == [101, 102, 103, 104, 105]
    assert await asyncio.to_thread(worker.terminate) == 0
    assert worker.events("ended")[0]["failed"] == 0
