"""Stories with a crash in them, of time, children and control flow; see crash_stories."""

from __future__ import annotations

from typing import Any

from fencepost_server.engine.operations import MessageKind
from tests.engine.flows import step, workflow
from tests.faults.crash_stories import COMPLETES, NAP, STORIES, WAIT, story
from tests.faults.crashing import Stage, delivers, fires
from tests.fixtures.raw_worker import seconds

KID: dict[str, Any] = {"id": "kid", "workflow": "kid"}


# Time


@story
async def end_of_a_sleep(s: Stage) -> None:
    run_id = await s.run(NAP, step("a"))
    async with s.cut(fires):
        await s.hurry(run_id, "SLEEP")
    await s.do("a")


@story
async def timeout_of_a_signal(s: Stage) -> None:
    run_id = await s.run(step("a", undo=True), {**WAIT, "timeout": "1h"})
    await s.do("a")
    async with s.cut(fires):
        await s.hurry(run_id, "SIGNAL_TIMEOUT")
    await s.do("undo-a")


@story
async def timeout_of_a_run(s: Stage) -> None:
    run_id = await s.run(step("a", undo=True), NAP, run_timeout=seconds(3600))
    await s.do("a")
    async with s.cut(fires):
        await s.hurry(run_id, "RUN_TIMEOUT")
    await s.do("undo-a")


@story
async def timeout_in_the_queue(s: Stage) -> None:
    run_id = await s.run(step("a", queue="nobody", queue_timeout="1h"))
    async with s.cut(fires):
        await s.hurry(run_id, "QUEUE_TIMEOUT")


@story
async def timeout_of_a_step_in_total(s: Stage) -> None:
    run_id = await s.run(step("a", total_timeout="1h"))
    a = await s.task("a")
    async with s.cut(fires):
        await s.hurry(run_id, "TOTAL_TIMEOUT")
    await s.until_told(run_id, "run_failed")  # by whoever fires it in the end
    await s.lost(a)


@story
async def end_of_a_start_delay(s: Stage) -> None:
    run_id = await s.run(step("a"), start_delay=seconds(3600))
    async with s.cut(fires):
        await s.hurry(run_id, "START_DELAY")
    await s.do("a")


# Children


async def _parent(s: Stage, **node: Any) -> str:
    await s.api.register(workflow(step("g"), workflow_id="kid"))
    return await s.run(step("a", undo=True), {**KID, **node}, step("b"))


@story
async def scheduling_of_a_child(s: Stage) -> None:
    await _parent(s)
    a = await s.task("a")
    async with s.cut(COMPLETES):
        await s.complete(a, 1)
    await s.do("g", "b")


@story
async def start_of_a_child(s: Stage) -> None:
    await _parent(s)
    async with s.cut(delivers(MessageKind.START_CHILD)):
        await s.do("a")
    await s.do("g", "b")


@story
async def final_commit_of_a_child(s: Stage) -> None:
    await _parent(s)
    await s.do("a")
    g = await s.task("g")
    async with s.cut(COMPLETES):
        await s.complete(g, "kid's")
    await s.do("b")


@story
async def outcome_of_a_child(s: Stage) -> None:
    await _parent(s)
    await s.do("a")
    async with s.cut(delivers(MessageKind.CHILD_ENDED)):
        await s.do("g", output="kid's")
    await s.do("b")


@story
async def failure_of_a_child(s: Stage) -> None:
    await _parent(s)
    await s.do("a")
    g = await s.task("g")
    async with s.cut(delivers(MessageKind.CHILD_ENDED)):
        await s.fail(g)
    await s.do("undo-a")


@story
async def cancel_of_a_child(s: Stage) -> None:
    run_id = await _parent(s)
    await s.do("a")
    g = await s.task("g")
    async with s.cut(delivers(MessageKind.CANCEL_CHILD)):
        await s.call("Cancel", run_id)
    await s.until_told(g.task.run_id, "run_ending")  # by whoever delivers it in the end
    await s.complete(g)
    await s.do("undo-a")


@story
async def termination_of_a_child(s: Stage) -> None:
    run_id = await _parent(s, on_parent_end="terminate")
    await s.do("a")
    g = await s.task("g")
    async with s.cut(delivers(MessageKind.TERMINATE_CHILD)):
        await s.call("Cancel", run_id)
    await s.until_told(g.task.run_id, "run_terminated")
    await s.lost(g)
    await s.do("undo-a")


# Control flow

FORK: dict[str, Any] = {"id": "both", "parallel": [[step("a")], [step("b")]]}
MAP: dict[str, Any] = {"id": "each", "map": {"over": "", "do": [step("b")], "max_parallel": 1}}


@story
async def fork(s: Stage) -> None:
    await s.run(step("c"), FORK)
    c = await s.task("c")
    async with s.cut(COMPLETES):
        await s.complete(c, 1)
    a, b = await s.tasks("a", "b")
    await s.complete(a, "A")
    await s.complete(b, "B")


@story
async def join(s: Stage) -> None:
    await s.run(FORK, step("c"))
    a, b = await s.tasks("a", "b")
    await s.complete(a, "A")
    async with s.cut(COMPLETES):
        await s.complete(b, "B")
    await s.do("c")


@story
async def opening_of_a_map(s: Stage) -> None:
    await s.run(step("a"), MAP)
    a = await s.task("a")
    async with s.cut(COMPLETES):
        await s.complete(a, [1, 2, 3])
    await s.do("b", "b", "b", output=0)


@story
async def item_of_a_map(s: Stage) -> None:
    await s.run(MAP, step("c"), data=[1, 2, 3])
    await s.do("b", output="first")
    b = await s.task("b")
    async with s.cut(COMPLETES):
        await s.complete(b, "second")
    await s.do("b", "c", output="third")


@story
async def last_item_of_a_map(s: Stage) -> None:
    await s.run(MAP, step("c"), data=[1, 2])
    await s.do("b", output="first")
    b = await s.task("b")
    async with s.cut(COMPLETES):
        await s.complete(b, "second")
    await s.do("c")


@story
async def choice_and_mapping(s: Stage) -> None:
    cases = [{"when": {"at": "", "gt": 1}, "do": [step("b", input={"a": {"$from": "a#"}})]}, {"otherwise": [step("c")]}]
    await s.run(step("a"), {"id": "way", "choose": cases})
    a = await s.task("a")
    async with s.cut(COMPLETES):
        await s.complete(a, 2)
    await s.do("b")


ALL_STORIES = STORIES
"""Those of crash_stories and these."""
