"""What a schedule asks for, and when it fires (semantics: schedules).

Times are aware and in UTC; a *fire time* is nominal, without jitter. cronsim reads the five fields and finds the times
that a clock on the wall would show; it is given no zone, because what it does about daylight saving depends on how a
field is spelled. Here, each time of the wall is one instant, by one rule: a time that does not exist fires at the first
instant after the gap, a time that exists twice fires at the first of the two. So instants never run backwards, and
times that a gap moves to the same instant are one fire time.

Nothing is enumerated without bound: counts of far ranges are made from days, and nothing fires after LAST_YEAR.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from enum import IntEnum
from functools import lru_cache
from importlib.resources import files
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from fencepost_server.domain.model import NULL, Payload
from fencepost_server.domain.violation import Violation

MAX_CRON = 200
"""Longest cron expression, in characters."""
LAST_YEAR = 8000
"""Nothing fires in this year or later: sums of times stay within what every clock and column holds."""
MIN_INTERVAL, MAX_INTERVAL = timedelta(seconds=1), timedelta(days=3650)
MIN_CATCH_UP, MAX_CATCH_UP = timedelta(seconds=1), timedelta(days=365)
DEFAULT_CATCH_UP = timedelta(minutes=1)
MAX_JITTER = timedelta(days=1)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_END = datetime(LAST_YEAR, 1, 1, tzinfo=UTC)
_TICK = timedelta(microseconds=1)
_SECOND, _DAY = timedelta(seconds=1), timedelta(days=1)
_CRON_TEXT = re.compile(r"[0-9A-Za-z*,/#\- \t]+")


class Overlap(IntEnum):
    """What happens at a fire time while the last run has not ended. The numbers are the contract's."""

    SKIP = 1
    QUEUE_ONE = 2
    ALLOW = 3
    CANCEL_RUNNING = 4

    @property
    def queues(self) -> bool:
        """A fire time waits for the end of the run."""
        return self in (Overlap.QUEUE_ONE, Overlap.CANCEL_RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """When to start what: ``cron`` in ``time_zone``, or ``interval`` shifted by ``offset``; exactly one of the two is
    there. ``run_timeout`` is in seconds; None: none.
    """

    cron: str = ""
    time_zone: str = "UTC"
    interval: timedelta | None = None
    offset: timedelta = timedelta(0)
    workflow_id: str
    input: Payload = NULL
    user_id: str = ""
    priority: int = 3
    attributes: Mapping[str, str] = field(default_factory=dict)
    run_timeout: float | None = None
    overlap: Overlap = Overlap.SKIP
    catch_up: timedelta = DEFAULT_CATCH_UP
    jitter: timedelta = timedelta(0)
    start_at: datetime | None = None
    end_at: datetime | None = None


def with_input(spec: Spec, value: Payload) -> Spec:
    """The same with another input."""
    return replace(spec, input=value)


def faults(spec: Spec) -> list[Violation]:
    """Everything about its times that is impossible or absurd, with the names of the contract's fields."""
    found = list(_when_faults(spec))
    if not MIN_CATCH_UP <= spec.catch_up <= MAX_CATCH_UP:
        found.append(Violation("catch_up_window", "must be between 1 s and 365 days"))
    if not timedelta(0) <= spec.jitter <= MAX_JITTER:
        found.append(Violation("jitter", "must be between 0 and 1 day"))
    if spec.start_at is not None and spec.end_at is not None and spec.end_at <= spec.start_at:
        found.append(Violation("end_time", "must be after start_time"))
    return found


def _when_faults(spec: Spec) -> Iterator[Violation]:
    if spec.interval is not None:
        if not MIN_INTERVAL <= spec.interval <= MAX_INTERVAL:
            yield Violation("interval", "must be between 1 s and 3650 days")
        elif not timedelta(0) <= spec.offset < spec.interval:
            yield Violation("offset", "must be at least 0 and less than the interval")
        return
    if not known_zone(spec.time_zone):
        yield Violation("time_zone", "is not a time zone of the IANA database, such as Europe/Berlin")
    if (fault := cron_fault(spec.cron)) is not None:
        yield Violation("cron", fault)


def cron_fault(cron: str) -> str | None:
    """What is wrong with a cron expression, or None."""
    if len(cron) > MAX_CRON:
        return f"at most {MAX_CRON} characters"
    if _CRON_TEXT.fullmatch(cron) is None or len(cron.split()) != 5:
        return "must be five fields: minute, hour, day of month, month, day of week"
    try:
        first = next(CronSim(cron, datetime(2000, 1, 1)), None)  # noqa: DTZ001  # a time of the wall has no zone
    except CronSimError as error:
        return f"is not valid or never fires: {str(error).lower()}"
    return None if first is not None else "never fires"


@lru_cache(maxsize=1)
def _zones() -> frozenset[str]:
    """The names of the database that comes with us: what a machine adds, such as "localtime", is not the same on the
    next one.
    """
    return frozenset((files("tzdata") / "zones").read_text(encoding="ascii").split())


def known_zone(name: str) -> bool:
    """Whether it is the name of a time zone."""
    if name not in _zones():
        return False
    try:
        ZoneInfo(name)
    except ZoneInfoNotFoundError:
        return False
    return True


def next_fire(spec: Spec, after: datetime) -> datetime | None:
    """The first fire time after ``after``, or None: it fires no more."""
    return next(fire_times(spec, after), None)


def fire_times(spec: Spec, after: datetime) -> Iterator[datetime]:
    """The fire times after ``after``, in order. Endless for most specs."""
    if spec.start_at is not None:
        after = max(after, spec.start_at - _TICK)
    after = max(after, EPOCH - _TICK)
    end = _END if spec.end_at is None else min(spec.end_at, _END)
    if after >= end:
        return
    times = _interval_times(spec.interval, spec.offset, after) if spec.interval else _cron_times(spec, after)
    for at in times:
        if at >= end:
            return
        yield at


def count_fires(spec: Spec, after: datetime, until: datetime) -> int:
    """How many fire times lie after ``after`` and not after ``until``. The cost grows with the days between, not with
    the fire times.
    """
    if spec.start_at is not None:
        after = max(after, spec.start_at - _TICK)
    after = max(after, EPOCH - _TICK)
    until = min(until, _END - _TICK)
    if spec.end_at is not None:
        until = min(until, spec.end_at - _TICK)
    if until <= after:
        return 0
    if spec.interval:
        base = EPOCH + spec.offset
        return (until - base) // spec.interval - (after - base) // spec.interval
    return _count_cron(spec, after, until)


def delay(spec: Spec, key: str, at: datetime) -> timedelta:
    """How much later than a fire time its run starts: the same for the same schedule (``key``) and time."""
    digest = hashlib.sha256(f"{key} {at.isoformat()}".encode()).digest()
    return (spec.jitter // _TICK * int.from_bytes(digest[:6], "big") >> 48) * _TICK


def _interval_times(interval: timedelta, offset: timedelta, after: datetime) -> Iterator[datetime]:
    base = EPOCH + offset
    at = base + ((after - base) // interval + 1) * interval
    while True:
        yield at
        at += interval


def _cron_times(spec: Spec, after: datetime) -> Iterator[datetime]:
    zone = ZoneInfo(spec.time_zone)
    last = after
    for wall in CronSim(spec.cron, _wall(after, zone)):
        at = _instant(wall, zone)
        if at > last:
            yield at
            last = at


def _count_cron(spec: Spec, after: datetime, until: datetime) -> int:
    """Day by day: those in between that no switch of the clocks touches have all the same number of fire times."""
    zone = ZoneInfo(spec.time_zone)
    minute, hour, *days = spec.cron.split()
    times = f"{minute} {hour} * * *"
    first, final = _wall(after, zone), _wall(until, zone)
    plain = sum(1 for _ in _walls_of_day(times, first.date()))
    total, last = 0, after
    begin = datetime.combine(first.date(), datetime.min.time()) - _SECOND
    for midnight in CronSim(f"0 0 {' '.join(days)}", begin):
        day = midnight.date()
        if day > final.date():
            break
        if first.date() < day < final.date() and not _switches(day, zone):
            total += plain
            continue
        for wall in _walls_of_day(times, day):
            at = _instant(wall, zone)
            if last < at <= until:
                total, last = total + 1, at
    return total


def _walls_of_day(times: str, day: date) -> Iterator[datetime]:
    begin = datetime.combine(day, datetime.min.time()) - _SECOND
    for wall in CronSim(times, begin):
        if wall.date() != day:
            return
        yield wall


def _switches(day: date, zone: ZoneInfo) -> bool:
    """Whether the clocks are changed on a day, or so near to its midnights that its times may move."""
    midnight = datetime.combine(day, datetime.min.time())
    offsets = {
        wall.replace(tzinfo=zone, fold=fold).utcoffset() for wall in (midnight, midnight + _DAY) for fold in (0, 1)
    }
    return len(offsets) > 1


def _wall(at: datetime, zone: ZoneInfo) -> datetime:
    """What a clock on the wall shows at an instant, without a zone."""
    return at.astimezone(zone).replace(tzinfo=None, fold=0)


def _instant(wall: datetime, zone: ZoneInfo) -> datetime:
    """The instant that a time of the wall stands for; see the module."""
    at = wall.replace(tzinfo=zone, fold=0).astimezone(UTC)
    if _wall(at, zone) == wall:
        return at
    # It does not exist. Read with the offset of after the gap it is before the switch, and the other way round.
    before = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
    offset = before.astimezone(zone).utcoffset()
    while at - before > _SECOND:
        middle = before + (at - before) // _SECOND // 2 * _SECOND
        if middle.astimezone(zone).utcoffset() == offset:
            before = middle
        else:
            at = middle
    return at


def spec_to_json(spec: Spec) -> str:
    """All of a spec but its input, for the store. Durations are in microseconds."""
    return json.dumps(
        {
            "cron": spec.cron,
            "time_zone": spec.time_zone,
            "interval": None if spec.interval is None else spec.interval // _TICK,
            "offset": spec.offset // _TICK,
            "workflow_id": spec.workflow_id,
            "user_id": spec.user_id,
            "priority": spec.priority,
            "attributes": dict(spec.attributes),
            "run_timeout": spec.run_timeout,
            "overlap": int(spec.overlap),
            "catch_up": spec.catch_up // _TICK,
            "jitter": spec.jitter // _TICK,
            "start_at": None if spec.start_at is None else spec.start_at.isoformat(),
            "end_at": None if spec.end_at is None else spec.end_at.isoformat(),
        }
    )


def spec_from_json(text: str, value: Payload) -> Spec:
    """The spec that ``spec_to_json`` wrote, with its input. Raises ValueError, KeyError, TypeError for another text."""
    fields = json.loads(text)
    for name in ("interval", "offset", "catch_up", "jitter"):
        fields[name] = None if fields[name] is None else fields[name] * _TICK
    for name in ("start_at", "end_at"):
        fields[name] = None if fields[name] is None else datetime.fromisoformat(fields[name])
    return Spec(**{**fields, "overlap": Overlap(fields["overlap"]), "input": value})
