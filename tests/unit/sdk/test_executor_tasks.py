"""Async steps that wait for nothing share a task, and nothing else; those that wait have one of their own."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from fencepost import (
    CancelReason,
    PermanentError,
    Step,
    Value,
    step,
)
from fencepost.failure import Completed
from tests.fixtures.waiting import eventually, paced
from tests.unit.sdk.building import lease_of, plain, this_task
from tests.unit.sdk.executing import Harness, both, raising


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
        await paced(0.1)
        return "innocent"

    handlers = [step("leaves")(leave), step("innocent")(innocent)]
    assert [outcome.output.json for outcome in await harness.run(*handlers)] == [None, '"innocent"']


async def test_what_is_kept_for_a_task_is_not_found_by_another_step(harness: Harness) -> None:
    kept: weakref.WeakKeyDictionary[asyncio.Task[Any], list[int]] = weakref.WeakKeyDictionary()

    turn, turns = 0, set()

    def count() -> None:
        nonlocal turn
        turn += 1
        harness.users_loop.call_soon(count)

    async def keep(number: int) -> list[int]:
        turns.add(turn)
        mine = kept.setdefault(this_task(), [])
        mine.append(number)
        return mine

    handler = step("a")(keep)
    leases = [lease_of(handler, run=number, input=Value(json=str(number))) for number in range(50)]
    harness.users_loop.call_soon_threadsafe(count)
    harness.executor.submit(leases)
    assert [outcome.output.json for outcome in await harness.outcomes(*leases)] == [f"[{n}]" for n in range(50)]
    assert len(turns) == 2  # that of the first, and that of all others


async def test_what_a_step_has_waited_for_is_not_kept(harness: Harness) -> None:
    class Large: ...

    async def make() -> Large:
        return Large()

    async def wait() -> bool:
        large = await asyncio.create_task(make())  # not from a thread, which may hold on to it for longer
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
