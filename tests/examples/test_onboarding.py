"""The onboarding example over its days, by skipped time: reminders, an approval, a refusal, silence, a cancellation."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from examples.onboarding.office import office
from examples.onboarding.workflow import UNDO, Answer, Hire, Onboarded, onboarding
from fencepost import AsyncRunHandle, RunCancelled, RunFailed, RunState
from fencepost.testing import AsyncEnvironment
from tests.fixtures.processes import Process
from tests.fixtures.waiting import eventually

DAY = dt.timedelta(days=1)
START = 90.0  # seconds for a program to start, and to end
PREPARED = ["account opened", "laptop ordered"]
TAKEN_BACK = ["account ada@example.com closed", "laptop for Ada sent back"]


@pytest.fixture(autouse=True)
def deeds(tmp_path: Path) -> None:
    """An office of the test's own."""
    office.open(tmp_path / "office.sqlite")


@pytest_asyncio.fixture(params=[False, True], ids=["kept", "replayed"])
async def run(env: AsyncEnvironment, request: pytest.FixtureRequest) -> AsyncIterator[AsyncRunHandle]:
    """A run that waits for the approval: with a worker that keeps it in memory, and one that replays it each time."""
    async with env.worker(UNDO, workflows=[onboarding], always_replay=request.param):
        handle = await env.client.start_run("onboarding", Hire("Ada", "Grace"))
        await env.settle()
        assert sorted(office.deeds(handle.run_id, "Ada")) == PREPARED
        yield handle


async def test_an_approval_ends_the_reminders(env: AsyncEnvironment, run: AsyncRunHandle) -> None:
    await env.skip(5 * DAY)
    assert office.deeds(run.run_id, "Grace") == ["May Ada come?", *(f"May Ada come? Reminder {n}" for n in (1, 2))]
    assert await run.query("progress") == {"hire": "Ada", "reminders": 2}
    assert (await run.get()).attributes == {"manager": "Grace"}
    await run.signal("approval", Answer(True, by="Grace"))
    ended = await run.result(type=Onboarded)
    assert ended == Onboarded("ada@example.com", "laptop for Ada", "Grace", reminders=2)
    assert office.deeds(run.run_id, "Ada")[-1] == "Welcome! Your account is ada@example.com."
    await env.skip(30 * DAY)
    assert len(office.deeds(run.run_id, "Grace")) == 3


async def test_a_refusal_undoes_what_was_prepared(env: AsyncEnvironment, run: AsyncRunHandle) -> None:
    await run.signal("approval", Answer(False, by="Grace"))
    with pytest.raises(RunFailed) as failed:
        await env.result(run)
    assert (failed.value.failure.code, failed.value.failure.message) == ("NOT_APPROVED", "Grace says no")
    assert sorted(office.deeds(run.run_id, "Ada")[2:]) == TAKEN_BACK


async def test_an_answer_that_is_none_changes_nothing(env: AsyncEnvironment, run: AsyncRunHandle) -> None:
    await run.signal("approval", {"aproved": True})
    await env.skip(1 * DAY)
    await run.signal("approval", Answer(True, by="Grace"))
    assert await run.result(type=Onboarded) == Onboarded("ada@example.com", "laptop for Ada", "Grace", reminders=0)


async def test_a_manager_who_never_answers_is_reminded_three_times_in_eight_days(
    env: AsyncEnvironment, run: AsyncRunHandle
) -> None:
    began = await env.now()
    with pytest.raises(RunFailed) as failed:
        await env.result(run)
    assert failed.value.failure.code == "NO_ANSWER"
    assert len(office.deeds(run.run_id, "Grace")) == 4
    assert 8 * DAY <= await env.now() - began + dt.timedelta(minutes=5) < 9 * DAY
    assert sorted(office.deeds(run.run_id, "Ada")[2:]) == TAKEN_BACK


async def test_a_cancellation_is_cleaned_up_after_and_then_undone(env: AsyncEnvironment, run: AsyncRunHandle) -> None:
    await env.skip(3 * DAY)
    assert await run.cancel("hired by mistake") is RunState.ENDING
    with pytest.raises(RunCancelled):
        await env.result(run)
    assert office.deeds(run.run_id, "Ada")[2] == "There was a mistake. We are sorry."
    assert sorted(office.deeds(run.run_id, "Ada")[3:]) == TAKEN_BACK
    assert len(office.deeds(run.run_id, "Grace")) == 2


@pytest.mark.parametrize(
    ("manager", "said"),
    [
        ("yes", "Onboarded(account="),
        ("no", "FAILED: Grace says no"),
        ("cancels", "CANCELLED: "),
        ("silent", "FAILED: Grace does not answer"),
    ],
)
async def test_its_command_does_what_its_page_says(
    env: AsyncEnvironment, python_process: Callable[..., Process], tmp_path: Path, manager: str, said: str
) -> None:
    """The days are skipped from here, so that the manager is in time however slow the machine is."""
    office.open(tmp_path / "o.sqlite")
    of_another_run: Any = SimpleNamespace(run_id="r0", idempotency_key="k")
    office.do(of_another_run, "Ada", "hired long ago")
    words = ("--address", env.address, "--office", str(tmp_path / "o.sqlite"), "--day", str(DAY.total_seconds()))
    program = python_process("-m", "examples.onboarding", *words, "--manager", manager)

    async def waits() -> bool:
        return bool([run async for run in env.client.list_runs("onboarding", RunState.WAITING)])

    await eventually(waits, START)
    await env.skip(5 * DAY)
    await eventually(lambda: "its query progress says" in program.logs)
    if manager == "silent":
        await env.skip(5 * DAY)
    await eventually(lambda: not program.running, START)
    assert program.returncode == 0, program.logs
    assert said in program.logs
    assert re.search("done for Ada: (account opened|laptop ordered), (account opened|laptop ordered), ", program.logs)
    assert "hired long ago" not in program.logs
    assert "{'hire': 'Ada', 'reminders': 2}" in program.logs
