"""Durations as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_server.domain.durations import MAX_MILLISECONDS, format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("0s", 0),
        ("500ms", 500),
        ("30s", 30_000),
        ("30000ms", 30_000),
        ("5m", 300_000),
        ("1h30m", 5_400_000),
        ("90m", 5_400_000),
        ("1d", 86_400_000),
        ("1d2h3m4s5ms", 93_784_005),
        ("007s", 7_000),
        ("3650d", MAX_MILLISECONDS),
    ],
)
def test_a_duration_is_read_to_the_millisecond(text: str, milliseconds: int) -> None:
    assert parse_duration(text) == milliseconds


@pytest.mark.parametrize(
    "text",
    [
        *["", "5", "s", "1.5s", "-1s", "+1s", "1 s", " 1s", "1s ", "1s\n", "1S", "1M", "1w", "1y", "1µs", "PT1S"],
        *["30s1m", "1s1s", "1h-30m", "٣s", "3651d", f"{'9' * 15}d", f"{'9' * 400}s"],
    ],
)
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|is longer than"):
        parse_duration(text)


@given(st.integers(0, MAX_MILLISECONDS))
def test_every_count_has_one_spelling_that_is_read_back(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds)) == milliseconds


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(0, "0s"), (1, "1ms"), (90_000, "1m30s"), (86_400_000, "1d"), (5_400_001, "1h30m1ms")],
)
def test_the_spelling_takes_the_largest_units(milliseconds: int, text: str) -> None:
    assert format_duration(milliseconds) == text
