"""Ends what a test let run beside itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def end(tasks: Iterable[asyncio.Future[Any]], timeout: float = 30.0) -> None:
    """Cancel tasks until they have ended, whatever they raise.

    Again and again, because a cancel can get lost: Python 3.11's wait_for, which drivers use, drops one that comes
    together with its result. Raises TimeoutError at the limit.
    """
    async with asyncio.timeout(timeout):
        pending = set(tasks)
        while pending:
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.2)
