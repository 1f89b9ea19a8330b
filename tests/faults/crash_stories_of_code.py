"""Stories with a crash in them, of code runs: how they start, what Advances do, what wakes them; see crash_stories."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.engine.operations import CommandKind, MessageKind, ReportKind
from tests.engine.code import CONTINUE, Held, call, cancel, child, local, payload, signal, timer
from tests.engine.flows import OPERATIONAL, PERMANENT, step, workflow
from tests.faults.crash_stories import COMPLETES, FAILS
from tests.faults.crashing import commands, delivers, fires, reports, starts
from tests.faults.crashing_code import ROOM, CodeStage, advances

CodeStory = Callable[[CodeStage], Awaitable[None]]
CODE_STORIES: list[CodeStory] = []

UNDO: dict[str, Any] = {"undo": {"step": "undo-a"}}
HOUR = 3600.0


def story(told: CodeStory) -> CodeStory:
    """One of the stories of code runs with a crash in it."""
    CODE_STORIES.append(told)
    return told


def failed(op: int, name: str = "f") -> pb.Command:
    """A local step that has failed for good."""
    failure = run_pb2.Failure(kind=PERMANENT, code="BROKEN", message="told to")
    return pb.Command(op=op, record_local_step=pb.RecordLocalStep(name=name, failure=failure, attempts=3))


def id_of(run: Held) -> str:
    """The run."""
    return run.task.task.run_id


async def nudge(s: CodeStage, run_id: str, name: str = "nudge", data: Any = None) -> None:
    """A signal."""
    await s.signal(run_id, name, data, request_id=f"{name}{run_id}")


async def awake(s: CodeStage, run: Held, kind: str) -> Held:
    """The run when it has come to its worker again, with an event of that kind."""
    run = await s.take(run)
    assert kind in run.kinds(), run.kinds()
    return run


# Beginnings


@story
async def start_of_a_code_run(s: CodeStage) -> None:
    async with s.cut(starts):
        await s.start(1, "code")
    await s.end(await s.take(), 1)


@story
async def claim_of_a_run(s: CodeStage) -> None:
    await s.room(0)
    await s.start(1, "code")
    async with s.cut_claim():
        await s.room(ROOM)
    await s.end(await s.take(), 1)


@story
async def claim_of_a_run_that_goes_on(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), call(2, "a"), outcome=CONTINUE)
    await s.advance(run)
    await s.room(0)
    await s.do("a", output="A")
    async with s.cut_claim():
        await s.room(ROOM)
    await s.end(await awake(s, run, "step_completed"))


@story
async def release_of_a_run(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    async with s.cut(reports(ReportKind.RELEASE)):
        assert await s.give_back(run)
    await s.end(run)


@story
async def failed_attempt_to_decide(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    async with s.cut(FAILS):
        await s.fail(run.task, OPERATIONAL, code="DEADLOCK", retry_after=0.01)
    again = await s.take(run, attempt=2)
    assert again.advance_no == 1
    await s.advance(again, local(2, "b"), outcome=CONTINUE)
    await s.end(again)


@story
async def expiry_of_a_run_that_is_decided(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    async with s.cut(reports(ReportKind.EXPIRE)):
        await s.expire(run.task)
    await s.hurry_retry(id_of(run))
    again = await s.take(run, attempt=2)
    await s.powerless(run)
    await s.end(again)


# Advances that go on


@story
async def local_step(s: CodeStage) -> None:
    """By the short way of engine.local_steps, for it is not the first Advance."""
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    async with s.cut(advances):
        assert await s.advance(run, local(2, "b"), outcome=CONTINUE)
    await s.advance(run, local(3, "c"), outcome=CONTINUE)
    await s.end(run)


@story
async def first_local_steps(s: CodeStage) -> None:
    run = await s.begin()
    async with s.cut(advances):
        assert await s.advance(run, local(1, "a"), failed(2), local(3, "c"), outcome=CONTINUE)
    await s.advance(run, local(4, "d"), outcome=CONTINUE)
    await s.end(run)


@story
async def local_step_with_an_undo(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    undone = local(2, "out", "charge", options=json.dumps(UNDO), input=payload("in"))
    async with s.cut(advances):
        assert await s.advance(run, undone, outcome=CONTINUE)
    await s.raises(run)
    await s.do("undo-a")


@story
async def local_step_while_a_signal_comes(s: CodeStage) -> None:
    run = await s.begin(signal(1, "nudge"), outcome=CONTINUE)
    await nudge(s, id_of(run), data=1)
    async with s.cut(advances):
        assert await s.advance(run, local(2, "a"), outcome=CONTINUE)
    assert "signal_received" in run.kinds()
    taken = [await s.seq(run, "signal_received")]
    await s.advance(
        run, local(3, "b"), outcome=CONTINUE, taken_signals=taken, ended_waits=[await s.seq(run, "signal_awaited")]
    )
    await s.end(run)


@story
async def signal_that_is_taken(s: CodeStage) -> None:
    run = await s.begin(signal(1, "nudge", HOUR))
    await nudge(s, id_of(run), data=1)
    run = await awake(s, run, "signal_received")
    numbers = [await s.seq(run, kind) for kind in ("signal_received", "signal_awaited")]
    async with s.cut(advances):
        assert await s.advance(run, taken_signals=numbers[:1], ended_waits=numbers[1:], outcome=CONTINUE)
    await s.end(run)


@story
async def labels_and_patch(s: CodeStage) -> None:
    run = await s.begin(attributes={"who": "me", "where": "here"})
    labels = pb.SetAttributes(attributes={"who": "you", "where": "", "new": "1"})
    patch = pb.Command(mark_patch=pb.MarkPatch(patch_id="p"))
    async with s.cut(advances):
        assert await s.advance(run, pb.Command(op=1, set_attributes=labels), patch, local(2, "a"), outcome=CONTINUE)
    assert dict((await s.api.get(id_of(run))).attributes) == {"who": "you", "new": "1"}
    await s.end(run)


@story
async def cancellation_of_everything(s: CodeStage) -> None:
    await s.api.register(workflow(step("g"), workflow_id="kid"))
    run = await s.begin(
        call(1, "a"), call(2, "a"), timer(3, HOUR), signal(4, "go", HOUR), child(5, "kid"), outcome=CONTINUE
    )
    a = await s.tasks("a", "a", "g")
    kinds = ("step_scheduled", "timer_started", "signal_awaited", "child_scheduled")
    step_, timer_, wait, kid = [await s.seq(run, kind) for kind in kinds]
    async with s.cut(advances):
        assert await s.advance(
            run, cancel(2, step_), cancel(3, timer_), cancel(4, wait), cancel(5, kid), call(6, "b"), cancel(6),
            outcome=CONTINUE,
        )  # fmt: skip
    first, second = sorted(a[:2], key=lambda task: task.task.task_id)
    await s.lost(second)
    await s.until_told(a[2].task.run_id, "run_ending")
    await s.complete(a[2])
    await s.until_told(id_of(run), "child_ended")
    await s.complete(first, "A")
    await s.advance(run)
    await s.end(run)


# Advances that wait


@story
async def wait_for_a_step(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    async with s.cut(advances):
        assert not await s.advance(run, call(2, "a", "in"))
    await s.do("a", output="out")
    await s.end(await awake(s, run, "step_completed"))


@story
async def wait_for_a_time(s: CodeStage) -> None:
    run = await s.begin()
    async with s.cut(advances):
        assert not await s.advance(run, timer(1, HOUR))
    await s.hurry(id_of(run), "SLEEP")
    await s.end(await awake(s, run, "timer_fired"))


@story
async def wait_for_a_signal(s: CodeStage) -> None:
    run = await s.begin()
    async with s.cut(advances):
        assert not await s.advance(run, signal(1, "nudge", HOUR))
    await nudge(s, id_of(run))
    run = await awake(s, run, "signal_received")
    taken, ended = await s.seq(run, "signal_received"), await s.seq(run, "signal_awaited")
    await s.end(run, taken_signals=[taken], ended_waits=[ended])


@story
async def wait_for_a_child(s: CodeStage) -> None:
    await s.api.register(workflow(step("g"), workflow_id="kid"))
    run = await s.begin()
    async with s.cut(advances):
        assert not await s.advance(run, child(1, "kid", "in"))
    await s.do("g", output="kid's")
    await s.end(await awake(s, run, "child_ended"))


@story
async def wait_without_commands(s: CodeStage) -> None:
    run = await s.begin(timer(1, HOUR), outcome=CONTINUE)
    async with s.cut(advances):
        assert not await s.advance(run)
    await s.hurry(id_of(run), "SLEEP")
    await s.end(await awake(s, run, "timer_fired"))


@story
async def wait_that_has_not_seen_everything(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    await nudge(s, id_of(run))
    async with s.cut(advances):
        assert await s.advance(run, signal(2, "nudge"))
    assert "signal_received" in run.kinds()
    taken, ended = await s.seq(run, "signal_received"), await s.seq(run, "signal_awaited")
    await s.end(run, taken_signals=[taken], ended_waits=[ended])


@story
async def wait_of_a_paused_run(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    await s.call("Pause", id_of(run))
    async with s.cut(advances):
        assert not await s.advance(run, local(2, "b"), outcome=CONTINUE)
    await s.call("Resume", id_of(run))
    await s.end(await s.take(run))


# What wakes a run: leased in the same commit to the worker that decided last


@story
async def completion_that_wakes(s: CodeStage) -> None:
    run = await s.begin(call(1, "a"))
    a = await s.task("a")
    async with s.cut(COMPLETES):
        await s.complete(a, "A")
    await s.end(await awake(s, run, "step_completed"))


@story
async def failure_that_wakes(s: CodeStage) -> None:
    run = await s.begin(call(1, "a"))
    a = await s.task("a")
    async with s.cut(FAILS):
        await s.fail(a)
    await s.end(await awake(s, run, "step_failed"))


@story
async def timer_that_wakes(s: CodeStage) -> None:
    run = await s.begin(timer(1, HOUR))
    async with s.cut(fires):
        await s.hurry(id_of(run), "SLEEP")
    await s.end(await awake(s, run, "timer_fired"))


@story
async def timeout_of_a_wait_that_wakes(s: CodeStage) -> None:
    run = await s.begin(signal(1, "go", HOUR))
    async with s.cut(fires):
        await s.hurry(id_of(run), "SIGNAL_TIMEOUT")
    await s.end(await awake(s, run, "timer_fired"))


@story
async def signal_that_wakes(s: CodeStage) -> None:
    run = await s.begin(signal(1, "nudge"))
    async with s.cut(commands(CommandKind.SIGNAL)):
        await nudge(s, id_of(run), data=[1])
    run = await awake(s, run, "signal_received")
    await s.end(run, taken_signals=[await s.seq(run, "signal_received")])


@story
async def signal_to_a_run_that_is_decided(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    async with s.cut(commands(CommandKind.SIGNAL)):
        await nudge(s, id_of(run), data=[1])
    assert await s.advance(run, local(2, "b"), outcome=CONTINUE)
    assert "signal_received" in run.kinds()
    await s.end(run, taken_signals=[await s.seq(run, "signal_received")])


@story
async def start_of_a_child_of_code(s: CodeStage) -> None:
    await s.api.register(workflow(step("g"), workflow_id="kid"))
    async with s.cut(delivers(MessageKind.START_CHILD)):
        run = await s.begin(child(1, "kid"))
    await s.do("g", output="kid's")
    await s.end(await awake(s, run, "child_ended"))


@story
async def child_that_wakes(s: CodeStage) -> None:
    await s.api.register(workflow(step("g"), workflow_id="kid"))
    run = await s.begin(child(1, "kid"))
    async with s.cut(delivers(MessageKind.CHILD_ENDED)):
        await s.do("g", output="kid's")
    await s.end(await awake(s, run, "child_ended"))


@story
async def child_of_code_that_wakes(s: CodeStage) -> None:
    run = await s.begin(child(1, "code"))
    kid = await s.take()
    async with s.cut(delivers(MessageKind.CHILD_ENDED)):
        await s.end(kid, "kid's")
    await s.end(await awake(s, run, "child_ended"))
