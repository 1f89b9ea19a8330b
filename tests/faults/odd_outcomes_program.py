"""A worker whose steps do what their input says, most of it odd: ``python -m tests.faults.odd_outcomes_program
TARGET``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from fencepost import CorrectiveError, PermanentError, StepContext, Worker, step


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text can be had")


def fail(error: BaseException) -> NoReturn:
    raise error


def cycle() -> list[Any]:
    ring: list[Any] = []
    ring.append({"again": ring})
    return ring


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def text(size: int) -> str:
    """A text whose JSON has so many bytes."""
    return "x" * (size - 2)


OUTCOMES: dict[str, Callable[..., Any]] = {
    "nothing": lambda: None,
    "nul": lambda: "\0",
    "large-integer": lambda: 2**3000,
    "depth": nested,
    "nan": lambda: float("nan"),
    "infinity": lambda: {"x": [float("-inf")]},
    "bytes": lambda: b"raw",
    "set": lambda: {1, 2},
    "cycle": cycle,
    "surrogate": lambda: "\ud800",
    "object": object,
    "generator": lambda: (number for number in range(3)),
    "huge-integer": lambda: 10**1000,
    "text": text,
    "raise-nul": lambda: fail(ValueError("before\0after")),
    "raise-surrogate": lambda: fail(ValueError("before\udfffafter")),
    "raise-long": lambda: fail(ValueError("é" * (5 << 20))),
    "raise-speechless": lambda: fail(Speechless()),
    "raise-exit": lambda: fail(SystemExit(3)),
    "raise-interrupt": lambda: fail(KeyboardInterrupt()),
    "raise-group": lambda: fail(BaseExceptionGroup("several", [PermanentError("no", code="NO"), ValueError("x")])),
    "raise-odd-code": lambda: fail(PermanentError("text", code="C\0\ud800" * 1000)),
}


@step("s1")
def odd(what: list[Any]) -> Any:
    name, *arguments = what
    return OUTCOMES[name](*arguments)


@step("s2")
def feedback(size: int, ctx: StepContext) -> Any:
    """Ask once for a correction with a feedback of so many bytes; return how long the one is that comes back."""
    if ctx.attempt == 1:
        raise CorrectiveError("again, please", feedback=text(size))
    return None if ctx.feedback is None else len(ctx.feedback) + 2


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    Worker(sys.argv[1], [odd, feedback], slots=4).run()
