"""Stories with a crash in them, of steps, undo and what callers ask for: each brings a run to its end and lets one
commit on its way go wrong (tests.faults.crashing).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fencepost.v1 import definition_service_pb2
from fencepost_server.engine.operations import CommandKind, ReportKind
from tests.engine.flows import AT_ONCE, ONCE, OPERATIONAL, step, workflow
from tests.faults.crashing import Stage, commands, reports, starts
from tests.fixtures.api import DEADLINE
from tests.fixtures.raw_worker import ALREADY_DONE, OK, REFUSED

Story = Callable[[Stage], Awaitable[None]]
STORIES: list[Story] = []

COMPLETES, FAILS = reports(ReportKind.COMPLETE), reports(ReportKind.FAIL)
NAP: dict[str, Any] = {"id": "nap", "sleep": "1h"}
WAIT: dict[str, Any] = {"id": "wait", "wait_signal": "go"}
TWICE: dict[str, Any] = {**AT_ONCE, "max_attempts": 2}


def story(told: Story) -> Story:
    """One of the stories with a crash in it."""
    STORIES.append(told)
    return told


# Steps


@story
async def start(s: Stage) -> None:
    await s.api.register(workflow(step("a")))
    async with s.cut(starts):
        await s.start()
    await s.do("a")


@story
async def completion_with_a_successor(s: Stage) -> None:
    await s.run(step("a"), step("b"))
    a = await s.task("a")
    async with s.cut(COMPLETES):
        await s.complete(a, 1)
    await s.do("b", output=2)


@story
async def completion_that_ends(s: Stage) -> None:
    await s.run(step("a"))
    a = await s.task("a")
    async with s.cut(COMPLETES):
        await s.complete(a, 1)


@story
async def completion_with_a_broken_output(s: Stage) -> None:
    await s.run(step("a", output_schema={"type": "integer"}, retry=AT_ONCE))
    a = await s.task("a")
    async with s.cut(COMPLETES):
        result = await s.told(a, lambda worker: worker.complete(a, '"one"'))
        assert result.outcome == REFUSED
    again = await s.task("a")
    assert (again.attempt, again.HasField("feedback")) == (2, True)
    await s.complete(again, 1)


@story
async def failure_with_a_retry(s: Stage) -> None:
    await s.run(step("a", retry=TWICE))
    a = await s.task("a")
    async with s.cut(FAILS):
        await s.fail(a, OPERATIONAL, checkpoint=(3, '"half"'))
    again = await s.task("a")
    assert (again.attempt, again.checkpoint.number) == (2, 3)
    await s.complete(again)


@story
async def failure_for_good(s: Stage) -> None:
    await s.run(step("a", undo=True), step("b"))
    await s.do("a")
    b = await s.task("b")
    async with s.cut(FAILS):
        await s.fail(b)
    await s.do("undo-a")


@story
async def release(s: Stage) -> None:
    await s.run(step("a", retry=ONCE))
    a = await s.task("a")
    async with s.cut(reports(ReportKind.RELEASE)):
        result = await s.told(a, lambda worker: _released(worker, a))
        assert result.outcome in (OK, ALREADY_DONE)
    again = await s.task("a")
    assert again.attempt == 1
    await s.complete(again)


async def _released(worker: Any, task: Any) -> Any:
    [result] = await worker.release(task)
    return result


@story
async def expiry(s: Stage) -> None:
    await s.run(step("a", retry=TWICE))
    a = await s.task("a")
    async with s.cut(reports(ReportKind.EXPIRE)):
        await s.expire(a)
    again = await s.task("a")
    assert again.attempt == 2
    await s.lost(a)
    await s.complete(again)


@story
async def checkpoint(s: Stage) -> None:
    await s.run(step("a", retry=TWICE))
    a = await s.task("a")
    async with s.cut(reports(ReportKind.CHECKPOINT)):
        result = await s.told(a, lambda worker: worker.checkpoint(a, 5, "[5]"))
        assert result.outcome in (OK, ALREADY_DONE)
    await s.fail(a, OPERATIONAL)
    again = await s.task("a")
    assert (again.checkpoint.number, again.checkpoint.state.json) == (5, "[5]")
    await s.complete(again)


# Undo


async def _undoing(s: Stage, **undo: Any) -> str:
    run_id = await s.run(step("a", undo=True), step("b", undo=undo or True), step("c"))
    await s.do("a", "b")
    await s.fail(await s.task("c"))
    return run_id


@story
async def undo_with_another_to_follow(s: Stage) -> None:
    await _undoing(s)
    undo = await s.task("undo-b")
    async with s.cut(COMPLETES):
        await s.complete(undo)
    await s.do("undo-a")


@story
async def last_undo(s: Stage) -> None:
    await _undoing(s)
    await s.do("undo-b")
    undo = await s.task("undo-a")
    async with s.cut(COMPLETES):
        await s.complete(undo)


@story
async def undo_that_is_retried(s: Stage) -> None:
    await _undoing(s, retry=TWICE)
    undo = await s.task("undo-b")
    async with s.cut(FAILS):
        await s.fail(undo, OPERATIONAL)
    await s.do("undo-b", "undo-a")


@story
async def undo_that_fails_for_good(s: Stage) -> None:
    run_id = await _undoing(s)
    undo = await s.task("undo-b")
    async with s.cut(FAILS):
        await s.fail(undo)
    await s.until(run_id, "BLOCKED")
    await s.call("Retry", run_id)
    await s.do("undo-b", "undo-a")


@story
async def retry_of_an_undo(s: Stage) -> None:
    run_id = await _undoing(s)
    await s.fail(await s.task("undo-b"))
    async with s.cut(commands(CommandKind.RETRY)):
        await s.call("Retry", run_id, reason="try again")
    await s.do("undo-b", "undo-a")


@story
async def skip_of_an_undo(s: Stage) -> None:
    run_id = await _undoing(s)
    await s.fail(await s.task("undo-b"))
    async with s.cut(commands(CommandKind.RETRY)):
        await s.call("Retry", run_id, reason="leave it", skip_undo=True)
    await s.do("undo-a")


# What callers ask for


@story
async def signal_that_is_waited_for(s: Stage) -> None:
    run_id = await s.run({**WAIT, "timeout": "1h"}, step("a"))
    async with s.cut(commands(CommandKind.SIGNAL)):
        await s.signal(run_id, data=[1], request_id=f"r{run_id}")
    await s.do("a")


@story
async def signal_that_comes_early(s: Stage) -> None:
    run_id = await s.run(step("a"), WAIT, {**WAIT, "id": "again"})
    async with s.cut(commands(CommandKind.SIGNAL)):
        await s.signal(run_id, data=1, request_id=f"1{run_id}")
    await s.do("a")
    await s.signal(run_id, data=2, request_id=f"2{run_id}")


@story
async def cancel_with_a_step_under_way(s: Stage) -> None:
    run_id = await s.run(step("a", undo=True), step("b"))
    a = await s.task("a")
    async with s.cut(commands(CommandKind.CANCEL)):
        await s.call("Cancel", run_id, reason="enough")
    await s.complete(a)
    await s.do("undo-a")


@story
async def cancel_of_a_run_that_waits(s: Stage) -> None:
    run_id = await s.run(step("a", undo=True), {"id": "both", "parallel": [[NAP], [WAIT]]})
    await s.do("a")
    async with s.cut(commands(CommandKind.CANCEL)):
        await s.call("Cancel", run_id)
    await s.do("undo-a")


@story
async def terminate(s: Stage) -> None:
    run_id = await s.run(step("a", undo=True), step("b"))
    await s.do("a")
    b = await s.task("b")
    async with s.cut(commands(CommandKind.TERMINATE)):
        await s.call("Terminate", run_id, reason="stop")
    await s.lost(b)


@story
async def pause(s: Stage) -> None:
    run_id = await s.run(step("a"), step("b"))
    a = await s.task("a")
    async with s.cut(commands(CommandKind.PAUSE)):
        await s.call("Pause", run_id)
    await s.complete(a)
    await s.no_task()
    await s.call("Resume", run_id)
    await s.do("b")


@story
async def resume(s: Stage) -> None:
    """With a signal and a timer that came meanwhile."""
    run_id = await s.run({"id": "both", "parallel": [[WAIT], [NAP], [step("a")]]}, step("b"))
    a = await s.task("a")
    await s.call("Pause", run_id)
    await s.complete(a)
    await s.signal(run_id, data="signal", request_id=f"r{run_id}")
    await s.hurry(run_id, "SLEEP")
    await s.until_told(run_id, "timer_fired")
    async with s.cut(commands(CommandKind.RESUME)):
        await s.call("Resume", run_id)
    await s.do("b")


@story
async def retry_of_a_failed_run(s: Stage) -> None:
    run_id = await s.run(step("a"), step("b"))
    await s.do("a")
    await s.fail(await s.task("b"))
    await s.until(run_id, "FAILED")
    async with s.cut(commands(CommandKind.RETRY)):
        await s.call("Retry", run_id)
    await s.do("b")


@story
async def removal_of_the_definition(s: Stage) -> None:
    """Of its own, because what is removed stays so."""
    nodes = step("a", undo=True), step("b")
    await s.api.register(workflow(*nodes, compatibility_id=str(s.crash)))
    run_id = await s.start()
    await s.do("a")
    b = await s.task("b")
    request = definition_service_pb2.RemoveDefinitionRequest(
        workflow_id="wf", definition_hash=(await s.api.get(run_id)).definition_hash
    )
    async with s.cut(commands(CommandKind.REMOVE)):
        await s.asked(lambda api: api.definitions.RemoveDefinition(request, timeout=DEADLINE))
    await s.until_told(run_id, "run_ending")
    await s.lost(b)
    await s.do("undo-a")
