"""The leases on one stream: those of steps, and apart from them those of DECIDE tasks, each up to its own capacity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fencepost_server.domain.model import DECIDE_TASK, Outcome
from fencepost_server.domain.ops import AdvanceOutcome
from fencepost_server.engine.operations import Answer, Report, ReportKind

_ADVANCE, _CHECKPOINT, _CONTINUE_AS_NEW = ReportKind.ADVANCE, ReportKind.CHECKPOINT, AdvanceOutcome.CONTINUE_AS_NEW

Key = tuple[str, int]
"""run_id, task_id."""


@dataclass(slots=True)
class Out:
    """A lease on this stream. ``reporting``: its outcome waits for its commit. ``workflow_id``: of a DECIDE task."""

    token: int
    depth: int
    tasks_number: int
    reporting: bool = False
    workflow_id: str = ""


class Side:
    """One kind of work of a session: how many tasks of it may be out, and how many are or are being claimed."""

    __slots__ = ("capacity", "out", "reserved")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.out = 0
        self.reserved = 0

    @property
    def room(self) -> int:
        """How many further tasks there may be."""
        return self.capacity - self.out - self.reserved


class Leases:
    """What is out on a stream, each counted on its side."""

    def __init__(self, capacity: int, workflow_capacity: int) -> None:
        self.steps = Side(capacity)
        self.decides = Side(workflow_capacity)
        self._out: dict[Key, Out] = {}

    def __bool__(self) -> bool:
        return bool(self._out)

    def __contains__(self, key: Key) -> bool:
        return key in self._out

    def side(self, task_id: int) -> Side:
        """Where a task counts: the DECIDE task of a run is the one that is named by its first event."""
        return self.decides if task_id == DECIDE_TASK else self.steps

    def get(self, run_id: str, task_id: int) -> Out | None:
        """The lease of a task, if one is out."""
        return self._out.get((run_id, task_id))

    def current(self, run_id: str, task_id: int, token: int) -> Out | None:
        """The same, if it is of that token."""
        out = self._out.get((run_id, task_id))
        return out if out is not None and out.token == token else None

    def put(self, run_id: str, task_id: int, out: Out) -> None:
        """A task is out."""
        if (run_id, task_id) not in self._out:
            self.side(task_id).out += 1
        self._out[run_id, task_id] = out

    def drop(self, run_id: str, task_id: int) -> None:
        """A task is out no more."""
        if self._out.pop((run_id, task_id), None) is not None:
            self.side(task_id).out -= 1

    def reported(self, report: Report) -> None:
        """An outcome waits for its commit."""
        out = self.current(report.run_id, report.task_id, report.token)
        if out is not None and report.kind is not _CHECKPOINT:
            out.reporting = True
            if report.advance is not None and report.advance.outcome is _CONTINUE_AS_NEW:
                report.workflow_id = out.workflow_id

    def items(self) -> Iterator[tuple[Key, Out]]:
        """All that is out."""
        return iter(self._out.items())


def goes_on(report: Report, answer: Answer) -> bool:
    """Whether the lease stays where it is. That of an Advance does if the answer says so, or if nothing was done; it is
    gone if the code could not go on.
    """
    kind = report.kind
    if kind is _ADVANCE:
        if answer.advance is not None:
            return answer.advance.kept
        return answer.outcome in (Outcome.ALREADY_DONE, Outcome.REFUSED)
    return kind is _CHECKPOINT and answer.outcome is not Outcome.LEASE_LOST
