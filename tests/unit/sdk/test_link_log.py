"""What a link logs of an outage."""

from __future__ import annotations

import itertools
import logging

import pytest

from fencepost import link
from fencepost.channel import Backoff, Targets
from fencepost.errors import Unreachable
from tests.unit.sdk.building import session_of


def test_an_outage_is_logged_each_second_at_first_and_every_ten_after_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(link, "clock", lambda: now)
    alone = link.Link(session_of(), Targets("127.0.0.1:1"), Backoff(), lambda _link, _effects: None)
    times = []
    with caplog.at_level(logging.WARNING, "fencepost.worker"):
        while now < 1200:
            before = len(caplog.records)
            alone._log_break(Unreachable("connection refused\nmore of it"), 0.25)
            times += [now] * (len(caplog.records) - before)
            now += 0.25
    assert times[:3] == [1000, 1001, 1002]
    assert {later - earlier for earlier, later in itertools.pairwise(times) if later >= 1070} == {10.0}
    assert all("more of it" not in record.getMessage() for record in caplog.records)
