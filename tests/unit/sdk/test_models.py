"""The SDK's values as people read them."""

from __future__ import annotations

import datetime as dt

from fencepost import Event, EventKind, Failure, FailureKind, Value

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


def test_an_event_reads_as_a_line_without_its_payload() -> None:
    started = Event(1, NOON, EventKind.RUN_STARTED, workflow_id="w", payload=Value(json="[1]"))
    assert str(started) == "1 run_started"
    failure = Failure(FailureKind.OPERATIONAL, "TIMEOUT", "too late\nat all", node_id="n", attempt=2)
    failed = Event(5, NOON, EventKind.STEP_RETRYING, node_id="n", attempt=2, failure=failure)
    assert str(failed) == "5 step_retrying n attempt 2 OPERATIONAL TIMEOUT: too late"
