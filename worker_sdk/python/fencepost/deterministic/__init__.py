"""The deterministic half of code workflows: an event loop driven by events alone, and what keeps functions to it.

`DeterministicLoop` runs the coroutines of one run, `guarded` refuses clocks, chance and threads while it does, and
`TaskGroup`, `wait`, `wait_for` and `as_completed` stand in for those of asyncio that go by the order of sets.
"""

from __future__ import annotations

from fencepost.deterministic.gathering import gather
from fencepost.deterministic.guard import guarded, unguarded
from fencepost.deterministic.loop import DeterministicLoop
from fencepost.deterministic.refusals import Evicted, NonDeterministic
from fencepost.deterministic.refused import escapes
from fencepost.deterministic.structured import TaskGroup, wait_for
from fencepost.deterministic.timers import Host
from fencepost.deterministic.waiting import as_completed, wait

__all__ = [
    "DeterministicLoop",
    "Evicted",
    "Host",
    "NonDeterministic",
    "TaskGroup",
    "as_completed",
    "escapes",
    "gather",
    "guarded",
    "unguarded",
    "wait",
    "wait_for",
]
