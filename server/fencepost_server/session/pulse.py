"""Whether a worker is there: what it was pinged, and what it has answered. Pings are numbered from 1."""

from __future__ import annotations

RAN_OUT = ("LEASE_EXPIRED", "ATTEMPT_TIMEOUT")
"""Why a lease ends that its worker let run out. One that is there tells of an attempt whose time is up, too."""
_UNANSWERED = 3


class Pulse:
    """Of one stream. Whoever asks sends the pings."""

    __slots__ = ("_awaited", "_ping", "_pong")

    def __init__(self) -> None:
        self._ping = self._pong = 0
        self._awaited = 0
        """The ping that it has to answer because it is doubted; 0: it is not."""

    @property
    def weak(self) -> bool:
        """It gets nothing more for now: the second ping is not answered, or the first one since it was doubted."""
        return self._awaited > 0 or self._ping - self._pong > 1

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
        number = self.beat() if self._ping == self._pong else None
        self._awaited = self._ping
        return number

    def answered(self, number: int) -> bool:
        """A pong has come. Returns whether the worker may get tasks again by that. One that was doubted may, whatever
        it was pinged since: over a long way each answer comes after the next ping.
        """
        was_weak = self.weak
        self._pong = min(max(self._pong, number), self._ping)
        if number >= self._awaited:
            self._awaited = 0
        return was_weak and not self.weak

    def excuse(self) -> None:
        """Its answers can't be read now."""
        self._pong = self._ping
