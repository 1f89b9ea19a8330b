"""A log of the program's that fails takes nothing of the worker along."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from fencepost.sdk_log import SdkLog
from tests.unit.sdk.building import frames, given, opened, task

logger = SdkLog("fencepost.worker")


class Away(logging.Handler):
    """A collector of logs that can't be reached, and whose handler does not keep that to itself."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ConnectionError("the collector is away")


@pytest.fixture
def away() -> Iterator[None]:
    handler, log = Away(), logging.getLogger("fencepost")
    log.addHandler(handler)
    yield
    log.removeHandler(handler)


@pytest.mark.usefixtures("away")
def test_an_attempt_times_out_though_the_log_of_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    session = opened()
    (lease,) = given(session, task(1, timeout=3))
    assert session.tick(3).cancel == [lease]
    assert [frame.WhichOneof("frame") for frame in frames(session, 3)] == ["fail"]
    assert "ConnectionError: the collector is away" in capsys.readouterr().err


@pytest.mark.usefixtures("away")
def test_a_task_for_a_handler_that_was_not_offered_goes_back_though_the_log_of_that_fails() -> None:
    session = opened()
    assert given(session, task(1), task(2, handler="other"), task(3)) == list(session.ledger.held.values())[::2]
    assert [len(frame.release.items) for frame in frames(session)] == [1]


def test_a_record_is_of_its_caller_with_all_that_was_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fencepost.worker"):
        logger.warning("a %s", "word", extra={"run_id": "r"})
    (record,) = caplog.records
    assert (record.getMessage(), record.name, record.levelname) == ("a word", "fencepost.worker", "WARNING")
    assert record.pathname == __file__
    assert vars(record)["run_id"] == "r"
