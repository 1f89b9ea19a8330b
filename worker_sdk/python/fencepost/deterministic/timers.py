"""The handles of scheduled callbacks, and the host that keeps the timers of a deterministic loop.

Both handles are asyncio's own types, because callers may look for these, with leaner bodies: a loop makes one for
every step of every task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, Protocol


class Host(Protocol):
    """What a loop needs of the run that it belongs to. All calls come from the thread that runs the loop."""

    def time(self) -> float:
        """The run's time in seconds: that of the last event fed, so the same at each replay."""

    def timer(self, delay: float, fire: Callable[[], None], /) -> object:
        """Ask for `fire()` in `delay` seconds (> 0, finite, whole microseconds) and return a token.

        `fire` only marks the callback as ready; run the loop afterwards. It may raise, e.g. CancelledError in a run
        that ends: that reaches the code that wanted to sleep.
        """

    def cancel_timer(self, token: object, /) -> None:
        """Forget a timer that has not fired."""


class Callback(asyncio.Handle):
    """A callback that is ready to run, or was cancelled: then its `_callback` is None."""

    __slots__ = ()

    # All attributes of asyncio.Handle are set, so that what it inherits works; its own __init__ asks the loop about
    # debugging, which costs as much as all of this.
    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: Any, context: Context | None
    ) -> None:
        self._callback: Callable[..., object] | None = callback
        self._args: Any = args
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._cancelled = False
        self._repr = None
        self._source_traceback = None

    def cancel(self) -> None:
        """Let the callback not run. Harmless when it has run."""
        self._cancelled = True
        self._callback = self._args = None


class Timer(asyncio.TimerHandle):
    """A callback that becomes ready when the host's timer fires."""

    __slots__ = ("_host", "_ready", "_token")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: Any,
        context: Context | None,
    ) -> None:
        super().__init__(when, callback, args, loop, copy_context() if context is None else context)
        self._loop: Any = loop
        self._host: Host | None = None
        self._ready: deque[Any] | None = None
        self._token: object = None

    def start(self, host: Host, delay: float, ready: deque[Any]) -> None:
        """Ask `host` for the timer; when it fires, the callback joins `ready`."""
        self._ready = ready
        self._token = host.timer(delay, self._fire)
        self._host = host
        self._scheduled = True

    def _fire(self) -> None:
        ready, self._ready, self._host, self._token = self._ready, None, None, None
        self._scheduled = False
        if ready is not None:
            ready.append(self)

    def cancel(self) -> None:
        """Let the callback not run, and the host forget the timer if it has not fired."""
        host, token = self._host, self._token
        self._ready = self._host = self._token = None
        self._scheduled = False
        self._cancelled = True
        self._callback: Any = None
        self._args: Any = None
        if host is not None and not self._loop.is_closed():
            host.cancel_timer(token)
