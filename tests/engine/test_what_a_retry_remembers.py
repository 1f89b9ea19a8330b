"""RetryRun gives fresh attempts; that there were attempts before is not forgotten, nor that a retry was made."""

from __future__ import annotations

import psycopg
import pytest

from tests.engine.flows import AT_ONCE, OPERATIONAL, Scene, given, state_of, step
from tests.engine.rows import count, fetch
from tests.fixtures.waiting import eventually

RELEASES = 4


async def _released_for_good(scene: Scene, run_id: str) -> None:
    """An attempt that fails, then workers who can't begin the next, until the run is BLOCKED."""
    await scene.fail(await scene.task("a"), OPERATIONAL)
    for _ in range(RELEASES):
        await scene.worker.release(await scene.task("a"))
    assert (await scene.until(run_id, "BLOCKED")).failure.code == "NOT_DELIVERED"
    await scene.worker.capacity(0)
    assert state_of(await scene.call("Retry", run_id)) == "RUNNING"


async def _let_queue_timeout_pass(scene: Scene, run_id: str) -> None:
    await scene.hurry(run_id, "QUEUE_TIMEOUT")

    async def gone() -> bool:
        return await count(scene.dsn, "timer") == 0

    await eventually(gone)


async def test_a_step_that_may_have_acted_is_undone_although_a_retry_gave_it_fresh_attempts(scene: Scene) -> None:
    retry = {**AT_ONCE, "max_attempts": 2}
    run_id = await scene.run(step("a", undo={"undo_unfinished": True}, retry=retry), data="in")
    await _released_for_good(scene, run_id)
    await scene.call("Cancel", run_id)
    await scene.until(run_id, "UNDOING")
    await scene.worker.capacity(10)
    undo = await scene.task("undo-a")
    assert given(undo) == "in"
    await scene.complete(undo)
    await scene.failure(run_id, "CANCELLED")


async def test_a_step_that_was_taken_has_no_queue_timeout_after_a_retry(scene: Scene) -> None:
    retry = {**AT_ONCE, "max_attempts": 2}
    run_id = await scene.run(step("a", queue_timeout="1h", retry=retry))
    await _released_for_good(scene, run_id)
    if await count(scene.dsn, "timer"):
        await _let_queue_timeout_pass(scene, run_id)
    await scene.worker.capacity(10)
    await scene.do("a", output=1)
    assert await scene.output(run_id) == 1


@pytest.mark.parametrize("back", ["before it passes", "after it has passed"])
async def test_a_step_that_came_back_unbegun_has_no_queue_timeout_any_more(scene: Scene, back: str) -> None:
    """A worker had it: it was over with that."""
    run_id = await scene.run(step("a", queue_timeout="1h"))
    a = await scene.task("a")
    await scene.worker.capacity(0)
    if back == "before it passes":
        await scene.worker.release(a)
        await _let_queue_timeout_pass(scene, run_id)
    else:
        await _let_queue_timeout_pass(scene, run_id)
        await scene.worker.release(a)
    assert await fetch(scene.dsn, "select attempt, lease_session from task") == [(0, None)]
    await scene.worker.capacity(10)
    await scene.do("a", output=1)
    assert await scene.output(run_id) == 1


@pytest.mark.parametrize("call", ["Retry", "Pause", "Cancel"])
async def test_a_call_without_a_request_id_whose_commit_had_no_answer_acts_once_and_is_told_so(
    scene: Scene, call: str
) -> None:
    """I6: the server repeats it by itself, and would refuse its own retry."""
    run_id = await scene.run(step("a"))
    a = await scene.task("a")
    if call == "Retry":
        await scene.fail(a)
        await scene.failure(run_id)
    committer = scene.server.app.engine.committer
    cuts: list[str] = []

    async def cut() -> None:
        if not cuts:
            cuts.append(call)
            raise psycopg.OperationalError("the answer of the commit is lost")

    committer.after_commit = cut
    answer = state_of(await scene.call(call, run_id))
    assert (cuts, answer) == ([call], {"Retry": "RUNNING", "Pause": "PAUSED", "Cancel": "ENDING"}[call])
    wanted = {"Retry": "run_retried", "Pause": "run_paused", "Cancel": "run_ending"}[call]
    assert (await scene.kinds(run_id)).count(wanted) == 1
