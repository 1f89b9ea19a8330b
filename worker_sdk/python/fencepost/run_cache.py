"""The code runs that a worker has in memory: those whose DECIDE task it holds, and, bounded, those that wait.

A run that waits holds no lease: it is kept only so that its next event needs no replay. The one that has waited longest
goes first when there are too many. Used by the users' loop's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fencepost.advances import Asked
    from fencepost.code_run import CodeRun
    from fencepost.history_pages import Reading
    from fencepost.lease import DecideLease
    from fencepost.local_steps import Underway
    from fencepost.v1 import run_pb2
    from fencepost.v1 import worker_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Limits:
    """How a decider works. Times in seconds. ``on_input_change`` is for `CodeRun`."""

    slots: int
    cache: int
    deadlock: float
    on_input_change: Literal["warn", "block"] = "warn"


class RunEntry:
    """One run in memory.

    ``lease`` is None while the run waits. ``target`` is the last event that is known to exist, ``buffered`` are events
    that are here and not fed yet, in order. ``in_flight`` is the Advance that is not answered, ``answer`` is one
    that can't be taken before ``reading`` has brought what it lacks; ``kept`` is what it says of the lease. ``ends``
    tells that the Advance on its way is the last one, ``unsent`` how many results of local steps go with the next.
    """

    __slots__ = (
        "answer",
        "asked",
        "buffered",
        "ends",
        "in_flight",
        "kept",
        "lease",
        "reading",
        "run",
        "run_id",
        "steps",
        "target",
        "touched",
    )

    def __init__(self, run_id: str, run: CodeRun) -> None:
        self.run_id = run_id
        self.run = run
        self.lease: DecideLease | None = None
        self.target = 0
        self.buffered: list[run_pb2.Event] = []
        self.in_flight: pb.AdvanceItem | None = None
        self.answer: pb.AdvanceResult | None = None
        self.reading: Reading | None = None
        self.steps: dict[int, Underway] = {}
        self.asked: list[Asked] = []
        self.touched = False
        self.ends = False
        self.kept = False

    def __str__(self) -> str:
        return f"run {self.run_id} of workflow {self.run.workflow.workflow_id}"

    def is_at(self, lease: DecideLease) -> bool:
        """Whether it is exactly where the server knows this session to be: it can go on under this new lease."""
        run = self.run
        return (
            self.lease is None
            and lease.after_seq > 0
            and run.seq == lease.after_seq
            and run.advance_no == lease.advance_no
            and run.workflow.compatibility_id == lease.compatibility_id
        )

    def buffer(self, events: list[run_pb2.Event]) -> None:
        """Keep events that are to be fed, but for what is here already."""
        known = self.buffered[-1].seq if self.buffered else self.run.seq
        if not events or (self.buffered and events[0].seq > known + 1):
            # There is a gap between the two, to be read; what is behind it is read with it.
            return
        if self.buffered and events[0].seq <= known:
            # What was pushed while what is before it was being read: they overlap, or the one completes the other.
            both = {event.seq: event for event in (*self.buffered, *events)}
            events, self.buffered = [both[seq] for seq in sorted(both)], []
            known = self.run.seq
        self.buffered.extend(event for event in events if event.seq > known)

    def take_buffered(self) -> list[run_pb2.Event]:
        """The events that can be fed now: those that follow what the run knows, without a gap."""
        seq = self.run.seq
        events = [event for event in self.buffered if event.seq > seq]
        whole = len(events)
        if events and events[-1].seq != seq + whole:
            whole = next(n for n, event in enumerate(events) if event.seq != seq + 1 + n)
        self.buffered = events[whole:]
        return events[:whole]


class RunCache:
    """The runs in memory; see the module. ``bound`` is how many there are at most, unless more are leased."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._leased: dict[str, RunEntry] = {}
        self._waiting: OrderedDict[str, RunEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leased) + len(self._waiting)

    def __iter__(self) -> Iterator[RunEntry]:
        """All of them; a copy, so that they may be taken out meanwhile."""
        return iter([*self._leased.values(), *self._waiting.values()])

    def leased(self) -> list[RunEntry]:
        """Those whose lease is held."""
        return list(self._leased.values())

    def get(self, run_id: str) -> RunEntry | None:
        """The run in memory, if it is there."""
        return self._leased.get(run_id) or self._waiting.get(run_id)

    def hold(self, entry: RunEntry) -> None:
        """Its lease is held."""
        self._waiting.pop(entry.run_id, None)
        self._leased[entry.run_id] = entry

    def wait(self, entry: RunEntry) -> None:
        """It waits, without a lease."""
        self._leased.pop(entry.run_id, None)
        self._waiting[entry.run_id] = entry
        self._waiting.move_to_end(entry.run_id)

    def remove(self, entry: RunEntry) -> None:
        """It is in memory no longer."""
        self._leased.pop(entry.run_id, None)
        self._waiting.pop(entry.run_id, None)

    def surplus(self) -> Iterator[RunEntry]:
        """Those that are too many, the one that has waited longest first; the caller removes each."""
        while self._waiting and len(self) > self.bound:
            yield next(iter(self._waiting.values()))
