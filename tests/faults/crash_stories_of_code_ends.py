"""Stories with a crash in them, of how code runs end, of workers whose code does not fit, and of what is asked of code
runs; see crash_stories_of_code.
"""

from __future__ import annotations

import json
from typing import Any

from fencepost.v1 import definition_service_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.engine.operations import CommandKind
from tests.engine.code import AS_NEW, BLOCK, CONTINUE, Held, call, child, local, payload, signal, timer
from tests.engine.flows import step, workflow
from tests.faults.crash_stories import COMPLETES
from tests.faults.crash_stories_of_code import CODE_STORIES, HOUR, UNDO, awake, failed, id_of, nudge, story
from tests.faults.crashing import commands, fires
from tests.faults.crashing_code import CodeStage, advances, manifest_of, removable
from tests.fixtures.api import DEADLINE
from tests.fixtures.raw_worker import seconds

# Ends


@story
async def completion_of_a_function(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    async with s.cut(advances):
        await s.end(run, {"total": 1}, local(2, "b"))


@story
async def completion_with_everything_open(s: CodeStage) -> None:
    await s.api.register(workflow(step("g"), workflow_id="kid"))
    run = await s.begin(call(1, "a"), timer(2, HOUR), signal(3, "go", HOUR), child(4, "kid"), outcome=CONTINUE)
    a, g = await s.tasks("a", "g")
    async with s.cut(advances):
        await s.end(run, "enough")
    await s.lost(a)
    await s.until_told(g.task.run_id, "run_ending")
    await s.complete(g)


@story
async def end_that_is_refused(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    await nudge(s, id_of(run))
    async with s.cut(advances):
        assert await s.advance(run, local(2, "b"), outcome=pb.ADVANCE_OUTCOME_COMPLETE, output=payload("early"))
    assert "signal_received" in run.kinds()
    await s.end(run, "late", taken_signals=[await s.seq(run, "signal_received")])


@story
async def failure_with_an_undo_log(s: CodeStage) -> None:
    run = await s.begin(call(1, "a", "in", **UNDO))
    await s.do("a", output="out")
    run = await awake(s, run, "step_completed")
    undo = json.dumps({"undo": {"step": "undo-b"}})
    await s.advance(run, local(2, "out", "charge", options=undo, input=payload("in")), outcome=CONTINUE)
    async with s.cut(advances):
        await s.raises(run)
    await s.do("undo-b", "undo-a")


@story
async def undo_of_a_local_step(s: CodeStage) -> None:
    undo = json.dumps({"undo": {"step": "undo-b"}})
    run = await s.begin(call(1, "a", **UNDO), local(2, "out", "charge", options=undo, input=payload("in")))
    await s.do("a", output="out")
    await s.raises(await awake(s, run, "step_completed"))
    first = await s.task("undo-a")
    await s.complete(first)
    last = await s.task("undo-b")
    async with s.cut(COMPLETES):
        await s.complete(last)


@story
async def continuation_as_new(s: CodeStage) -> None:
    """With signals that nobody has taken, an undo log, a dedupe key, labels and a time to end by."""
    fields = {"dedupe_key": "k", "attributes": {"who": "me"}, "run_timeout": seconds(HOUR)}
    first = await s.begin(call(1, "a", "in", **UNDO), **fields)
    await s.do("a", output="out")
    first = await awake(s, first, "step_completed")
    for name in ("one", "two"):
        await nudge(s, id_of(first), name, name)
    async with s.cut(advances):
        assert not await s.advance(first, outcome=AS_NEW, output=payload({"month": 2}))
    second = await s.take()
    assert second.kinds() == ["run_started", "signal_received", "signal_received"]
    assert (await s.start(None, "code", dedupe_key="k")) == s.run_ids.pop() == id_of(second)
    await nudge(s, id_of(first), "more")
    assert await s.advance(second)
    await s.raises(second, taken_signals=[2, 3])
    await s.do("undo-a")


@story
async def continuation_of_a_child(s: CodeStage) -> None:
    await s.run({"id": "kid", "workflow": "code"}, step("b"))
    first = await s.take()
    async with s.cut(advances):
        assert not await s.advance(first, local(1, "a"), outcome=AS_NEW, output=payload(2))
    await s.end(await s.take(), "kid's")
    await s.do("b")


@story
async def end_of_a_child_that_continued(s: CodeStage) -> None:
    run = await s.begin(child(1, "code"))
    assert not await s.advance(await s.take(), outcome=AS_NEW, output=payload(2))
    last = await s.take()
    async with s.cut(advances):
        await s.end(last, "kid's")
    await s.end(await awake(s, run, "child_ended"))


# Workers whose code does not fit


async def _blocked(s: CodeStage) -> Held:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    await _blocks(s, run)
    return run


async def _blocks(s: CodeStage, run: Held) -> None:
    failure = run_pb2.Failure(code="NONDETERMINISM", message="op 1: history has f, code asks for g")
    assert not await s.advance(run, outcome=BLOCK, failure=failure)


@story
async def nondeterminism(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    async with s.cut(advances):
        await _blocks(s, run)
    await s.until(id_of(run), "BLOCKED")
    await s.newcomer()
    await s.end(await s.take(run))


@story
async def offer_to_a_newcomer(s: CodeStage) -> None:
    run = await _blocked(s)
    async with s.cut(commands(CommandKind.OFFER)):
        await s.newcomer()
    await s.end(await s.take(run))


@story
async def retry_of_a_blocked_run(s: CodeStage) -> None:
    run = await _blocked(s)
    async with s.cut(commands(CommandKind.RETRY)):
        await s.call("Retry", id_of(run), reason="it fits now")
    await s.end(await s.take(run))


# What is asked of a run


async def _waiting(s: CodeStage, **fields: Any) -> Held:
    """A run that waits, with a step to be undone."""
    run = await s.begin(call(1, "a", "in", **UNDO), **fields)
    await s.do("a", output="out")
    run = await awake(s, run, "step_completed")
    assert not await s.advance(run, signal(2, "never", HOUR))
    return run


@story
async def cancel_of_a_function_that_waits(s: CodeStage) -> None:
    run = await _waiting(s)
    async with s.cut(commands(CommandKind.CANCEL)):
        await s.call("Cancel", id_of(run), reason="enough")
    run = await awake(s, run, "run_ending")
    assert not await s.advance(run, call(3, "b"))
    await s.do("b")
    await s.end(await awake(s, run, "step_completed"), "as if nothing had been")
    await s.do("undo-a")


@story
async def cancel_of_a_function_amid_a_step(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    async with s.cut(commands(CommandKind.CANCEL)):
        await s.call("Cancel", id_of(run))
    undone = local(2, "out", "charge", options=json.dumps(UNDO), input=payload("in"))
    assert await s.advance(run, undone, outcome=CONTINUE)
    assert "run_ending" in run.kinds()
    await s.raises(run)
    await s.do("undo-a")


@story
async def end_of_a_cancelled_function(s: CodeStage) -> None:
    run = await _waiting(s)
    await s.call("Cancel", id_of(run))
    run = await awake(s, run, "run_ending")
    async with s.cut(advances):
        await s.end(run)
    await s.do("undo-a")


@story
async def end_of_a_grace(s: CodeStage) -> None:
    run = await _waiting(s)
    await s.call("Cancel", id_of(run))
    run = await awake(s, run, "run_ending")
    async with s.cut(fires):
        await s.hurry(id_of(run), "GRACE")
    await s.do("undo-a")
    await s.powerless(run)


@story
async def timeout_of_a_code_run(s: CodeStage) -> None:
    run = await _waiting(s, run_timeout=seconds(HOUR))
    async with s.cut(fires):
        await s.hurry(id_of(run), "RUN_TIMEOUT")
    await s.end(await awake(s, run, "run_ending"))
    await s.do("undo-a")


@story
async def pause_of_a_run_that_is_decided(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), outcome=CONTINUE)
    async with s.cut(commands(CommandKind.PAUSE)):
        await s.call("Pause", id_of(run))
    assert not await s.advance(run, local(2, "b"), outcome=CONTINUE)
    await s.no_task()
    await s.call("Resume", id_of(run))
    await s.end(await s.take(run))


@story
async def resume_of_a_code_run(s: CodeStage) -> None:
    run = await s.begin(signal(1, "nudge"), timer(2, HOUR))
    await s.call("Pause", id_of(run))
    await nudge(s, id_of(run))
    await s.hurry(id_of(run), "SLEEP")
    await s.until_told(id_of(run), "timer_fired")
    async with s.cut(commands(CommandKind.RESUME)):
        await s.call("Resume", id_of(run))
    run = await awake(s, run, "timer_fired")
    await s.end(run, taken_signals=[await s.seq(run, "signal_received")])


async def _failed_by_a_step(s: CodeStage) -> tuple[Held, int]:
    """A run whose function is about to let a step's failure through, while another step is under way."""
    run = await s.begin(call(1, "a", "in"), call(2, "b"))
    a, b = await s.tasks("a", "b")
    await s.complete(b, "B")
    run = await awake(s, run, "step_completed")
    await s.advance(run)
    await s.fail(a)
    run = await awake(s, run, "step_failed")
    return run, await s.seq(run, "step_failed")


async def _retried_step(s: CodeStage, run: Held) -> None:
    run = await awake(s, run, "run_retried")
    assert not await s.advance(run)
    await s.do("a", output="A")
    await s.end(await awake(s, run, "step_completed"), "both")


@story
async def failure_that_is_let_through(s: CodeStage) -> None:
    run, failed_seq = await _failed_by_a_step(s)
    async with s.cut(advances):
        await s.raises(run, failed_seq=failed_seq)
    await s.until(id_of(run), "FAILED")
    await s.call("Retry", id_of(run))
    await _retried_step(s, run)


@story
async def retry_of_a_step_that_failed(s: CodeStage) -> None:
    run, failed_seq = await _failed_by_a_step(s)
    await s.raises(run, failed_seq=failed_seq)
    await s.until(id_of(run), "FAILED")
    async with s.cut(commands(CommandKind.RETRY)):
        await s.call("Retry", id_of(run), reason="once more")
    await _retried_step(s, run)


@story
async def retry_of_a_local_step_that_failed(s: CodeStage) -> None:
    run = await s.begin(local(1, "a"), failed(2), outcome=CONTINUE)
    await s.raises(run, failed_seq=await s.seq(run, "local_step_ended"))
    await s.until(id_of(run), "FAILED")
    async with s.cut(commands(CommandKind.RETRY)):
        await s.call("Retry", id_of(run))
    run = await s.take(run)
    assert run.seen[-1].run_retried.ignored_seq == 3
    await s.advance(run, local(2, "b"), outcome=CONTINUE)
    await s.end(run)


@story
async def removal_of_a_code_run(s: CodeStage) -> None:
    """Of a definition of its own, because what is removed stays so."""
    await s.api.register(manifest_of(removable(s.crash)))
    run = await s.begin(call(1, "a", "in", **UNDO))
    await s.do("a", output="out")
    run = await awake(s, run, "step_completed")
    request = definition_service_pb2.RemoveDefinitionRequest(
        workflow_id="code", definition_hash=(await s.api.get(id_of(run))).definition_hash
    )
    async with s.cut(commands(CommandKind.REMOVE)):
        await s.asked(lambda api: api.definitions.RemoveDefinition(request, timeout=DEADLINE))
    await s.until_told(id_of(run), "run_ending")
    await s.powerless(run)
    await s.do("undo-a")


@story
async def termination_of_a_code_run(s: CodeStage) -> None:
    await s.api.register(workflow(step("g"), workflow_id="kid"))
    run = await s.begin(call(1, "a", **UNDO), timer(2, HOUR), signal(3, "go", HOUR), child(4, "kid"), outcome=CONTINUE)
    a, g = await s.tasks("a", "g")
    async with s.cut(commands(CommandKind.TERMINATE)):
        await s.call("Terminate", id_of(run), reason="stop")
    await s.powerless(run)
    await s.lost(a)
    await s.until(g.task.run_id, "TERMINATED", "ENDING")
    if await s.state(g.task.run_id) == "ENDING":
        await s.complete(g)


ALL_CODE_STORIES = CODE_STORIES
"""Those of crash_stories_of_code and these."""
