"""A worker's stream as the taker of DECIDE tasks: what code workflows do next is decided apart from the steps, with a
capacity and handlers of its own. The dispatcher knows both sides as sessions of one id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fencepost_server.domain.errors import FencepostError
from fencepost_server.domain.model import LeasedTask
from fencepost_server.domain.ops import HistoryEvent
from fencepost_server.engine.dispatch import DECIDE_SIDE
from fencepost_server.engine.operations import Answer, Report
from fencepost_server.session.frames import Ref
from fencepost_server.session.leases import Side

if TYPE_CHECKING:
    from fencepost_server.session.session import Session


class Decider:
    """Implements engine.operations.WorkerSession for the DECIDE tasks of a session."""

    def __init__(self, session: Session, side: Side, handlers: frozenset[tuple[str, str]]) -> None:
        self.session_id = session.session_id
        self.key = session.session_id + DECIDE_SIDE
        self.nonce = session.nonce
        self.namespace = session.namespace
        self.handlers = handlers
        self._session = session
        self._side = side

    @property
    def open(self) -> bool:
        """False once the stream has ended."""
        return self._session.open

    def decides(self, handler: str) -> bool:
        """Whether the worker has the code workflow that DECIDE tasks with that handler are of."""
        return any(mine == handler for _, mine in self.handlers)

    def room(self) -> int:
        """How many further code runs it can decide."""
        return 0 if self._session.unfit else self._side.room

    def reserve(self, tasks: int) -> None:
        """Keep room for a claim under way."""
        self._side.reserved += tasks

    def last_frame(self) -> int:
        """The id of the last frame received."""
        return self._session.last_frame()

    def eager_depth(self, run_id: str, task_id: int) -> int | None:
        """As the session's."""
        return self._session.eager_depth(run_id, task_id)

    def settle(self, answers: Sequence[tuple[Report, Answer]], tasks: Sequence[LeasedTask]) -> Sequence[LeasedTask]:
        """As the session's."""
        return self._session.settle(answers, tasks)

    def give_up(self, report: Report, error: FencepostError) -> None:
        """As the session's."""
        self._session.give_up(report, error)

    def end(self, error: FencepostError) -> None:
        """As the session's."""
        self._session.end(error)

    def revoke(self, ref: Ref, reason: str) -> None:
        """As the session's."""
        self._session.revoke(ref, reason)

    def cancel(self, ref: Ref, reason: str, remaining: float) -> None:
        """As the session's."""
        self._session.cancel(ref, reason, remaining)

    def knows(self, ref: Ref) -> bool:
        """As the session's."""
        return self._session.knows(ref)

    def push_events(self, ref: Ref, after_seq: int, events: Sequence[HistoryEvent], last_seq: int = 0) -> None:
        """As the session's."""
        self._session.push_events(ref, after_seq, events, last_seq)
