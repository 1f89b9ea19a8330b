"""The deterministic event loop: what runs in which order, what works on it, and how it lives in another loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fencepost.deterministic import DeterministicLoop


class Clock:
    """A host whose timers fire when a test says so, earliest first."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.timers: dict[int, tuple[float, Callable[[], None]]] = {}
        self.asked: list[float] = []

    def time(self) -> float:
        return self.now

    def timer(self, delay: float, fire: Callable[[], None]) -> object:
        self.asked.append(delay)
        token = len(self.asked)
        self.timers[token] = (self.now + delay, fire)
        return token

    def cancel_timer(self, token: object) -> None:
        assert isinstance(token, int)
        del self.timers[token]

    def fire_next(self) -> bool:
        if not self.timers:
            return False
        token = min(self.timers, key=lambda each: (self.timers[each][0], each))
        self.now, fire = self.timers.pop(token)
        fire()
        return True


def run(main: Coroutine[Any, Any, Any], clock: Clock | None = None) -> Any:
    """The result of `main` on a loop of its own, with all timers fired in turn."""
    clock = clock or Clock()
    loop = DeterministicLoop(clock)
    task = loop.create_task(main)
    loop.run_until_blocked()
    while not task.done() and clock.fire_next():
        loop.run_until_blocked()
    loop.evict()
    return task.result()


def test_callbacks_run_in_the_order_in_which_they_became_ready() -> None:
    loop = DeterministicLoop(Clock())
    seen: list[int] = []
    loop.call_soon(seen.append, 1)
    loop.call_soon(lambda: loop.call_soon(seen.append, 3))
    loop.call_soon(seen.append, 2)
    loop.run_until_blocked()
    assert seen == [1, 2, 3]


def test_a_sleep_is_a_timer_of_the_host() -> None:
    clock = Clock()

    async def main() -> float:
        await asyncio.sleep(30)
        await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run(main(), clock) == 1_030.0
    assert clock.asked == [30]


async def test_it_runs_within_a_task_of_another_loop_and_puts_that_back() -> None:
    outer, outer_task = asyncio.get_running_loop(), asyncio.current_task()

    async def main() -> None:
        assert asyncio.get_running_loop() is not outer
        assert asyncio.current_task() is not outer_task
        await asyncio.sleep(1)

    run(main())
    assert asyncio.get_running_loop() is outer
    assert asyncio.current_task() is outer_task
    await asyncio.sleep(0)


def test_the_errors_of_callbacks_reach_the_host_once_all_have_run() -> None:
    loop = DeterministicLoop(Clock())
    seen: list[int] = []
    loop.call_soon(int, "no number")
    loop.call_soon(seen.append, 1)
    with pytest.raises(ValueError, match="no number"):
        loop.run_until_blocked()
    assert seen == [1]
    loop.run_until_blocked()
