"""The signals of one run: those that nobody has taken, and the waits that nobody has met.

Signals of one name are taken in the order of their events by waits in the order of their calls, each once. So a name
never has both.
"""

from __future__ import annotations

from collections import deque

from fencepost.codec import Value
from fencepost.ops import Op


class SignalBox:
    """Matches signals with waits by name."""

    __slots__ = ("_came", "_waits")

    def __init__(self) -> None:
        self._came: dict[str, deque[tuple[int, Value]]] = {}
        self._waits: dict[str, deque[Op]] = {}

    def came(self, name: str, seq: int, payload: Value) -> Op | None:
        """The wait that takes the signal of event ``seq``; None if it is kept for one to come."""
        waits = self._waits.get(name)
        if not waits:
            self._came.setdefault(name, deque()).append((seq, payload))
            return None
        op = waits.popleft()
        if not waits:
            del self._waits[name]
        return op

    def wait(self, op: Op) -> tuple[int, Value] | None:
        """The signal that the wait takes, and its event; None if it waits."""
        came = self._came.get(op.name)
        if not came:
            self._waits.setdefault(op.name, deque()).append(op)
            return None
        taken = came.popleft()
        if not came:
            del self._came[op.name]
        return taken

    def give_up(self, op: Op) -> None:
        """The wait takes none any more."""
        waits = self._waits.get(op.name)
        if waits is not None and op in waits:
            waits.remove(op)
            if not waits:
                del self._waits[op.name]
