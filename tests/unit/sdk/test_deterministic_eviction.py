"""Runs that leave the process: none of their code can act afterwards, and Python has nothing to say about it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import pytest

from fencepost.deterministic import DeterministicLoop, Evicted, TaskGroup, guarded, wait_for
from tests.unit.sdk.test_deterministic_loop import Clock


class Run:
    """A run whose host gives out steps, and counts them."""

    def __init__(self) -> None:
        self.loop = DeterministicLoop(Clock())
        self.commands: list[str] = []

    def step(self, name: str) -> Awaitable[Any]:
        self.loop.raise_if_evicted()
        self.commands.append(name)
        return self.loop.create_future()

    def start(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(main)
        with guarded():
            self.loop.run_until_blocked()
        return task


async def step_in_finally(run: Run) -> None:
    try:
        await run.step("work")
    finally:
        await run.step("clean up")


async def step_in_every_handler(run: Run) -> None:
    for _ in range(5):
        try:
            await run.step("work")
        except BaseException:  # noqa: BLE001 (code that does this is what is tested)
            await run.step("handler")
        finally:
            await run.step("finally")


async def children_in_finally(run: Run) -> None:
    async def child() -> None:
        await run.step("child")

    try:
        await run.step("work")
    finally:
        alone = asyncio.create_task(child())
        await asyncio.gather(child(), child())
        await alone


async def sleep_in_finally(run: Run) -> None:
    try:
        await run.step("work")
    finally:
        await asyncio.sleep(5)
        await run.step("after sleep")


async def waits_for_a_plain_future_in_finally(run: Run) -> None:
    future = asyncio.get_running_loop().create_future()
    try:
        await run.step("work")
    finally:
        for _ in range(3):
            with suppress(BaseException):
                await future
        await run.step("after future")


async def everything_around(run: Run) -> None:
    lock = asyncio.Lock()

    @asynccontextmanager
    async def resource() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await run.step("resource")

    @contextmanager
    def plain() -> Iterator[None]:
        try:
            yield
        finally:
            run.step("plain")  # type: ignore[unused-awaitable]  # begun is enough

    async with resource(), lock, TaskGroup() as group, asyncio.timeout(50):
        with plain():
            _ = group.create_task(wait_for(step_in_finally(run), 50))
            await run.step("work")


async def generators(run: Run) -> None:
    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            await run.step("work")
        finally:
            await run.step("generator")

    def suspended() -> Iterator[int]:
        try:
            yield 1
        finally:
            run.step("plain generator")  # type: ignore[unused-awaitable]  # as above

    left = numbers()
    await anext(left)
    plain = suspended()
    next(plain)
    async for _ in numbers():
        pass


async def coroutines_not_awaited_yet(run: Run) -> None:
    first, second, _ = step_in_finally(run), step_in_finally(run), [step_in_finally(run)]
    try:
        await first
    finally:
        await second


async def unlocks_others(run: Run) -> None:
    condition, event, queue = asyncio.Condition(), asyncio.Event(), asyncio.Queue[int]()

    async def other() -> None:
        await event.wait()
        await run.step("other")

    task = asyncio.create_task(other())
    try:
        async with condition:
            await run.step("work")
    finally:
        try:
            event.set()
            queue.put_nowait(1)
        finally:
            task.cancel()
            await run.step("after event")


PROGRAMS: list[Callable[[Run], Coroutine[Any, Any, None]]] = [
    step_in_finally,
    step_in_every_handler,
    children_in_finally,
    sleep_in_finally,
    waits_for_a_plain_future_in_finally,
    everything_around,
    generators,
    coroutines_not_awaited_yet,
    unlocks_others,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_command_leaves_an_evicted_run_and_nothing_is_said(
    program: Callable[[Run], Coroutine[Any, Any, None]], caplog: pytest.LogCaptureFixture
) -> None:
    # What tests before this one have left is not to be heard in it.
    gc.collect()
    caplog.clear()
    run = Run()
    _ = run.start(program(run))
    commands = run.commands.copy()
    assert "work" in commands
    run.loop.evict()
    gc.collect()
    assert run.commands == commands
    assert caplog.text == ""


def test_a_thousand_runs_that_step_in_finally_are_evicted_without_a_command() -> None:
    runs = []
    for _ in range(1_000):
        run = Run()
        _ = run.start(step_in_finally(run))
        runs.append(run)
    for run in runs:
        run.loop.evict()
    gc.collect()
    assert {tuple(run.commands) for run in runs} == {("work",)}


def test_a_task_that_has_not_begun_never_begins() -> None:
    run = Run()
    _ = run.loop.create_task(step_in_finally(run))
    run.loop.evict()
    run.loop.run_until_blocked()
    gc.collect()
    assert run.commands == []


def test_a_coroutine_that_never_ends_is_given_up_in_silence() -> None:
    testing = True

    async def endless() -> None:
        while testing:
            with suppress(BaseException):
                await asyncio.sleep(0)
                await asyncio.get_running_loop().create_future()

    run = Run()
    _ = run.start(endless())
    run.loop.evict()
    gc.collect()
    testing = False  # so that the interpreter can end it


def test_an_evicted_run_is_free_to_be_collected() -> None:
    async def main(run: Run) -> None:
        async with TaskGroup() as group:
            _ = group.create_task(step_in_finally(run))
            await everything_around(run)

    run = Run()
    task = weakref.ref(run.start(main(run)))
    loop = weakref.ref(run.loop)
    run.loop.evict()
    del run
    gc.collect()
    assert loop() is None
    assert task() is None


def test_finally_blocks_run_in_the_context_of_their_task_and_on_their_loop() -> None:
    variable: ContextVar[str] = ContextVar("variable")
    seen: list[object] = []

    async def main() -> None:
        token = variable.set("inner")
        try:
            await run.step("work")
        finally:
            seen.extend((variable.get(), asyncio.get_running_loop() is run.loop))
            variable.reset(token)
            seen.append("reset")

    run = Run()
    _ = run.start(main())
    run.loop.evict()
    assert seen == ["inner", True, "reset"]


async def test_a_task_made_while_unwinding_does_not_land_on_the_workers_loop() -> None:
    run = Run()
    _ = run.start(children_in_finally(run))
    before = asyncio.all_tasks()
    run.loop.evict()
    assert asyncio.all_tasks() == before
    await asyncio.sleep(0)
    assert run.commands == ["work"]


def test_unwinding_code_stops_at_the_first_thing_that_it_asks_of_its_loop() -> None:
    seen: list[str] = []

    async def waits_for(event: asyncio.Event) -> None:
        await event.wait()

    async def main(ask: Callable[[asyncio.Event], object]) -> None:
        event = asyncio.Event()
        waiting = asyncio.create_task(waits_for(event))
        try:
            await run.step("work")
        finally:
            seen.append("unwinds")
            ask(event)
            seen.append(f"goes on {waiting}")

    run = Run()
    for ask in (
        lambda event: event.set(),
        lambda _: asyncio.get_running_loop().call_soon(print),
        lambda _: asyncio.get_running_loop().call_later(1, print),
        lambda _: asyncio.ensure_future(asyncio.sleep(1)),
    ):
        _ = run.start(main(ask))
    run.loop.evict()
    assert seen == ["unwinds"] * 4


def test_an_asynchronous_generator_that_waits_for_its_next_turn_is_closed_once() -> None:
    seen: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            seen.append("closed")
            await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await anext(kept)
        await run.step("work")

    run = Run()
    kept = numbers()
    _ = run.start(main())
    run.loop.evict()
    assert seen == ["closed"]


def test_the_host_may_settle_futures_of_an_evicted_run() -> None:
    run = Run()
    future = run.loop.create_future()

    async def main() -> None:
        await future
        await run.step("after")

    _ = run.start(main())
    run.loop.evict()
    future.set_result(None)
    run.loop.run_until_blocked()
    assert run.commands == []
    assert run.loop.is_closed()
    run.loop.evict()


def test_a_task_on_an_evicted_loop_is_refused_and_its_coroutine_closed() -> None:
    loop = DeterministicLoop(Clock())
    loop.close()
    with pytest.raises(Evicted):
        _ = loop.create_task(asyncio.sleep(0))
    with pytest.raises(Evicted):
        loop.raise_if_evicted()
    assert loop.call_soon(print).cancelled()
    assert loop.call_later(5, print).cancelled()


def test_an_interrupt_while_unwinding_is_raised_once_all_is_unwound() -> None:
    seen: list[str] = []

    async def interrupted() -> None:
        try:
            await run.step("work")
        finally:
            raise KeyboardInterrupt

    async def other() -> None:
        try:
            await run.step("work")
        finally:
            seen.append("unwound")

    run = Run()
    _ = run.loop.create_task(interrupted())
    _ = run.start(other())
    with pytest.raises(KeyboardInterrupt):
        run.loop.evict()
    assert seen == ["unwound"]


def test_a_coroutine_that_is_forgotten_is_still_reported_outside_of_evictions() -> None:
    DeterministicLoop(Clock()).evict()
    forgotten = [asyncio.sleep(0)]
    with pytest.warns(RuntimeWarning, match="never awaited"):
        forgotten.clear()
