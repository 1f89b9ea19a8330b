"""The reports of one session that wait for their commit, bounded in number and in bytes (I12)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fencepost_server.engine.operations import Report


class Pending:
    """``items`` and ``size``: how many there may be, and bytes of their payloads, before the stream is read no
    further; what one frame brings may go past it.
    """

    __slots__ = ("_bytes", "_items", "_most_bytes", "_most_items", "thinned")

    def __init__(self, items: int, size: int) -> None:
        self._most_items, self._most_bytes = items, size
        self._items = self._bytes = 0
        self.thinned = asyncio.Event()
        """Set when there are few enough again, after ``full`` was true and this was cleared."""

    def __bool__(self) -> bool:
        return self._items > 0

    @property
    def full(self) -> bool:
        """There are too many."""
        return self._items >= self._most_items or self._bytes >= self._most_bytes

    def add(self, reports: Sequence[Report]) -> None:
        """These wait from now on."""
        self._items += len(reports)
        self._bytes += sum([report.size for report in reports])

    def settled(self, reports: Sequence[Report]) -> None:
        """These wait no more."""
        self._items -= len(reports)
        self._bytes -= sum([report.size for report in reports])
        if not self.full:
            self.thinned.set()
