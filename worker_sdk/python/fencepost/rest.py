"""Several coroutines begun by one task, one after the other, by hand with ``send``, each in a context of its own.

Most steps are short, and a task for each would be a tenth of what they cost. The first that has to wait for something
keeps the task for itself, by awaiting its rest there. None of the others may have left anything on the task that acts
later, such as a timeout that it did not close: so after each is asked whether anything has changed (`marks`).
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def marks(task: asyncio.Task[Any]) -> tuple[int, bool, int, int]:
    """What a coroutine leaves on the task that it runs in: cancels that are to come, and whoever still knows of it. To
    be compared with those before it, taken in the same function, because that knows of it as well.
    """
    must_cancel = getattr(task, "_must_cancel", False)  # which on Python 3.11 and 3.12 stays after an `uncancel`
    return task.cancelling(), must_cancel, sys.getrefcount(task), weakref.getweakrefcount(task)


class Rest(Generic[T]):
    """The rest of a coroutine; see the module. ``waits_for`` is what the first ``send`` gave, and not kept."""

    __slots__ = ("_context", "_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T], context: contextvars.Context, waits_for: Any) -> None:
        self._coroutine = coroutine
        self._context = context
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine, run = self._coroutine, self._context.run
        waits_for, self._waits_for = self._waits_for, None
        while True:
            try:
                value = yield waits_for
            except GeneratorExit:
                run(coroutine.close)
                raise
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's to handle
                method: Callable[..., Any] = coroutine.throw
                value = error
            else:
                method = coroutine.send
            waits_for = None
            try:
                waits_for = run(method, value)
            except StopIteration as end:
                output: T = end.value
                return output
