"""The end of a run is a cancellation of its function that can't be swallowed, and ops can be cancelled one by one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import fencepost
from fencepost import PermanentError, StepFailed, TaskGroup, WorkflowContext, workflow
from fencepost.workflow import Workflow
from tests.unit.sdk.replaying import COMPLETE, FAIL, Decider, Story, decided, output_of, replayed, result_of


def double(x: int) -> int:
    return 2 * x


def cancelled(function: Workflow[..., Any]) -> Decider:
    """A run that was begun, then cancelled, and has gone as far as it goes by itself."""
    decider = decided(function)
    decider.story.cancel()
    decider.go()
    return decider


def test_a_function_that_lets_the_cancellation_through_fails_with_its_reason() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        await ctx.sleep(60)

    decider = cancelled(function)
    assert decider.story.outcome == FAIL
    assert decider.story.failure is not None
    assert (decider.story.failure.code, decider.story.failure.message) == ("RUN_CANCELLED", "it was cancelled")
    # The server knows that what is open is over.
    assert decider.story.kinds == ["run_started", "timer_started", "run_ending"]


@pytest.mark.parametrize(
    "kind", ["run", "call", "sleep", "signal", "child", "asyncio", "queue", "gather", "group", "task"]
)
def test_whatever_the_function_awaits_is_cancelled(kind: str) -> None:
    async def awaiting(ctx: WorkflowContext) -> None:
        if kind == "group":
            async with TaskGroup() as group:
                group.create_task(asyncio.sleep(60))
                await ctx.sleep(60)
        elif kind == "queue":
            await asyncio.Queue[int]().get()
        elif kind == "gather":
            await asyncio.gather(ctx.sleep(60), ctx.call("charge"))
        elif kind == "task":
            await asyncio.create_task(asyncio.sleep(60))
        elif kind == "asyncio":
            await asyncio.sleep(60)
        elif kind == "run":
            await ctx.run(double, 1)
        elif kind in {"call", "child", "signal"}:
            await getattr(ctx, kind)("x")
        else:
            await ctx.sleep(60)

    seen: list[str] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        seen.clear()
        try:
            await awaiting(ctx)
        except asyncio.CancelledError:
            seen.append(f"cancelled {ctx.cancelled}")
            raise

    decider = Decider(function, Story())
    decider.run.decision()
    decider.evict()
    decider.story.cancel()
    decider.catch_up()
    assert seen == ["cancelled True"]
    assert decider.run.local_steps() == []
    decider.go()
    assert decider.story.outcome == FAIL
    replayed(function, decider.story)
    assert seen == ["cancelled True"]


def test_clean_up_works_in_a_shield_only() -> None:
    seen: list[str] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        seen.clear()
        try:
            await ctx.sleep(60)
        finally:
            try:
                await ctx.run(double, 1)
            except asyncio.CancelledError:
                seen.append("not outside")
            with ctx.shielded():
                seen.append(f"local {await ctx.run(double, 2)}")
                seen.append(f"remote {await ctx.call('release')}")
                await asyncio.sleep(5)
                seen.append("slept")
            seen.append("again outside")
            await ctx.signal("never")

    decider = cancelled(function)
    assert decider.ran == ["double"]
    decider.story.complete(decider.story.first("step"), "ok")
    decider.evict()
    decider.go()
    decider.story.fire(list(decider.story.open)[-1])
    decider.go()
    assert decider.story.outcome == FAIL
    first = list(seen)
    assert first == ["not outside", "local 4", "remote ok", "slept", "again outside"]
    replayed(function, decider.story)
    assert seen == first


def test_tasks_in_the_background_begin_nothing_outside_of_a_shield() -> None:
    async def once(ctx: WorkflowContext) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.sleep(60)
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.call("charge")

    @workflow("w", compatibility_id="1")
    async def patient(ctx: WorkflowContext) -> Any:
        task = asyncio.create_task(once(ctx))
        with ctx.shielded():
            await ctx.signal("done")
            await task

    decider = cancelled(patient)
    decider.story.signal("done")
    decider.go()
    assert decider.story.outcome == COMPLETE
    assert "step_scheduled" not in decider.story.kinds


def test_what_is_in_a_shield_already_goes_on() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> Any:
        with ctx.shielded():
            result = await ctx.call("charge")
        try:
            await ctx.sleep(1)
        except asyncio.CancelledError:
            return ["late", result]

    decider = cancelled(function)
    assert not decider.story.outcome
    decider.story.complete(decider.story.first("step"), 3)
    decider.go()
    assert output_of(decider) == ["late", 3]


def test_a_shield_covers_the_tasks_that_are_begun_in_it() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> Any:
        try:
            await ctx.sleep(60)
        except asyncio.CancelledError:
            with ctx.shielded():
                async with TaskGroup() as group:
                    tasks = [group.create_task(work(ctx, number)) for number in range(3)]
            return [task.result() for task in tasks]

    async def work(ctx: WorkflowContext, number: int) -> int:
        return await ctx.run(double, number)

    assert output_of(cancelled(function)) == [0, 2, 4]


def test_a_step_that_the_server_stopped_is_told_in_a_shield() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> str:
        with ctx.shielded():
            try:
                await ctx.call("charge")
            except StepFailed as error:
                return error.code
        return "never"

    decider = cancelled(function)
    event = decider.story._event()
    event.step_cancelled.task_id = decider.story.first("step")
    decider.go()
    assert output_of(decider) == "StepCancelled"


def test_a_swallowed_cancellation_comes_again_at_the_next_await() -> None:
    seen: list[int] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> str:
        seen.clear()
        for number in range(5):
            with contextlib.suppress(asyncio.CancelledError):
                await (ctx.sleep(60) if number % 2 else asyncio.Event().wait())
                seen.append(-number)
            seen.append(number)
        return "as if nothing were"

    decider = cancelled(function)
    assert seen == [0, 1, 2, 3, 4]
    # That it completed decides nothing: the run ends as cancelled.
    assert decider.story.outcome == COMPLETE
    replayed(function, decider.story)


def test_a_function_that_goes_on_whatever_comes_is_ended() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    decider = cancelled(function)
    assert decider.story.failure is not None
    assert decider.story.failure.code == "CANCEL_IGNORED"


def test_results_that_came_in_the_same_batch_are_seen() -> None:
    seen: list[Any] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        seen.append(await ctx.run(double, 0))
        seen.append(await ctx.run(double, 1))

    decider = Decider(function, Story())
    [call] = decider.run.local_steps()
    decider.run.local_ended(call.op, result_of(call), 1)
    decision = decider.run.decision()
    assert decision is not None
    decider.story.cancel()
    decider.run.accepted(decider.story.advance(decision))
    decider.go()
    # The cancellation was numbered first; the result is in the history all the same, for its undo.
    assert decider.story.kinds == ["run_started", "run_ending", "local_step_ended"]
    assert seen == []
    replayed(function, decider.story)


def test_a_local_step_that_was_not_begun_never_runs_when_it_is_cancelled() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        handle = ctx.run(double, 1)
        handle.cancel()
        await ctx.sleep(1)

    decider = decided(function)
    assert decider.ran == []
    assert decider.story.kinds == ["run_started", "timer_started"]
    assert decider.story.history[1].timer_started.op == 2
    decider.evict()
    assert decider.run.local_steps() == []


def test_a_local_step_under_way_is_recorded_when_it_is_cancelled() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> str:
        try:
            async with asyncio.timeout(5):
                await ctx.run(double, 1, undo="halve")
        except TimeoutError:
            await ctx.sleep(1)
            return "too slow"
        return "in time"

    decider = Decider(function, Story())
    [call] = decider.run.local_steps()
    decider.step()
    decider.story.fire(decider.story.first("timer"))
    decider.catch_up()
    assert call.cancelled
    decider.run.local_ended(call.op, result_of(call), 1)
    decider.go()
    assert "local_step_ended" in decider.story.kinds
    decider.evict()
    decider.story.fire(decider.story.first("timer"))
    decider.go()
    assert output_of(decider) == "too slow"
    assert decider.ran == []


@pytest.mark.parametrize("ask", ["call", "child", "signal", "sleep"])
def test_cancelling_a_handle_or_who_awaits_it_stops_the_op(ask: str) -> None:
    def asked(ctx: WorkflowContext) -> fencepost.Handle[Any]:
        return ctx.sleep(60) if ask == "sleep" else getattr(ctx, ask)("x")

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        async def awaiting() -> None:
            await asked(ctx)

        handle, task = asked(ctx), asyncio.create_task(awaiting())
        await ctx.signal("go")
        handle.cancel()
        task.cancel()
        await ctx.signal("go")

    decider = decided(function)
    decider.story.signal("go")
    decider.go()
    stopped = [event.op_cancelled for event in decider.story.history if event.HasField("op_cancelled")]
    began = [event.seq for event in decider.story.history[1:4]]
    assert [(told.op, told.of_seq) for told in stopped] == [(1, began[0]), (3, began[2])]
    replayed(function, decider.story)


def test_an_op_that_is_cancelled_before_it_was_sent_leaves_nothing_but_its_number() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        ctx.call("charge").cancel()
        await ctx.sleep(1)

    story = decided(function).story
    assert story.kinds == ["run_started", "timer_started"]
    assert story.history[1].timer_started.op == 2
    replayed(function, story)


def test_an_op_that_another_worker_had_sent_before_it_was_cancelled_is_stopped_at_replay() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        charging = ctx.call("charge")
        await ctx.signal("go")
        charging.cancel()
        await ctx.signal("go")

    decider = Decider(function, Story())
    decision = decider.run.decision()
    assert decision is not None
    decider.story.signal("go")
    decider.story.advance(decision)
    # Its worker never got the answer. The signal has a lower number than the step.
    assert decider.story.kinds == ["run_started", "signal_received", "step_scheduled", "signal_awaited"]
    decider.evict()
    decider.go()
    assert sorted(decider.story.kinds[4:]) == ["op_cancelled", "signal_awaited"]
    assert decider.story.open == {}
    replayed(function, decider.story)


def test_a_result_that_overtook_its_cancellation_is_nobodys() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> str:
        charging = ctx.call("charge")
        await ctx.signal("go")
        charging.cancel()
        await ctx.sleep(1)
        return f"{charging.cancelled()}"

    decider = decided(function)
    decider.story.signal("go")
    decider.story.complete(decider.story.first("step"), 1)
    decider.go()
    decider.story.fire(decider.story.first("timer"))
    decider.evict()
    decider.go()
    assert output_of(decider) == "True"


def test_a_timeout_stops_what_it_bounds_and_its_own_timer_when_it_is_in_time() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> list[str]:
        seen = []
        for _ in range(2):
            try:
                async with asyncio.timeout(30):
                    await ctx.call("charge")
                seen.append("in time")
            except TimeoutError:
                seen.append("too late")
        return seen

    decider = decided(function)
    decider.story.complete(decider.story.first("step"))
    decider.go()
    decider.story.fire(decider.story.first("timer"))
    decider.go()
    assert output_of(decider) == ["in time", "too late"]
    stops = [event.op_cancelled.op for event in decider.story.history if event.HasField("op_cancelled")]
    assert stops == [1, 4]
    replayed(function, decider.story)


def test_an_error_of_one_branch_stops_the_others() -> None:
    def refuse() -> None:
        raise PermanentError("no", code="NO")

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        async with TaskGroup() as group:
            group.create_task(wait(ctx))
            await ctx.run(refuse)

    async def wait(ctx: WorkflowContext) -> None:
        await ctx.call("charge")

    decider = decided(function)
    assert decider.story.failure is not None
    assert decider.story.failure.code == "NO"
    assert decider.story.kinds == ["run_started", "step_scheduled", "local_step_ended"], "its end stops the others"
    replayed(function, decider.story)
