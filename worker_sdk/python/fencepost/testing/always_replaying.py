"""A decider that forgets each run whenever it can, so that all of it is replayed at its next event.

What a worker decides must not depend on whether it has had the run in memory, or comes to it by its history alone. In
production that is put to the test only when a worker dies; with this, each test of a workflow does it at each step.
"""

from __future__ import annotations

from fencepost.decider import Decider
from fencepost.lease import DecideLease
from fencepost.run_cache import RunEntry
from fencepost.v1 import worker_service_pb2 as pb


class AlwaysReplaying(Decider):
    """Goes on with a run after an Advance as if another worker had had it until then.

    Only while a local step of it is under way, or has a result that is not recorded, it is kept: that would be run
    again. A run that waits is dropped by a cache of no runs.
    """

    _accepted: RunEntry | None = None

    def _accept(self, entry: RunEntry, result: pb.AdvanceResult) -> None:
        self._accepted = entry
        super()._accept(entry, result)
        self._accepted = None

    def _go_on(self, entry: RunEntry) -> None:
        lease = entry.lease
        if entry is self._accepted and lease is not None and not entry.run.owes_results:
            self._accepted = None
            self._replay(entry, lease)
        else:
            super()._go_on(entry)

    def _replay(self, entry: RunEntry, lease: DecideLease) -> None:
        """Drop the run, and take its lease as if it had come just now."""
        run = entry.run
        lease.after_seq, lease.last_seq = 0, entry.target
        lease.advance_no, lease.seen_seq = run.advance_no, run.seen_seq
        self._evict(entry)
        self._given(lease)
