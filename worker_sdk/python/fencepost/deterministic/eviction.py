"""Unwinding the code of a run that leaves the process, so that nothing of it acts or complains afterwards.

A coroutine can be dropped only by closing it: GeneratorExit is raised where it waits, and its finally blocks run. The
loop and its host raise Evicted at whatever these ask for, so no command can come of it; what they do besides (print,
change a global) happens, once, at the eviction. That is Python's rule, and workflow code should have no such effects.

Whatever unwinding raises is dropped, but for KeyboardInterrupt, which is raised again at the end.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import AsyncGenerator, Callable
from contextvars import Context
from typing import Any, Self

from fencepost.deterministic import guard
from fencepost.deterministic.refusals import Evicted

_CLOSES = 100  # A coroutine that waits on after so many GeneratorExits never ends.

# Coroutines that never end. They are kept, because Python reports it when one of them is collected.
_endless: list[object] = []


class Unwinding:
    """What closes the tasks and generators of one run; as a context, in which Python's complaints are silenced.

    Coroutines that the code had made and not yet awaited are no fault of it, and neither are generators and destructors
    that meet Evicted.
    """

    def __init__(self) -> None:
        self._interrupt: KeyboardInterrupt | None = None
        self._hook: Callable[[Any], object] | None = None

    def __enter__(self) -> Self:
        _be_quiet_about_coroutines()
        guard.turn.depth += 1
        guard.turn.unwinding = True
        hook = sys.unraisablehook
        # Another thread may be unwinding too: then its hook serves both.
        if not isinstance(hook, _QuietHook):
            sys.unraisablehook = _QuietHook(hook)
            self._hook = hook
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None and isinstance(sys.unraisablehook, _QuietHook):
            sys.unraisablehook = self._hook
        guard.turn.unwinding = False
        guard.turn.depth -= 1
        if self._interrupt is not None:
            raise self._interrupt

    def task(self, task: asyncio.Task[Any], context: Context) -> None:
        """Close the coroutine of a task, in its context.

        The task stays pending for ever; what asyncio has to say of that, its evicted loop does not pass on.
        """
        coro: Any = task.get_coro()  # None from 3.12 on, when it ended as it began
        if coro is None or self._call(context.run, coro.close):
            return
        # An error ended it or it waits again: closing what has ended does nothing.
        for _ in range(_CLOSES):
            if self._call(coro.close):
                return
        _endless.append(coro)

    def generator(self, agen: AsyncGenerator[Any, Any]) -> None:
        """Close an asynchronous generator; what it awaits meanwhile raises Evicted."""
        closing = agen.aclose()
        try:
            closing.send(None)
            for _ in range(_CLOSES):
                closing.throw(Evicted())
        except KeyboardInterrupt as interrupt:
            self._interrupt = interrupt
        except BaseException:  # noqa: BLE001, S110 (it ended, which StopIteration tells too)
            pass
        else:
            _endless.append(closing)

    def _call(self, function: Callable[..., object], *args: object) -> bool:
        try:
            function(*args)
        except KeyboardInterrupt as interrupt:
            self._interrupt = interrupt
            return False
        except BaseException:  # noqa: BLE001 (whatever the run's code raises now, there is nobody to tell)
            return False
        return True


class _QuietHook:
    """sys.unraisablehook, but for Evicted in destructors and generators."""

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, Evicted):
            self._hook(unraisable)


class _QuietWarning:
    """What Python calls when it collects a coroutine that was never awaited; silent while its thread unwinds a run."""

    def __init__(self, warn: Callable[[Any], object]) -> None:
        self._warn = warn

    def __call__(self, coro: Any) -> None:
        if not guard.turn.unwinding:
            self._warn(coro)


def _be_quiet_about_coroutines() -> None:
    warn = getattr(warnings, "_warn_unawaited_coroutine", None)
    if warn is not None and not isinstance(warn, _QuietWarning):
        warnings._warn_unawaited_coroutine = _QuietWarning(warn)  # type: ignore[attr-defined]  # CPython's own hook
