"""Whoever lost the lease of a code run can change nothing of it, hears of it soon, and takes nothing that he remembers
for what is: when the run comes back to him, its history decides. What was said and not answered counts once.

Rows 10, 55, 5 and 49 of the field failures. I2, I6.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.code import (
    AS_NEW,
    BLOCK,
    CODE,
    COMPLETE,
    CONTINUE,
    FAIL,
    MANIFEST,
    WAIT,
    Held,
    call,
    cancel,
    child,
    held,
    local,
    payload,
    send,
    signal,
    timer,
)
from tests.engine.flows import PERMANENT
from tests.faults.conftest import StartCodeWorker
from tests.faults.scene import STAYING, Scene, count, fetch, until_printed
from tests.faults.sink import Effect, Sink
from tests.fixtures.api import DEADLINE, Api, kinds
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, RawWorker
from tests.fixtures.waiting import eventually

HELD = pb.WorkflowHandler(workflow_id="held", compatibility_id="1")
_EXPIRE = "update task set lease_expires_at = clock_timestamp() - interval '1 second' where lease_session is not null"
_HURRY = "update task set visible_at = clock_timestamp() where lease_session is null and visible_at < 'infinity'"
_TABLES = ("task", "timer", "wait", "signal", "child", "message", "undo", "run")


async def decider(scene: Scene, address: str, **fields: Any) -> RawWorker:
    return await scene.raw(address, handlers=(), capacity=0, **{"workflows": [CODE], "workflow_capacity": 10, **fields})


async def expire_all(dsn: str) -> None:
    """Let all leases run out, again if a heartbeat that was on its way has renewed one meanwhile."""

    async def expired() -> bool:
        await fetch(dsn, _EXPIRE)
        return await count(dsn, "task where lease_session is not null") == 0

    await eventually(expired)


async def everything(scene: Scene, api: Api, run_id: str) -> list[Any]:
    """The history of a run, and all rows that an Advance could touch."""
    rows = [
        await fetch(scene.dsn, f"select row_to_json(t)::text as row from {table} t order by 1") for table in _TABLES
    ]
    return [await api.history(run_id), *rows]


def failure(code: str) -> run_pb2.Failure:
    return run_pb2.Failure(kind=PERMANENT, code=code, message="told to")


def advances(run: Held) -> list[pb.AdvanceItem]:
    """The next Advance, with every outcome and every command."""
    commands = (
        local(2, "late"), call(3, "a"), timer(4, 0.01), signal(5, "go", 0.01), child(6, "code"), cancel(1),
        pb.Command(mark_patch=pb.MarkPatch(patch_id="p")),
    )  # fmt: skip
    return [
        run.item(*commands, outcome=CONTINUE),
        run.item(*commands, outcome=WAIT),
        run.item(outcome=COMPLETE, output=payload("late")),
        run.item(outcome=FAIL, failure=failure("LATE")),
        run.item(outcome=AS_NEW, output=payload("late")),
        run.item(outcome=BLOCK, failure=failure("NONDETERMINISM")),
    ]


async def assert_powerless(scene: Scene, api: Api, stale: Held) -> None:
    zombie, task = stale.worker, stale.task
    before = await everything(scene, api, task.task.run_id)
    results = [
        *await send(zombie, *advances(stale)),
        *await zombie.heartbeat([task]),
        await zombie.fail(task),
        await zombie.fail(task, PERMANENT),
        *await zombie.release(task),
    ]
    assert [result.outcome for result in results] == [LEASE_LOST] * 10
    assert await everything(scene, api, task.task.run_id) == before


async def test_a_decider_without_its_lease_can_change_nothing_whatever_it_says(scene: Scene) -> None:
    """Row 10: while another one has the run, while it waits, and when it has ended; on its stream and on a new one."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    await api.register(MANIFEST)
    zombie = await decider(scene, server.grpc_address)
    run_id = (await api.start("code")).run_id
    stale = held(zombie, await zombie.task())
    assert (await stale.advance(local(1, "early"), outcome=CONTINUE)).outcome == OK
    zombie.workflow_capacity_now = 0
    await zombie.sync()
    await expire_all(scene.dsn)
    await assert_powerless(scene, api, stale)
    other = await decider(scene, server.grpc_address)
    await fetch(scene.dsn, _HURRY)
    fresh = held(other, await other.task())
    assert (fresh.task.task.run_id, fresh.task.attempt, fresh.advance_no) == (run_id, 2, 1)
    await assert_powerless(scene, api, stale)
    welcome = await zombie.reconnect(held=[stale.task.task], workflow_capacity=0)
    assert [result.kept for result in welcome.held] == [False]
    await assert_powerless(scene, api, stale)
    assert (await fresh.advance(signal(2, "go"))).outcome == OK
    await assert_powerless(scene, api, stale)
    await api.runs.SignalRun(
        run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go", payload=payload(1)), timeout=DEADLINE
    )
    last = held(other, await other.task())
    assert (await last.complete("done")).outcome == OK
    await assert_powerless(scene, api, stale)
    assert (await api.get(run_id)).output.json == '"done"'


async def test_a_worker_that_was_frozen_past_its_lease_stops_its_step_within_a_second_and_decides_nothing(
    scene: Scene, code_process: StartCodeWorker, sink: Sink
) -> None:
    """Row 10: SIGSTOP amid a local step, another worker finishes the run, SIGCONT. What it still does outside is told
    by its token to be stale.
    """
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    frozen = code_process(server.grpc_address, name="frozen")
    await until_printed(frozen, "connected")
    run_id = (await api.start("held", '["never"]')).run_id
    await until_printed(frozen, "begun")
    frozen.pause()
    await expire_all(scene.dsn)
    other = code_process(server.grpc_address, name="other")

    async def begun() -> bool:
        await fetch(scene.dsn, _HURRY)
        return bool(other.events("begun"))

    await eventually(begun, 60)
    # Only now, for the frozen one would else find it open when it wakes.
    sink.open("never")
    assert (await api.wait(run_id)).output.json == '["other"]'
    await fetch_sink_closed(sink)
    before = await api.history(run_id)
    frozen.resume()
    (cancelled,) = await eventually(lambda: frozen.events("cancelled"))  # long before its own clock would tell it
    assert cancelled["reason"] == "LEASE_LOST"
    await until_printed(frozen, "acted")
    assert await api.history(run_id) == before
    assert kinds(before) == ["run_started", "local_step_ended", "run_completed"]
    for worker in (frozen, other):
        assert await asyncio.to_thread(worker.terminate) == 0
    assert frozen.events("ended")[0]["advanced"] == 0
    assert await api.history(run_id) == before
    assert list(sink.effects().values()) == [Effect(accepted=1, refused=1)]


async def fetch_sink_closed(sink: Sink) -> None:
    """Close all gates again."""
    await fetch(sink.dsn, "delete from gate")


async def test_a_run_that_comes_back_to_a_worker_is_replayed_from_what_another_one_made_of_it(
    scene: Scene, code_process: StartCodeWorker, sink: Sink
) -> None:
    """Row 55: the worker's Advance is LEASE_LOST, on the stream on which it had the lease; what it has in memory is
    ahead of the history, and wrong.
    """
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    worker = code_process(server.grpc_address, name="worker", workflow_slots=1)
    await until_printed(worker, "connected")
    run_id = (await api.start("held", '["one", "two", "three"]')).run_id
    await until_printed(worker, "begun")
    # Its local step ends, and its Advance is sent, before it can be told that the lease is gone.
    worker.pause()
    sink.open("one")
    await expire_all(scene.dsn)
    hand = await decider(scene, server.grpc_address, workflows=[HELD])
    await fetch(scene.dsn, _HURRY)
    run = held(hand, await hand.task())
    assert run.task.task.run_id == run_id
    assert (await run.advance(local(1, "by hand", "hold"), outcome=CONTINUE)).outcome == OK
    assert (await run.advance(signal(2, "go"))).outcome == OK
    worker.resume()
    await until_printed(worker, "acted")
    await go(api, run_id)
    run = held(hand, await hand.task())
    assert (await run.advance(local(3, "by hand", "hold"), outcome=CONTINUE, taken_signals=[run.seq])).outcome == OK
    assert (await run.advance(signal(4, "go"))).outcome == OK
    before = await api.history(run_id)
    await hand.close()
    await eventually(lambda: server.app.engine.dispatcher.session(hand.sessions[0]) is None)
    sink.open("three")
    await go(api, run_id)
    ended = await api.wait(run_id)
    assert json.loads(ended.output.json) == ["by hand", "by hand", "worker"]
    assert (await api.history(run_id))[: len(before)] == before
    called = [event for event in worker.events("called") if event["run_id"] == run_id]
    assert len(called) == 2, "called anew, for the history"
    assert await asyncio.to_thread(worker.terminate) == 0
    assert worker.events("ended")[0]["lost"] == 1


async def go(api: Api, run_id: str) -> None:
    request = run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go")
    await api.runs.SignalRun(request, timeout=DEADLINE)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same-server", "another-server"])
@pytest.mark.parametrize("hole", ["up", "down"])
async def test_advances_that_or_whose_answers_were_lost_count_once_when_they_come_again(
    scene: Scene, hole: str, elsewhere: bool
) -> None:
    """Rows 5 and 49: the connection breaks before they arrive, or after the commit; the same process comes back."""
    first = await scene.serve(**STAYING)
    second = await scene.serve(**STAYING) if elsewhere else first
    proxy, api = scene.proxy(first.grpc_address), scene.api(second.grpc_address)
    await api.register(MANIFEST)
    worker = await decider(scene, proxy.address)
    for _ in range(4):
        await api.start("code")
    going, waiting, ending, failing = [held(worker, task) for task in await worker.tasks(4)]
    items = [
        going.item(local(1, "x"), timer(2, 3600), call(3, "a", undo={"step": "u"}), outcome=CONTINUE),
        waiting.item(signal(1, "go"), outcome=WAIT),
        ending.item(outcome=COMPLETE, output=payload("done")),
        failing.item(outcome=FAIL, failure=failure("BROKEN")),
    ]
    run_ids = [item.task.run_id for item in items]

    async def state() -> list[Any]:
        return [await api.history(run_id) for run_id in run_ids]

    before = await state()

    async def recorded() -> bool:
        return all(now != then for now, then in zip(await state(), before, strict=True))

    proxy.blackhole("up" if hole == "up" else "down")
    await worker.send(pb.Advance(items=items))
    if hole == "down":
        await eventually(recorded)
    proxy.reset()
    proxy.heal()
    await worker.ended()
    again = await scene.raw(
        second.grpc_address, handlers=(), capacity=0, process_nonce=worker.hello().process_nonce, hello=False
    )
    claimed = [item.task for item in items]
    hello = again.hello(previous_session_ids=worker.sessions, held=claimed, workflows=[CODE], workflow_capacity=0)
    await again.send(hello)
    kept = [result.kept for result in (await again.next(pb.Welcome)).held]
    assert kept == ([True] * 4 if hole == "up" else [True, False, False, False])
    between = await state()
    assert (between == before) is (hole == "up")
    wanted = OK if hole == "up" else ALREADY_DONE
    assert [result.outcome for result in await send(again, *items)] == [wanted] * 4
    after = await state()
    assert [result.outcome for result in await send(again, *items)] == [ALREADY_DONE] * 4
    assert await state() == after
    if hole == "down":
        assert after == between
    assert [kinds(events)[1:] for events in after] == [
        ["local_step_ended", "timer_started", "step_scheduled"], ["signal_awaited"], ["run_completed"], ["run_failed"],
    ]  # fmt: skip
    going.advance_no, going.seq, going.worker = 1, 4, again
    assert (await going.advance(local(4), outcome=CONTINUE)).outcome == OK
