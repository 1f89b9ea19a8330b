"""Runs coroutines of the server's commands."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in a new event loop: uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
