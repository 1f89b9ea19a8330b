"""How workflows are declared, and what their calls ask the server for."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

import fencepost
from fencepost import (
    FailureKind,
    NotEncodable,
    Retry,
    StepContext,
    UndoPolicy,
    Value,
    WorkflowContext,
    step,
    undo,
    workflow,
)
from fencepost.policies import duration_text, seconds_in
from fencepost.recordable import MAX_DEPTH
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.code import op_node
from fencepost_server.domain.manifest import parse_manifest
from fencepost_server.domain.model import FailureKind as ServerKind
from fencepost_server.domain.policy import RetryPolicy
from fencepost_server.domain.retry import decide
from tests.unit.sdk.replaying import RUN_ID, Decider, Story, decided, output_of, replayed, result_of


@dataclass
class Order:
    id: int
    tags: set[str]


@step("charge", queue="money")
def charge(order: Order) -> int:
    return order.id


@undo("refund", queue="money")
def refund(order: Order) -> None: ...


@workflow("invoice", compatibility_id="3", queue="paper", output_schema={"type": "integer"})
async def invoice(ctx: WorkflowContext, order: Order) -> int:
    return order.id


def command_of(ask: Callable[[WorkflowContext], Any]) -> pb.Command:
    """The one command that a function sends that asks for this."""

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        asked = ask(ctx)
        await asyncio.Event().wait()
        del asked

    decider = decided(function)
    [command] = [command for sent in decider.sent for command in sent.commands]
    assert command.op == 1
    return command


def test_a_workflow_still_is_its_function() -> None:
    assert (invoice.workflow_id, invoice.compatibility_id, invoice.queue) == ("invoice", "3", "paper")
    assert asyncio.run(_awaited(invoice(None, Order(7, set())))) == 7  # type: ignore[arg-type]  # it needs no context


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def test_its_manifest_is_one_that_the_server_reads() -> None:
    manifest = parse_manifest(invoice.manifest)
    assert (manifest.workflow_id, manifest.compatibility_id, manifest.code) == ("invoice", "3", "paper")
    assert manifest.output_schema == {"type": "integer"}


def test_only_async_functions_of_a_context_and_an_input_are_workflows() -> None:
    declare: Any = workflow("w", compatibility_id="1")

    def blocking(ctx: WorkflowContext) -> None: ...

    async def alone() -> None: ...

    async def greedy(ctx: WorkflowContext, a: int, b: int) -> None: ...

    async def keyword(ctx: WorkflowContext, *, a: int) -> None: ...

    async def strange(ctx: WorkflowContext, a: asyncio.Event) -> None: ...

    for function in (blocking, alone, greedy, keyword, strange):
        with pytest.raises(TypeError, match="workflow w: "):
            declare(function)
    with pytest.raises(ValueError, match="a workflow's compatibility_id: '' is not a name: 1 to 200 letters"):
        workflow("w", compatibility_id="")(invoice.function)


def test_an_input_may_be_left_out() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext, n: int | None) -> list[Any]:
        return [n, ctx.workflow_id, ctx.user_id, ctx.run_id]

    assert output_of(decided(function, user_id="me")) == [None, "w", "me", RUN_ID]


def test_annotations_of_the_functions_that_declare_are_known() -> None:
    @dataclass
    class Here:
        n: int

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext, here: Here) -> Here:
        def after(of: Here) -> Here:
            return Here(of.n + 1)

        return await ctx.run(after, here)

    assert output_of(decided(function, Here(1))) == {"n": 2}


OPTIONS: dict[str, Any] = {
    "queue": "gpu",
    "timeout": 90,
    "lease": dt.timedelta(minutes=2),
    "queue_timeout": 0.5,
    "total_timeout": dt.timedelta(days=1, seconds=1),
    "retry": Retry(max_attempts=2, initial_delay=0.25, max_delay=dt.timedelta(hours=1), jitter=0),
    "undo": UndoPolicy("refund", queue="money", timeout=5, lease=10, retry=Retry(max_attempts=9), unfinished=True),
}


def test_the_options_of_a_remote_step_are_those_of_a_node() -> None:
    command = command_of(lambda ctx: ctx.call("charge", {"n": 1}, **OPTIONS)).schedule_step
    assert (command.handler, command.input.json, len(command.input_hash)) == ("charge", '{"n":1}', 8)
    assert json.loads(command.options)["queue_timeout"] == "500ms"
    node = op_node("step", command.handler, command.options).node
    assert node.timeout_seconds == 90  # type: ignore[union-attr]  # it is a step's
    assert node.lease_seconds == 120  # type: ignore[union-attr]
    assert node.total_timeout_seconds == 86_401  # type: ignore[union-attr]
    assert node.retry.max_attempts == 2  # type: ignore[union-attr]
    assert node.undo.unfinished  # type: ignore[union-attr]


def test_a_step_brings_its_name_its_queue_and_its_types() -> None:
    command = command_of(lambda ctx: ctx.call(charge, Order(1, {"a"}), undo=refund)).schedule_step
    assert (command.handler, command.input.json) == ("charge", '{"id":1,"tags":["a"]}')
    assert json.loads(command.options) == {"queue": "money", "undo": {"step": "refund", "queue": "money"}}
    op_node("step", command.handler, command.options)


def test_a_call_without_options_has_none() -> None:
    command = command_of(lambda ctx: ctx.call("charge")).schedule_step
    assert (command.options, command.input.WhichOneof("data")) == ("", None)


def test_a_child_has_the_options_of_a_node() -> None:
    command = command_of(lambda ctx: ctx.child(invoice, Order(2, set()), on_parent_end="abandon", undo="void"))
    child = command.start_child
    assert (child.workflow_id, child.input.json) == ("invoice", '{"id":2,"tags":[]}')
    assert json.loads(child.options) == {"on_parent_end": "abandon", "undo": {"step": "void"}}
    op_node("child", child.workflow_id, child.options)


def test_a_local_step_that_can_be_undone_records_its_input() -> None:
    def pair(a: int, b: str) -> None: ...

    def nothing() -> None: ...

    @step("tag")
    def tagging(tags: set[str]) -> None: ...

    one = command_of(lambda ctx: ctx.run(charge, Order(1, {"a"}), undo=refund)).record_local_step
    assert json.loads(one.input.json) == {"id": 1, "tags": ["a"]}
    assert json.loads(one.options) == {"undo": {"step": "refund", "queue": "money"}}
    op_node("local", one.name, one.options)
    two = command_of(lambda ctx: ctx.run(pair, 1, "x", undo="unpair")).record_local_step
    assert two.input.json == '[1,"x"]'
    none = command_of(lambda ctx: ctx.run(nothing, undo="something")).record_local_step
    assert none.HasField("input")
    assert none.input.WhichOneof("data") is None
    sets = command_of(lambda ctx: ctx.run(tagging, {"a"}, undo="untag")).record_local_step
    assert sets.input.json == '["a"]'
    without = command_of(lambda ctx: ctx.run(pair, 1, "x")).record_local_step
    assert not without.HasField("input")


def test_the_input_of_an_undo_is_looked_at_as_a_whole() -> None:
    """Also where the first of several arguments can't break a rule."""
    refused: list[str] = []

    def pair(a: int, b: list[Any]) -> None: ...

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        nested: list[Any] = []
        for _ in range(MAX_DEPTH + 1):
            nested = [nested]
        with pytest.raises(NotEncodable) as caught:
            _ = ctx.run(pair, 1, nested, undo="unpair")
        refused.append(caught.value.message)

    decided(function)
    assert refused == [f"arrays and objects are nested more than {MAX_DEPTH} deep"]


def test_times_are_told_to_the_microsecond() -> None:
    timer = command_of(lambda ctx: ctx.sleep(dt.timedelta(days=1, microseconds=1))).start_timer
    assert (timer.delay.seconds, timer.delay.nanos) == (86_400, 1_000)
    assert command_of(lambda ctx: ctx.sleep(0)).start_timer.HasField("delay")
    wait = command_of(lambda ctx: ctx.signal("go", timeout=1.5)).await_signal
    assert (wait.signal_name, wait.timeout.seconds, wait.timeout.nanos) == ("go", 1, 500_000_000)
    assert not command_of(lambda ctx: ctx.signal("go")).await_signal.HasField("timeout")


def test_labels_are_texts_and_none_takes_one_away() -> None:
    told = command_of(lambda ctx: ctx.set_attributes({"stage": "paid", "old": None})).set_attributes
    assert dict(told.attributes) == {"stage": "paid", "old": ""}
    with pytest.raises(AssertionError, match="TypeError"):
        output_of(decided(_raising(lambda ctx: ctx.set_attributes({"n": 1}))))  # type: ignore[dict-item]


def _raising(ask: Callable[[WorkflowContext], object]) -> fencepost.Workflow[..., Any]:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        ask(ctx)

    return function


def generator() -> Any:
    yield 1


def untyped() -> asyncio.Event:
    raise NotImplementedError


WRONG: dict[str, tuple[Callable[[WorkflowContext], object], str]] = {
    "negative": (lambda ctx: ctx.sleep(-1), "ValueError"),
    "no number": (lambda ctx: ctx.sleep(float("nan")), "ValueError"),
    "too long": (lambda ctx: ctx.sleep(4000 * 86_400), "ValueError"),
    "no name": (lambda ctx: ctx.signal(""), "ValueError"),
    "long name": (lambda ctx: ctx.call("x" * 201), "ValueError"),
    "no JSON": (lambda ctx: ctx.call("x", object()), "NotEncodable"),
    "too large": (lambda ctx: ctx.call("x", "y" * (1 << 20)), "NotEncodable"),
    "no JSON, locally": (lambda ctx: ctx.run(charge, object()), "NotEncodable"),
    "a result": (lambda ctx: ctx.run(charge.function(Order(1, set()))), "TypeError"),  # type: ignore[call-overload]
    "generator": (lambda ctx: ctx.run(generator), "TypeError"),
    "no type of JSON": (lambda ctx: ctx.run(untyped), "TypeError"),
    "undo": (lambda ctx: ctx.run(refund, Order(1, set()), None), "TypeError"),
    "async query": (lambda ctx: ctx.on_query("q", _awaited), "TypeError"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_can_never_be_asked_for_is_an_error_at_the_call(wrong: str) -> None:
    ask, code = WRONG[wrong]
    failure = decided(_raising(ask)).story.failure
    assert failure is not None
    assert (failure.kind, failure.code) == (FailureKind.PERMANENT, code)


def test_local_steps_are_named_by_what_they_run() -> None:
    def named() -> None: ...

    class Called:
        def __call__(self) -> None: ...

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        for fn in (named, functools.partial(named), lambda: None, Called()):
            await ctx.run(fn)
        await ctx.run(named, name="mine")
        await ctx.run(charge, Order(1, set()))

    decider = decided(function)
    assert decider.ran == ["named", "named", "lambda", "Called", "mine", "charge"]
    replayed(function, decider.story)


def test_a_local_step_that_wants_a_context_gets_one() -> None:
    seen: list[Any] = []

    @step("local")
    async def with_context(context: StepContext, n: int) -> int:
        seen.append((context.run_id, context.node_id, context.attempt, context.fencing_token, context.idempotency_key))
        seen.append(context.last_checkpoint)
        await context.checkpoint({"n": n})
        return n

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> int:
        return await ctx.run(with_context, 3, timeout=30, retry=Retry(max_attempts=2))

    decider = Decider(function, Story())
    decider.run.leased(77)
    [call] = decider.run.local_steps()
    assert (call.timeout, call.retry.max_attempts, call.is_async) == (30, 2, True)
    for attempt in (1, 2):
        arguments, keywords = call.bind(attempt)
        assert asyncio.run(call.function(*arguments, **keywords)) == 3
    assert seen == [
        (RUN_ID, "local", 1, 77, f"{RUN_ID}/-1"),
        None,
        (RUN_ID, "local", 2, 77, f"{RUN_ID}/-1"),
        {"n": 3},
    ]


def test_a_context_comes_where_the_function_takes_it() -> None:
    def first(ctx: StepContext, a: int, b: int = 2) -> list[Any]:
        return [ctx.attempt, a, b]

    def last(a: int, b: int = 2, ctx: StepContext | None = None) -> list[Any]:
        return [ctx and ctx.attempt, a, b]

    def named(*numbers: int, ctx: StepContext) -> list[Any]:
        return [ctx.attempt, *numbers]

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> list[Any]:
        asked = [ctx.run(first, 1), ctx.run(first, 1, 3), ctx.run(last, 1), ctx.run(last, 1, 3), ctx.run(named, 1, 3)]
        return [await handle for handle in asked]

    assert output_of(decided(function)) == [[1, 1, 2], [1, 1, 3], [1, 1, 2], [1, 1, 3], [1, 1, 3]]


def test_what_a_local_step_returns_has_to_have_json() -> None:
    async def forgotten() -> int:
        return 1

    def returns_awaitable() -> Any:
        return forgotten()

    decider = Decider(_raising(lambda ctx: None), Story())
    for output in (float("nan"), {1}, returns_awaitable(), "x" * 2000):
        with pytest.raises(NotEncodable):
            _call_of(returns_awaitable).completed(output, 1000)
    assert _call_of(returns_awaitable).completed([1], 1000).output == Value(json="[1]")
    assert decider.begin() == []


def _call_of(fn: Callable[..., Any]) -> Any:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        await ctx.run(fn)

    [call] = Decider(function, Story()).run.local_steps()
    return call


@pytest.mark.parametrize("most", [0, 1, 3])
def test_retries_pause_as_the_server_would(most: int) -> None:
    retry = Retry(max_attempts=4, initial_delay=2, multiplier=3, max_delay=7, jitter=0, max_corrective_attempts=most)
    policy = RetryPolicy(4, 2.0, 3.0, 7.0, 0.0, most)
    for kind, asked in itertools.product(
        (FailureKind.OPERATIONAL, FailureKind.CORRECTIVE, FailureKind.PERMANENT), (None, 99.0)
    ):
        for operational, corrective in itertools.product(range(6), repeat=2):
            if (operational if kind is FailureKind.OPERATIONAL else corrective) == 0:
                continue  # the counters have the failure that is decided on
            served = decide(policy, ServerKind[kind.name], operational, corrective, asked, 0.5)
            paused = retry.pause_after(kind, operational, corrective, asked)
            assert paused == (None if served is None else pytest.approx(served.delay)), (kind, operational, corrective)


def test_chance_moves_the_pauses_within_the_jitter() -> None:
    jittered = {Retry(jitter=0.5).pause_after(FailureKind.OPERATIONAL, 1, 0) for _ in range(50)}
    assert all(pause is not None and 0.5 <= pause <= 1.5 for pause in jittered)
    assert len(jittered) > 40
    assert Retry(max_attempts=1_000_000).pause_after(FailureKind.OPERATIONAL, 999_999, 0) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"max_attempts": 0}, id="attempts"),
        pytest.param({"max_corrective_attempts": -1}, id="corrective"),
        pytest.param({"multiplier": 0.5}, id="multiplier"),
        pytest.param({"jitter": 2}, id="jitter"),
        pytest.param({"initial_delay": 10, "max_delay": 5}, id="order"),
        pytest.param({"max_delay": dt.timedelta(days=8)}, id="longest"),
        pytest.param({"initial_delay": -1}, id="negative"),
    ],
)
def test_a_policy_that_no_manifest_could_have_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is from|is at most|no length"):
        Retry(**wrong)


def test_durations_are_spelled_as_manifests_do() -> None:
    spelled = {90: "1m30s", 0: "0s", 0.001: "1ms", 86_400.5: "1d500ms", 3661: "1h1m1s", 1e-9: "0s"}
    assert {seconds: duration_text(seconds) for seconds in spelled} == spelled
    assert seconds_in(dt.timedelta(minutes=1)) == 60


def test_results_of_local_steps_are_decoded_to_what_they_say() -> None:
    def moment() -> dt.datetime:
        return dt.datetime(2026, 1, 2, tzinfo=dt.UTC)

    async def tags() -> set[str]:
        return {"b"}

    seen: list[Any] = []

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> None:
        seen.extend(await asyncio.gather(ctx.run(moment), ctx.run(tags)))

    decided(function)
    assert seen == [dt.datetime(2026, 1, 2, tzinfo=dt.UTC), {"b"}]
    assert result_of(_call_of(moment)).size == 22
