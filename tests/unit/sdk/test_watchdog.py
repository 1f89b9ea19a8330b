"""Turns that do not end are interrupted, and nothing else ever is."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fencepost import watchdog as watchdog_module
from fencepost.watchdog import TurnInterrupted, Watchdog


@contextlib.contextmanager
def watching(watchdog: Watchdog) -> Iterator[None]:
    """Look at it all the time, from another thread."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            watchdog.check()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def spin() -> None:
    while True:
        pass


def test_a_turn_that_does_not_end_is_interrupted_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watchdog(0.05)
    with watching(watchdog), pytest.raises(TurnInterrupted):
        watchdog.run("run 7", 0.0, spin)
    (record,) = [each for each in caplog.records if each.name == "fencepost.worker"]
    assert record.levelno == logging.ERROR
    assert "run 7 does not come to a wait" in record.getMessage()
    assert "in spin" in record.getMessage(), "it says where"


def test_a_turn_that_catches_the_interruption_is_interrupted_again() -> None:
    caught = []

    def stubborn() -> None:
        while True:
            try:
                spin()
            except TurnInterrupted:
                caught.append(time.monotonic())
                if len(caught) == 2:
                    return

    watchdog = Watchdog(0.05)
    with watching(watchdog), pytest.raises(TurnInterrupted):
        watchdog.run("r", 0.0, stubborn)
    assert len(caught) == 2


def test_a_turn_may_take_longer_by_what_it_was_granted() -> None:
    def slow() -> str:
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            pass
        return "done"

    watchdog = Watchdog(0.02)
    with watching(watchdog):
        assert watchdog.run("r", 60.0, slow) == "done"


@pytest.mark.parametrize(
    ("gap", "ran", "stuck"), [(10.0, 0.0, False), (10.0, 10.0, True), (2.0, 0.3, False), (0.9, 0.1, False)]
)
def test_time_in_which_the_process_did_not_run_does_not_count(
    gap: float, ran: float, stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike that in which it ran: code of the turn may keep everybody else from running, as a regular expression does,
    and between the last look and the stop there is always some.
    """
    clock = SimpleNamespace(now=100.0, ran=1.0)
    monkeypatch.setattr(watchdog_module, "monotonic", lambda: clock.now)
    monkeypatch.setattr(watchdog_module, "process_time", lambda: clock.ran)
    watchdog = Watchdog(2.0)

    def work(quarters: int) -> None:
        for _ in range(quarters):
            clock.now, clock.ran = clock.now + 0.25, clock.ran + 0.25
            watchdog.check()

    def turn() -> None:
        work(2)
        clock.now, clock.ran = clock.now + gap, clock.ran + ran
        watchdog.check()
        work(4)

    with pytest.raises(TurnInterrupted) if stuck else contextlib.nullcontext():
        watchdog.run("r", 0.0, turn)

    def late() -> None:
        turn()
        work(3)

    with pytest.raises(TurnInterrupted):
        watchdog.run("r", 0.0, late)


def test_code_that_sleeps_and_lets_nobody_run_is_interrupted_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code in C that keeps the interpreter's lock: from outside, the process stands still again and again."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(watchdog_module, "monotonic", lambda: clock.now)
    monkeypatch.setattr(watchdog_module, "process_time", lambda: 1.0)
    watchdog = Watchdog(2.0)

    def turn() -> None:
        for _ in range(30):
            clock.now += 1.5
            watchdog.check()

    with pytest.raises(TurnInterrupted):
        watchdog.run("r", 0.0, turn)
    assert 100 + 20 * 1.5 < clock.now <= 100 + 23 * 1.5


def test_an_alarm_that_comes_as_its_turn_ends_does_not_put_off_that_of_the_next() -> None:
    watchdog = Watchdog(2.0)

    def turn() -> None:
        watchdog._alarms = 1

    watchdog.run("r", 0.0, turn)
    assert watchdog._alarms == 0


def test_an_error_of_a_turn_is_its_own() -> None:
    def broken() -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        Watchdog(1.0).run("r", 0.0, broken)


def test_no_interruption_ever_leaves_its_turn() -> None:
    watchdog = Watchdog(0.0005)
    interrupted = 0
    with watching(watchdog):
        # As often as it takes: the thread that watches may not have its turn for long.
        for number in range(20_000):
            if number >= 3000 and interrupted:
                break
            end = time.perf_counter() + (number % 4) * 0.0004

            def turn(end: float = end) -> None:
                while time.perf_counter() < end:
                    pass

            try:
                watchdog.run("r", 0.0, turn)
            except TurnInterrupted:
                interrupted += 1
            # Outside of turns, as much again: an interruption here ends the test.
            for _ in range(200):
                pass
    assert interrupted > 0
