"""What workflow code may not do, and the two exceptions that tell it so.

RuntimeError
└── NonDeterministic    the code asked for something that a replay could not give it again
BaseException
└── Evicted             the run left this process: its code unwinds, and may ask for nothing any more
"""

from __future__ import annotations

from typing import NoReturn


class NonDeterministic(RuntimeError):
    """Workflow code asked for what differs from replay to replay: I/O, threads, clocks, chance. Says what to use."""


class Evicted(BaseException):
    """The run was dropped from memory. Raised in its code while that unwinds; nobody is meant to catch it."""


def refuse(what: str, instead: str) -> NoReturn:
    """Raise NonDeterministic for `what`, naming what to use `instead`."""
    raise NonDeterministic(f"{what} is not deterministic in a workflow: {instead}")
