"""The deterministic half of code workflows: an event loop driven by events alone, and what keeps functions to it."""

from __future__ import annotations

from fencepost.deterministic.loop import DeterministicLoop
from fencepost.deterministic.refusals import Evicted, NonDeterministic
from fencepost.deterministic.timers import Host

__all__ = ["DeterministicLoop", "Evicted", "Host", "NonDeterministic"]
