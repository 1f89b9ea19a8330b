"""Questions to code runs that a worker was asked and has not answered: who waits for which, bounded (I12)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.errors import FencepostError, NoWorker, Overloaded, QueryFailed
from fencepost_server.domain.model import Outcome, Payload
from fencepost_server.engine.operations import OK, Answer
from fencepost_server.session.frames import result_message
from fencepost_server.session.outbox import Outbox
from fencepost_server.wire.payloads import payload_in

MAX_QUESTIONS = 1000
_MAX_MESSAGE = 1000

Answered = Callable[[Payload | FencepostError], None]
"""Called once, with the answer or why there is none."""


class Questions:
    """Of one session. ``limit``: bytes of questions that may wait for an answer. ``outbox``: where they are written."""

    def __init__(self, limit: int, outbox: Outbox) -> None:
        self._limit = limit
        self._outbox = outbox
        self._asked: dict[str, tuple[int, Answered]] = {}
        self._bytes = 0

    def ask(self, query_id: str, frame: bytes, answered: Answered) -> None:
        """Put a question to the worker, in its turn. Raises Overloaded."""
        size = len(frame)
        if self._outbox.full:  # of questions that nobody waits for any more, perhaps: they are still to be written
            raise Overloaded("the worker does not read what it is sent")
        if len(self._asked) >= MAX_QUESTIONS or self._bytes + size > self._limit:
            raise Overloaded("too many queries wait for the answer of a worker")
        self._asked[query_id] = (size, answered)
        self._bytes += size
        self._outbox.push_behind(frame)

    def forget(self, query_id: str) -> Answered | None:
        """Nobody waits for this answer any more. Returns who did."""
        size, answered = self._asked.pop(query_id, (0, None))
        self._bytes -= size
        return answered

    def receive(self, items: Iterable[pb.QueryResultItem], limit: int) -> list[pb.ItemResult]:
        """Answers of the worker, and what it is told of each. One that nobody waits for any more is as good as any."""
        return [result_message(index, self._take(item, limit)) for index, item in enumerate(items)]

    def _take(self, item: pb.QueryResultItem, limit: int) -> Answer:
        told: Answer = OK
        outcome: Payload | FencepostError
        try:
            if item.HasField("failure"):
                outcome = QueryFailed(f"{item.failure.code}: {item.failure.message}"[:_MAX_MESSAGE])
            else:
                outcome, _ = payload_in(item.output, limit, "output")
        except FencepostError as error:
            outcome = QueryFailed(f"the worker's answer is refused: {error.message}"[:_MAX_MESSAGE])
            told = Answer(Outcome.REFUSED, error.reason, error.message, error.violations)
        answered = self.forget(item.query_id)
        if answered is not None:
            answered(outcome)
        return told

    def close(self) -> None:
        """The worker is gone: those who wait may ask another one."""
        asked, self._asked, self._bytes = self._asked, {}, 0
        for _, answered in asked.values():
            answered(NoWorker("the worker that was asked has gone"))
