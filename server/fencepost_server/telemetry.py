"""The names of all metrics. Values are read when they are asked for: nothing is counted twice, and on the hot path
only events are, a batch at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fencepost_server.domain.model import EventType
from fencepost_server.engine.engine import Engine


class EngineCollector(Collector):
    """Metrics of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """All metrics, now."""
        engine, now = self._engine, time.monotonic()
        yield GaugeMetricFamily("fencepost_healthy", "1 if the database answered lately.", value=float(engine.healthy))
        yield GaugeMetricFamily(
            "fencepost_sessions",
            "Sides of worker streams: one for steps and one for code workflows, so a worker with both counts twice.",
            value=len(engine.dispatcher.sessions),
        )
        ages = GaugeMetricFamily(
            "fencepost_loop_last_good_seconds",
            "Seconds since a loop's last good pass; a waiting loop is as old as its cause.",
            labels=["loop"],
        )  # fmt: skip
        errors = CounterMetricFamily("fencepost_loop_errors", "Passes of a loop that failed.", labels=["loop"])
        for loop in engine.loops:
            ages.add_metric([loop.name], now - loop.last_good if loop.last_good else -1.0)
            errors.add_metric([loop.name], loop.errors)
        yield ages
        yield errors
        yield CounterMetricFamily(
            "fencepost_schedule_failures",
            "Fire times of schedules that could not start a run.",
            value=engine.firing.failures,
        )
        yield CounterMetricFamily(
            "fencepost_runs_blocked",
            "Times that a run was BLOCKED: it waits for a person.",
            value=engine.blocked.count,
        )
        ready = GaugeMetricFamily(
            "fencepost_ready_tasks",
            "Tasks of all servers that wait for a worker, READY.",
            labels=["namespace", "queue"],
        )
        oldest = GaugeMetricFamily(
            "fencepost_ready_oldest_seconds",
            "Seconds for which the oldest of these has been READY.",
            labels=["namespace", "queue"],
        )
        for place, waiting in engine.backlog.waiting.items():
            ready.add_metric(place, waiting.count)
            oldest.add_metric(place, waiting.oldest)
        yield ready
        yield oldest
        events = CounterMetricFamily(
            "fencepost_events", "Events of histories that this server has committed.", labels=["type"]
        )  # fmt: skip
        for number in EventType:
            events.add_metric([number.name], engine.events[number])
        yield events
        depth = GaugeMetricFamily("fencepost_lane_depth", "Operations that wait for a lane.", labels=["lane"])
        batches = CounterMetricFamily("fencepost_lane_batches", "Transactions of a lane.", labels=["lane"])
        operations = CounterMetricFamily(
            "fencepost_lane_operations", "Operations that a lane committed.", labels=["lane"]
        )
        for lane in engine.lanes:
            depth.add_metric([lane.name], lane.depth)
            batches.add_metric([lane.name], lane.batches)
            operations.add_metric([lane.name], lane.operations)
        yield depth
        yield batches
        yield operations
