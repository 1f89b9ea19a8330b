"""How much is measured: the sizes of a benchmark, and the named profiles of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STEPS = 10
"""Steps of a run, the same for every peer that Fencepost is compared with."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes. ``slots`` are those of each worker; ``latency_runs`` are made one after the other in each round."""

    runs: int
    rounds: int
    latency_runs: int
    workers: int = 1
    slots: int = 400

    @property
    def warm_up_runs(self) -> int:
        """Runs of the round that is not counted."""
        return max(1, self.runs // 5)


PROFILES: Mapping[str, Plan] = {
    "full": Plan(runs=2000, rounds=5, latency_runs=40),
    "quick": Plan(runs=800, rounds=3, latency_runs=15),
}
"""On two processors that do nothing else, full takes some 40 seconds and quick 20. Runs are a multiple of the slots."""
