"""How much is measured: the sizes of every benchmark, and the named profiles of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STEPS = 10
"""Steps of a run, the same for every peer that Fencepost is compared with."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes. ``runs`` and ``rounds`` are for all benchmarks, the rest for the ones that are named after them.

    ``slots`` are the steps that all worker processes together hold at a time; ``workers`` are the numbers of worker
    processes that `throughput` goes through. Times are in seconds.
    """

    runs: int
    rounds: int
    latency_runs: int
    load_seconds: float
    submit_runs: int
    backlog_tasks: int
    history_events: int
    fanout_items: int
    timers: int
    snapshot_seconds: float
    payload_bytes: int
    streams: int
    tasks_out: int
    idle_seconds: float
    waiting_runs: int
    cold_events: int
    undo_steps: int
    workers: tuple[int, ...] = (1, 2, 4)
    servers: tuple[int, ...] = (1, 2, 4)
    slots: int = 400

    @property
    def warm_up_runs(self) -> int:
        """Runs of the round that is not counted."""
        return max(1, self.runs // 5)


PROFILES: Mapping[str, Plan] = {
    "full": Plan(
        runs=2000,
        rounds=5,
        latency_runs=40,
        load_seconds=10.0,
        submit_runs=10_000,
        backlog_tasks=1_000_000,
        history_events=10_000_000,
        fanout_items=10_000,
        timers=100_000,
        snapshot_seconds=120.0,
        payload_bytes=600_000_000,
        streams=1000,
        tasks_out=10_000,
        idle_seconds=60.0,
        waiting_runs=10_000,
        cold_events=10_000,
        undo_steps=1000,
    ),
    "quick": Plan(
        runs=800,
        rounds=3,
        latency_runs=15,
        load_seconds=2.0,
        submit_runs=2000,
        backlog_tasks=50_000,
        history_events=250_000,
        fanout_items=1000,
        timers=5000,
        snapshot_seconds=4.0,
        payload_bytes=40_000_000,
        streams=200,
        tasks_out=400,
        idle_seconds=4.0,
        waiting_runs=2000,
        cold_events=1000,
        undo_steps=200,
        servers=(1, 2),
    ),
    "tiny": Plan(
        runs=12,
        rounds=1,
        latency_runs=2,
        load_seconds=0.3,
        submit_runs=20,
        backlog_tasks=40,
        history_events=200,
        fanout_items=20,
        timers=20,
        snapshot_seconds=0.1,
        payload_bytes=20_000_000,
        streams=5,
        tasks_out=10,
        idle_seconds=0.5,
        waiting_runs=20,
        cold_events=30,
        undo_steps=10,
        workers=(1, 2),
        servers=(1, 2),
        slots=8,
    ),
}
"""``full`` for a release, ``quick`` for a change, ``tiny`` to see that all of it works: its figures mean nothing."""
