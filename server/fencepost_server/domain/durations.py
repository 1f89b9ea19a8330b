"""Durations as people write them: `500ms`, `30s`, `1h30m`, `1d`.

Grammar: one or more parts, each an integer and its unit, largest unit first and none twice; the units are `d`
(24 hours), `h`, `m`, `s` and `ms`. No sign, fraction or space, and never a number without its unit, so that
nobody has to remember which one is meant. Inside the domain a duration is an exact count of milliseconds.
"""

from __future__ import annotations

import re

MAX_MILLISECONDS = 10 * 365 * 86_400_000
"""Ten years: no longer duration is read, so that sums of durations fit every clock and column."""

_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))
_MAX_PART_DIGITS = 15
_PARTS = re.compile("".join(rf"(?:([0-9]{{1,{_MAX_PART_DIGITS}}}){unit})?" for unit, _ in _UNITS))


def parse_duration(text: str) -> int:
    """Return the milliseconds that `text` stands for.

    Raises:
        ValueError: `text` breaks the grammar or is longer than MAX_MILLISECONDS; the message is for its
            author.
    """
    match = _PARTS.fullmatch(text)
    if match is None or not text:
        raise ValueError(f"{text[:40]!r} is not a duration such as 500ms, 30s, 5m, 1h30m or 1d")
    parts = zip(match.groups(), _UNITS, strict=True)
    milliseconds = sum(int(count) * size for count, (_, size) in parts if count)
    if milliseconds > MAX_MILLISECONDS:
        raise ValueError(f"{text[:40]!r} is longer than {format_duration(MAX_MILLISECONDS)}")
    return milliseconds


def format_duration(milliseconds: int) -> str:
    """Return the one canonical spelling of a count of milliseconds: `1m30s` for 90,000, `0s` for 0."""
    parts = []
    for unit, size in _UNITS:
        count, milliseconds = divmod(milliseconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
