"""Page tokens and checks of requests, for whatever callers send."""

from __future__ import annotations

import base64
import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost_server.api.checks import Checks, page_token, read_page_token
from fencepost_server.domain.errors import InvalidPageToken, InvalidRequest

TIMES = st.integers(0, 250_000_000_000_000_000).map(lambda n: datetime(1, 1, 2, tzinfo=UTC) + timedelta(microseconds=n))
TYPES = (str, datetime, int, uuid.UUID)


@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=50),
    at=TIMES,
    number=st.integers(0, (1 << 62) - 1),
    id=st.uuids().map(str),
)
def test_a_token_brings_back_what_was_put_into_it(text: str, at: datetime, number: int, id: str) -> None:
    token = page_token("list", [text, at, number, id])
    assert read_page_token("list", token, TYPES) == [text, at, number, id]
    assert token.isascii()
    assert "=" not in token
    with pytest.raises(InvalidPageToken):
        read_page_token("other", token, TYPES)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
)


@given(value=JSON.map(lambda v: ["list", v]) | JSON)
@settings(max_examples=40, deadline=None)
def test_no_token_does_anything_but_be_read_or_refused(value: Any) -> None:
    token = base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
    for types in ((str,), (int,), (datetime,), (uuid.UUID,)):
        try:
            [found] = read_page_token("list", token, types)
        except InvalidPageToken:
            continue
        assert found == value[1] or isinstance(found, datetime)


@given(token=st.text())
def test_no_text_does_anything_but_be_refused(token: str) -> None:
    with pytest.raises(InvalidPageToken):
        read_page_token("list", token, (str,))


NAMES = {"a": True, "A1._/-x": True, "x" * 200: True, "": False, "-a": False, ".": False, "a b": False, "ä": False}
NAMES |= {"x" * 201: False, "a\n": False, "a\0": False, "١": False}


@pytest.mark.parametrize(("name", "good"), NAMES.items())
def test_names_are_those_of_manifests(name: str, good: bool) -> None:
    checks = Checks()
    checks.name(name, "x")
    assert (not checks.faults) == good


@pytest.mark.parametrize(
    ("text", "good"), {"": True, "ä\n😀": True, "x" * 200: True, "x" * 201: False, "\0": False}.items()
)
def test_keys_are_any_text_but_nul_and_not_too_long(text: str, good: bool) -> None:
    checks = Checks()
    checks.text(text, "x")
    assert (not checks.faults) == good


def test_an_empty_value_stands_for_the_default() -> None:
    checks = Checks()
    assert checks.namespace("") == "default"
    assert checks.number(0, "n", 1, 5, 3) == 3
    assert checks.hash("") is None
    assert checks.hash("AB" * 32) == b"\xab" * 32
    assert checks.seconds(Duration(seconds=1, nanos=500_000_000), "t", 2) == 1.5
    checks.done()


@pytest.mark.parametrize("nanos", [10**9, 2**31 - 1, -(10**9)])
def test_a_duration_whose_nanos_are_a_second_or_more_is_none(nanos: int) -> None:
    checks = Checks()
    checks.seconds(Duration(seconds=5, nanos=nanos), "t", 10)
    with pytest.raises(InvalidRequest) as failure:
        checks.done()
    [violation] = failure.value.violations
    assert (violation.path, "nanos" in violation.message) == ("t", True)


def test_faults_are_gathered_and_raised_together() -> None:
    checks = Checks()
    checks.name("", "a")
    checks.run_id("x", "b")
    checks.hash("xyz", "c")
    checks.number(9, "d", 1, 5, 3)
    checks.seconds(Duration(seconds=-1), "e", 2)
    checks.run_id("", "f")
    checks.text("", "g", required=True)
    with pytest.raises(InvalidRequest) as failure:
        checks.done()
    assert [violation.path for violation in failure.value.violations] == list("abcdefg")
