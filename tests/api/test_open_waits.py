"""What a run shows of what it waits for beside plain steps: times, signals, children, items, undo."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from fencepost.v1 import run_pb2
from fencepost.v1 import run_service_pb2 as pb
from tests.engine.rows import execute
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker, seconds
from tests.fixtures.servers import InProcessServer

ConnectWorker = Callable[..., Awaitable[RawWorker]]
WAITING, RUNNING = run_pb2.RUN_STATE_WAITING, run_pb2.RUN_STATE_RUNNING


def graph(*sequence: dict[str, Any], workflow_id: str = "wf") -> str:
    return json.dumps({"id": workflow_id, "compatibility_id": "1", "sequence": sequence})


async def test_a_run_shows_until_when_it_sleeps(api: Api) -> None:
    await api.register(graph({"id": "nap", "sleep": "1d"}, {"id": "n", "step": "s1"}))
    run = await api.get((await api.start()).run_id)
    assert run.state == WAITING
    assert not run.open_steps
    [wait] = run.open_waits
    assert (wait.seq, wait.node_id, wait.WhichOneof("kind")) == (2, "nap", "fire_time")
    slept = wait.fire_time.ToDatetime() - run.create_time.ToDatetime()
    assert timedelta(days=1) <= slept < timedelta(days=1, seconds=5)


async def test_a_start_that_is_put_off_is_a_wait_of_no_node(api: Api) -> None:
    await api.register(manifest())
    run = await api.get((await api.start(start_delay=seconds(3600))).run_id)
    [wait] = run.open_waits
    assert (wait.node_id, wait.WhichOneof("kind")) == ("", "fire_time")
    [event] = [event for event in await api.history(run.run_id) if event.HasField("timer_started")]
    assert (event.seq, event.timer_started) == (wait.seq, run_pb2.TimerStarted(fire_time=wait.fire_time))


async def test_a_run_shows_the_signal_that_it_waits_for_and_not_the_timeout_of_it(api: Api) -> None:
    await api.register(graph({"id": "approval", "wait_signal": "approve", "timeout": "7d"}))
    run_id = (await api.start()).run_id
    [wait] = (await api.get(run_id)).open_waits
    assert (wait.node_id, wait.signal_name) == ("approval", "approve")
    await api.runs.SignalRun(pb.SignalRunRequest(run_id=run_id, signal_name="approve"), timeout=DEADLINE)
    run = await api.wait(run_id)
    assert not run.open_waits


async def test_a_run_shows_the_child_that_it_waits_for(api: Api) -> None:
    await api.register(manifest(1, workflow_id="invoicing"))
    await api.register(graph({"id": "invoice", "workflow": "invoicing"}))
    run = await api.get((await api.start()).run_id)
    [wait] = run.open_waits
    assert wait.node_id == "invoice"
    [event] = [event for event in await api.history(run.run_id) if event.HasField("child_scheduled")]
    assert (wait.seq, wait.child_run_id) == (event.seq, event.child_scheduled.child_run_id)


async def test_open_steps_say_in_which_branch_or_item_they_are_and_waits_come_in_their_order(api: Api) -> None:
    branches = [
        [{"id": "a", "step": "s1"}],
        [{"id": "b", "sleep": "1h"}],
        [{"id": "c", "wait_signal": "go"}],
        [{"id": "d", "step": "s2"}],
    ]
    await api.register(graph({"id": "all", "parallel": branches}))
    run = await api.get((await api.start()).run_id)
    [opened] = [event for event in await api.history(run.run_id) if event.HasField("scope_opened")]
    assert [(s.node_id, s.scope_id, s.item) for s in run.open_steps] == [("a", opened.seq, 0), ("d", opened.seq, 3)]
    assert not any(step.undo for step in run.open_steps)
    assert [(wait.node_id, wait.WhichOneof("kind")) for wait in run.open_waits] == [
        ("b", "fire_time"),
        ("c", "signal_name"),
    ]
    assert run.open_waits[0].seq < run.open_waits[1].seq


async def test_a_step_that_is_undone_shows_as_that(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    undo: dict[str, dict[str, Any]] = {"n1": {"undo": {"step": "s1.undo"}}, "n2": {"retry": {"max_attempts": 1}}}
    await api.register(manifest(2, nodes=undo))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=["s1", "s2"])
    await worker.complete(await worker.task(), "1")
    await worker.fail(await worker.task())
    run = await api.get(run_id)
    assert (run.state, run.ending) == (run_pb2.RUN_STATE_UNDOING, run_pb2.RUN_STATE_FAILED)
    [step] = run.open_steps
    assert (step.node_id, step.handler, step.undo) == ("n1", "s1.undo", True)


async def test_no_more_than_a_thousand_waits_are_told(api: Api, dsn: str) -> None:
    """I12."""
    await api.register(graph({"id": "approval", "wait_signal": "approve"}))
    run_id = (await api.start()).run_id
    await execute(
        dsn,
        "insert into wait (run_id, seq, name, place) select %s, n, 'x' || n, '{\"node\": 0}' "
        "from generate_series(100, 1200) n",
        [run_id],
    )
    waits = (await api.get(run_id)).open_waits
    assert [wait.seq for wait in waits] == [2, *range(100, 1099)]
