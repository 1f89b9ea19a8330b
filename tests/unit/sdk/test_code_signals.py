"""What reaches a code run from outside: signals, queries, and who may not reach it."""

from __future__ import annotations

import datetime as dt
import logging
from dataclasses import dataclass
from typing import Any

import pytest

import fencepost
from fencepost import (
    Value,
    WorkflowContext,
    workflow,
)
from tests.unit.sdk.replaying import (
    RUN_ID,
    decided,
    output_of,
    replayed,
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


def test_signals_are_taken_in_order_each_once_and_told() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> list[int]:
        first = await ctx.signal("n", type=int)
        numbers = [first]
        async for number in ctx.signals("n", type=int):
            numbers.append(number)
            if number == 3:
                break
        return numbers

    decider = decided(function)
    for number in (1, 2):
        decider.story.signal("n", number)
    decider.go()
    assert decider.last.taken_signals == [3, 4]
    assert decider.last.ended_waits == [2]
    decider.evict()
    decider.story.signal("n", 3)
    decider.story.signal("n", 4)
    decider.go()
    assert output_of(decider) == [1, 2, 3]
    assert [seq for sent in decider.sent for seq in sent.taken_signals] == [3, 4, 7]
    assert [seq for sent in decider.sent for seq in sent.ended_waits] == [2, 5, 6]


def test_a_signal_that_came_before_its_wait_still_makes_an_op() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> Any:
        await ctx.sleep(1)
        return await ctx.signal("go", timeout=60)

    decider = decided(function)
    decider.story.signal("go", "early")
    decider.story.fire(decider.story.first("timer"))
    decider.go()
    assert output_of(decider) == "early"
    assert decider.story.kinds[-1] == "signal_awaited"
    # It has its signal, so that its timeout is over before it begins.
    assert not decider.story.history[-1].signal_awaited.HasField("timeout_time")
    replayed(function, decider.story)


def test_a_signal_that_does_not_come_times_out() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> Any:
        try:
            return await ctx.signal("go", timeout=dt.timedelta(minutes=1))
        except TimeoutError as error:
            late = str(error)
        return [late, await ctx.signal("go")]

    decider = decided(function)
    decider.story.fire(decider.story.first("wait"))
    decider.story.signal("go", "late")
    decider.go()
    assert output_of(decider) == ["signal go: SIGNAL_TIMEOUT: no signal 'go' came in 60 s", "late"]


def test_the_timeout_of_a_wait_that_had_its_signal_means_nothing() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> Any:
        first = await ctx.signal("go", timeout=60)
        await ctx.sleep(1)
        return first

    decider = decided(function)
    decider.story.signal("go", 1)
    decider.story.fire(decider.story.first("wait"))
    decider.go()
    decider.story.fire(decider.story.first("timer"))
    decider.go()
    assert output_of(decider) == 1


def test_a_result_that_does_not_fit_its_type_is_an_error_of_the_function() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> str:
        with pytest.raises(fencepost.NotDecodable):
            await ctx.signal("n", type=int)
        with pytest.raises(fencepost.NotDecodable):
            await ctx.call("charge", type=Receipt)
        return "on"

    decider = decided(function)
    decider.story.signal("n", "text")
    decider.go()
    decider.story.complete(decider.story.first("step"), 3)
    decider.go()
    assert output_of(decider) == "on"


def test_a_query_reads_and_changes_nothing() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        lines: list[str] = []
        ctx.on_query("lines", lambda: lines)
        ctx.on_query("line", lambda number: lines[number])
        ctx.on_query("bad", lambda: ctx.run(double, 1))
        while True:
            lines.append(await ctx.signal("line", type=str))

    decider = decided(function)
    decider.story.signal("line", "one")
    decider.go()
    assert decider.run.query("lines", Value()) == Value(json='["one"]')
    assert decider.run.query("line", Value(json="0")) == Value(json='"one"')
    with pytest.raises(fencepost.UnknownQuery, match=r"no query 'other'; the workflow answers: bad, line, lines"):
        decider.run.query("other", Value())
    with pytest.raises(fencepost.NonDeterministic, match="only reads"):
        decider.run.query("bad", Value())
    with pytest.raises(IndexError):
        decider.run.query("line", Value(json="7"))
    assert decider.run.waiting
    assert decider.run.local_steps() == []


def test_the_log_of_a_workflow_is_silent_at_replay(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fencepost.workflow")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        ctx.logger.info("begun")
        await ctx.run(double, 1)
        ctx.logger.info("went on", extra={"n": 1})
        await ctx.sleep(1)
        ctx.logger.info("woke")

    decider = decided(function)
    decider.evict()
    assert told() == [f"[{RUN_ID}] begun", f"[{RUN_ID}] went on"]
    decider.story.fire(decider.story.first("timer"))
    decider.evict()
    assert told()[2:] == [f"[{RUN_ID}] woke"]


def test_steps_and_threads_can_not_use_the_context() -> None:
    contexts: list[WorkflowContext] = []

    def steal() -> None:
        contexts[0].run(double, 1).cancel()

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        contexts.append(ctx)
        await ctx.run(steal)

    story = decided(function).story
    assert story.failure is not None
    assert story.failure.code == "NonDeterministic"
