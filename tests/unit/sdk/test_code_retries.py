"""Code runs that had failed and go on: what the function is told anew, and what it is not told any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fencepost import PermanentError, SignalTimeout, StepFailed, TaskGroup, Workflow, WorkflowContext, workflow
from fencepost.v1 import run_pb2
from tests.unit.sdk.replaying import (
    CONTINUE,
    FAIL,
    PERMANENT,
    Decider,
    Story,
    decided,
    output_of,
    replayed,
    result_of,
)


class Broken:
    """A step that does not work until it is mended."""

    def __init__(self) -> None:
        self.works = False
        self.calls: list[str] = []

    def step(self, name: str) -> Callable[[], str]:
        def done() -> str:
            self.calls.append(name)
            if name == "bad" and not self.works:
                raise PermanentError("not yet", code="BROKEN")
            return name

        done.__name__ = name
        return done


def retried(decider: Decider, flow: Workflow[..., Any] | None = None) -> Decider:
    """A worker that gets the run after its RetryRun."""
    decider.story.retry()
    again = Decider(flow or decider.workflow, decider.story)
    again.go()
    return again


def test_a_local_step_that_failed_is_run_again_and_what_was_done_before_is_not() -> None:
    broken = Broken()

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> list[str]:
        return [await ctx.run(broken.step(name)) for name in ("a", "bad", "b")]

    decider = decided(flow)
    assert (decider.story.outcome, decider.last.failed_seq) == (FAIL, 3)
    broken.works = True
    again = retried(decider)
    assert output_of(again) == ["a", "bad", "b"]
    assert broken.calls == ["a", "bad", "bad", "b"]
    replayed(flow, again.story)


def test_a_remote_step_that_failed_has_another_result_under_its_op() -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> list[str]:
        return [await ctx.call("a"), await ctx.call("b")]

    decider = decided(flow)
    step = decider.story.first("step")
    decider.story.fail(step, "BAD")
    decider.go()
    assert (decider.story.outcome, decider.last.failed_seq) == (FAIL, 3)
    again = retried(decider)
    assert again.last.outcome != FAIL
    again.story.complete(step, "a")
    again.go()
    again.story.complete(again.story.first("step"), "b")
    again.go()
    assert output_of(again) == ["a", "b"]
    replayed(flow, again.story)


def test_what_was_stopped_with_the_run_goes_on_with_it() -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> list[Any]:
        return list(await asyncio.gather(ctx.call("a"), ctx.call("b"), ctx.signal("s"), ctx.sleep(9)))

    decider = decided(flow)
    a, b = (seq for seq, kind in decider.story.open.items() if kind == "step")
    decider.story.fail(a, "BAD")
    decider.go()
    assert decider.story.outcome == FAIL
    again = retried(decider)
    assert not again.run.cancelled
    again.story.complete(b, "b")
    again.story.signal("s", "s")
    again.story.fire(again.story.first("timer"))
    again.story.complete(a, "a")
    again.go()
    assert output_of(again) == ["a", "b", "s", None]
    replayed(flow, again.story)


def test_a_retry_may_fail_and_be_retried_again() -> None:
    broken = Broken()

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> str:
        return await ctx.run(broken.step("bad"))

    decider = decided(flow)
    for _ in range(3):
        decider = retried(decider)
        assert decider.story.outcome == FAIL
    broken.works = True
    again = retried(decider)
    assert output_of(again) == "bad"
    replayed(flow, again.story)


def test_a_bug_is_mended_by_other_code() -> None:
    broken = Broken()

    def flow(divisor: int) -> Workflow[..., Any]:
        @workflow("w", compatibility_id="1")
        async def function(ctx: WorkflowContext) -> list[str]:
            done = [await ctx.run(broken.step("a"))]
            _ = 1 // divisor
            return [*done, await ctx.run(broken.step("b"))]

        return function

    decider = decided(flow(0))
    assert decider.story.failure is not None
    assert (decider.story.failure.code, decider.last.failed_seq) == ("ZeroDivisionError", 0)
    again = retried(decider, flow(1))
    assert output_of(again) == ["a", "b"]
    assert broken.calls == ["a", "b"]


def test_steps_that_ended_while_the_function_had_failed_count_and_leave_the_retry_possible() -> None:
    """One branch fails, the others go on: what they did is recorded, but the function has decided nothing on it."""
    broken = Broken()

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> list[str]:
        return list(await asyncio.gather(ctx.run(broken.step("bad")), ctx.run(broken.step("slow"))))

    decider = Decider(flow, Story())
    bad, slow = decider.run.local_steps()
    decider.run.local_ended(bad.op, result_of(bad), 1)
    assert decider.step()
    decider.run.local_ended(slow.op, result_of(slow), 1)
    decider.go()
    record = decider.sent[-2]
    assert (record.outcome, len(record.commands)) == (CONTINUE, 1)
    assert (decider.last.outcome, decider.last.commands) == (FAIL, [])
    assert decider.story.seen_seq < decider.last.failed_seq == 2
    broken.works = True
    again = retried(decider)
    assert output_of(again) == ["bad", "slow"]
    assert again.ran == ["bad"]
    replayed(flow, again.story)


def test_a_branch_that_is_stopped_by_the_failure_of_another_is_open_again_after_a_retry() -> None:
    broken = Broken()

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> str:
        async def charge() -> str:
            return await ctx.call("charge", type=str)

        async with TaskGroup() as group:
            charged = group.create_task(charge())
            await ctx.sleep(1)
            await ctx.run(broken.step("bad"))
        return charged.result()

    decider = decided(flow)
    decider.story.fire(decider.story.first("timer"))
    decider.go()
    assert (decider.story.outcome, decider.last.commands) == (FAIL, [])
    broken.works = True
    again = retried(decider)
    again.story.complete(again.story.first("step"), "charged")
    again.go()
    assert output_of(again) == "charged"
    replayed(flow, again.story)


def test_labels_that_a_failing_function_gives_are_recorded_before_it_fails() -> None:
    broken = Broken()

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> None:
        _ = ctx.call("never.sent")
        ctx.set_attributes({"state": "broken"})
        raise ValueError("a bug")

    decider = decided(flow)
    assert [decision.outcome for decision in decider.sent] == [CONTINUE, FAIL]
    assert decider.story.kinds == ["run_started", "attributes_set"]
    assert broken.calls == []
    replayed(flow, decider.story)


def test_signals_that_a_failing_function_took_are_taken_by_its_retry() -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> str:
        word = await ctx.signal("s", type=str, timeout=9)
        if word == "x":
            await ctx.call("a")
        return word

    decider = decided(flow)
    decider.story.signal("s", "x")
    decider.go()
    decider.story.fail(decider.story.first("step"), "BAD")
    decider.go()
    again = retried(decider)
    again.story.complete(again.story.first("step"))
    again.go()
    assert output_of(again) == "x"


Raise = Callable[[WorkflowContext], Any]


async def bare(ctx: WorkflowContext) -> None:
    await ctx.call("a")


async def as_cause(ctx: WorkflowContext) -> None:
    try:
        await ctx.call("a")
    except StepFailed as error:
        raise PermanentError("it matters") from error


async def in_a_group(ctx: WorkflowContext) -> None:
    async with TaskGroup() as group:
        group.create_task(as_cause(ctx))


async def while_handling_it(ctx: WorkflowContext) -> None:
    try:
        await ctx.call("a")
    except StepFailed:
        raise ValueError("a decision of the function's own")  # noqa: B904 - that it has no cause is the point


@pytest.mark.parametrize(
    ("how", "named"), [(bare, 3), (as_cause, 3), (in_a_group, 3), (while_handling_it, 0)], ids=lambda how: str(how)[:20]
)
def test_the_failure_that_is_let_through_is_named(how: Raise, named: int) -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> None:
        await how(ctx)

    decider = decided(flow)
    decider.story.fail(2, "BAD")
    decider.go()
    assert (decider.last.outcome, decider.last.failed_seq) == (FAIL, named)


def test_of_a_child_the_failure_is_named_of_a_signal_that_did_not_come_nothing() -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> None:
        try:
            await ctx.signal("s", timeout=1)
        except SignalTimeout:
            await ctx.child("c")

    decider = decided(flow)
    decider.story.fire(decider.story.first("wait"))
    decider.go()
    decider.story.end_child(decider.story.first("child"), failure=run_pb2.Failure(kind=PERMANENT, code="X"))
    decider.go()
    assert decider.last.failed_seq == decider.story.last_seq

    @workflow("w", compatibility_id="1")
    async def impatient(ctx: WorkflowContext) -> None:
        await ctx.signal("s", timeout=1)

    decider = decided(impatient)
    decider.story.fire(decider.story.first("wait"))
    decider.go()
    assert (decider.last.outcome, decider.last.failed_seq) == (FAIL, 0)


def test_a_run_that_was_blocked_while_it_ended_goes_on_to_end() -> None:
    """Its RunRetried is none of a failure: the cancellation stands."""

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> None:
        await ctx.sleep(9)

    decider = decided(flow)
    decider.story.cancel()
    decider.story.history.append(run_pb2.Event(seq=decider.story.last_seq + 1, run_retried=run_pb2.RunRetried()))
    assert replayed(flow, decider.story).cancelled


def test_what_the_function_did_on_the_failure_counts_as_decided_also_if_it_is_sent_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the server refuses to retry the run."""
    monkeypatch.setattr("fencepost.decisions._MAX_COMMANDS", 1)
    broken = Broken()

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> None:
        try:
            await ctx.run(broken.step("bad"))
        except StepFailed:
            first, _ = ctx.run(broken.step("first")), ctx.run(broken.step("second"))
            await first
            raise

    decider = decided(flow)
    assert decider.story.outcome == FAIL
    assert 2 == decider.last.failed_seq <= decider.story.seen_seq
