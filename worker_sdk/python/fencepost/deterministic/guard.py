"""Refusing what a replay could not repeat, while workflow code runs and nowhere else.

`guarded()` marks a turn of workflow code in this thread. The functions that are refused in it are replaced once, for
the whole process, when the first turn begins (see fencepost.deterministic.refused): outside of turns, and in other
threads, they do what they did, some 100 ns later.

Within a turn some callers are excused, because what they learn does not reach the workflow: logging with its handlers
and formatters, imports, and destructors (the garbage collector runs those of strangers at any time). For others that
are harmless, such as tracing, there is `unguarded()`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from fencepost.deterministic.refusals import refuse

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Turn(threading.local):
    depth = 0  # of guarded() in this thread
    unwinding = False  # whether this thread evicts a run


turn = _Turn()


class _Guarded:
    __slots__ = ()

    def __enter__(self) -> None:
        turn.depth += 1

    def __exit__(self, *_: object) -> None:
        turn.depth -= 1


class _Unguarded:
    __slots__ = ("_depth",)

    def __enter__(self) -> None:
        self._depth = turn.depth
        turn.depth = 0

    def __exit__(self, *_: object) -> None:
        turn.depth = self._depth


# Frames of these are around workflow code: whoever logs, imports or destroys outside of them excuses nothing.
_AROUND_TURNS = frozenset({"fencepost.deterministic.loop", "fencepost.deterministic.eviction"})

_GUARDED = _Guarded()
_installed = False


def guarded() -> _Guarded:
    """A context in which this thread runs workflow code: clocks, chance, threads and sockets raise NonDeterministic."""
    if not _installed:
        install()
    return _GUARDED


def unguarded() -> _Unguarded:
    """A context within a turn in which nothing is refused, for code whose outcome the workflow never sees."""
    return _Unguarded()


def install() -> None:
    """Replace the functions that turns refuse. The first turn does it; a worker may do it earlier."""
    global _installed  # noqa: PLW0603 (the replaced functions are the process's, too)
    from fencepost.deterministic import refused

    if not _installed:
        _installed = True
        refused.install()


def refuse_in_turn(what: str, instead: str) -> None:
    """Raise NonDeterministic for `what` in a turn, for code of ours that is not called in place of another's."""
    if turn.depth and not _excused(sys._getframe(1)):
        refuse(what, instead)


def _excused(frame: FrameType | None) -> bool:
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module in _AROUND_TURNS:
            return False
        if module == "logging" or module.startswith(("logging.", "importlib._bootstrap")):
            return True
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


class Refused:
    """A function in place of a module's own, refused in turns.

    Not a Python function, because one that becomes an attribute of a class (`clock = time.monotonic`) would be bound,
    as functions written in C are not.
    """

    def __init__(self, original: Callable[..., Any], what: str, instead: str) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._what = what
        self._instead = instead

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the original, or raise NonDeterministic in a turn."""
        if turn.depth and not _excused(sys._getframe(1)):
            refuse(self._what, self._instead)
        return self._original(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._original)

    def __reduce__(self) -> str:
        return str(self._original.__name__)


class RefusedWithout(Refused):
    """As Refused, when fewer than so many arguments come: time.localtime() reads the clock, time.localtime(0) not."""

    def __init__(self, original: Callable[..., Any], what: str, instead: str, fewer_than: int) -> None:
        super().__init__(original, what, instead)
        self._fewer_than = fewer_than

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the original, or raise NonDeterministic in a turn."""
        if turn.depth and self._reads_clock(args) and not _excused(sys._getframe(1)):
            refuse(self._what, self._instead)
        return self._original(*args, **kwargs)

    def _reads_clock(self, args: tuple[Any, ...]) -> bool:
        return len(args) < self._fewer_than or args[self._fewer_than - 1] is None


def refused_method(
    original: Callable[_P, _R], what: str, instead: str, when: Callable[..., bool] | None = None
) -> Callable[_P, _R]:
    """A method in place of a class's own, refused in turns: always, or when `when` says so of the arguments."""

    @functools.wraps(original)
    def method(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if turn.depth and (when is None or when(*args, **kwargs)) and not _excused(sys._getframe(1)):
            refuse(what, instead)
        return original(*args, **kwargs)

    return method
