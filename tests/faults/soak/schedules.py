"""Schedules that fire all through a soak, and whether each of their times had its run once."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from fencepost import OverlapPolicy, ScheduleSpec
from tests.faults.scene import fetch
from tests.faults.soak.findings import Finding, Rule
from tests.faults.soak.graphs import PREFIX

HOUR = 3600.0
BEHIND = 120.0
"""Seconds that a schedule may be behind when it is paused: as long as no outage lasts."""


def _spec(interval: float, overlap: OverlapPolicy) -> ScheduleSpec:
    given = {"seed": 0, "way": 1, "items": []}
    # Whatever a fault takes, it is made up for.
    return ScheduleSpec(PREFIX + "one", interval=interval, input=given, overlap=overlap, catch_up_window=HOUR)


SPECS: Mapping[str, ScheduleSpec] = {
    "beside": _spec(2.0, OverlapPolicy.ALLOW),
    "skipping": _spec(2.0, OverlapPolicy.SKIP),
    "queueing": _spec(3.0, OverlapPolicy.QUEUE_ONE),
    "cancelling": _spec(3.0, OverlapPolicy.CANCEL_RUNNING),
}


async def wrong_schedules(dsn: str, paused: Mapping[str, datetime]) -> list[Finding]:
    """Fire times without a run, and counts that are not those of the runs. ``paused``: when each was told to end."""
    found: list[Finding] = []
    keys = await fetch(dsn, "select k.key, r.run_id from run_key k left join run r using (run_id) where k.kind = 4")
    for row in await fetch(dsn, "select schedule_id, uuid::text, started_runs, failed_starts, skipped_overlap, "
                           "skipped_missed, starting_at, pending_at from schedule"):  # fmt: skip
        name, own = row["schedule_id"], [key for key in keys if key["key"].startswith(row["uuid"] + " ")]
        times = sorted(datetime.fromisoformat(key["key"].partition(" ")[2]) for key in own)
        spec = SPECS[name]
        step = timedelta(seconds=spec.interval or 0)
        left_out = sum((later - earlier) // step - 1 for earlier, later in pairwise(times))
        behind = _behind(step, times, row["skipped_overlap"], paused.get(name))
        wrong = [
            (not times, "it has started nothing"),
            (behind > BEHIND, f"{behind:.0f} s behind when it was paused: it had stopped to fire"),
            (any(key["run_id"] is None for key in own), "a run that it started is not there"),
            (row["started_runs"] != len(times), f"{row['started_runs']} are counted, {len(times)} runs are there"),
            (row["failed_starts"] or row["skipped_missed"], "starts have failed or were missed"),
            (left_out > row["skipped_overlap"], f"{left_out} times are left out, {row['skipped_overlap']} counted"),
            (row["starting_at"] is not None, "a start is under way for ever"),
            (spec.overlap is OverlapPolicy.ALLOW and left_out, f"{left_out} times have no run"),
        ]
        found += [Finding(Rule.SCHEDULE, f"{name}: {text}") for is_so, text in wrong if is_so]
    return found


def _behind(step: timedelta, times: list[datetime], skipped: int, paused: datetime | None) -> float:
    """Seconds before its end for which a schedule has neither started nor skipped anything."""
    if paused is None or not times:
        return 0.0
    due = (paused - times[0].astimezone(UTC)) // step + 1
    return (due - len(times) - skipped) * step.total_seconds()
