"""A code run is what its events make of it: fed again, they make the same."""

from __future__ import annotations

import asyncio
import datetime as dt
import uuid
from dataclasses import dataclass
from typing import Any

import pytest

from fencepost import (
    CorrectiveError,
    StepFailed,
    WorkflowContext,
    step,
    workflow,
)
from fencepost.code_run import CodeRun
from fencepost.v1 import worker_service_pb2 as pb
from tests.unit.sdk.replaying import (
    COMPLETE,
    CONTINUE,
    FAIL,
    RUN_ID,
    WAIT,
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


@dataclass
class Receipt:
    order: Order
    cents: int


def double(x: int) -> int:
    return 2 * x


def identity(x: Any) -> Any:
    return x


def receipt(order: Order) -> Receipt:
    return Receipt(order, 100)


@step("reserve")
async def reserve(order: Order) -> Receipt:
    return Receipt(order, 5)


def test_local_steps_run_one_after_the_other_and_each_is_recorded_first() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext, n: int) -> int:
        total = 0
        for i in range(n):
            total += await ctx.run(double, i)
        return total

    decider = decided(function, 3)
    assert output_of(decider) == 6
    assert decider.story.kinds == ["run_started", *["local_step_ended"] * 3]
    assert (decider.run.seq, decider.run.seen_seq, decider.run.advance_no) == (4, 4, 4)
    assert [(sent.advance_no, sent.seen_seq, len(sent.commands), sent.outcome) for sent in decider.sent] == [
        (1, 1, 1, CONTINUE),
        (2, 2, 1, CONTINUE),
        (3, 3, 1, CONTINUE),
        (4, 4, 0, COMPLETE),
    ]


def test_a_replay_runs_no_step_again() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> int:
        first = await ctx.run(double, 1)
        await ctx.sleep(60)
        return first + await ctx.run(double, 2)

    decider = decided(function)
    decider.evict()
    decider.go()
    assert decider.ran == ["double"]
    decider.story.fire(decider.story.first("timer"))
    decider.evict()
    decider.go()
    assert decider.ran == ["double", "double"]
    assert output_of(decider) == 6


def test_what_is_awaited_is_the_recorded_value_also_at_first() -> None:
    values: list[object] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        values.append(await ctx.run(identity, (1, 2)))
        values.append(await ctx.run(receipt, Order(7)))
        values.append(await ctx.run(reserve, Order(8)))

    decider = decided(function)
    assert decider.story.outcome == COMPLETE
    first = list(values)
    assert first == [[1, 2], Receipt(Order(7), 100), Receipt(Order(8), 5)]
    values.clear()
    replayed(function, decider.story)
    assert values == first


def test_a_step_can_not_change_what_the_workflow_has() -> None:
    def grow(items: list[int]) -> int:
        items.append(1)
        return len(items)

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> list[int]:
        items = [0]
        await ctx.run(grow, items)
        return items

    assert output_of(decided(function)) == [0]


def test_ops_are_begun_when_they_are_called_and_numbered_in_that_order() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> Any:
        late, early = ctx.call("charge", 1), ctx.sleep(5)
        await early
        return await late

    story = decided(function).story
    assert story.kinds == ["run_started", "step_scheduled", "timer_started"]
    assert (story.history[1].step_scheduled.op, story.history[2].timer_started.op) == (1, 2)


def test_gather_waits_for_all_kinds_of_ops_at_once() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> Any:
        return await asyncio.gather(
            ctx.run(double, 4), ctx.call("charge"), ctx.child("invoice"), ctx.signal("go"), ctx.sleep(3)
        )

    decider = decided(function)
    story = decider.story
    story.end_child(story.first("child"), "paid")
    story.signal("go", {"by": "me"})
    story.fire(story.first("timer"))
    decider.go()
    assert not story.outcome
    story.complete(story.first("step"), 12)
    decider.go()
    assert output_of(decider) == [8, 12, "paid", {"by": "me"}, None]


def test_what_was_numbered_first_is_seen_first_though_the_local_step_ended_before_it_was_known() -> None:
    seen: list[str] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> list[str]:
        seen.clear()

        async def hear(name: str) -> None:
            await ctx.signal(name)
            seen.append(name)

        async def run() -> None:
            await ctx.run(double, 1)
            seen.append("local")

        await asyncio.gather(hear("first"), run(), hear("second"), hear("third"))
        return seen

    decider = Decider(function, Story())
    [call] = decider.run.local_steps()
    decider.run.local_ended(call.op, result_of(call), 1)
    decision = decider.run.decision()
    assert decision is not None
    for name in ("first", "second", "nobody's"):
        decider.story.signal(name)
    decider.run.accepted(decider.story.advance(decision))
    assert seen == ["first", "second", "local"]
    decider.story.signal("third")
    decider.go()
    assert output_of(decider) == ["first", "second", "local", "third"]
    replayed(function, decider.story)
    assert seen == ["first", "second", "local", "third"]


def test_events_that_came_with_an_answer_and_were_pushed_too_are_fed_once() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> list[Any]:
        first = ctx.run(double, 1)
        return [await ctx.signal("go"), await ctx.signal("go"), await first]

    decider = Decider(function, Story())
    decider.begin()
    decision = decider.run.decision()
    assert decision is not None
    decider.story.signal("go", 1)
    decider.run.feed(decider.story.history[1:])
    decider.story.signal("go", 2)
    decider.run.accepted(decider.story.advance(decision))
    decider.go()
    assert output_of(decider) == [1, 2, 2]


def test_no_event_may_be_left_out() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        await ctx.signal("go")

    decider = decided(function)
    decider.story.signal("other")
    decider.story.signal("go")
    with pytest.raises(ValueError, match=r"event 4 .* does not follow 2"):
        decider.run.feed(decider.story.history[3:])


def test_the_time_is_that_of_the_last_input() -> None:
    times: list[dt.datetime] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        times.append(ctx.now())
        await ctx.sleep(10)
        times.append(ctx.now())
        await ctx.run(double, 1)
        times.append(ctx.now())

    decider = decided(function)
    decider.story.skipped()
    decider.story.fire(decider.story.first("timer"))
    decider.go()
    start = dt.datetime.fromtimestamp(1_700_000_000, dt.UTC)
    assert times == [start + dt.timedelta(seconds=passed) for passed in (0, 3, 4)]
    times.clear()
    replayed(function, decider.story)
    assert [time - start for time in times] == [dt.timedelta(seconds=passed) for passed in (0, 3, 4)]


def test_chance_is_the_same_at_each_replay_and_differs_between_runs() -> None:
    drawn: list[Any] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        drawn.append((ctx.random.random(), ctx.uuid4(), ctx.random.random(), ctx.uuid4()))

    for _ in range(2):
        decided(function)
    other = CodeRun(function, "another", seen_seq=0, advance_no=0)
    other.feed(Story().history)
    assert drawn[0] == drawn[1]
    assert len({value for values in drawn[1:] for value in values}) == 8
    assert all(isinstance(value, uuid.UUID) and value.version == 4 for value in drawn[0][1::2])


def test_a_run_that_waits_says_so_once_for_each_lease() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        await ctx.sleep(5)

    decider = decided(function)
    assert decider.last.outcome == WAIT
    assert (decider.run.waiting, decider.run.decision()) == (True, None)
    decider.run.leased(2)
    assert not decider.run.waiting
    again = decider.run.decision()
    assert again is not None
    assert (again.outcome, again.commands, again.advance_no) == (WAIT, [], 2)


def test_a_run_whose_local_steps_are_under_way_keeps_its_lease() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        await asyncio.gather(ctx.run(double, 1), ctx.sleep(5))

    decider = Decider(function, Story())
    [call] = decider.run.local_steps()
    assert decider.run.local_steps() == []
    assert decider.step()
    assert decider.last.outcome == CONTINUE
    assert decider.run.decision() is None
    assert not decider.run.waiting
    decider.run.local_ended(call.op, result_of(call), 3)
    assert decider.step()
    record = decider.last.commands[0].record_local_step
    assert (record.name, record.output.json, record.attempts) == ("double", "2", 3)


def test_nothing_is_decided_while_an_advance_is_on_its_way() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        await asyncio.gather(ctx.run(double, 1), ctx.run(double, 2))

    decider = Decider(function, Story())
    first, second = decider.run.local_steps()
    decider.run.local_ended(second.op, result_of(second), 1)
    decision = decider.run.decision()
    assert decision is not None
    decider.run.local_ended(first.op, result_of(first), 1)
    assert decider.run.decision() is None
    decider.run.accepted(decider.story.advance(decision))
    decider.go()
    assert [event.local_step_ended.op for event in decider.story.history[1:]] == [2, 1]
    replayed(function, decider.story)


def test_a_history_that_comes_in_pages_is_looked_at_as_a_whole() -> None:
    went: list[bool] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        went.append(ctx.patched("new"))
        await ctx.run(double, 1)
        await ctx.sleep(1)

    story = decided(function).story
    run = CodeRun(function, RUN_ID, seen_seq=story.seen_seq, advance_no=story.advance_no)
    for event in story.history[:-1]:
        run.feed([event], more=True)
        assert (run.seq, run.local_steps(), run.decision()) == (0, [], None)
    run.feed(story.history[-1:])
    assert run.seq == story.last_seq
    assert went == [True, True]


def test_an_evicted_run_does_nothing_any_more() -> None:
    after: list[str] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        try:
            await ctx.sleep(60)
        finally:
            after.append("finally")
            await ctx.run(double, 1)
            after.append("never")

    decider = decided(function)
    decider.run.evict()
    assert after == ["finally"]
    assert decider.run.local_steps() == []
    assert decider.run.decision() is None


def test_a_decision_is_an_item_but_for_its_task() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        raise CorrectiveError("x", feedback=[1])

    decision = decided(function).last
    item = pb.AdvanceItem()
    decision.fill(item)
    assert (item.advance_no, item.seen_seq, item.outcome) == (1, 1, FAIL)
    assert item.failure.feedback.json == "[1]"
    assert decision.size >= item.ByteSize()


@pytest.mark.parametrize(("told", "attempts"), [((3, 2, 0), 3), ((1, 0, 0), 1), ((0, 2, 1), 3)])
def test_a_failed_step_tells_how_often_it_was_tried(told: tuple[int, int, int], attempts: int) -> None:
    """A failure that is permanent is in no counter; a server of older days told nothing but the counters."""

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> int:
        try:
            await ctx.call("a")
        except StepFailed as error:
            return error.attempts
        return -1

    decider = decided(flow)
    decider.story.fail(2, "BAD")
    failed = decider.story.history[-1].step_failed
    failed.failure.attempt, failed.operational_failures, failed.corrective_failures = told
    decider.go()
    assert output_of(decider) == attempts
