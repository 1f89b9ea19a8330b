"""Whether a worker is there: what it was pinged, and what it has answered. Pings are numbered from 1."""

from __future__ import annotations

_UNANSWERED = 3


class Pulse:
    """Of one stream. Whoever asks sends the pings."""

    __slots__ = ("_doubted", "_ping", "_pong")

    def __init__(self) -> None:
        self._ping = self._pong = 0
        self._doubted = False

    @property
    def weak(self) -> bool:
        """It gets nothing more for now: the second ping is not answered, or the first one since it was doubted."""
        return self._doubted or self._ping - self._pong > 1

    @property
    def gone(self) -> bool:
        """The third ping is not answered."""
        return self._ping - self._pong >= _UNANSWERED

    def beat(self) -> int:
        """The number of the next ping."""
        self._ping += 1
        return self._ping

    def doubt(self) -> int | None:
        """It has let a lease run out: it may be frozen, and would do the same with the next one. Returns the number of
        a ping to send, None if one is on its way: each counts if it is not answered.
        """
        self._doubted = True
        return self.beat() if self._ping == self._pong else None

    def answered(self, number: int) -> bool:
        """A pong has come. Returns whether it is doubted no more by that."""
        self._pong = min(max(self._pong, number), self._ping)
        trusted = self._doubted and self._pong == self._ping
        if trusted:
            self._doubted = False
        return trusted

    def excuse(self) -> None:
        """Its answers can't be read now."""
        self._pong = self._ping
