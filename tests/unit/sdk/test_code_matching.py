"""Code that does not do what the history says is told so, with the first difference; patches are how it may change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencepost import NondeterminismError, WorkflowContext, workflow
from fencepost.code_run import CodeRun
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.workflow import Workflow
from tests.unit.sdk.replaying import RUN_ID, Decider, Story, decided, output_of, replayed

Function = Callable[[WorkflowContext], Awaitable[Any]]


def charge(cents: int = 1) -> int:
    return cents


def total(cents: int = 1) -> int:
    return cents


def code(function: Function) -> Workflow[..., Any]:
    async def body(ctx: WorkflowContext) -> Any:
        return await function(ctx)

    return workflow("w", compatibility_id="1")(body)


async def nothing(ctx: WorkflowContext) -> None:
    await asyncio.Event().wait()


def asking(*asks: Callable[[WorkflowContext], object]) -> Function:
    """A function that asks for these at once, and waits."""

    async def function(ctx: WorkflowContext) -> None:
        kept = [ask(ctx) for ask in asks]
        await asyncio.Event().wait()
        del kept

    return function


ASKS: dict[str, Callable[[WorkflowContext], object]] = {
    "local step charge": lambda ctx: ctx.run(charge),
    "local step total": lambda ctx: ctx.run(total),
    "step charge": lambda ctx: ctx.call("charge"),
    "step refund": lambda ctx: ctx.call("refund"),
    "sleep 30s": lambda ctx: ctx.sleep(30),
    "sleep 1m30s": lambda ctx: asyncio.create_task(asyncio.sleep(90)),
    "signal go": lambda ctx: ctx.signal("go"),
    "signal stop": lambda ctx: ctx.signal("stop", timeout=5),
    "child invoice": lambda ctx: ctx.child("invoice"),
    "child letter": lambda ctx: ctx.child("letter"),
    "attributes": lambda ctx: ctx.set_attributes({"a": "1"}),
}
DIFFERENT = [
    (before, after)
    for before in ASKS
    for after in ASKS
    # Another length of time is another input, and no other kind.
    if before != after and not before[:5] == after[:5] == "sleep"
]


@pytest.mark.parametrize(("before", "after"), DIFFERENT)
def test_another_kind_or_name_is_told_exactly(before: str, after: str) -> None:
    story = decided(code(asking(ASKS["sleep 30s"], ASKS[before]))).story
    with pytest.raises(NondeterminismError) as caught:
        replayed(code(asking(ASKS["sleep 30s"], ASKS[after])), story)
    assert caught.value.message == f"op 2: history has {before}, code asks for {after}"
    assert str(caught.value) == f"NONDETERMINISM: op 2: history has {before}, code asks for {after}"


@pytest.mark.parametrize("before", ASKS)
def test_what_is_asked_for_no_more_is_told_exactly(before: str) -> None:
    story = decided(code(asking(ASKS[before]))).story
    with pytest.raises(NondeterminismError) as caught:
        replayed(code(nothing), story)
    assert caught.value.message == f"op 1: history has {before}, code asks for nothing"


def test_what_the_function_raised_before_it_came_so_far_is_told_with_the_difference() -> None:
    async def raises(ctx: WorkflowContext) -> None:
        raise KeyError("nmae")

    story = decided(code(asking(ASKS["step charge"]))).story
    with pytest.raises(NondeterminismError) as caught:
        replayed(code(raises), story)
    asked = "op 1: history has step charge, code asks for nothing"
    assert caught.value.message == f"{asked}: it has failed with KeyError: 'nmae'"
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("after", [ask for ask in ASKS if not ask.startswith("local")])
def test_what_the_history_lacks_is_told_exactly(after: str) -> None:
    story = decided(code(asking(ASKS["local step charge"]))).story
    with pytest.raises(NondeterminismError) as caught:
        replayed(code(asking(ASKS["local step charge"], ASKS[after])), story)
    assert caught.value.message == f"op 2: history has nothing, code asks for {after}"


def test_a_local_step_that_the_history_lacks_may_have_been_under_way() -> None:
    story = decided(code(asking(ASKS["sleep 30s"]))).story
    run = replayed(code(asking(ASKS["sleep 30s"], ASKS["local step charge"])), story)
    assert [call.name for call in run.local_steps()] == ["charge"]


def test_a_cancellation_is_matched_too() -> None:
    async def keeps(ctx: WorkflowContext) -> None:
        _sleeping = ctx.sleep(90)
        await ctx.signal("go")
        await nothing(ctx)

    async def stops(ctx: WorkflowContext) -> None:
        sleeping = ctx.sleep(90)
        await ctx.signal("go")
        sleeping.cancel()
        await nothing(ctx)

    def gone(function: Function) -> Story:
        decider = decided(code(function))
        decider.story.signal("go")
        decider.go()
        return decider.story

    replayed(code(stops), gone(stops))
    with pytest.raises(
        NondeterminismError, match=r"^NONDETERMINISM: op 1: history has cancel of sleep 1m30s, code asks for nothing$"
    ):
        replayed(code(keeps), gone(stops))
    with pytest.raises(
        NondeterminismError, match=r"^NONDETERMINISM: op 1: history has nothing, code asks for cancel of sleep 1m30s$"
    ):
        replayed(code(stops), gone(keeps))


def test_code_that_fits_again_goes_on() -> None:
    async def right(ctx: WorkflowContext) -> int:
        await ctx.sleep(1)
        return await ctx.run(charge, 3)

    async def wrong(ctx: WorkflowContext) -> int:
        return await ctx.run(charge, 3)

    decider = decided(code(right))
    decider.story.fire(decider.story.first("timer"))
    run = CodeRun(code(wrong), RUN_ID, seen_seq=decider.story.seen_seq, advance_no=decider.story.advance_no)
    with pytest.raises(NondeterminismError) as caught:
        run.feed(decider.story.history)
    told = run.blocked(caught.value)
    assert (told.outcome, told.commands, told.advance_no) == (pb.ADVANCE_OUTCOME_BLOCK, (), 2)
    assert told.failure is not None
    assert (told.failure.code, told.failure.message) == ("NONDETERMINISM", caught.value.message)
    decider.go()
    assert output_of(decider) == 3


CHANGES: dict[str, tuple[Callable[[WorkflowContext], object], Callable[[WorkflowContext], object], str]] = {
    "local": (
        lambda ctx: ctx.run(charge, 1),
        lambda ctx: ctx.run(charge, 2),
        "op 1: history has another input of local step charge",
    ),
    "step": (
        lambda ctx: ctx.call("charge", 1),
        lambda ctx: ctx.call("charge", 2),
        "op 1: history has another input of step charge",
    ),
    "child": (
        lambda ctx: ctx.child("invoice", {"a": 1}),
        lambda ctx: ctx.child("invoice", {"a": 2}),
        "op 1: history has another input of child invoice",
    ),
    "sleep": (
        lambda ctx: ctx.sleep(30),
        lambda ctx: ctx.sleep(86_400.5),
        "op 1: history has sleep 30s, code asks for sleep 1d500ms",
    ),
    "attributes": (
        lambda ctx: ctx.set_attributes({"a": "1"}),
        lambda ctx: ctx.set_attributes({"a": "2"}),
        "op 1: history has other attributes",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_input_warns_or_blocks_as_configured(change: str, caplog: pytest.LogCaptureFixture) -> None:
    before, after, message = CHANGES[change]
    story = decided(code(asking(before))).story
    caplog.clear()
    replayed(code(asking(after)), story)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"[{RUN_ID}] {message}"
    ]
    with pytest.raises(NondeterminismError) as caught:
        replayed(code(asking(after)), story, on_input_change="block")
    assert caught.value.message == message


def test_the_order_of_keys_and_of_sets_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    story = decided(code(asking(lambda ctx: ctx.run(charge, {"a": {3, 1, 2}, "b": 1})))).story
    caplog.clear()
    replayed(code(asking(lambda ctx: ctx.run(charge, {"b": 1, "a": {2, 3, 1}}))), story, on_input_change="block")
    assert [record for record in caplog.records if record.levelno == logging.WARNING] == []


# Patches


def patching(went: list[bool], *, before: int = 0, times: int = 1, named: str = "new") -> Workflow[..., Any]:
    """Waits for so many signals, then asks so often, with another wait after each."""

    async def function(ctx: WorkflowContext) -> None:
        went.clear()
        for _ in range(before):
            await ctx.signal("s")
        for _ in range(times):
            went.append(ctx.patched(named))
            await ctx.signal("s")

    return code(function)


def unpatched() -> Workflow[..., Any]:
    async def function(ctx: WorkflowContext) -> None:
        while True:
            await ctx.signal("s")

    return code(function)


def test_a_run_that_comes_to_a_patch_anew_goes_the_new_way_and_is_marked() -> None:
    went: list[bool] = []
    function = patching(went)
    decider = decided(function)
    assert went == [True]
    assert decider.story.kinds == ["run_started", "patch_marked", "signal_awaited"]
    decider.evict()
    assert went == [True]


def test_a_run_that_has_passed_a_patch_before_it_was_there_goes_the_old_way() -> None:
    went: list[bool] = []
    decider = decided(unpatched())
    decider.workflow = patching(went)
    decider.evict()
    assert went == [False]
    decider.go()
    assert "patch_marked" not in decider.story.kinds


def test_a_run_that_has_yet_to_come_to_a_patch_goes_the_new_way() -> None:
    went: list[bool] = []
    decider = decided(unpatched())
    decider.workflow = patching(went, before=1)
    decider.story.signal("s")
    decider.evict()
    assert went == [True]
    decider.go()
    assert decider.story.kinds[-2:] == ["patch_marked", "signal_awaited"]
    decider.evict()
    assert went == [True]


def test_what_a_run_was_told_once_it_is_told_always() -> None:
    went: list[bool] = []
    decider = decided(unpatched())
    decider.workflow = patching(went, times=3)
    decider.story.signal("s")
    decider.evict()
    decider.story.signal("s")
    decider.go()
    # The first call was passed by the old code, and so the others are answered alike.
    assert went == [False, False, False]
    assert "patch_marked" not in decider.story.kinds
    decider.evict()
    assert went == [False, False, False]


def test_a_loop_is_marked_once() -> None:
    went: list[bool] = []
    decider = decided(patching(went, times=3))
    for _ in range(2):
        decider.story.signal("s")
    decider.go()
    assert went == [True, True, True]
    assert decider.story.kinds.count("patch_marked") == 1
    decider.evict()
    assert went == [True, True, True]


def test_two_patches_are_two() -> None:
    went: list[tuple[bool, bool]] = []

    async def function(ctx: WorkflowContext) -> None:
        await ctx.signal("s")
        went.append((ctx.patched("first"), ctx.patched("second")))
        await ctx.signal("s")

    first: list[bool] = []
    decider = decided(patching(first, before=1, named="first"))
    decider.story.signal("s")
    decider.go()
    assert first == [True]
    decider.workflow = code(function)
    decider.evict()
    assert went == [(True, False)]


def test_a_patch_can_be_taken_out_of_the_code() -> None:
    went: list[bool] = []
    decider = decided(patching(went))
    decider.workflow = unpatched()
    decider.evict()
    decider.story.signal("s")
    decider.go()
    assert decider.story.kinds[-2:] == ["signal_received", "signal_awaited"]


def test_a_mark_that_was_not_recorded_is_made_again() -> None:
    went: list[bool] = []
    function = patching(went)
    decider = Decider(function, Story())
    assert decider.run.decision() is not None
    decider.evict()
    assert went == [True]
    decider.go()
    assert decider.story.kinds == ["run_started", "patch_marked", "signal_awaited"]
