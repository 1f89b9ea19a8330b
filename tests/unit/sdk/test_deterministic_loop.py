"""The deterministic event loop: what runs in which order, what works on it, and how it lives in another loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from fencepost.deterministic import DeterministicLoop, NonDeterministic


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


def test_an_endless_delay_asks_the_host_for_no_timer() -> None:
    clock = Clock()
    DeterministicLoop(clock).call_later(float("inf"), print)
    assert clock.asked == []


def test_a_cancelled_timer_is_forgotten_by_the_host_and_does_not_run() -> None:
    clock = Clock()
    loop = DeterministicLoop(clock)
    seen: list[int] = []
    timer = loop.call_later(5, seen.append, 1)
    timer.cancel()
    timer.cancel()
    assert clock.timers == {}
    fired = loop.call_later(5, seen.append, 2)
    clock.fire_next()
    fired.cancel()
    loop.run_until_blocked()
    assert seen == []
    assert timer.cancelled()
    assert fired.when() == 1_005.0


def test_a_timer_that_a_host_fires_twice_or_after_its_end_runs_once() -> None:
    clock = Clock()
    loop = DeterministicLoop(clock)
    seen: list[int] = []
    loop.call_later(5, seen.append, 1)
    loop.call_later(6, seen.append, 2).cancel()
    ((_, fire),) = clock.timers.values()
    fire()
    fire()
    loop.run_until_blocked()
    assert seen == [1]


def test_a_deadline_asks_for_a_timer_of_whole_microseconds() -> None:
    clock = Clock()
    clock.now = 1_700_000_000.123456

    async def main() -> None:
        async with asyncio.timeout(0.1):
            await asyncio.sleep(0)

    run(main(), clock)
    assert clock.asked == [0.1]


def test_context_variables_belong_to_their_tasks() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="outside")

    async def inner(name: str) -> str:
        variable.set(name)
        await asyncio.sleep(1)
        return variable.get()

    async def main() -> tuple[str, str, str]:
        return *await asyncio.gather(inner("a"), inner("b")), variable.get()

    assert run(main()) == ("a", "b", "outside")
    assert variable.get() == "outside"


def test_a_turn_outside_of_any_loop_leaves_none_behind() -> None:
    run(asyncio.sleep(1))
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_a_loop_refuses_to_run_within_itself() -> None:
    loop = DeterministicLoop(Clock())
    loop.call_soon(loop.run_until_blocked)
    loop.call_soon(loop.evict)
    loop.call_soon(len, "")
    with pytest.raises(ExceptionGroup) as failed:
        loop.run_until_blocked()
    assert [str(error) for error in failed.value.exceptions] == ["this loop is running already"] * 2


def test_what_is_no_exception_leaves_at_once_and_the_loop_goes_on_later() -> None:
    class Stop(BaseException):
        pass

    def stop() -> None:
        raise Stop

    loop = DeterministicLoop(Clock())
    seen: list[int] = []
    loop.call_soon(stop)
    loop.call_soon(seen.append, 1)
    with pytest.raises(Stop):
        loop.run_until_blocked()
    assert seen == []
    assert not loop.is_running()
    loop.run_until_blocked()
    assert seen == [1]


def test_a_cancellation_in_a_callback_does_not_cancel_the_host() -> None:
    loop = DeterministicLoop(Clock())
    future = loop.create_future()
    future.cancel()
    loop.call_soon(future.result)
    with pytest.raises(RuntimeError, match="raised CancelledError"):
        loop.run_until_blocked()


def test_an_exception_handler_has_the_errors_instead_of_the_host() -> None:
    loop = DeterministicLoop(Clock())
    told: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: told.append(context))
    loop.call_soon(int, "no number")
    loop.run_until_blocked()
    assert [str(context["exception"])[:15] for context in told] == ["invalid literal"]


def test_the_failure_of_a_task_that_nobody_awaits_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ValueError("nobody awaits this")

    loop = DeterministicLoop(Clock())
    task = loop.create_task(fails())
    loop.run_until_blocked()
    assert caplog.text == ""
    del task
    gc.collect()
    assert "never retrieved" in caplog.text


async def use_gather() -> tuple[int, ...]:
    async def after(seconds: float) -> int:
        await asyncio.sleep(seconds)
        return int(seconds)

    return tuple(await asyncio.gather(after(3), after(1), after(2)))


async def use_timeout() -> str:
    try:
        async with asyncio.timeout(5):
            await asyncio.sleep(10)
    except TimeoutError:
        return "timed out"
    return "slept"


async def use_queue() -> list[int]:
    queue: asyncio.Queue[int] = asyncio.Queue(1)
    seen = []

    async def produce() -> None:
        for number in range(3):
            await queue.put(number)

    producer = asyncio.create_task(produce())
    for _ in range(3):
        seen.append(await queue.get())
        queue.task_done()
    await queue.join()
    await producer
    return seen


async def use_event_lock_and_semaphore() -> list[str]:
    event, lock, semaphore = asyncio.Event(), asyncio.Lock(), asyncio.Semaphore(2)
    seen: list[str] = []

    async def wait(name: str) -> None:
        await event.wait()
        async with semaphore, lock:
            seen.append(name)
            await asyncio.sleep(1)

    waiting = [asyncio.create_task(wait(name)) for name in "abc"]
    await asyncio.sleep(1)
    event.set()
    await asyncio.gather(*waiting)
    return seen


async def use_condition() -> str:
    condition = asyncio.Condition()
    items: list[str] = []

    async def consume() -> str:
        async with condition:
            await condition.wait_for(lambda: bool(items))
            return items.pop()

    consumer = asyncio.create_task(consume())
    await asyncio.sleep(0)
    async with condition:
        items.append("item")
        condition.notify_all()
    return await consumer


async def use_shield() -> str:
    async def work() -> str:
        await asyncio.sleep(5)
        return "done"

    inner = asyncio.create_task(work())
    outer = asyncio.create_task(asyncio.wait_for(asyncio.shield(inner), 1))
    with pytest.raises(TimeoutError):
        await outer
    return await inner


@pytest.mark.parametrize(
    ("program", "result"),
    [
        (use_gather, (3, 1, 2)),
        (use_timeout, "timed out"),
        (use_queue, [0, 1, 2]),
        (use_event_lock_and_semaphore, ["a", "b", "c"]),
        (use_condition, "item"),
        (use_shield, "done"),
    ],
)
def test_asyncio_works_as_it_does_elsewhere(program: Callable[[], Coroutine[Any, Any, Any]], result: object) -> None:
    assert run(program()) == result


def test_names_of_tasks_count_anew_in_each_run() -> None:
    async def main() -> list[str]:
        tasks = [asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(asyncio.sleep(0), name="mine")]
        await asyncio.gather(*tasks)
        return [task.get_name() for task in tasks]

    assert run(main()) == run(main()) == ["Task-2", "mine"]


def test_a_task_that_nobody_holds_goes_on() -> None:
    seen: list[str] = []

    async def alone() -> None:
        await asyncio.get_running_loop().create_future()
        seen.append("not reached")

    async def main() -> int:
        for _ in range(1_000):
            asyncio.get_running_loop().call_soon(lambda: asyncio.create_task(asyncio.sleep(0)))
        asyncio.get_running_loop().call_soon(lambda: asyncio.create_task(alone()))
        await asyncio.sleep(1)
        gc.collect()
        return len(asyncio.all_tasks())

    assert run(main()) == 2  # itself, and the one that waits


def test_an_asynchronous_generator_that_is_left_is_closed_in_the_next_turn() -> None:
    seen: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            seen.append("closed")

    async def main() -> None:
        async for _ in numbers():
            break
        seen.append("left")
        await asyncio.sleep(5)

    run(main())
    assert seen == ["left", "closed"]


def test_an_asynchronous_generator_in_a_cycle_is_never_resumed_by_the_collector() -> None:
    seen: list[str] = []

    class Holder:
        numbers: AsyncIterator[int]

    async def numbers(_: Holder) -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            seen.append("closed")

    async def main() -> None:
        holder = Holder()
        holder.numbers = numbers(holder)
        await anext(holder.numbers)
        del holder
        gc.collect()
        await asyncio.sleep(5)

    run(main())
    assert seen == []


REFUSED = [
    "add_reader",
    "add_signal_handler",
    "create_connection",
    "create_server",
    "getaddrinfo",
    "run_forever",
    "run_in_executor",
    "run_until_complete",
    "sock_connect",
    "subprocess_exec",
]


@pytest.mark.parametrize("name", REFUSED)
def test_the_outside_world_is_refused_at_the_call(name: str) -> None:
    loop = DeterministicLoop(Clock())
    with pytest.raises(NonDeterministic, match=rf"^loop\.{name} is not deterministic in a workflow: "):
        getattr(loop, name)(None, print)


def test_every_method_of_a_loop_works_or_is_refused() -> None:
    for name in dir(asyncio.AbstractEventLoop):
        assert name.startswith("_") or getattr(DeterministicLoop, name) is not getattr(asyncio.AbstractEventLoop, name)


def test_threads_of_asyncio_and_task_factories_are_refused() -> None:
    loop = DeterministicLoop(Clock())
    with pytest.raises(NonDeterministic, match=r"with ctx\.run"):
        run(asyncio.to_thread(print))
    with pytest.raises(NonDeterministic, match="task factory"):
        loop.set_task_factory(asyncio.Task)
    with pytest.raises(NonDeterministic, match="eagerly"):
        _ = loop.create_task(asyncio.sleep(0), eager_start=True)
    loop.set_task_factory(None)


def test_only_its_own_thread_may_call_a_loop() -> None:
    loop = DeterministicLoop(Clock())
    seen: list[str] = []

    def from_elsewhere() -> None:
        try:
            loop.call_soon_threadsafe(print)
        except NonDeterministic as refused:
            seen.append(str(refused))

    def turn() -> None:
        other = threading.Thread(target=from_elsewhere)
        other.start()
        other.join(30)
        loop.call_soon_threadsafe(seen.append, "from its own")

    loop.call_soon(turn)
    loop.run_until_blocked()
    assert "another thread" in seen[0]
    assert seen[1:] == ["from its own"]
