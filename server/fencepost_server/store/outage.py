"""The log of an outage: one line a second for the whole process, whoever notices it and however often."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("fencepost.database")

_INTERVAL = 1.0


class _Last:
    noted = float("-inf")


def note_outage(who: str, error: BaseException) -> None:
    """Log that ``who`` can't do its work because of ``error`` and goes on trying."""
    now = time.monotonic()
    if now - _Last.noted >= _INTERVAL:
        _Last.noted = now
        log.warning("%s: the database is away (%s); trying again", who, type(error.__cause__ or error).__name__)
