"""A log of the program's that fails takes nothing of the worker along."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import fencepost
from fencepost import WorkflowContext, workflow
from fencepost.errors import Unreachable
from fencepost.sdk_log import SdkLog
from fencepost.status import error_of
from fencepost.workflow import Workflow
from tests.unit.sdk.building import frames, given, opened, task
from tests.unit.sdk.replaying import Decider, decided, output_of

logger = SdkLog("fencepost.worker")


class Away(logging.Handler):
    """A collector of logs that can't be reached, and whose handler does not keep that to itself."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ConnectionError("the collector is away")


@pytest.fixture
def away() -> Iterator[None]:
    handler, log = Away(), logging.getLogger("fencepost")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    yield
    log.setLevel(level)
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


@pytest.mark.usefixtures("away")
def test_an_error_whose_details_can_not_be_read_is_told_though_the_log_of_that_fails() -> None:
    error = error_of(grpc.StatusCode.UNAVAILABLE, "no", [("grpc-status-details-bin", b"\xff")])
    assert type(error) is Unreachable


@pytest.mark.usefixtures("away")
def test_a_workflow_is_not_told_that_the_log_of_a_changed_input_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def sleeping(delay: float) -> Workflow[..., int]:
        async def function(ctx: WorkflowContext) -> int:
            await ctx.sleep(delay)
            return 7

        return workflow("w", compatibility_id="1")(function)

    story = decided(sleeping(1)).story
    story.fire(story.first("timer"))
    worker = Decider(sleeping(2), story)
    worker.go()
    assert output_of(worker) == 7
    assert "ConnectionError: the collector is away" in capsys.readouterr().err


@pytest.mark.usefixtures("away")
def test_a_workflow_is_not_told_that_the_log_of_its_loop_fails(capsys: pytest.CaptureFixture[str]) -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> int:
        asyncio.get_running_loop().call_exception_handler({"message": "as a task whose error nobody awaited"})
        return 7

    assert output_of(decided(function)) == 7
    assert "ConnectionError: the collector is away" in capsys.readouterr().err


@pytest.mark.usefixtures("away")
def test_a_workflow_that_logs_goes_on_though_its_log_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Else it would have failed where a replay, which is silent, goes on."""

    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> int:
        ctx.logger.info("on its way")
        return 7

    assert output_of(decided(function)) == 7
    assert "ConnectionError: the collector is away" in capsys.readouterr().err


def test_the_sdk_logs_in_no_other_way() -> None:
    """But for the log that a step is given, and where a worker sets up the program's."""
    files = Path(fencepost.__file__).parent.rglob("*.py")
    plain = {file.name for file in files if "logging.getLogger(" in file.read_text()}
    assert plain == {"sdk_log.py", "context.py", "worker.py"}


def test_a_record_is_of_its_caller_with_all_that_was_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fencepost.worker"):
        logger.warning("a %s", "word", extra={"run_id": "r"})
    (record,) = caplog.records
    assert (record.getMessage(), record.name, record.levelname) == ("a word", "fencepost.worker", "WARNING")
    assert record.pathname == __file__
    assert vars(record)["run_id"] == "r"
