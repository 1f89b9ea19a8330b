"""One run of a code workflow in memory: fed events, it runs the function and says what is to be done. No I/O.

Used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from fencepost.codec import Value
from fencepost.failure import Completed, Failed
from fencepost.ops import LocalCall
from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.workflow import Workflow


@dataclass(frozen=True, slots=True)
class Decision:
    """What to send with the next Advance of a run: an AdvanceItem but for its task, which `fill` writes."""

    advance_no: int
    seen_seq: int
    outcome: pb.AdvanceOutcome.ValueType
    commands: list[pb.Command] = field(default_factory=list)
    taken_signals: list[int] = field(default_factory=list)
    output: Value | None = None
    failure: Failed | None = None

    def fill(self, item: pb.AdvanceItem) -> None:
        """Write it into an item that has its task already."""
        raise NotImplementedError


class CodeRun:
    """One run of ``workflow`` in memory."""

    seq: int
    advance_no: int
    seen_seq: int

    def __init__(
        self,
        workflow: Workflow[..., Any],
        run_id: str,
        *,
        seen_seq: int,
        advance_no: int,
        user_id: str = "",
        fencing_token: int = 0,
        on_input_change: Literal["warn", "block"] = "warn",
    ) -> None:
        self.workflow = workflow
        self.run_id = run_id
        self.user_id = user_id
        self.seq = 0
        self.seen_seq = seen_seq
        self.advance_no = advance_no
        self.fencing_token = fencing_token
        self.on_input_change = on_input_change

    def feed(self, events: Iterable[run_pb2.Event], *, more: bool = False) -> None:
        """Feed the events that follow ``seq``. ``more``: further known events follow with the next call, so that
        they are only kept until then: whoever reads a history in pages says so for all but the last. Raises
        NondeterminismError.
        """
        raise NotImplementedError

    def leased(self, fencing_token: int) -> None:
        """The DECIDE task is held, anew or under another token."""
        self.fencing_token = fencing_token

    def local_steps(self) -> list[LocalCall]:
        """The local steps to begin now, each told once."""
        raise NotImplementedError

    def local_ended(self, op: int, result: Completed | Failed, attempts: int) -> None:
        """A local step has ended, after so many attempts: to be recorded with the next Advance."""
        raise NotImplementedError

    def decision(self) -> Decision | None:
        """What to send now; None if there is nothing, or an Advance is on its way. The caller sends it until it is
        answered.
        """
        raise NotImplementedError

    def accepted(self, result: pb.AdvanceResult) -> None:
        """The Advance on its way was answered OK. ``result.events`` is complete. Raises NondeterminismError."""
        raise NotImplementedError

    def query(self, name: str, payload: Value) -> Value:
        """Answer a question. Raises UnknownQuery, and whatever the handler raises."""
        raise NotImplementedError

    def evict(self) -> None:
        """Drop the function where it stands: no code of it gets anything any more."""
        raise NotImplementedError

    @property
    def waiting(self) -> bool:
        """Whether there is nothing to do until the server has events."""
        raise NotImplementedError
