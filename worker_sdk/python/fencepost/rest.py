"""The rest of a coroutine that was begun by hand, with ``send``, in a context of its own.

Most steps are short. So several are begun by one task, one after the other; the first that has to wait for something
keeps the task for itself, by awaiting its rest there.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Rest(Generic[T]):
    """See the module. ``waits_for`` is what the first ``send`` gave."""

    __slots__ = ("_context", "_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T], context: contextvars.Context, waits_for: Any) -> None:
        self._coroutine = coroutine
        self._context = context
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine, run = self._coroutine, self._context.run
        waits_for = self._waits_for
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
            try:
                waits_for = run(method, value)
            except StopIteration as end:
                output: T = end.value
                return output
