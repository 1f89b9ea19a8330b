"""Users' code runs apart from the session, and whatever it does ends in one result for each lease begun."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import math
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import psycopg
import pytest
import pytest_asyncio

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
from fencepost.executor import Executor, Result
from fencepost.failure import Completed, Failed, Released
from fencepost.lease import Lease
from tests.fixtures.waiting import eventually
from tests.unit.sdk.building import lease_of, plain, this_task
from tests.unit.sdk.threads import no_thread_starts


class Harness:
    """An executor whose session is the test's loop and whose users' loop runs in a thread, as in a worker."""

    def __init__(self, threads: int) -> None:
        self.users_loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve)
        self.results: list[Result] = []
        self.deliveries = 0
        self.executor = Executor(self.users_loop, asyncio.get_running_loop(), threads, self._deliver)
        self.thread.start()

    def _serve(self) -> None:
        self.users_loop.run_forever()
        self.users_loop.close()

    def _deliver(self) -> None:
        self.deliveries += 1
        self.results += self.executor.take_results()

    async def outcomes(self, *leases: Lease) -> list[Any]:
        """What became of leases, in their order."""
        await eventually(lambda: len(self.results) >= len(leases))
        by_lease = dict(self.results)
        return [by_lease[lease] for lease in leases]

    async def run(self, *handlers: Step[..., Any], input: Value | None = None) -> list[Any]:
        leases = [
            lease_of(handler, run=number, input=input or Value(), max_payload_bytes=1 << 20)
            for number, handler in enumerate(handlers)
        ]
        self.executor.submit(leases)
        return await self.outcomes(*leases)

    def close(self) -> None:
        self.executor.close()
        self.users_loop.call_soon_threadsafe(self.users_loop.stop)
        self.thread.join(5)
        assert not self.thread.is_alive()


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness(threads=4)
    yield made
    made.close()


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@step("nothing")
def nothing() -> None: ...


def both(function: Callable[[], Any]) -> list[Step[..., Any]]:
    """The same body as a sync and as an async handler."""

    async def run() -> Any:
        return function()

    return [step("sync")(function), step("async")(run)]


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


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
        return barrier.wait(5)

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


async def test_steps_do_not_share_context_variables(harness: Harness) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    def count() -> int:
        variable.set(variable.get() + 1)
        return variable.get()

    async def wait() -> int:
        await asyncio.sleep(0)
        return count()

    variable.set(10)  # of the session, which is none of theirs
    waiting = step("waiting")(wait)
    for _ in range(3):
        harness.results.clear()
        outcomes = await harness.run(*both(count), waiting, waiting)
        assert [outcome.output.json for outcome in outcomes] == ["1"] * 4


async def test_async_steps_that_wait_for_nothing_are_run_by_one_task(harness: Harness) -> None:
    tasks = set()

    async def quick(number: int) -> int:
        tasks.add(this_task().get_name())
        return number

    handler = step("a")(quick)
    leases = [lease_of(handler, run=number, input=Value(json=str(number))) for number in range(100)]
    harness.executor.submit(leases)
    assert [outcome.output.json for outcome in await harness.outcomes(*leases)] == [str(n) for n in range(100)]
    assert len(tasks) == 1


async def test_steps_that_wait_hold_up_no_other_and_begin_in_one_turn_the_next_time(harness: Harness) -> None:
    go = asyncio.Event()
    turns: list[int] = []
    turn = 0

    def count() -> None:
        nonlocal turn
        turn += 1
        harness.users_loop.call_soon(count)

    async def waits() -> None:
        turns.append(turn)
        await go.wait()

    slow: Step[..., Any] = step("slow")(waits)
    handlers = [slow, plain, slow, *both(raising(PermanentError("quick"))), slow]
    first = [lease_of(handler, run=number) for number, handler in enumerate(handlers)]
    harness.users_loop.call_soon_threadsafe(count)
    harness.executor.submit(first)
    await eventually(lambda: len(harness.results) == 3 and len(turns) == 3)
    second = [lease_of(slow, run=number) for number in range(10, 60)]
    harness.executor.submit(second)
    await eventually(lambda: len(turns) == 53)
    assert len(set(turns[3:])) == 1
    new: Step[..., Any] = step("new")(waits)
    third = [lease_of(new, run=number) for number in range(60, 110)]
    harness.executor.submit(third)
    await eventually(lambda: len(turns) == 103)
    assert len(set(turns[53:])) == 2  # that of the first, and that of all others
    harness.users_loop.call_soon_threadsafe(go.set)
    await harness.outcomes(*first, *second, *third)


async def test_a_step_that_cancels_its_task_does_not_cancel_the_next(harness: Harness) -> None:
    async def careless() -> str:
        this_task().cancel()
        return "careless"

    async def careful() -> str:
        await asyncio.sleep(0)
        return "careful"

    async def impatient() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)
        return "impatient"

    names = ["careless", "careful", "careless", "impatient", "careful", "impatient"]
    functions = {"careless": careless, "careful": careful, "impatient": impatient}
    handlers: dict[str, Step[..., Any]] = {name: step(name)(function) for name, function in functions.items()}
    for _ in range(2):  # the second time those that wait have tasks of their own
        harness.results.clear()
        outcomes = await harness.run(*(handlers[name] for name in names))
        assert [outcome.output.json for outcome in outcomes] == [f'"{name}"' for name in names]
    await eventually(lambda: not harness.executor._tasks)


async def cancel_and_take_back() -> None:
    this_task().cancel()
    this_task().uncancel()


async def cancel_later() -> None:
    asyncio.get_running_loop().call_later(0.01, this_task().cancel)


async def leave_a_timeout_open() -> None:
    class Stream:
        """A cycle: closed when the collector comes by, and not before."""

        def __init__(self) -> None:
            self.me = self
            self.numbers = self.count()

        async def count(self) -> AsyncIterator[int]:
            async with asyncio.timeout(0.01):
                yield 1

    async for _ in Stream().numbers:
        return


@pytest.mark.parametrize("leave", [cancel_and_take_back, cancel_later, leave_a_timeout_open])
async def test_what_a_step_leaves_on_its_task_does_not_reach_the_next(
    harness: Harness, leave: Callable[[], Awaitable[None]], without_collector: None
) -> None:
    async def innocent() -> str:
        await asyncio.sleep(0.1)
        return "innocent"

    handlers = [step("leaves")(leave), step("innocent")(innocent)]
    assert [outcome.output.json for outcome in await harness.run(*handlers)] == [None, '"innocent"']


async def test_what_is_kept_for_a_task_is_not_found_by_another_step(harness: Harness) -> None:
    kept: weakref.WeakKeyDictionary[asyncio.Task[Any], list[int]] = weakref.WeakKeyDictionary()

    async def keep(number: int) -> list[int]:
        mine = kept.setdefault(this_task(), [])
        mine.append(number)
        return mine

    leases = [lease_of(step("a")(keep), run=number, input=Value(json=str(number))) for number in range(3)]
    harness.executor.submit(leases)
    assert [outcome.output.json for outcome in await harness.outcomes(*leases)] == ["[0]", "[1]", "[2]"]


async def test_what_a_step_has_waited_for_is_not_kept(harness: Harness) -> None:
    class Large: ...

    async def wait() -> bool:
        large = await asyncio.to_thread(Large)
        known = weakref.ref(large)
        del large
        await asyncio.sleep(0)
        return known() is None

    assert [outcome.output.json for outcome in await harness.run(step("a")(wait))] == ["true"]


async def test_running_steps_are_not_collected(harness: Harness) -> None:
    async def wait() -> None:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.05, future.set_result, None)
        await future

    handler = step("a")(wait)
    leases = [lease_of(handler, run=number) for number in range(200)]
    harness.executor.submit(leases)

    def collected() -> bool:
        gc.collect()
        return len(harness.results) == 200

    await eventually(collected)
    assert all(isinstance(outcome, Completed) for _, outcome in harness.results)


async def test_an_eager_task_factory_is_no_trouble(harness: Harness) -> None:
    factory = getattr(asyncio, "eager_task_factory", None)
    if factory is None:
        pytest.skip("eager tasks are new in Python 3.12")
    harness.users_loop.call_soon_threadsafe(harness.users_loop.set_task_factory, factory)
    assert len(await harness.run(*[plain] * 3, *both(lambda: 1))) == 5
    await eventually(lambda: not harness.executor._tasks)


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
        ended.wait(5)
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


@pytest.mark.parametrize("alone", [False, True], ids=["in the shared task", "in one of its own"])
async def test_a_step_that_is_cancelled_before_its_first_line_has_a_result_and_does_not_begin(
    harness: Harness, alone: bool
) -> None:
    ran: list[int] = []

    async def run() -> None:
        await asyncio.sleep(0)
        ran.append(1)

    handler = step("a")(run)
    if alone:
        await harness.run(handler)
        harness.results.clear()
        ran.clear()
    lease = lease_of(handler)

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """The session's thread cancels the step in the moment in which it is begun."""
        lease.cancel_reason = CancelReason.RUN_CANCELLED
        assert harness.executor.cancel([lease]) == []
        return asyncio.Task(work, loop=loop, **options)

    harness.users_loop.call_soon_threadsafe(harness.users_loop.set_task_factory, factory)
    harness.executor.submit([lease])
    (outcome,) = await harness.outcomes(lease)
    assert (outcome.code, ran) == ("StepCancelled", [])
    await eventually(lambda: not harness.executor._tasks)


async def test_a_task_factory_that_raises_holds_steps_up_no_longer_than_it_does(harness: Harness) -> None:
    raised = threading.Event()

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        if not raised.is_set():
            raised.set()
            work.close()
            raise RuntimeError("this is the first")
        return asyncio.Task(work, loop=loop, **options)

    async def nothing_else() -> None: ...

    harness.users_loop.set_exception_handler(lambda _loop, _context: None)
    harness.users_loop.call_soon_threadsafe(harness.users_loop.set_task_factory, factory)
    handler = step("a")(nothing_else)
    leases = [lease_of(handler, run=number) for number in (1, 2)]
    harness.executor.submit(leases[:1])
    await eventually(raised.is_set)
    harness.executor.submit(leases[1:])
    assert all(isinstance(outcome, Completed) for outcome in await harness.outcomes(*leases))


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
