"""What `fencepost runs get|history` show of runs that are more than a sequence of steps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from tests.cli.program import TIMEOUT, Program
from tests.fixtures.api import Api
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import InProcessServer

ConnectWorker = Callable[..., Awaitable[RawWorker]]


async def start(api: Api) -> str:
    """A run of two branches: a step, and a wait of a week for a signal."""
    branches = [[{"id": "pack", "step": "s1"}], [{"id": "approval", "wait_signal": "approve", "timeout": "7d"}]]
    sequence = [
        {"id": "all", "parallel": branches},
        {"id": "route", "choose": [{"otherwise": [{"id": "nap", "sleep": "1d"}]}]},
    ]
    await api.register(json.dumps({"id": "wf", "compatibility_id": "1", "sequence": sequence}))
    return (await api.start()).run_id


async def test_people_see_what_a_run_waits_for_and_how_far_its_steps_are(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    run_id = await start(api)
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    await worker.checkpoint(task, 7, "1")
    await worker.heartbeat(progress=[(task, '"half"')])
    lines = (await fencepost("runs", "get", run_id)).out.splitlines()
    [step] = [line for line in lines if line.startswith("pack [0]")]
    assert '"half"' in step
    [wait] = [line for line in lines if line.startswith("approval")]
    assert wait.split()[1:3] == ["signal", "approve"]
    document = (await fencepost("runs", "get", run_id, "--json")).document
    [open_step] = document["open_steps"]
    assert (open_step["progress"], open_step["checkpoint_number"], open_step["undo"]) == ("half", 7, False)
    assert (open_step["item"], open_step["scope_id"]) == (0, 2)
    [open_wait] = document["open_waits"]
    assert (open_wait["node_id"], open_wait["signal_name"]) == ("approval", "approve")
    assert "ending" not in document


async def test_the_failure_of_a_node_that_is_no_step_names_no_attempt(fencepost: Program, api: Api) -> None:
    sequence = [{"id": "approval", "wait_signal": "approve", "timeout": "1ms"}]
    await api.register(json.dumps({"id": "wf", "compatibility_id": "1", "sequence": sequence}))
    run_id = (await api.start()).run_id
    failure = (await api.wait(run_id)).failure
    assert (failure.code, failure.attempt) == ("SIGNAL_TIMEOUT", 0)
    for command in ("wait", "get", "history"):
        told = (await fencepost("runs", command, run_id)).out
        assert "PERMANENT SIGNAL_TIMEOUT at approval: " in told, command
        assert "attempt" not in told, command


async def test_a_history_tells_of_branches_waits_choices_and_ends(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    run_id = await start(api)
    worker = await connect_worker(server.grpc_address)
    await worker.complete(await worker.task(), "1")
    await fencepost("signal", "approve", run_id, "--payload", '"yes"', "--request-id", "q")
    sleeping = (await fencepost("runs", "get", run_id)).out
    assert "WAITS FOR" in sleeping
    text = (await fencepost("runs", "history", run_id)).out
    lines = {line.split()[3]: line for line in text.splitlines()[1:]}
    assert "2 branches or items" in lines["scope_opened"]
    assert "s1 on default; item 0 of event 2" in lines["step_scheduled"]
    assert "signal approve; until " in lines["signal_awaited"]
    assert 'signal approve; "yes"' in lines["signal_received"]
    assert "case 0" in lines["choice_made"]
    assert "until " in lines["timer_started"]
    documents = {d["kind"]: d for d in (await fencepost("runs", "history", run_id, "--json")).documents}
    assert documents["choice_made"]["case_index"] == 0
    assert documents["scope_opened"]["items"] == 2
    received = documents["signal_received"]
    assert (received["signal_name"], received["request_id"], received["payload"]) == ("approve", "q", "yes")
    assert documents["signal_awaited"]["timeout_time"].endswith("Z")
    assert (documents["signal_awaited"]["scope_id"], documents["signal_awaited"]["item"]) == (2, 1)
    assert "item" not in documents["choice_made"]


async def test_a_history_tells_why_a_run_ended_and_how_much_time_its_steps_had(fencepost: Program, api: Api) -> None:
    run_id = await start(api)
    await fencepost("cancel", run_id, "--reason", "too late", "--grace", "0")
    await api.wait(run_id)
    text = (await fencepost("runs", "history", run_id)).out
    [ending] = [line for line in text.splitlines() if " run_ending " in line]
    assert "CANCELLED; PERMANENT RUN_CANCELLED" in ending
    assert "too late" in ending
    assert "grace 0 ms" in ending
    documents = {d["kind"]: d for d in (await fencepost("runs", "history", run_id, "--json")).documents}
    assert (documents["run_ending"]["state"], documents["run_ending"]["grace"]) == ("CANCELLED", 0)


async def test_people_see_that_nobody_takes_a_step_also_while_they_wait_for_the_run(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    run_id = await start(api)
    why = "no connected worker takes s1 from the queue default (NO_WORKER)"
    shown = (await fencepost("runs", "get", run_id)).out.splitlines()
    assert [line.split(maxsplit=2)[2] for line in shown if line.startswith("waits because")] == [why]
    [step] = (await fencepost("runs", "get", run_id, "--json")).document["open_steps"]
    assert step["waiting_reason"] == "NO_WORKER"
    waiting = await fencepost.start("runs", "wait", run_id)
    assert waiting.stderr is not None
    line = await asyncio.wait_for(waiting.stderr.readline(), TIMEOUT)
    assert line.decode() == f"fencepost: run {run_id} waits: {why}\n"
    await connect_worker(server.grpc_address)
    assert "waits because" not in (await fencepost("runs", "get", run_id)).out
    await fencepost("terminate", run_id)
    assert await asyncio.wait_for(waiting.wait(), TIMEOUT) == 3


async def test_people_see_signals_that_no_wait_has_taken(fencepost: Program, api: Api) -> None:
    """One whose name is misspelled, for one."""
    run_id = await start(api)
    for name in ("aprove", "later", "aprove", "approve"):
        assert (await fencepost("signal", name, run_id)).code == 0
    lines = (await fencepost("runs", "get", run_id)).out.splitlines()
    assert [line.split() for line in lines[-3:]] == [["SIGNAL", "NOT", "TAKEN"], ["aprove", "2"], ["later", "1"]]
    document = (await fencepost("runs", "get", run_id, "--json")).document
    assert document["pending_signals"] == [
        {"signal_name": "aprove", "count": 2},
        {"signal_name": "later", "count": 1},
    ]
    await fencepost("terminate", run_id)
    assert (await fencepost("runs", "get", run_id, "--json")).document["pending_signals"] == []
