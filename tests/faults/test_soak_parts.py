"""The soak ends with what went wrong in a part of itself, and its report says what it could not judge."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from fencepost.errors import Unavailable
from tests.faults.soak import conductor, load
from tests.faults.soak.conditional_sink import ConditionalSink
from tests.faults.soak.conductor import Conductor
from tests.faults.soak.faults import Fault, touched
from tests.faults.soak.levels import LONG_ENOUGH, Level
from tests.faults.soak.load import Load
from tests.faults.soak.report import Report
from tests.faults.soak.soaking import play
from tests.faults.soak.stage import Stage
from tests.faults.soak.watcher import Watcher


class Broken(Exception):
    """What a part of the soak dies of."""


class Parts:
    """A load, a watch and faults that go on until they are cancelled; all but the one that breaks."""

    def __init__(self, broken: str) -> None:
        self.broken = broken
        self.cancelled: set[str] = set()

    async def _part(self, name: str) -> None:
        if name == self.broken:
            raise Broken(name)
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.add(name)

    async def prepare(self) -> None:
        """Nothing has to be there."""

    async def run(self) -> None:
        await self._part("load")

    async def watch(self) -> None:
        await self._part("watch")

    async def faults(self) -> None:
        await self._part("faults")


@pytest.mark.parametrize("broken", ["load", "watch", "faults"])
async def test_the_first_part_that_fails_ends_the_soak(broken: str) -> None:
    parts = Parts(broken)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(10):
            await play(cast("Load", parts), [parts.watch], parts.faults)
    assert [repr(error) for error in caught.value.exceptions] == [repr(Broken(broken))]
    assert broken not in parts.cancelled


async def test_a_call_that_is_never_answered_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "INSISTENCE", 1.5)
    calls = 0
    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: calls))  # each takes a second

    async def call() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        raise Unavailable("nobody is there")

    playing = Load("127.0.0.1:1", cast("Watcher", None), cast("ConditionalSink", None), 1, 1)
    try:
        with pytest.raises(Unavailable):
            await playing._insist(call)
    finally:
        await playing.close()
    assert calls == 2


async def test_a_part_that_is_never_left_ends_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor, "NEXT_LIMIT", 0.05)
    playing = Conductor(cast("Stage", None), cast("Watcher", None), verbose=False)
    fault = Fault("hold locks", 0, 1, touched("hold locks", 0))
    playing._busy.update(fault.touches)
    with pytest.raises(TimeoutError, match=r"busy Counter.*database.*hold locks"):
        await playing._next([fault])


def test_the_report_says_of_which_servers_it_can_say_nothing() -> None:
    report = Report(1)
    assert "no server lived long enough: nothing is said of growth" in list(report.lines())
    assert '"servers_judged_for_growth": 0' in report.as_json()
    report.levels = [Level(0, LONG_ENOUGH, (1, 1), (1, 1))]
    said = "\n".join(report.lines())
    assert "no server lived" not in said
    assert "server 1: no process of it lived long enough" in said
    assert "server 0: no process" not in said
