"""Columns go to the database as arrays of one type and come back as what they were."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fencepost_server.store import arrays
from fencepost_server.store.arrays import Blobs, Bools, Column, Ints, Names, Texts, Times, Uuids, columns

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
YEAR_1 = datetime(1, 1, 2, tzinfo=UTC)
TIMES = st.builds(
    lambda micros, hours: (YEAR_1 + timedelta(microseconds=micros)).astimezone(timezone(timedelta(hours=hours))),
    st.integers(0, 9998 * 365 * 86_400 * 10**6),
    st.integers(-11, 14),
)


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        arrays.register(connection)  # type: ignore[arg-type]  # adapters are the same for both kinds
        yield connection


def returned(connection: psycopg.Connection[Any], column: Column, type_: str) -> list[Any]:
    """The elements as the database sees them, and the type that it was told."""
    cursor = connection.cursor(binary=True)
    cursor.execute("select v, pg_typeof(%(c)s)::text from unnest(%(c)s) v", {"c": column})
    rows = cursor.fetchall()
    assert {told for _, told in rows} <= {type_}
    return [value for value, _ in rows]


@given(values=st.lists(st.none() | st.integers(-(1 << 63), (1 << 63) - 1)))
@SETTINGS
def test_integers(connection: psycopg.Connection[Any], values: list[int | None]) -> None:
    assert returned(connection, Ints(values), "bigint[]") == values


@given(values=st.lists(st.none() | TEXTS))
@SETTINGS
def test_texts(connection: psycopg.Connection[Any], values: list[str | None]) -> None:
    assert returned(connection, Texts(values), "text[]") == values


@given(values=st.lists(st.none() | TEXTS))
@SETTINGS
def test_names(connection: psycopg.Connection[Any], values: list[str | None]) -> None:
    assert returned(connection, Names(values), "text[]") == values


def test_what_was_laid_out_is_kept_up_to_a_bound(connection: psycopg.Connection[Any]) -> None:
    """The first two come again when the rest has taken up all the room."""
    names = [f"name {number}" for number in range(3_000)]
    assert returned(connection, Names([*names, None, *names[:2]]), "text[]") == [*names, None, *names[:2]]
    assert len(arrays._NAMES) <= 1_000
    numbers = list(range(-12_000, 12_000))
    assert returned(connection, Ints([*numbers, None, -12_000]), "bigint[]") == [*numbers, None, -12_000]
    assert len(arrays._INTS) <= 10_000


@given(values=st.lists(st.none() | st.binary()))
@SETTINGS
def test_bytes(connection: psycopg.Connection[Any], values: list[bytes | None]) -> None:
    assert returned(connection, Blobs(values), "bytea[]") == values


@given(values=st.lists(st.none() | st.uuids().map(str)))
@SETTINGS
def test_uuids(connection: psycopg.Connection[Any], values: list[str | None]) -> None:
    assert returned(connection, Uuids(values), "uuid[]") == values


@given(values=st.lists(st.none() | TIMES))
@SETTINGS
def test_times(connection: psycopg.Connection[Any], values: list[datetime | None]) -> None:
    assert returned(connection, Times(values), "timestamp with time zone[]") == values


def test_times_come_back_in_utc_whatever_the_time_zone_of_the_database_is(
    connection: psycopg.Connection[Any],
) -> None:
    connection.execute("set time zone 'Asia/Kolkata'")
    times = [datetime(2026, 11, 30, 12, tzinfo=UTC) + timedelta(microseconds=number) for number in range(12_000)]
    for _ in range(2):  # the second time some are known, and some not any more
        found = returned(connection, Times([*times, None, *times[:10]]), "timestamp with time zone[]")
        assert found == [*times, None, *times[:10]]
        assert {at.tzinfo for at in found if at is not None} == {UTC}
    assert len(arrays._TIMES) <= 10_000


@given(values=st.lists(st.booleans()))
@SETTINGS
def test_booleans(connection: psycopg.Connection[Any], values: list[bool]) -> None:
    assert returned(connection, Bools(values), "boolean[]") == values


def test_rows_become_one_column_for_each_type() -> None:
    assert columns([(1, "a"), (2, None)], Ints, Texts) == [[1, 2], ["a", None]]
    assert [type(column) for column in columns([], Ints, Texts)] == [Ints, Texts]
    with pytest.raises(ValueError, match="longer"):
        columns([(1, 2, 3)], Ints, Ints)


def test_json_and_uuid_come_back_as_the_text_that_was_stored(connection: psycopg.Connection[Any]) -> None:
    """Nothing in the store looks into a payload: not its numbers, its escapes or its white space."""
    text = ' {"a": 1.00, "b": "\\u0000\\ud83d\\ude00", "a": 1e400} '
    for binary in (True, False):
        cursor = connection.cursor(binary=binary)
        cursor.execute("select %s::json, '0190B0C4-0000-7000-8000-000000000001'::uuid", [text])
        assert cursor.fetchone() == (text, "0190b0c4-0000-7000-8000-000000000001")
