"""gather, as asyncio has it and in the same number of turns in every version of Python.

From 3.12 on asyncio's takes note of futures that have ended at once; before, a turn of the loop later. What runs in
between would come in another order after an update of Python. So in turns of workflow code `asyncio.gather` is this
one.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable
from typing import Any

from fencepost.deterministic.guard import turn


class _Gathering(asyncio.Future[list[Any]]):
    """The future of all: it is cancelled by cancelling each, and ends when they have."""

    def __init__(self, parts: list[asyncio.Future[Any]], return_exceptions: bool) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._parts = parts
        self._left = dict.fromkeys(parts)
        self._return_exceptions = return_exceptions
        self._stopped = False
        for part in self._left:
            part.add_done_callback(self._part_ended)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel what has not ended."""
        if self.done():
            return False
        # Each is to be told, whatever the others say.
        told = [part.cancel(msg) for part in self._left]
        self._stopped = self._stopped or any(told)
        return any(told)

    def _part_ended(self, part: asyncio.Future[Any]) -> None:
        del self._left[part]
        # Asking for an error keeps asyncio from reporting that nobody did.
        error = asyncio.CancelledError() if part.cancelled() else part.exception()
        if self.done():
            return
        if error is not None and not self._return_exceptions:
            self.set_exception(error)
        elif not self._left:
            if self._stopped:
                self.set_exception(asyncio.CancelledError())
            else:
                self.set_result([_outcome(each) for each in self._parts])


def gather(*awaitables: Awaitable[Any], return_exceptions: bool = False) -> asyncio.Future[list[Any]]:
    """Run all at once and return their results in the order in which they were given.

    The first error is raised while the others go on; with ``return_exceptions`` errors are among the results.
    Cancelling it cancels all.
    """
    if not awaitables:
        nothing: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        nothing.set_result([])
        return nothing
    begun: dict[int, asyncio.Future[Any]] = {}
    for awaitable in awaitables:
        if id(awaitable) not in begun:
            begun[id(awaitable)] = asyncio.ensure_future(awaitable)
    return _Gathering([begun[id(awaitable)] for awaitable in awaitables], return_exceptions)


def _outcome(part: asyncio.Future[Any]) -> Any:
    if part.cancelled():
        return asyncio.CancelledError()
    error = part.exception()
    return part.result() if error is None else error


def install() -> None:
    """Let `asyncio.gather` be this one in turns of workflow code."""
    original: Any = asyncio.gather

    @functools.wraps(original)
    def chosen(*awaitables: Any, **options: Any) -> Any:
        return (gather if turn.depth else original)(*awaitables, **options)

    for module in (asyncio, asyncio.tasks):
        module.gather = chosen  # type: ignore[attr-defined]  # replacing it is the point
