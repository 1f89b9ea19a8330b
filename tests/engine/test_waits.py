"""Sleeps, signals and the waits for them, delayed starts (semantics: signals, timers)."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import grpc
import pytest

from fencepost.v1 import run_pb2
from tests.engine.flows import OpenScene, Scene, given, step, workflow
from tests.engine.rows import count
from tests.fixtures.raw_worker import seconds
from tests.fixtures.refusals import refused

ASK = {"id": "ask", "wait_signal": "go"}


def ask(node_id: str, signal: str = "go", **more: object) -> dict[str, object]:
    """A wait for a signal."""
    return {"id": node_id, "wait_signal": signal, **more}


# Sleeps


async def test_a_sleep_takes_its_time_by_the_databases_clock_and_passes_its_input_on(scene: Scene) -> None:
    run_id = await scene.run(step("a"), {"id": "nap", "sleep": "300ms"}, step("b"))
    await scene.do("a", output=[1])
    assert (await scene.until(run_id, "WAITING", "RUNNING")).state
    b = await scene.task("b")
    assert given(b) == [1]
    [started], [fired] = await scene.events(run_id, "timer_started"), await scene.events(run_id, "timer_fired")
    assert started.node_id == fired.node_id == "nap"
    times = {event.seq: event.event_time.ToDatetime() for event in await scene.api.history(run_id)}
    began = await scene.seq_of(run_id, "timer_started", "nap")
    ended = await scene.seq_of(run_id, "timer_fired", "nap")
    assert timedelta(seconds=0.3) <= times[ended] - times[began] < timedelta(seconds=15)
    await scene.complete(b)
    await scene.output(run_id)


async def test_a_run_that_only_waits_is_waiting_and_says_for_what(scene: Scene) -> None:
    fork = {"id": "both", "parallel": [[{"id": "nap", "sleep": "1d"}], [ask("ask")], [step("a")]]}
    run_id = await scene.run(fork)
    assert await scene.state(run_id) == "PENDING"
    await scene.do("a")
    run = await scene.until(run_id, "WAITING")
    assert {wait.node_id: wait.WhichOneof("kind") for wait in run.open_waits} == {
        "nap": "fire_time",
        "ask": "signal_name",
    }
    await scene.signal(run_id)
    assert [wait.node_id for wait in (await scene.until(run_id, "WAITING")).open_waits] == ["nap"]
    await scene.hurry(run_id, "SLEEP")
    await scene.output(run_id)
    assert await count(scene.dsn, "timer") == await count(scene.dsn, "wait") == 0


# Signals


async def test_a_wait_that_is_open_takes_a_signal_at_once_and_gives_its_payload(scene: Scene) -> None:
    run_id = await scene.run(ASK, step("a"))
    await scene.until(run_id, "WAITING")
    seq = await scene.signal(run_id, data={"ok": True})
    a = await scene.task("a")
    assert given(a) == {"ok": True}
    [taken] = await scene.events(run_id, "signal_taken")
    assert taken.signal_seq == seq
    assert taken.wait_seq == await scene.seq_of(run_id, "signal_awaited", "ask")


async def test_a_signal_that_comes_before_its_wait_is_kept_for_it(scene: Scene) -> None:
    run_id = await scene.run(step("a"), ASK, step("b"))
    seq = await scene.signal(run_id, data="early")
    assert (await scene.kinds(run_id))[-1] == "signal_received"
    assert await scene.state(run_id) == "PENDING"
    await scene.do("a")
    b = await scene.task("b")
    assert given(b) == "early"
    [taken] = await scene.events(run_id, "signal_taken")
    assert taken.signal_seq == seq
    assert await count(scene.dsn, "signal") == 0


async def test_waits_take_signals_of_their_name_in_order_each_once(scene: Scene) -> None:
    waits = [[ask(f"w{n}"), step("abc"[n])] for n in range(3)]
    run_id = await scene.run({"id": "all", "parallel": [*waits, [ask("other", "else"), step("d")]]})
    for n in range(2):
        await scene.signal(run_id, data=n)
    assert [given(task) for task in await scene.tasks("a", "b")] == [0, 1]
    await scene.no_task()
    await scene.signal(run_id, "else", "x")
    await scene.signal(run_id, data=2)
    c, d = await scene.tasks("c", "d")
    assert (given(c), given(d)) == (2, "x")
    for _ in range(2):
        await scene.signal(run_id)
    assert await count(scene.dsn, "signal") == 2


async def test_a_sequence_of_waits_takes_what_was_queued_in_order(scene: Scene) -> None:
    run_id = await scene.run(step("a"), ask("w1"), ask("w2"), ask("w3"))
    for n in range(5):
        await scene.signal(run_id, data=n)
    await scene.do("a")
    assert await scene.output(run_id) == 2
    taken = [event.signal_seq for event in await scene.events(run_id, "signal_taken")]
    assert taken == sorted(taken)
    assert len(taken) == 3


async def test_a_wait_that_times_out_fails_the_run_and_takes_nothing_any_more(scene: Scene) -> None:
    run_id = await scene.run(ask("ask", timeout="1d"), step("a"))
    await scene.hurry(run_id, "SIGNAL_TIMEOUT")
    failure = await scene.failure(run_id)
    assert (failure.code, failure.node_id, failure.kind) == (
        "SIGNAL_TIMEOUT",
        "ask",
        run_pb2.FAILURE_KIND_PERMANENT,
    )
    [fired] = await scene.events(run_id, "timer_fired")
    assert fired.node_id == "ask"
    with refused("ILLEGAL_TRANSITION", grpc.StatusCode.FAILED_PRECONDITION) as refusal:
        await scene.signal(run_id)
    assert refusal.error.metadata == {"state": "FAILED", "event": "SIGNAL"}


async def test_a_wait_that_was_signalled_does_not_time_out(scene: Scene) -> None:
    run_id = await scene.run(ask("ask", timeout="1d"), step("a"))
    await scene.until(run_id, "WAITING")
    await scene.signal(run_id)
    await scene.task("a")
    assert await count(scene.dsn, "timer") == 0


async def test_a_signal_and_its_waits_timeout_that_race_have_one_winner(scene: Scene) -> None:
    """Row 6 of the field's failures."""
    await scene.api.register(workflow(ask("ask", timeout="1d")))
    runs = [await scene.start() for _ in range(20)]
    for run_id in runs:
        await scene.hurry(run_id, "SIGNAL_TIMEOUT")

    async def send(run_id: str) -> bool:
        try:
            await scene.signal(run_id)
        except grpc.aio.AioRpcError:
            return False
        return True

    sent = await asyncio.gather(*(send(run_id) for run_id in runs))
    for run_id, was_sent in zip(runs, sent, strict=True):
        run = await scene.api.wait(run_id)
        events = await scene.kinds(run_id)
        assert events.count("signal_taken") + events.count("timer_fired") == 1
        assert (run.state == run_pb2.RUN_STATE_COMPLETED) == ("signal_taken" in events)
        assert was_sent or "timer_fired" in events


async def test_many_signals_at_once_from_two_servers_against_many_waits_lose_none(
    open_scene: OpenScene,
) -> None:
    """Row 6 of the field's failures: none hangs, each is taken once, in the order of their numbers."""
    scene, other = await open_scene(), await open_scene()
    run_id = await scene.run(*(ask(f"w{n}") for n in range(40)))
    sent = await asyncio.gather(
        *((scene if n % 2 else other).signal(run_id, data=n) for n in range(40)),
    )
    await scene.output(run_id)
    taken = [event.signal_seq for event in await scene.events(run_id, "signal_taken")]
    assert taken == sorted(sent)


async def test_a_signals_payload_has_to_fit_the_schema_of_the_waits_for_it(scene: Scene) -> None:
    run_id = await scene.run(ask("ask", output_schema={"type": "integer"}))
    with refused("INPUT_SCHEMA_MISMATCH", grpc.StatusCode.INVALID_ARGUMENT):
        await scene.signal(run_id, data="x")
    assert "signal_received" not in await scene.kinds(run_id)
    await scene.signal(run_id, data=5)
    assert await scene.output(run_id) == 5


async def test_a_repeat_of_an_accepted_signal_has_its_first_answer_whatever_became_of_the_run(scene: Scene) -> None:
    run_id = await scene.run(ASK)
    seq = await scene.signal(run_id, data=1, request_id="r")
    await scene.output(run_id)
    assert await scene.signal(run_id, data=1, request_id="r") == seq
    with refused("REQUEST_ID_CONFLICT"):
        await scene.signal(run_id, data=2, request_id="r")
    [received] = await scene.events(run_id, "signal_received")
    assert received.request_id == "r"


async def test_a_run_holds_no_more_signals_than_the_limit(open_scene: OpenScene) -> None:
    """I12."""
    scene = await open_scene(max_pending_signals=2)
    run_id = await scene.run(step("a"), ASK, ask("again"))
    for n in range(2):
        await scene.signal(run_id, data=n)
    with refused("TOO_MANY_SIGNALS"):
        await scene.signal(run_id)
    await scene.do("a")
    assert await scene.output(run_id) == 1


async def test_a_signal_while_a_run_ends_is_recorded_and_no_more(scene: Scene) -> None:
    run_id = await scene.run({"id": "both", "parallel": [[ASK], [step("a")]]})
    a = await scene.task("a")
    await scene.call("Cancel", run_id)
    assert await scene.state(run_id) == "ENDING"
    await scene.signal(run_id)
    assert (await scene.kinds(run_id))[-1] == "signal_received"
    await scene.complete(a)
    await scene.failure(run_id, "CANCELLED")
    assert "signal_taken" not in await scene.kinds(run_id)
    assert await count(scene.dsn, "signal") == 0


# Delayed starts


async def test_a_start_delay_passes_before_the_first_node_begins(scene: Scene) -> None:
    run_id = await scene.run(step("a"), start_delay=seconds(3600))
    assert await scene.state(run_id) == "WAITING"
    await scene.no_task()
    assert await scene.kinds(run_id) == ["run_started", "timer_started"]
    await scene.hurry(run_id, "START_DELAY")
    a = await scene.task("a")
    assert await scene.state(run_id) == "PENDING"
    await scene.complete(a)
    await scene.output(run_id)
    assert (await scene.kinds(run_id))[2:4] == ["timer_fired", "step_scheduled"]


async def test_a_start_that_is_delayed_a_little_begins_by_itself(scene: Scene) -> None:
    await scene.run(step("a"), start_delay=seconds(0.2))
    await scene.task("a")


@pytest.mark.parametrize("call", ["Cancel", "Terminate"])
async def test_a_run_that_has_not_begun_ends_at_once(scene: Scene, call: str) -> None:
    run_id = await scene.run(step("a", undo=True), start_delay=seconds(3600))
    await scene.call(call, run_id)
    assert await scene.state(run_id) in ("CANCELLED", "TERMINATED")
    assert await count(scene.dsn, "timer") == 0


async def test_a_signal_may_come_before_a_delayed_start(scene: Scene) -> None:
    run_id = await scene.run(ASK, start_delay=seconds(3600))
    await scene.signal(run_id, data=7)
    await scene.hurry(run_id, "START_DELAY")
    assert await scene.output(run_id) == 7
