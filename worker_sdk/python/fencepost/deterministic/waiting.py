"""wait and as_completed, as asyncio has them but in a fixed order.

asyncio's own go through sets of futures, in the order of their addresses. Here wait keeps the order of its arguments,
and as_completed that in which they complete; several that are done at once come in the order of the arguments. In a
workflow a set as the argument is refused.
"""

from __future__ import annotations

import asyncio
from asyncio import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, Generic, TypeVar

from fencepost.deterministic.loop import DeterministicLoop
from fencepost.deterministic.refusals import refuse

_T = TypeVar("_T")
_A = TypeVar("_A", bound=Awaitable[Any])
_F = TypeVar("_F", bound="asyncio.Future[Any]")


async def wait(
    fs: Iterable[_F], *, timeout: float | None = None, return_when: str = ALL_COMPLETED
) -> tuple[list[_F], list[_F]]:
    """Wait for futures or tasks, and return those that are done and those that are not: two lists, in order of `fs`.

    As asyncio.wait, which returns sets: an expiring `timeout` (in seconds) raises nothing and cancels nothing.
    TypeError for coroutines, ValueError for no futures or another `return_when`.
    """
    if isinstance(fs, Awaitable):
        raise TypeError(f"wait takes several futures, not one {type(fs).__name__}")
    if return_when not in {FIRST_COMPLETED, FIRST_EXCEPTION, ALL_COMPLETED}:
        raise ValueError(f"return_when is {return_when!r}, which is none of asyncio's three conditions")
    futures = _in_order(fs)
    if not futures:
        raise ValueError("wait needs at least one future")
    if any(asyncio.iscoroutine(future) for future in futures):
        raise TypeError("wait takes futures and tasks, not coroutines: create tasks of them")
    if not _satisfied(futures, return_when):
        await _until_satisfied(futures, timeout, return_when)
    return [each for each in futures if each.done()], [each for each in futures if not each.done()]


def _in_order(fs: Iterable[_A]) -> list[_A]:
    """Each once, in the order given; in a workflow that must be one."""
    if isinstance(fs, AbstractSet) and isinstance(asyncio.get_running_loop(), DeterministicLoop):
        refuse("the order of a set", "give a list, or anything else that keeps the order")
    return list(dict.fromkeys(fs))


def _satisfied(futures: list[_F], return_when: str) -> bool:
    if all(future.done() for future in futures):
        return True
    if return_when == FIRST_COMPLETED:
        return any(future.done() for future in futures)
    return return_when == FIRST_EXCEPTION and any(_failed(future) for future in futures)


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None


async def _until_satisfied(futures: list[_F], timeout: float | None, return_when: str) -> None:
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    left = sum(not future.done() for future in futures)

    def over() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def one_done(future: asyncio.Future[Any]) -> None:
        nonlocal left
        left -= 1
        if left == 0 or return_when == FIRST_COMPLETED or (return_when == FIRST_EXCEPTION and _failed(future)):
            over()

    timer = None if timeout is None else loop.call_later(timeout, over)
    pending = [future for future in futures if not future.done()]
    for future in pending:
        future.add_done_callback(one_done)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        for future in pending:
            future.remove_done_callback(one_done)


class as_completed(Generic[_T]):  # noqa: N801 (a function to its callers, as asyncio's)
    """Results as they come: `for each in as_completed(fs): result = await each`, or `async for future in …`.

    As asyncio.as_completed of Python 3.13: the plain loop gives awaitables of results, `async for` the futures
    themselves. Coroutines become tasks, in the order given. When `timeout` seconds have passed, what is awaited next
    raises TimeoutError. Needs a running loop. TypeError for a single future or coroutine.
    """

    def __init__(self, fs: Iterable[Awaitable[_T]], *, timeout: float | None = None) -> None:
        if isinstance(fs, Awaitable):
            raise TypeError(f"as_completed takes several awaitables, not one {type(fs).__name__}")
        self._done: deque[asyncio.Future[_T]] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._expired = False
        futures: list[asyncio.Future[_T]] = [asyncio.ensure_future(each) for each in _in_order(fs)]
        self._pending = dict.fromkeys(future for future in futures if not future.done())
        self._done.extend(future for future in futures if future.done())
        self._promised = 0
        self._total = len(futures)
        for future in self._pending:
            future.add_done_callback(self._completed)
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None and self._pending:
            self._timer = asyncio.get_running_loop().call_later(timeout, self._expire)

    def __iter__(self) -> Iterator[Awaitable[_T]]:
        return self

    def __next__(self) -> Awaitable[_T]:
        if self._promised == self._total:
            raise StopIteration
        self._promised += 1
        return self._result()

    def __aiter__(self) -> AsyncIterator[asyncio.Future[_T]]:
        return self

    async def __anext__(self) -> asyncio.Future[_T]:
        if self._promised == self._total:
            raise StopAsyncIteration
        self._promised += 1
        return await self._next_done()

    async def _result(self) -> _T:
        return (await self._next_done()).result()

    async def _next_done(self) -> asyncio.Future[_T]:
        while not self._done:
            if self._expired:
                raise TimeoutError
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except BaseException:
                # Woken and cancelled at once: what it was woken for is the next one's.
                if waiter.done() and not waiter.cancelled():
                    self._wake()
                raise
        return self._done.popleft()

    def _completed(self, future: asyncio.Future[_T]) -> None:
        if self._expired:
            return
        del self._pending[future]
        self._done.append(future)
        if not self._pending and self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _expire(self) -> None:
        self._expired = True
        for future in self._pending:
            future.remove_done_callback(self._completed)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
