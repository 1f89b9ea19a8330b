"""What a workflow's function asks for and can't have is refused at the call, and says of what it is."""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Protocol

import pytest

import fencepost
from fencepost import Retry, UndoPolicy, Worker, WorkflowContext, step, undo, workflow
from fencepost.ledger import _refusal
from fencepost.op_options import _step_options, step_options
from fencepost.v1 import run_service_pb2
from tests.unit.sdk.replaying import Decider, Story, decided, output_of, replayed

NAME = "1 to 200 letters, digits and . _ - / of ASCII, beginning with a letter or digit"
SECONDS = "is no length of time: give seconds as a number, or a timedelta"
RETRY = "fencepost.Retry"
UNDO = "give what @fencepost.undo has made, or its name"
WRONG_POLICY = (
    f"UndoPolicy: handler: '' is not a name: {NAME}; queue: 'a b' is not a name: {NAME}; "
    f"timeout: Decimal('1') {SECONDS}; lease: 0.1 is not from 1 s to 1 day; "
    "retry: 3 is no fencepost.Retry: write Retry(max_attempts=3)"
)


@undo("give.back")
def give_back(x: Any) -> None: ...


@step("a.step")
def a_step(x: Any) -> Any:
    return x


@workflow("a.child", compatibility_id="1")
async def a_child(ctx: WorkflowContext, x: int) -> int:
    return x


def same(x: Any) -> Any:
    return x


def failure_of(ask: Callable[[WorkflowContext], Any]) -> str:
    """How a run fails that asks for that first."""

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        await ask(ctx)

    story = decided(function).story
    assert story.failure is not None
    assert not story.open, "it was sent"
    return f"{story.failure.code}: {story.failure.message}"


def a_call(**options: Any) -> Callable[[WorkflowContext], Any]:
    return lambda ctx: ctx.call("charge", 1, **options)


def a_run(**options: Any) -> Callable[[WorkflowContext], Any]:
    return lambda ctx: ctx.run(same, 1, **options)


def child_of(**options: Any) -> Callable[[WorkflowContext], Any]:
    return lambda ctx: ctx.child(a_child, 1, **options)


@pytest.mark.parametrize(
    ("ask", "failure"),
    [
        (a_call(queue_timeout=Decimal(1)), f"step charge: queue_timeout: Decimal('1') {SECONDS}"),
        (a_call(total_timeout="10s"), f"step charge: total_timeout: '10s' {SECONDS}"),
        (a_call(timeout=True), f"step charge: timeout: True {SECONDS}"),
        (a_call(lease=[60]), f"step charge: lease: [60] {SECONDS}"),
        (a_call(queue=7), "step charge: queue: a name is text, which int is not"),
        (a_call(retry=3), "step charge: retry: 3 is no fencepost.Retry: write Retry(max_attempts=3)"),
        (
            a_call(timeout="1m", lease=0.001, retry=False),
            f"step charge: timeout: '1m' {SECONDS}; lease: 0.001 is not from 1 s to 1 day; retry: False is no {RETRY}",
        ),
        (
            a_call(undo=a_step),
            f"step charge: undo: <Step a.step queue=default> undoes nothing: {UNDO}",
        ),
        (a_run(retry=3), "local step same: retry: 3 is no fencepost.Retry: write Retry(max_attempts=3)"),
        (a_run(timeout="5"), f"local step same: timeout: '5' {SECONDS}"),
        (
            a_run(undo=same),
            f"local step same: undo: {same!r} undoes nothing: {UNDO}",
        ),
        (child_of(on_parent_end=1), "child a.child: on_parent_end: it is text, which int is not"),
        (lambda ctx: ctx.sleep(Decimal(5)), f"sleep: Decimal('5') {SECONDS}"),
        (lambda ctx: ctx.sleep("5"), f"sleep: '5' {SECONDS}"),
        (lambda ctx: ctx.signal("go", timeout="10s"), f"signal go: timeout: '10s' {SECONDS}"),
        (a_call(retry=object), "step charge: retry: <class 'object'> is no fencepost.Retry"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_at_the_call_and_named(ask: Any, failure: str) -> None:
    assert failure_of(ask) == f"TypeError: {failure}"


@pytest.mark.parametrize(
    ("ask", "failure"),
    [
        (a_call(queue="", lease=0.001), f"step charge: queue: '' is not a name: {NAME}; lease: 0.001 is not from 1 s "),
        (a_call(lease=dt.timedelta(days=2)), "step charge: lease: datetime.timedelta(days=2) is not from 1 s to 1 day"),
        (a_call(timeout=0), "step charge: timeout: 0 is not from 1 ms to 365 days"),
        (a_call(timeout=0.0004), "step charge: timeout: 0.0004 is not from 1 ms to 365 days"),
        (a_call(queue_timeout=dt.timedelta(days=366)), "step charge: queue_timeout: datetime.timedelta(days=366) is n"),
        (
            a_call(total_timeout=float("nan")),
            "step charge: total_timeout: nan is no length of time from 0 to 3650 days",
        ),
        (a_call(total_timeout=10**400), "step charge: total_timeout: 1000"),
        (a_call(undo="take back"), f"step charge: undo: 'take back' is not a name: {NAME}"),
        (child_of(on_parent_end="stop"), "child a.child: on_parent_end: 'stop' is none of cancel, terminate, abandon"),
        (
            child_of(undo=UndoPolicy(give_back, unfinished=True)),
            "child a.child: undo: unfinished is for steps: a child that does not complete undoes its own",
        ),
        (a_run(timeout=-1), "local step same: timeout: -1 is no length of time from 0 to 3650 days"),
        (a_run(name="a\nb"), r"a name has 1 to 200 printable characters, which 'a\nb' has not"),
        (lambda ctx: ctx.call("my step"), f"'my step' is no name of a handler: {NAME}"),
        (lambda ctx: ctx.call("x" * 201), "'xxxxx"),
        (lambda ctx: ctx.child("möbel"), f"'möbel' is no name of a workflow: {NAME}"),
        (lambda ctx: ctx.signal(""), f"'' is no name of a signal: {NAME}"),
        (lambda ctx: ctx.set_attributes({"a b": "x"}), f"attributes: 'a b' is not a name: {NAME}, and these have"),
        (lambda ctx: ctx.set_attributes({"a": "x" * 201}), "attributes: a: a value has at most 200 characters, and no"),
        (lambda ctx: ctx.set_attributes({"b": "x\ud800"}), "attributes: b: a value has at most 200 characters, and no"),
        (lambda ctx: ctx.set_attributes({f"a{n}": "x" for n in range(33)}), "attributes: there are 33, and a run has "),
        (lambda ctx: ctx.sleep(-1), "sleep: -1 is no length of time from 0 to 3650 days"),
    ],
)
def test_a_value_that_the_server_would_refuse_is_refused_at_the_call_and_named(ask: Any, failure: str) -> None:
    assert failure_of(ask).startswith(f"ValueError: {failure}")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Retry(max_attempts="3"), TypeError, "Retry: max_attempts: '3' is no whole number"),  # type: ignore[arg-type]  # what it is about
        (lambda: Retry(jitter=None), TypeError, "Retry: jitter: None is no number"),  # type: ignore[arg-type]
        (lambda: Retry(max_delay="1m"), TypeError, f"Retry: max_delay: '1m' {SECONDS}"),  # type: ignore[arg-type]
        (
            lambda: UndoPolicy("", queue="a b", lease=0.1, timeout=Decimal(1), retry=3),  # type: ignore[arg-type]
            TypeError,
            WRONG_POLICY,
        ),
    ],
)
def test_a_policy_looks_at_its_fields_when_it_is_made(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


def test_options_are_looked_at_once_for_each_of_their_values() -> None:
    _step_options.cache_clear()
    texts = {step_options("s", "q", 5, None, None, 1.5, Retry(max_attempts=2), give_back) for _ in range(100)}
    assert len(texts) == 1
    assert json.loads(texts.pop())["total_timeout"] == "1s500ms"
    assert (_step_options.cache_info().misses, _step_options.cache_info().hits) == (1, 99)
    assert step_options("s", None, None, None, None, None, None, None) == ""


def test_what_equals_a_value_that_was_right_is_still_refused_for_its_type() -> None:
    assert step_options("s", None, 1, None, None, None, None, None)
    for wrong in (True, Decimal(1)):
        with pytest.raises(TypeError, match="step s: timeout: "):
            step_options("s", None, wrong, None, None, None, None, None)  # type: ignore[arg-type]  # what it is about


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("advance: a/lease: must be less", "advance: a/lease: must be less (b: is no name)"),
        ("2 faults", "2 faults (a/lease: must be less; b: is no name)"),
    ],
)
def test_a_refusal_tells_each_fault_once(message: str, told: str) -> None:
    faults = [
        run_service_pb2.Violation(path="a/lease", message="must be less"),
        run_service_pb2.Violation(path="b", message="is no name"),
    ]
    assert _refusal(message, faults) == told
    assert _refusal(told, faults) == told


def test_what_does_not_fit_its_type_says_of_what_it_is() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> list[str]:
        def seven() -> str:
            return 7  # type: ignore[return-value]  # what the test is about

        said = []
        handles: list[Any] = [ctx.signal("go", type=int), ctx.call("charge", type=int), ctx.child("c", type=int)]
        for handle in (ctx.run(seven), *handles):
            with pytest.raises(fencepost.NotDecodable) as caught:
                await handle
            said.append(caught.value.message)
        return said

    decider = decided(function)
    decider.story.signal("go", "text")
    decider.story.complete(decider.story.first("step"), "text")
    decider.story.end_child(decider.story.first("child"), "text")
    decider.go()
    wrong = "not int: Expected `int`, got `str`"
    assert output_of(decider) == [
        "local step seven: not str: Expected `str`, got `int`",
        f"signal go: {wrong}",
        f"step charge: {wrong}",
        f"child c: {wrong}",
    ]
    replayed(function, decider.story)


def test_a_type_that_is_said_counts_more_than_that_of_the_step_or_of_the_child() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> list[str]:
        stepped, gone = ctx.call(a_step, 1, type=Decimal), ctx.child(a_child, 1, type=Decimal)
        times: list[Decimal] = [2 * await stepped, 2 * await gone]  # for mypy too
        return [repr(value) for value in times]

    decider = decided(function)
    decider.story.complete(decider.story.first("step"), 1)
    decider.story.end_child(decider.story.first("child"), 2)
    decider.go()
    assert output_of(decider) == ["Decimal('2')", "Decimal('4')"]
    replayed(function, decider.story)


def test_an_input_that_does_not_fit_says_that_it_is_the_input() -> None:
    failure = decided(a_child, "text").story.failure
    assert failure is not None
    assert (failure.code, failure.message) == (
        "INPUT_NOT_DECODABLE",
        "input of workflow a.child: not int: Expected `int`, got `str`",
    )


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.levelno == logging.WARNING]
    return [record.getMessage().partition("] ")[2] for record in records]


def test_the_log_tells_once_of_what_is_open_at_the_end_and_was_never_awaited(caplog: pytest.LogCaptureFixture) -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> str:
        ctx.call("charge")  # type: ignore[unused-awaitable]  # what the test is about
        ctx.run(same, 1)  # type: ignore[unused-awaitable]  # what the test is about
        ctx.sleep(60)  # type: ignore[unused-awaitable]  # what the test is about
        await ctx.signal("go")
        ctx.signal("more")  # type: ignore[unused-awaitable]  # what the test is about
        return "done"

    decider = Decider(function, Story())
    decider.go()
    decider.story.signal("go")
    decider.go()
    assert output_of(decider) == "done"
    [said] = warnings(caplog)
    assert said.startswith("workflow w returned while step charge, sleep 1m, signal more was open, and nobody had awa")
    caplog.clear()
    replayed(function, decider.story)
    assert not warnings(caplog)


def test_the_log_tells_of_a_local_step_that_was_never_begun(caplog: pytest.LogCaptureFixture) -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        for _ in range(7):
            ctx.run(same, 1)  # type: ignore[unused-awaitable]  # what the test is about

    decided(function)
    [said] = warnings(caplog)
    assert said.startswith(
        "workflow w returned while " + "local step same, " * 4 + "local step same and 2 more was open"
    )


def test_what_was_awaited_and_left_or_stopped_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> str:
        handles: list[Any] = [ctx.call("fast"), ctx.call("slow")]
        await fencepost.wait(handles, return_when="FIRST_COMPLETED")
        ctx.call("stopped").cancel()
        return "done"

    decider = decided(function)
    decider.story.complete(decider.story.first("step"))
    decider.go()
    assert output_of(decider) == "done"
    assert not warnings(caplog)


def test_a_function_without_a_context_is_no_workflow() -> None:
    async def plain(a: int) -> None: ...

    async def generic(a: list[int], b: int) -> None: ...

    for function in (plain, generic):
        with pytest.raises(TypeError, match=r"takes a WorkflowContext first.*its first parameter a is declared as"):
            workflow("w", compatibility_id="1")(function)


def test_a_context_may_be_declared_as_whatever_it_is() -> None:
    class Ours(Protocol):
        def sleep(self, length: float) -> Any: ...

    async def bare(ctx) -> None: ...  # type: ignore[no-untyped-def]  # what the test is about

    async def anything(ctx: Any) -> None: ...

    async def any_object(ctx: object) -> None: ...

    async def narrow(ctx: Ours) -> None: ...

    async def for_checkers(ctx: Unknown) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for function in (bare, anything, any_object, narrow, for_checkers):
        workflow("w", compatibility_id="1")(function)


def test_a_worker_with_nothing_or_a_workflow_among_its_steps_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="at least one handler or one workflow, and this one has none"):
        Worker("localhost:1", [])
    with pytest.raises(TypeError, match=r"is a workflow, not a handler: give it as Worker\(…, workflows=\[…\]\)"):
        Worker("localhost:1", [a_child])  # type: ignore[list-item]  # what the test is about
