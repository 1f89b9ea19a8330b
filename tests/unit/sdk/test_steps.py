"""A handler says by its signature what it takes and what it returns."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import fencepost
from fencepost import CancelReason, NotDecodable, NotEncodable, Step, StepContext, TaskKind, Undo, Value, step, undo
from fencepost.failure import NOTHING
from tests.unit.sdk.building import lease_of

if TYPE_CHECKING:
    import fencepost.context as hidden


@dataclass
class Order:
    id: int


def bound(handler: Step[..., Any], json: str = '{"id":7}') -> tuple[tuple[Any, ...], dict[str, Any]]:
    handler.prepare()
    arguments, keywords = handler.bind(lease_of(handler, input=Value(json=json)))
    return arguments, dict(keywords)


def test_a_step_still_is_its_function() -> None:
    @step("s")
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    assert double(4) == 8
    assert double.__doc__ == "Twice."
    assert (double.name, double.queue, double.is_async) == ("s", "default", False)


def test_async_handlers_are_known_however_they_are_made() -> None:
    async def plain(x: int) -> int:
        return x

    class AsyncCall:
        async def __call__(self, x: int) -> int:
            return x

    handlers: list[Callable[..., Any]] = [plain, functools.partial(plain), AsyncCall()]
    assert [Step(handler, "s").is_async for handler in handlers] == [True, True, True]


def test_the_input_has_the_declared_type() -> None:
    @step("s")
    def handle(order: Order) -> None: ...

    assert bound(handle) == ((Order(7),), {})
    with pytest.raises(NotDecodable):
        bound(handle, "[]")


def test_without_an_annotation_the_input_is_plain_json() -> None:
    def handle(order):  # type: ignore[no-untyped-def]  # the point
        return order

    assert bound(step("s")(handle)) == (({"id": 7},), {})


def nothing() -> None: ...


def test_a_handler_may_take_nothing() -> None:
    assert bound(step("s")(nothing)) == ((), {})


def context_last(order: Any, ctx: Any) -> None: ...
def context_first(ctx: Any, order: Any) -> None: ...
def context_by_keyword(order: Any, *, ctx: Any) -> None: ...


@pytest.mark.parametrize("function", [context_last, context_first, context_by_keyword])
def test_a_context_is_passed_where_it_is_named_ctx(function: Callable[..., None]) -> None:
    arguments, keywords = bound(step("s")(function))
    contexts = [value for value in (*arguments, *keywords.values()) if isinstance(value, StepContext)]
    assert len(contexts) == 1
    assert {"id": 7} in arguments
    function(*arguments, **keywords)


def test_a_context_is_passed_where_it_is_annotated() -> None:
    @step("s")
    def own(order: Order, c: StepContext) -> None: ...
    @step("s")
    def qualified(c: fencepost.StepContext) -> None: ...
    @step("s")
    def unseen(order: Order, c: hidden.StepContext, more: int = 0) -> None: ...

    assert isinstance(bound(own)[0][1], StepContext)
    assert isinstance(bound(qualified)[0][0], StepContext)


def test_a_handler_that_takes_more_is_refused() -> None:
    def two(a: int, b: int) -> None: ...

    with pytest.raises(TypeError, match="asks for a, b"):
        step("s")(two)
    with pytest.raises(TypeError, match="generator"):

        @step("s")
        def generate(x: int) -> Any:
            yield x


def test_further_parameters_with_defaults_keep_them() -> None:
    def handle(order: Any, retries: int = 3, *rest: Any, **more: Any) -> None: ...

    assert bound(step("s")(handle)) == (({"id": 7},), {})


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_names_have_limits(name: str) -> None:
    with pytest.raises(ValueError, match="is not a name: 1 to 200 letters"):
        step(name)(nothing)
    with pytest.raises(ValueError, match="is not a name: 1 to 200 letters"):
        step("s", queue=name)(nothing)


def test_a_type_of_the_function_around_it_is_found() -> None:
    @dataclass
    class Local:
        id: int

    @step("s")
    def handle(order: Local) -> None: ...

    assert bound(handle) == ((Local(7),), {})


@step("later")
def takes_later(order: Later) -> None: ...


@dataclass
class Later:
    id: int


def test_a_type_that_is_defined_further_down_is_found() -> None:
    assert bound(takes_later) == ((Later(7),), {})


def test_an_annotation_of_what_does_not_exist_is_refused_when_the_worker_starts() -> None:
    def handle(order: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821 - the point

    handler = step("s")(handle)
    with pytest.raises(TypeError, match="Nowhere"):
        handler.prepare()


def test_a_type_that_no_json_becomes_is_refused_at_once() -> None:
    class Opaque:
        pass

    with pytest.raises(TypeError, match=r"step s: JSON can't be converted to .*Opaque"):

        @step("s")
        def handle(order: Opaque) -> None: ...


def test_what_is_returned_may_have_sets_if_that_is_declared() -> None:
    @step("s")
    def declared() -> set[int]:
        return {1}

    @step("s")
    def undeclared() -> dict[str, Any]:
        return {"a": {1}}

    assert declared.completed({1}, 100).output.json == "[1]"
    with pytest.raises(NotEncodable):
        undeclared.completed({"a": {1}}, 100)


def test_an_output_over_the_limit_is_refused_and_one_at_the_limit_is_not() -> None:
    handler = step("s")(nothing)
    assert handler.completed("é" * 10, 22).size == 22
    with pytest.raises(NotEncodable, match="22 bytes, over the limit of 21"):
        handler.completed("é" * 10, 21)


def test_none_costs_nothing() -> None:
    assert step("s")(nothing).completed(None, 100) is NOTHING


async def test_a_sync_handler_that_returns_an_awaitable_is_told_so() -> None:
    async def late() -> int:
        return 1

    handler = step("s")(functools.partial(late).__call__)
    with pytest.raises(NotEncodable, match="returned an awaitable"):
        handler.completed(handler(), 100)
    assert asyncio.get_running_loop().is_running()


def test_a_context_tells_about_its_attempt() -> None:
    context = StepContext.for_test(attempt=2, fencing_token=9, idempotency_key="k", user_id="u")
    assert (context.attempt, context.fencing_token, context.idempotency_key, context.user_id) == (2, 9, "k", "u")
    assert context.deadline is None
    assert context.feedback is None
    assert context.lease_remaining > 50
    assert not context.cancelled
    assert context.wait_cancelled(0.001) is False


def test_a_cancelled_context_says_so_and_why() -> None:
    lease = lease_of(step("s")(nothing))
    context = StepContext(lease)
    lease.cancel_reason = CancelReason.ATTEMPT_TIMEOUT
    assert context.cancelled
    assert context.cancel_reason is CancelReason.ATTEMPT_TIMEOUT
    assert context.wait_cancelled(60)


def test_its_logger_names_the_attempt(caplog: pytest.LogCaptureFixture) -> None:
    context = StepContext.for_test(run_id="r", node_id="n", attempt=3)
    with caplog.at_level(logging.INFO, "fencepost.step"):
        context.logger.info("charged %d", 5, extra={"amount": 5})
    (record,) = caplog.records
    assert record.getMessage() == "[r n #3] charged 5"
    assert (record.__dict__["node_id"], record.__dict__["amount"]) == ("n", 5)


# Undo handlers.


@dataclass
class Reservation:
    units: int


def undone(handler: Step[..., Any], output: Value | None = None, *, unfinished: bool = False) -> tuple[Any, ...]:
    handler.prepare()
    lease = lease_of(
        handler, input=Value(json='{"id":7}'), kind=TaskKind.UNDO, undo_output=output, unfinished=unfinished
    )
    arguments, keywords = handler.bind(lease)
    handler.function(*arguments, **keywords)
    return arguments


def test_an_undo_handler_gets_the_input_and_the_output_of_its_step_in_their_types() -> None:
    @undo("orders.unreserve", queue="q")
    def unreserve(order: Order, reservation: Reservation, ctx: StepContext) -> None:
        assert ctx.kind is TaskKind.UNDO

    assert isinstance(unreserve, Undo)
    assert (unreserve.name, unreserve.queue, unreserve.kind) == ("orders.unreserve", "q", TaskKind.UNDO)
    assert undone(unreserve, Value(json='{"units":2}'))[:2] == (Order(7), Reservation(2))
    with pytest.raises(NotDecodable):
        undone(unreserve, Value(json="[]"))


def test_the_output_of_a_step_that_did_not_complete_is_none_whatever_its_type() -> None:
    @undo("u")
    def handle(order: Order, reservation: Reservation | None, ctx: StepContext) -> None:
        assert ctx.unfinished

    assert undone(handle, unfinished=True)[1] is None
    assert undone(handle, Value(json='{"units":2}'), unfinished=True)[1] is None

    @undo("u")
    def strict(order: Order, reservation: Reservation) -> None: ...

    assert undone(strict) == (Order(7), None)


def test_an_output_of_null_is_decoded_like_any_other() -> None:
    @undo("u")
    def handle(order: Order, output: None) -> None: ...

    @undo("u")
    def strict(order: Order, output: Reservation) -> None: ...

    assert undone(handle, Value())[1] is None
    with pytest.raises(NotDecodable):
        undone(strict, Value())


def test_an_undo_handler_may_take_less() -> None:
    def input_only(order: Any) -> None: ...
    def context_only(ctx: Any) -> None: ...
    def context_between(order: Any, ctx: Any, output: Any) -> None: ...
    def context_first(ctx: Any, order: Any, output: Any) -> None: ...
    def by_keyword(order: Any, output: Any, *, ctx: Any) -> None: ...

    output = Value(json="5")
    assert undone(undo("u")(nothing), output) == ()
    assert undone(undo("u")(input_only), output) == ({"id": 7},)
    assert isinstance(undone(undo("u")(context_only), output)[0], StepContext)
    between, first = undone(undo("u")(context_between), output), undone(undo("u")(context_first), output)
    assert (between[0], between[2]) == first[1:] == ({"id": 7}, 5)
    assert isinstance(between[1], StepContext)
    assert undone(undo("u")(by_keyword), output) == ({"id": 7}, 5)


def test_an_undo_handler_that_takes_more_is_refused() -> None:
    def three(a: int, b: int, c: int) -> None: ...

    with pytest.raises(TypeError, match=r"undo handler u: a handler takes an input, an output and.* asks for a, b, c"):
        undo("u")(three)


def test_an_undo_handler_still_is_its_function_and_sees_the_types_around_it() -> None:
    @dataclass
    class Local:
        id: int

    @undo("u")
    async def handle(order: Local, output: int) -> int:
        return order.id + output

    handle.prepare()
    assert asyncio.run(handle(Local(1), 2)) == 3
    assert handle.is_async
    arguments, _ = handle.bind(lease_of(handler=handle, input=Value(json='{"id":7}'), undo_output=Value(json="1")))
    assert arguments == (Local(7), 1)
