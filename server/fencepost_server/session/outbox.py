"""What waits to be written to one stream: answers, revocations and cancels first, tasks in their turn.

Bounded in bytes where a slow reader could make it grow (I12); what else waits is bounded by the session's room.
Called by the session, and through it by the one writer of the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from fencepost.v1 import worker_service_pb2 as pb

_REF_BYTES = 80  # of a TaskRef in a frame, generously


class Outbox:
    """Frames on their way. ``limit``: bytes that may wait; ``frame``: the bytes of the largest frame."""

    def __init__(self, limit: int, frame: int) -> None:
        self._limit = limit
        self._refs_a_frame = max(1, frame // (2 * _REF_BYTES))
        self._urgent: deque[tuple[int, bytes | pb.Cancel]] = deque()
        self._later: deque[bytes] = deque()
        self._urgent_bytes = self._later_bytes = 0
        self._open = True
        self.on_output: Callable[[], None] = lambda: None
        """Called when there is something to write."""

    @property
    def empty(self) -> bool:
        """Nothing waits."""
        return not self._urgent and not self._later

    @property
    def overfull(self) -> bool:
        """More answers wait than may: nobody reads them."""
        return self._urgent_bytes > self._limit

    @property
    def laden(self) -> bool:
        """Enough tasks wait."""
        return self._later_bytes > self._limit // 2

    @property
    def full(self) -> bool:
        """Nothing more should be put behind that the session's room does not bound."""
        return self._later_bytes > self._limit

    @property
    def waiting(self) -> int:
        """How many frames wait in their turn."""
        return len(self._later)

    def push(self, message: pb.SessionResponse) -> None:
        """Let a frame be written before any task."""
        self.push_bytes(message.SerializeToString())

    def push_bytes(self, data: bytes) -> None:
        """The same with a frame in its bytes."""
        self._queue(len(data), data)

    def push_cancel(self, task: pb.TaskRef, cancel: pb.Cancel) -> None:
        """Tell of one lease that its step should stop; what is told in one go travels in one frame."""
        last = self._urgent[-1] if self._urgent else None
        if last is not None and isinstance(last[1], pb.Cancel):
            size, same = last[0], last[1]
            fits = len(same.tasks) < self._refs_a_frame
            if fits and (same.reason, same.remaining) == (cancel.reason, cancel.remaining):
                same.tasks.append(task)
                self._urgent[-1] = (size + _REF_BYTES, same)
                self._urgent_bytes += _REF_BYTES
                return
        cancel.tasks.append(task)
        self._queue(2 * _REF_BYTES, cancel)

    def _queue(self, size: int, frame: bytes | pb.Cancel) -> None:
        if self._open:
            self._urgent.append((size, frame))
            self._urgent_bytes += size
            self.on_output()

    def push_behind(self, data: bytes) -> None:
        """Let something be written in its turn. Bounded by room: that more bytes wait than the outbox may hold
        is no sign of a slow reader.
        """
        if self._open:
            self._later.append(data)
            self._later_bytes += len(data)
            self.on_output()

    def take(self) -> bytes | None:
        """The next frame to write."""
        if self._urgent:
            size, frame = self._urgent.popleft()
            self._urgent_bytes -= size
            return frame if isinstance(frame, bytes) else pb.SessionResponse(cancel=frame).SerializeToString()
        if not self._later:
            return None
        data = self._later.popleft()
        self._later_bytes -= len(data)
        return data

    def close(self) -> None:
        """Nothing is written any more."""
        self._open = False
        self._urgent.clear()
        self._later.clear()
        self._urgent_bytes = self._later_bytes = 0

    def unwritten(self) -> Iterator[int]:
        """The numbers of the Tasks frames that wait, in their order."""
        numbers = (pb.SessionResponse.FromString(data).tasks.tasks_number for data in self._later)
        return (number for number in numbers if number)
