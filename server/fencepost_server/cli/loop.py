"""What the commands that serve need of their process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def quiet_grpc() -> None:
    """Keep gRPC's own lines out of the log, unless somebody wants them; call it before gRPC is imported.

    What they tell reaches the log, or whoever called, in our words as well.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in a new event loop: uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
