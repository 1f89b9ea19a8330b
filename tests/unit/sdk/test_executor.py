"""Users' code runs apart from the session, and whatever it does ends in one result for each lease begun."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import psycopg
import pytest

from fencepost import (
    CancelReason,
    FailureKind,
    LeaseLost,
    PermanentError,
    Step,
    StepContext,
    TaskKind,
    Value,
    step,
    undo,
)
from fencepost.checkpoints import Saving
from fencepost.failure import Completed, Failed, Released
from fencepost.lease import Lease
from tests.fixtures.waiting import eventually
from tests.unit.sdk.building import lease_of
from tests.unit.sdk.executing import Harness, both, raising
from tests.unit.sdk.threads import no_thread_starts


@step("nothing")
def nothing() -> None: ...


async def test_an_output_comes_back_for_each_lease(harness: Harness) -> None:
    outcomes = await harness.run(*both(lambda: {"a": 1}))
    assert outcomes == [Completed(Value(json='{"a":1}'), 7)] * 2


async def test_sync_handlers_run_in_threads_and_async_ones_on_the_users_loop(harness: Harness) -> None:
    def sync() -> int:
        return threading.get_ident()

    async def on_loop() -> int:
        return threading.get_ident()

    outcomes = await harness.run(step("a")(sync), step("b")(on_loop))
    threads = [int(outcome.output.json) for outcome in outcomes]
    assert threads[1] == harness.thread.ident
    assert len({*threads, threading.get_ident()}) == 3


@pytest.mark.parametrize(
    "error",
    [
        grpc.RpcError("unavailable"),
        psycopg.OperationalError("connection lost"),
        TimeoutError("late"),
        asyncio.CancelledError("not ours"),
        asyncio.InvalidStateError("odd"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopAsyncIteration(),
        MemoryError(),
    ],
)
async def test_errors_of_users_code_are_its_own_failure_and_the_worker_lives(
    harness: Harness, error: BaseException
) -> None:
    outcomes = await harness.run(*both(raising(error)))
    assert [(type(outcome), outcome.kind) for outcome in outcomes] == [(Failed, FailureKind.OPERATIONAL)] * 2
    assert {outcome.code for outcome in outcomes} == {type(error).__name__}
    harness.results.clear()
    assert len(await harness.run(*both(lambda: 1))) == 2


async def test_stop_iteration_out_of_a_handler_is_a_failure(harness: Harness) -> None:
    outcomes = await harness.run(*both(raising(StopIteration(1))))
    assert [outcome.kind for outcome in outcomes] == [FailureKind.OPERATIONAL] * 2


@pytest.mark.parametrize(
    "output",
    [
        math.nan,
        b"x",
        {1},
        "\ud800",
        object(),
        "x" * (1 << 20),
        [math.inf],
        Value(json={}),  # type: ignore[arg-type]
        Value(binary="x"),  # type: ignore[arg-type]
        Value(json="1", metadata={"n": 1}),  # type: ignore[dict-item]
    ],
    ids=["nan", "bytes", "set", "surrogate", "object", "large", "infinity", "no-text", "no-bytes", "no-metadata"],
)
async def test_an_output_that_can_not_be_recorded_is_a_permanent_failure(harness: Harness, output: object) -> None:
    for outcome in await harness.run(*both(lambda: output)):
        assert isinstance(outcome, Failed)
        assert (outcome.kind, outcome.code) == (FailureKind.PERMANENT, "OUTPUT_NOT_RECORDABLE")
        assert "can't be recorded" in outcome.message


async def test_an_input_that_does_not_fit_is_a_permanent_failure(harness: Harness) -> None:
    def sync(x: int) -> None: ...
    async def on_loop(x: int) -> None: ...

    for outcome in await harness.run(step("a")(sync), step("b")(on_loop), input=Value(json='"1"')):
        assert isinstance(outcome, Failed)
        assert (outcome.kind, outcome.code) == (FailureKind.PERMANENT, "INPUT_NOT_DECODABLE")


async def test_an_error_of_decoding_inside_a_handler_is_not_the_inputs(harness: Harness) -> None:
    def fetch() -> None:
        Value(json='"x"').decode(int)

    for outcome in await harness.run(*both(fetch)):
        assert (outcome.kind, outcome.code) == (FailureKind.OPERATIONAL, "NotDecodable")


async def test_each_failed_attempt_is_logged_in_a_line_and_unexpected_ones_with_their_traceback(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fencepost.worker"):
        await harness.run(step("a")(raising(PermanentError("meant\nmore"))), step("b")(raising(KeyError("bug"))))
    meant, bug = sorted(caplog.records, key=lambda record: record.getMessage())
    assert meant.getMessage().startswith("step a failed: node n, run ")
    assert meant.getMessage().endswith(", attempt 1: PERMANENT PermanentError: meant")
    assert not meant.exc_info
    assert bug.getMessage().startswith("step b failed: ")
    assert bug.exc_info


async def test_a_blocked_handler_holds_up_neither_the_session_nor_the_threads(harness: Harness) -> None:
    released = threading.Event()

    def block() -> bool:
        return released.wait(10)

    async def block_loop() -> bool:
        return released.wait(10)

    blocked = [lease_of(step("a")(block), run=1), lease_of(step("b")(block_loop), run=2)]
    harness.executor.submit(blocked)
    await eventually(lambda: all(lease.begun for lease in blocked))
    free = [lease_of(nothing, run=number) for number in (3, 4, 5)]
    harness.executor.submit(free)
    await harness.outcomes(*free)
    assert len(harness.results) == 3
    released.set()
    await harness.outcomes(*blocked, *free)


async def test_no_lease_waits_behind_a_busy_thread_while_another_may_be_started(harness: Harness) -> None:
    barrier = threading.Barrier(4)

    def meet() -> int:
        return barrier.wait(30)

    for number in range(25):
        harness.results.clear()
        leases = [lease_of(step("a")(meet), run=number * 10 + turn) for turn in range(4)]
        for lease in leases:
            harness.executor.submit([lease])
        outcomes = await harness.outcomes(*leases)
        assert all(isinstance(outcome, Completed) for outcome in outcomes)


async def test_a_batch_costs_one_delivery(harness: Harness) -> None:
    async def nothing() -> None: ...

    handler = step("a")(nothing)
    leases = [lease_of(handler, run=number) for number in range(500)]
    harness.executor.submit(leases)
    await harness.outcomes(*leases)
    assert harness.deliveries < 20


def running(lease: Lease) -> bool:
    return lease.runner is not None


async def test_a_cancelled_async_step_is_interrupted(harness: Harness) -> None:
    seen: list[str] = []

    async def wait(ctx: StepContext) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(f"{ctx.cancelled} {ctx.cancel_reason}")
            raise

    handler = step("a")(wait)
    for number in (1, 2):  # the second time it has a task of its own
        lease = lease_of(handler, run=number)
        harness.results.clear()
        harness.executor.submit([lease])
        await eventually(partial(running, lease))
        lease.cancel_reason = CancelReason.LEASE_LOST
        assert harness.executor.cancel([lease]) == []
        (outcome,) = await harness.outcomes(lease)
        assert (outcome.code, outcome.kind) == ("StepCancelled", FailureKind.OPERATIONAL)
        assert seen == ["True LEASE_LOST"] * number


async def test_a_cancelled_sync_step_is_told(harness: Harness) -> None:
    def wait(ctx: StepContext) -> bool:
        return ctx.wait_cancelled(60)

    lease = lease_of(step("a")(wait))
    harness.executor.submit([lease])
    await eventually(lambda: lease.begun)
    lease.cancel_reason = CancelReason.ATTEMPT_TIMEOUT
    assert harness.executor.cancel([lease]) == []
    (outcome,) = await harness.outcomes(lease)
    assert outcome.output.json == "true"


async def test_a_handler_that_ignores_its_cancellation_still_has_one_result(harness: Harness) -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "all the same"

    lease = lease_of(step("a")(stubborn))
    harness.executor.submit([lease])
    await eventually(lambda: lease.runner is not None)
    lease.cancel_reason = CancelReason.LEASE_LOST
    harness.executor.cancel([lease])
    assert (await harness.outcomes(lease))[0].output.json == '"all the same"'
    assert len(harness.results) == 1


async def test_what_was_not_begun_can_be_taken_back_and_never_runs(harness: Harness) -> None:
    released = threading.Event()
    ran: list[int] = []

    async def block_loop() -> bool:
        return released.wait(10)

    async def run(x: int) -> None:
        ran.append(x)

    def block() -> bool:
        return released.wait(10)

    busy = [lease_of(step("a")(block_loop), run=1)]
    busy += [lease_of(step("b")(block), run=number) for number in (2, 3, 4, 5)]
    harness.executor.submit(busy)
    await eventually(lambda: all(lease.begun for lease in busy))
    queued = [lease_of(step("c")(run), run=6), lease_of(step("d")(ran.append), run=7)]
    harness.executor.submit(queued)
    assert harness.executor.withdraw([*busy, *queued]) == queued
    assert harness.executor.withdraw(queued) == []
    released.set()
    await harness.outcomes(*busy)
    harness.results.clear()
    await harness.run(*both(lambda: 1))
    assert ran == []


async def test_checkpoints_arrive_in_order_and_before_the_result_of_their_step(harness: Harness) -> None:
    def save(ctx: StepContext) -> None:
        for number in range(100):
            ctx.checkpoint(number, wait=False)

    async def save_on_the_loop(ctx: StepContext) -> None:
        save(ctx)

    leases = [lease_of(step("a")(save), run=1), lease_of(step("b")(save_on_the_loop), run=2)]
    harness.executor.submit(leases)
    await eventually(lambda: len(harness.results) == 202)
    for lease in leases:
        *states, outcome = [result for of, result in harness.results if of is lease]
        assert [state.number for state in states if isinstance(state, Saving)] == list(range(1, 101))
        assert isinstance(outcome, Completed)


async def test_who_waits_for_a_checkpoint_of_a_worker_that_has_ended_is_told_so(harness: Harness) -> None:
    begun, ended = threading.Event(), threading.Event()
    errors: list[LeaseLost] = []

    def save(ctx: StepContext) -> None:
        begun.set()
        ended.wait(30)
        try:
            ctx.checkpoint(1)
        except LeaseLost as error:
            errors.append(error)

    lease = lease_of(step("a")(save))
    harness.executor.submit([lease])
    await eventually(begun.is_set)
    harness.executor.close()
    ended.set()
    await eventually(lambda: errors)
    assert "the worker has ended" in str(errors[0])


async def test_undo_handlers_run_like_steps(harness: Harness) -> None:
    def sync(given: int, made: str) -> str:
        return f"{given} {made}"

    async def on_loop(given: int, made: str, ctx: StepContext) -> str:
        return f"{given} {made} {ctx.kind}"

    handlers: list[Step[..., Any]] = [undo("a")(sync), undo("b")(on_loop)]
    leases = [
        lease_of(handler, run=number, kind=TaskKind.UNDO, input=Value(json="1"), undo_output=Value(json='"x"'))
        for number, handler in enumerate(handlers)
    ]
    harness.executor.submit(leases)
    outcomes = await harness.outcomes(*leases)
    assert [outcome.output.json for outcome in outcomes] == ['"1 x"', '"1 x UNDO"']


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
async def test_what_a_users_class_raises_as_it_is_made_is_the_steps_own_failure(
    harness: Harness, error: BaseException
) -> None:
    """Also what is no Exception: nobody would hear of the step any more."""

    @dataclass
    class Order:
        id: int

        def __post_init__(self) -> None:
            raise error

    def sync(order: Order) -> None: ...
    async def on_loop(order: Order) -> None: ...

    outcomes = await harness.run(step("a")(sync), step("b")(on_loop), input=Value(json='{"id":1}'))
    assert [(type(outcome), outcome.code) for outcome in outcomes] == [(Failed, type(error).__name__)] * 2
    harness.results.clear()
    assert len(await harness.run(*both(lambda: 1))) == 2


async def test_what_a_users_class_raises_as_it_is_written_is_the_steps_own_failure(harness: Harness) -> None:
    class Odd(list[int]):
        def __iter__(self) -> Any:
            raise SystemExit(3)

    outcomes = await harness.run(*both(lambda: Odd([1])))
    assert [outcome.code for outcome in outcomes] == ["SystemExit"] * 2


async def test_a_step_for_which_no_thread_can_be_started_is_given_back(harness: Harness) -> None:
    first, second = lease_of(nothing, run=1), lease_of(nothing, run=2)
    with no_thread_starts():
        harness.executor.submit([first, second])
        assert await harness.outcomes(first, second) == [Released(), Released()]
    harness.results.clear()
    assert len(await harness.run(*[nothing] * 6)) == 6


async def test_a_step_for_which_no_further_thread_can_be_started_waits_for_one_that_is_there(harness: Harness) -> None:
    go = threading.Event()

    def wait() -> bool:
        return go.wait(10)

    busy, waiting = lease_of(step("a")(wait), run=1), lease_of(nothing, run=2)
    harness.executor.submit([busy])
    await eventually(lambda: busy.begun)
    with no_thread_starts():
        harness.executor.submit([waiting])
    go.set()
    assert all(isinstance(outcome, Completed) for outcome in await harness.outcomes(busy, waiting))
