"""Workflows that are written as people write them at first: they work, or the error says what to write instead."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

import pytest

from fencepost import PermanentError, StartRun, StepFailed, TaskGroup, WorkflowContext, workflow
from fencepost.calls import _start_request
from fencepost.codec import encode
from fencepost.failure import failed
from fencepost.local_functions import local_function
from tests.unit.sdk.replaying import Decider, Story, decided, output_of, replayed, result_of


def times(a: int, *, b: int) -> int:
    return a * b


def same(x: Any) -> Any:
    return x


def refuse() -> None:
    raise PermanentError("no", code="NO")


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name

    def sell(self, what: str) -> str:
        return f"{self.name} sells {what}"


def failure_of(function: Any) -> str:
    """How a run of that function fails."""
    decider = decided(workflow("w", compatibility_id="1")(function))
    assert decider.story.failure is not None
    return f"{decider.story.failure.code}: {decider.story.failure.message}"


async def to_unknown_keyword(ctx: WorkflowContext) -> None:
    await ctx.run(times, 3)


async def with_too_much(ctx: WorkflowContext) -> None:
    await ctx.run(same, 1, 2)


async def by_its_name(ctx: WorkflowContext) -> None:
    await ctx.run("same", 1)  # type: ignore[call-overload]  # what the test is about, here and below


async def a_function_remotely(ctx: WorkflowContext) -> None:
    await ctx.call(same, 1)  # type: ignore[call-overload]


async def a_workflow_as_a_step(ctx: WorkflowContext) -> None:
    await ctx.run(workflow("other", compatibility_id="1")(to_unknown_keyword))


async def a_text_as_a_time(ctx: WorkflowContext) -> None:
    await ctx.sleep("5s")  # type: ignore[arg-type]


async def until_the_sun_is_cold(ctx: WorkflowContext) -> None:
    await asyncio.sleep(1e12)


async def a_handle_as_a_part(ctx: WorkflowContext) -> dict[str, object]:
    return {"x": ctx.run(same, 1)}


@pytest.mark.parametrize(
    ("function", "failure"),
    [
        (to_unknown_keyword, "TypeError: local step times: missing a required argument: 'b'"),
        (with_too_much, "TypeError: local step same: too many positional arguments"),
        (by_its_name, "TypeError: a local step is a function, not the name 'same': ctx.call takes names"),
        (a_function_remotely, "TypeError: a handler has a name, which function is not: ctx.run takes functions"),
        (a_workflow_as_a_step, "TypeError: other is a workflow: ctx.child runs it"),
        (a_text_as_a_time, "TypeError: sleep: '5s' is no length of time: give seconds as a number, or a timedelta"),
        (until_the_sun_is_cold, "ValueError: 1e+12 s are over 100 years: wait without a limit, or for less"),
        (
            a_handle_as_a_part,
            "OUTPUT_NOT_RECORDABLE: Handle is an awaitable, which has no JSON: await it first",
        ),
    ],
)
def test_what_can_not_be_asked_for_fails_at_once_and_says_what_to_do(function: Any, failure: str) -> None:
    assert failure_of(function) == failure


def test_a_generator_is_no_workflow() -> None:
    async def flow(ctx: WorkflowContext) -> Any:
        yield 1

    with pytest.raises(TypeError, match="a workflow is an async function, without yield"):
        workflow("w", compatibility_id="1")(flow)


def test_a_step_gets_its_arguments_as_they_were_when_it_was_asked_for() -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> list[Any]:
        batch: list[int] = []
        handles = []
        for number in range(4):
            batch.append(number)
            if len(batch) == 2:
                handles.append(ctx.run(same, batch))
                batch.clear()
        return [await handle for handle in handles]

    decider = decided(flow)
    assert output_of(decider) == [[0, 1], [2, 3]]
    # Also if the first worker was lost with one of them done.
    story = Story()
    lost = Decider(flow, story)
    first, _ = lost.run.local_steps()
    lost.run.local_ended(first.op, result_of(first), 1)
    lost.step()
    again = Decider(flow, story)
    again.go()
    assert output_of(again) == [[0, 1], [2, 3]]
    assert again.ran == ["same"]


def test_partials_and_methods_are_steps_and_what_is_known_of_a_method_is_found_out_once() -> None:
    shop = Shop("Ann")

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> list[Any]:
        return [
            await ctx.run(functools.partial(times, b=4), 3),
            await ctx.run(functools.partial(times, 5, b=4)),
            await ctx.run(shop.sell, "tea"),
            await ctx.run(Shop("Bob").sell, "ink"),
        ]

    decider = decided(flow)
    assert output_of(decider) == [12, 20, "Ann sells tea", "Bob sells ink"]
    assert decider.ran == ["times", "times", "sell", "sell"]
    assert local_function(shop.sell, {}) is local_function(Shop("Bob").sell, {})


def test_functions_of_one_code_keep_their_own_names() -> None:
    """Else the name in the history would be that of the one which the process has met first."""

    def named(name: str) -> Any:
        def function() -> None: ...

        function.__name__ = name
        return function

    assert [local_function(named(name), {}).name for name in ("a", "b", "a")] == ["a", "b", "a"]


def test_functions_of_one_code_return_what_each_of_them_says() -> None:
    """Their annotations are the same text here, and mean what each function closes over."""

    def reads(kind: type[Any]) -> Any:
        def read(value: Any) -> kind:  # type: ignore[valid-type]
            return kind(value) if value else None

        return read

    texts, numbers = local_function(reads(str), {}), local_function(reads(int), {})
    assert (texts.codec.decode(encode("7")), numbers.codec.decode(encode(7))) == ("7", 7)
    plain = [local_function(lambda: plain, {}) for _ in range(2)]
    assert plain[0] is plain[1]


def test_what_a_call_returns_can_be_made_a_task() -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> list[Any]:
        call: Any = ctx.run(same, 1)  # typeshed wants a coroutine
        alone = asyncio.create_task(call)
        async with TaskGroup() as group:
            tasks = [group.create_task(ctx.run(same, number)) for number in (2, 3)]
        return [await alone, *(task.result() for task in tasks)]

    decider = decided(flow)
    assert output_of(decider) == [1, 2, 3]
    replayed(flow, decider.story)


def test_a_group_that_fails_stops_the_calls_that_are_its_tasks() -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> str:
        try:
            async with TaskGroup() as group:
                group.create_task(ctx.call("charge"))
                group.create_task(ctx.run(refuse))
        except* StepFailed:
            await ctx.sleep(1)
        return "stopped"

    decider = decided(flow)
    assert "op_cancelled" in decider.story.kinds
    replayed(flow, decider.story)


@pytest.mark.parametrize(("given", "taken"), [(None, 7), (3, 3)])
def test_a_run_without_an_input_has_the_default_of_its_function(given: object, taken: int) -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext, number: int = 7) -> int:
        return number

    assert output_of(decided(flow, given)) == taken


def test_the_log_says_where_a_function_has_raised_and_only_when_it_happens(caplog: pytest.LogCaptureFixture) -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> None:
        await ctx.run(same, 1)
        raise KeyError("lost")

    decider = decided(flow)
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage().endswith("workflow w fails: 'lost'")
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)
    caplog.clear()
    replayed(flow, decider.story)
    assert not caplog.records


def test_the_log_tells_of_failures_that_nobody_has_awaited(caplog: pytest.LogCaptureFixture) -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> str:
        _ = ctx.run(refuse)
        seen = ctx.run(refuse)
        with pytest.raises(StepFailed):
            await seen
        await asyncio.gather(ctx.run(refuse), return_exceptions=True)
        await ctx.run(same, 1)
        return "done"

    decided(flow)
    said = [record.getMessage().partition("] ")[2] for record in caplog.records]
    assert said == ["nobody has awaited what failed: local step refuse: NO: no"]


def test_the_failure_of_a_group_says_what_was_in_it() -> None:
    error = ExceptionGroup("tasks failed", [ExceptionGroup("more", [ValueError("this")]), TypeError("that")])
    assert failed(error, 1 << 20).message == "tasks failed (2 sub-exceptions), first ValueError: this"


def test_the_log_tells_once_of_a_function_that_nothing_can_bring_on(caplog: pytest.LogCaptureFixture) -> None:
    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> None:
        await ctx.signal("go")
        await asyncio.Event().wait()

    decider = decided(flow)
    assert not caplog.records
    for _ in range(2):
        decider.story.signal("go")
        decider.go()
    [record] = caplog.records
    assert record.getMessage().endswith("the function waits for nothing durable: only a cancellation can end that")


def test_a_query_without_an_input_has_the_default_of_its_handler() -> None:
    def progress(verbose: bool = False) -> str:
        return "all" if verbose else "short"

    @workflow("w", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> None:
        ctx.on_query("progress", progress)
        await ctx.signal("end")

    decider = decided(flow)
    answers = [decider.run.query("progress", encode(given)).decode() for given in (None, True)]
    assert answers == ["short", "all"]


def test_a_run_is_started_by_its_workflow() -> None:
    @workflow("by.itself", compatibility_id="1")
    async def flow(ctx: WorkflowContext, some: bytes) -> None: ...

    request = _start_request(StartRun(flow, b"\x00"))
    assert (request.workflow_id, request.input.binary) == ("by.itself", b"\x00")
    assert _start_request(StartRun("by.name", 1)).workflow_id == "by.name"
