"""How functions end: what they raise, and what has to be over before."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from fencepost import (
    ChildFailed,
    CorrectiveError,
    FailureKind,
    OperationalError,
    PermanentError,
    RunState,
    StepFailed,
    Value,
    WorkflowContext,
    workflow,
)
from fencepost.v1 import run_pb2
from tests.unit.sdk.replaying import (
    COMPLETE,
    CONTINUE,
    CONTINUE_AS_NEW,
    FAIL,
    OPERATIONAL,
    Decider,
    Story,
    decided,
    output_of,
    replayed,
    result_of,
)


@dataclass
class Order:
    id: int


def double(x: int) -> int:
    return 2 * x


def identity(x: Any) -> Any:
    return x


def test_a_failed_step_can_be_caught_and_says_what_failed() -> None:
    def declined() -> None:
        raise PermanentError("no money", code="CARD_DECLINED")

    def wrong() -> None:
        raise CorrectiveError("do it again", feedback={"line": 3})

    caught: list[StepFailed] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> str:
        for handle in (ctx.run(declined), ctx.run(wrong), ctx.call("charge")):
            try:
                await handle
            except StepFailed as error:
                caught.append(error)
        return "on"

    decider = decided(function)
    decider.story.fail(decider.story.first("step"), "BUSY", OPERATIONAL)
    decider.go()
    assert output_of(decider) == "on"
    replayed(function, decider.story)
    assert [(error.kind, error.code, error.detail, error.feedback) for error in caught] == 2 * [
        (FailureKind.PERMANENT, "CARD_DECLINED", "no money", None),
        (FailureKind.CORRECTIVE, "CorrectiveError", "do it again", {"line": 3}),
        (FailureKind.OPERATIONAL, "BUSY", "it did not work", None),
    ]
    assert str(caught[0]) == "local step declined: CARD_DECLINED: no money"
    assert caught[0].attempts == 1


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (PermanentError("x", code="NO"), FailureKind.PERMANENT, "NO"),
        (OperationalError("x", code="BUSY"), FailureKind.OPERATIONAL, "BUSY"),
        (CorrectiveError("x", code="WRONG"), FailureKind.CORRECTIVE, "WRONG"),
        (KeyError("x"), FailureKind.PERMANENT, "KeyError"),
        (ExceptionGroup("both", [KeyError("x"), OperationalError("y", code="BUSY")]), FailureKind.OPERATIONAL, "BUSY"),
        (SystemExit(3), FailureKind.PERMANENT, "SystemExit"),
        (asyncio.CancelledError(), FailureKind.PERMANENT, "CancelledError"),
    ],
)
def test_what_the_function_raises_fails_the_run_with_its_kind(
    error: BaseException, kind: FailureKind, code: str
) -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        raise error

    story = decided(function).story
    assert story.outcome == FAIL
    assert story.failure is not None
    assert (story.failure.kind, story.failure.code) == (kind, code)


class Strange(BaseException):
    """What no `except Exception` catches."""


@pytest.mark.parametrize("error", [ValueError("no"), Strange("no")])
def test_what_a_callback_raises_fails_the_run_whatever_it_is(error: BaseException) -> None:
    """It would end the turn of all other runs."""

    def raises() -> None:
        raise error

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> None:
        asyncio.get_running_loop().call_soon(raises)
        await ctx.signal("never")

    failure = decided(flow).story.failure
    assert failure is not None
    assert (failure.kind, failure.code, failure.message) == (FailureKind.PERMANENT, type(error).__name__, "no")


def test_kinds_survive_wrapping_and_children() -> None:
    states: list[RunState] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        try:
            await ctx.child("invoice", on_parent_end="abandon")
        except ChildFailed as error:
            states.append(error.state)
            raise RuntimeError("no invoice") from error

    decider = decided(function)
    failure = run_pb2.Failure(kind=OPERATIONAL, code="BUSY", message="printer")
    decider.story.end_child(decider.story.first("child"), failure=failure)
    decider.go()
    told = decider.story.failure
    assert told is not None
    assert states == [RunState.FAILED]
    assert (told.kind, told.code) == (FailureKind.OPERATIONAL, "BUSY")
    assert told.message == "no invoice (because of ChildFailed: child invoice: BUSY: printer)"


def test_a_failure_that_is_let_through_says_its_code_once() -> None:
    async def calls(ctx: WorkflowContext) -> None:
        await ctx.call("charge")

    async def has_a_child(ctx: WorkflowContext) -> None:
        await ctx.child("invoice")

    async def waits(ctx: WorkflowContext) -> None:
        await ctx.signal("go", timeout=1)

    told = []
    for function in (calls, has_a_child, waits):
        decider = decided(workflow("w", compatibility_id="1")(function))
        story = decider.story
        if function is calls:
            story.fail(story.first("step"), "DECLINED")
        elif function is has_a_child:
            message = "child run 7 is FAILED: BUSY: later"
            failure = run_pb2.Failure(kind=OPERATIONAL, code="CHILD_FAILED", message=message)
            story.end_child(story.first("child"), failure=failure)
        else:
            story.fire(story.first("wait"))
        decider.go()
        assert story.failure is not None
        told.append((story.failure.code, story.failure.message))
    assert told == [
        ("DECLINED", "step charge: it did not work"),
        ("CHILD_FAILED", "child invoice: child run 7 is FAILED: BUSY: later"),
        ("SIGNAL_TIMEOUT", "signal go: no signal 'go' came in 1 s"),
    ]


def test_an_end_that_was_refused_is_sent_again() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> int:
        return await ctx.run(double, 1)

    decider = Decider(function, Story())
    decider.begin()
    decider.step()
    for refused in range(3):
        decision = decider.run.decision()
        assert decision is not None
        decider.story.signal("late")
        decider.run.accepted(decider.story.advance(decision))
        assert (decider.story.refusals, decider.run.over) == (refused + 1, False)
    decision = decider.run.decision()
    assert decision is not None
    decider.run.accepted(decider.story.advance(decision))
    assert output_of(decider) == 2
    assert decider.run.over
    assert decider.run.decision() is None


def test_what_still_runs_of_a_function_that_has_ended_begins_nothing() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> str:
        async def forward() -> None:
            async for text in ctx.signals("text"):
                await ctx.call("send", text)

        forwarding = asyncio.create_task(forward())
        await ctx.signal("go")
        return f"done {forwarding.done()}"

    decider = decided(function)
    decider.story.signal("go")
    decider.catch_up()
    decision = decider.run.decision()
    assert decision is not None
    decider.story.signal("text", "late")
    decider.run.accepted(decider.story.advance(decision))
    assert decider.story.refusals == 1
    decider.go()
    assert output_of(decider) == "done False"
    assert "step_scheduled" not in decider.story.kinds
    replayed(function, decider.story)


def test_what_the_input_does_not_fit_fails_the_run() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext, order: Order) -> None: ...

    failure = decided(function, "text").story.failure
    assert failure is not None
    assert (failure.kind, failure.code) == (FailureKind.PERMANENT, "INPUT_NOT_DECODABLE")


@pytest.mark.parametrize("output", [float("nan"), {1, 2}, "x" * (1 << 20)])
def test_an_output_that_can_not_be_recorded_fails_the_run(output: object) -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> Any:
        return output

    failure = decided(function).story.failure
    assert failure is not None
    assert (failure.kind, failure.code) == (FailureKind.PERMANENT, "OUTPUT_NOT_RECORDABLE")


def test_what_a_class_raises_as_the_output_is_written_is_the_runs_own_failure() -> None:
    class Odd(list[int]):
        def __iter__(self) -> Any:
            raise SystemExit("odd")

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> Any:
        return Odd([1])

    failure = decided(function).story.failure
    assert failure is not None
    assert (failure.kind, failure.code) == (FailureKind.PERMANENT, "SystemExit")


def test_local_steps_under_way_are_recorded_before_the_run_completes() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> str:
        _open = [ctx.run(double, 1)]
        await ctx.sleep(1)
        _open.append(ctx.run(double, 2))
        return "done"

    decider = Decider(function, Story())
    [call] = decider.run.local_steps()
    assert decider.step()
    decider.story.fire(decider.story.first("timer"))
    decider.catch_up()
    assert decider.run.local_steps() == []
    assert decider.run.decision() is None
    decider.run.local_ended(call.op, result_of(call), 1)
    assert decider.step()
    assert decider.story.kinds[-1] == "local_step_ended"
    assert output_of(decider) == "done"
    replayed(function, decider.story)


def test_an_end_that_would_fit_no_frame_with_what_is_recorded_before_it_comes_after_that() -> None:
    """A step that can be undone has two payloads, an end has one, and a frame room for less than three."""
    largest = "x" * ((1 << 20) - 2)

    def same(text: str) -> str:
        return text

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> str:
        _open = ctx.run(same, largest, undo="take-back")
        await ctx.sleep(1)
        return largest

    decider = Decider(flow, Story())
    [call] = decider.run.local_steps()
    assert decider.step()
    decider.story.fire(decider.story.first("timer"))
    decider.catch_up()
    decider.run.local_ended(call.op, result_of(call), 1)
    decider.go()
    assert [sent.outcome for sent in decider.sent] == [CONTINUE, CONTINUE, COMPLETE]
    assert all(sent.size < (3 << 20) - 2048 for sent in decider.sent)
    assert output_of(decider) == largest
    replayed(flow, decider.story)


def test_a_run_goes_on_as_a_new_one_when_what_was_open_is_over() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext, n: int) -> None:
        await ctx.run(double, n)
        _open = ctx.call("charge"), ctx.child("invoice"), ctx.sleep(60), ctx.signal("stop", timeout=60)
        await ctx.signal("go")
        ctx.continue_as_new(n + 1)

    decider = decided(function, 1)
    decider.story.signal("go")
    decider.go()
    assert decider.story.kinds[-4:] == ["op_cancelled"] * 4
    assert not decider.story.outcome
    assert decider.run.waiting
    decider.evict()
    decider.story.end_child(decider.story.first("child"))
    decider.go()
    assert decider.story.outcome == CONTINUE_AS_NEW
    assert decider.story.output == Value(json="2")
    assert decider.story.open == {}


def test_a_long_history_is_known_alike_at_first_and_at_replay() -> None:
    known: list[tuple[int, bool]] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        known.clear()
        for number in range(14):
            await asyncio.gather(ctx.run(identity, "x" * 400_000), ctx.signal("s"))
            known.append((number, ctx.should_continue_as_new))

    decider = Decider(function, Story())
    for _ in range(14):
        decider.story.signal("s", "y" * 400_000)
    decider.go()
    assert decider.story.outcome == COMPLETE
    first = list(known)
    assert [long for _, long in first].index(True) == 12
    run = replayed(function, decider.story)
    assert known == first
    assert run.should_continue_as_new


def test_ten_thousand_events_are_a_long_history() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        while not ctx.should_continue_as_new:
            await ctx.signal("s")
        ctx.continue_as_new()

    story = Story()
    for _ in range(9_998):
        story.signal("s")
    decider = Decider(function, story)
    assert decider.run.local_steps() == []
    assert not decider.run.should_continue_as_new
    story.signal("s")
    decider.go()
    assert story.outcome == CONTINUE_AS_NEW
