"""Code runs, decided by hand: what the server does with Advances, and who gets a run when (semantics: code runs)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from fencepost.v1 import definition_service_pb2 as definition_pb
from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.code import (
    AS_NEW,
    BLOCK,
    COMPLETE,
    CONTINUE,
    FAIL,
    WAIT,
    Code,
    another_decider,
    call,
    cancel,
    child,
    held,
    local,
    open_code,
    payload,
    send,
    signal,
    timer,
)
from tests.engine.flows import PERMANENT, OpenScene, given, state_of, step, value_of, workflow
from tests.engine.rows import execute, fetch
from tests.fixtures.api import DEADLINE, kinds
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, REFUSED
from tests.fixtures.refusals import decode
from tests.fixtures.waiting import eventually


@pytest.fixture
async def code(open_scene: OpenScene) -> AsyncIterator[Code]:
    """A server with a worker that decides."""
    code = await open_code(open_scene)
    yield code
    await code.decider.close()


async def test_local_steps_are_one_event_each_and_the_run_completes_with_what_the_function_returns(code: Code) -> None:
    run_id = await code.start({"n": 1})
    run = await code.take()
    assert (run.kinds(), value_of(run.seen[0].run_started.input)) == (["run_started"], {"n": 1})
    first = await run.advance(local(1, "a"), outcome=CONTINUE)
    assert (list(first.advance.seqs), first.advance.kept) == ([2], True)
    second = await run.advance(local(2, "b"), local(3, "c"), outcome=CONTINUE)
    assert list(second.advance.seqs) == [3, 4]
    assert not (await run.complete({"total": 3})).advance.kept
    ended = await code.scene.api.wait(run_id)
    assert (state_of(ended), value_of(ended.output)) == ("COMPLETED", {"total": 3})
    told = await code.scene.api.history(run_id)
    assert kinds(told) == ["run_started", *["local_step_ended"] * 3, "run_completed"]
    assert [value_of(event.local_step_ended.output) for event in told[1:4]] == ["a", "b", "c"]
    assert await fetch(code.scene.dsn, "select count(*) from task") == [(0,)]


async def test_a_remote_step_runs_anywhere_and_its_result_wakes_the_run_with_what_it_has_not_seen(code: Code) -> None:
    run = await code.begin(call(1, "a", 7))
    task = await code.scene.worker.task()
    assert (given(task), task.node_id, task.kind) == (7, "a", pb.TASK_KIND_STEP)
    await code.scene.worker.complete(task, "49")
    run = await code.again(run)
    assert (run.task.decide.after_seq, run.kinds()) == (2, ["step_completed"])
    assert value_of(run.seen[0].step_completed.output) == 49
    await run.complete(49)
    assert state_of(await code.scene.api.wait(run.task.task.run_id)) == "COMPLETED"


async def test_a_step_that_fails_for_good_is_an_event_and_the_function_decides(code: Code) -> None:
    run = await code.begin(call(1, "a"))
    await code.scene.worker.fail(await code.scene.worker.task(), PERMANENT)
    run = await code.again(run)
    assert run.kinds() == ["step_failed"]
    await run.complete("all the same")
    assert state_of(await code.scene.api.wait(run.task.task.run_id)) == "COMPLETED"


async def test_a_timer_a_signal_and_a_child_wake_the_run(code: Code) -> None:
    await code.scene.api.register(workflow(step("b"), workflow_id="kid"))
    run = await code.begin(timer(1, 0.01), signal(2, "go"), child(3, "kid", "in"))
    run = await code.again(run)
    while len(run.seen) < 1:
        run = await code.again(run)
    assert "timer_fired" in run.kinds()
    await run.advance()
    run_id = run.task.task.run_id
    await code.scene.api.runs.SignalRun(
        run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go", payload=payload(1)), timeout=DEADLINE
    )
    run = await code.again(run)
    assert run.kinds() == ["signal_received"]
    taken = [run.seen[0].seq]
    await run.advance(taken_signals=taken, ended_waits=[3])
    await code.scene.worker.complete(await code.scene.worker.task(), '"out"')
    run = await code.again(run)
    assert (run.kinds(), value_of(run.seen[0].child_ended.output)) == (["child_ended"], "out")
    await run.complete()
    assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"
    for table in ("task", "timer", "wait", "signal", "child", "message"):
        assert await fetch(code.scene.dsn, f"select count(*) from {table}") == [(0,)], table


async def test_what_comes_while_the_run_is_held_is_pushed_and_told_with_the_next_answer(code: Code) -> None:
    run_id = await code.start()
    run = await code.take()
    await run.advance(local(1), outcome=CONTINUE)
    await code.scene.api.runs.SignalRun(
        run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go"), timeout=DEADLINE
    )
    pushed = (await code.decider.next(pb.Events)).runs[0]
    assert (pushed.task, pushed.after_seq, kinds(pushed.events)) == (run.task.task, 2, ["signal_received"])
    answer = await run.advance(local(2), outcome=CONTINUE)
    assert (kinds(answer.advance.events), list(answer.advance.seqs)) == (["signal_received"], [4])
    assert run.seq == 4


async def test_a_wait_that_has_not_seen_everything_keeps_the_run_and_is_told(code: Code) -> None:
    run_id = await code.start()
    run = await code.take()
    await code.scene.api.runs.SignalRun(
        run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go"), timeout=DEADLINE
    )
    answer = await run.advance(signal(1, "go"))
    assert (kinds(answer.advance.events), answer.advance.kept) == (["signal_received"], True)
    assert not (await run.advance(taken_signals=[2])).advance.kept


async def test_an_end_with_unseen_inputs_is_refused_with_them_and_signals_alone_only_three_times(code: Code) -> None:
    run_id = await code.start()
    run = await code.take()
    for _ in range(3):
        await code.scene.api.runs.SignalRun(
            run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go"), timeout=DEADLINE
        )
        answer = (await run.complete()).advance
        assert (answer.end_refused, answer.kept, kinds(answer.events)) == (True, True, ["signal_received"])
    await code.scene.api.runs.SignalRun(
        run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go"), timeout=DEADLINE
    )
    assert not (await run.complete()).advance.end_refused
    assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"


async def test_a_repeated_advance_has_its_effect_once_and_a_gap_is_refused(code: Code) -> None:
    """I6."""
    run_id = await code.start()
    run = await code.take()
    item = run.item(local(1), outcome=CONTINUE)
    assert [r.outcome for r in await send(code.decider, item, item)] == [OK, ALREADY_DONE]
    assert [r.outcome for r in await send(code.decider, item)] == [ALREADY_DONE]
    item.advance_no = 3
    [refused] = await send(code.decider, item)
    assert (refused.outcome, refused.message) == (REFUSED, "advance_no 3 came where 2 was expected")
    assert kinds(await code.scene.api.history(run_id)) == ["run_started", "local_step_ended"]


async def test_a_repeated_end_gets_its_first_answer(code: Code) -> None:
    """I6."""
    run_id = await code.start()
    run = await code.take()
    item = run.item(outcome=COMPLETE, output=payload(1))
    assert [r.outcome for r in await send(code.decider, item)] == [OK]
    assert [r.outcome for r in await send(code.decider, item)] == [ALREADY_DONE]
    item.output.json = "2"
    assert [r.outcome for r in await send(code.decider, item)] == [LEASE_LOST]
    assert value_of((await code.scene.api.wait(run_id)).output) == 1


async def test_an_advance_under_a_stale_token_changes_nothing(code: Code) -> None:
    """I2."""
    run = await code.begin(signal(1, "go"))
    stale = run.item(local(2), outcome=CONTINUE)
    assert [r.outcome for r in await send(code.decider, stale)] == [LEASE_LOST]


async def test_nondeterminism_blocks_the_run_until_a_worker_comes_that_fits(code: Code) -> None:
    run_id = await code.start()
    run = await code.take()
    failure = run_pb2.Failure(code="NONDETERMINISM", message="op 7: history has step charge, code asks for sleep 30s")
    await run.advance(outcome=BLOCK, failure=failure)
    blocked = await code.scene.api.get(run_id)
    assert (state_of(blocked), blocked.failure.code, blocked.failure.message) == (
        "BLOCKED",
        "NONDETERMINISM",
        failure.message,
    )
    other = await another_decider(code.scene)
    try:
        again = held(other, await other.task())
        assert again.task.task.run_id == run_id
        await again.complete("went on")
        assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"
    finally:
        await other.close()


async def test_a_cancel_is_an_event_and_the_run_ends_cancelled_whatever_the_function_returns(code: Code) -> None:
    undo = {"undo": {"step": "undo-a"}}
    run = await code.begin(call(1, "a", "in", **undo))
    await code.scene.worker.complete(await code.scene.worker.task(), '"out"')
    run = await code.again(run)
    await run.advance(signal(2, "never"))
    run_id = run.task.task.run_id
    await code.scene.api.runs.CancelRun(run_service_pb2.CancelRunRequest(run_id=run_id), timeout=DEADLINE)
    run = await code.again(run)
    assert run.kinds() == ["run_ending"]
    assert state_of(await code.scene.api.get(run_id)) == "ENDING"
    await run.advance(call(3, "b"))  # it cleans up
    await code.scene.worker.complete(await code.scene.worker.task(), "1")
    run = await code.again(run)
    await run.complete("as if nothing had been")
    undone = await code.scene.worker.task()
    assert (undone.kind, undone.handler, given(undone), value_of(undone.undo_output)) == (
        pb.TASK_KIND_UNDO,
        "undo-a",
        "in",
        "out",
    )
    await code.scene.worker.complete(undone)
    assert state_of(await code.scene.api.wait(run_id)) == "CANCELLED"


async def test_a_function_that_does_not_end_in_its_grace_loses_the_run(code: Code) -> None:
    run_id = await code.start()
    run = await code.take()
    request = run_service_pb2.CancelRunRequest(run_id=run_id)
    request.grace.FromMilliseconds(50)
    await code.scene.api.runs.CancelRun(request, timeout=DEADLINE)
    assert state_of(await code.scene.api.wait(run_id)) == "CANCELLED"
    assert [r.outcome for r in await send(code.decider, run.item(local(1), outcome=CONTINUE))] == [LEASE_LOST]


async def test_a_failed_function_undoes_what_was_done_local_steps_too_in_reverse(code: Code) -> None:
    run_id = await code.start()
    run = await code.take()
    undo = '{"undo": {"step": "undo-b"}}'
    await run.advance(call(1, "a", "in-a", undo={"step": "undo-a"}))
    await code.scene.worker.complete(await code.scene.worker.task(), '"out-a"')
    run = await code.again(run)
    await run.advance(local(2, "out-b", "charge", options=undo, input=payload("in-b")), outcome=CONTINUE)
    await run.fail()
    order = []
    for _ in range(2):
        task = await code.scene.worker.task()
        order.append((task.handler, given(task), value_of(task.undo_output), task.step_idempotency_key))
        await code.scene.worker.complete(task)
    assert order == [("undo-b", "in-b", "out-b", f"{run_id}/-2"), ("undo-a", "in-a", "out-a", f"{run_id}/2")]
    ended = await code.scene.api.wait(run_id)
    assert (state_of(ended), ended.failure.code) == ("FAILED", "BROKEN")


async def test_a_cancelled_op_is_stopped(code: Code) -> None:
    run = await code.begin(call(1, "a"), timer(2, 3600), signal(3, "go", 3600), call(4, "b"))
    tasks = await code.scene.worker.tasks(2)
    run_id = run.task.task.run_id
    await code.scene.api.runs.SignalRun(
        run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="wake"), timeout=DEADLINE
    )
    run = await code.again(run)
    answer = await run.advance(cancel(1, 2), cancel(2, 3), cancel(3, 4), call(5, "c"), cancel(5))
    assert len(answer.advance.seqs) == 5
    a, b = sorted(tasks, key=lambda task: task.handler)
    assert (await code.scene.worker.complete(a)).outcome == LEASE_LOST
    assert (await code.scene.worker.complete(b)).outcome == OK
    run = await code.again(run)
    await run.complete()
    assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"
    assert await fetch(code.scene.dsn, "select count(*) from timer") == [(0,)]


async def test_a_paused_run_keeps_what_comes_and_acts_on_it_on_resume(code: Code) -> None:
    run = await code.begin(signal(1, "go"))
    run_id = run.task.task.run_id
    runs = code.scene.api.runs
    await runs.PauseRun(run_service_pb2.PauseRunRequest(run_id=run_id), timeout=DEADLINE)
    await runs.SignalRun(run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go"), timeout=DEADLINE)
    await code.decider.no_task()
    await runs.ResumeRun(run_service_pb2.ResumeRunRequest(run_id=run_id), timeout=DEADLINE)
    run = await code.again(run)
    assert "signal_received" in run.kinds()
    await run.complete()
    assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"


async def test_a_pause_takes_the_run_from_its_worker_with_its_next_advance(code: Code) -> None:
    run_id = await code.start()
    run = await code.take()
    runs = code.scene.api.runs
    await runs.PauseRun(run_service_pb2.PauseRunRequest(run_id=run_id), timeout=DEADLINE)
    assert not (await run.advance(local(1), outcome=CONTINUE)).advance.kept
    await runs.ResumeRun(run_service_pb2.ResumeRunRequest(run_id=run_id), timeout=DEADLINE)
    run = await code.again(run)
    assert run.advance_no == 1
    await run.complete()


async def test_a_run_that_continues_as_new_takes_along_what_it_has(code: Code) -> None:
    undo = {"undo": {"step": "undo-a"}}
    run = await code.begin(call(1, "a", "in", **undo), dedupe_key="k", attributes={"who": "me"})
    first_id = run.task.task.run_id
    await code.scene.worker.complete(await code.scene.worker.task(), '"out"')
    run = await code.again(run)
    runs = code.scene.api.runs
    await runs.SignalRun(
        run_service_pb2.SignalRunRequest(run_id=first_id, signal_name="go", payload=payload(5)), timeout=DEADLINE
    )
    await run.advance(outcome=AS_NEW, output=payload({"month": 2}))
    second = await code.take()
    second_id = second.task.task.run_id
    assert second.kinds() == ["run_started", "signal_received"]
    assert value_of(second.seen[0].run_started.input) == {"month": 2}
    old, new = await code.scene.api.get(first_id), await code.scene.api.get(second_id)
    assert (state_of(old), old.next_run_id, new.previous_run_id) == ("CONTINUED", second_id, first_id)
    assert (new.dedupe_key, dict(new.attributes)) == ("k", {"who": "me"})
    bound = await code.scene.api.start("code", dedupe_key="k")
    assert (bound.run_id, bound.created) == (second_id, False)
    # By the first id: the call is for whoever goes on.
    await runs.SignalRun(run_service_pb2.SignalRunRequest(run_id=first_id, signal_name="more"), timeout=DEADLINE)
    assert (await second.advance()).advance.kept
    await second.fail()
    undone = await code.scene.worker.task()
    assert (undone.handler, given(undone), value_of(undone.undo_output)) == ("undo-a", "in", "out")
    assert undone.step_idempotency_key == f"{first_id}/2"
    await code.scene.worker.complete(undone)
    assert state_of(await code.scene.api.wait(first_id)) == "FAILED"


async def test_a_run_cannot_continue_as_new_while_steps_are_open(code: Code) -> None:
    run = await code.begin(call(1, "zzz"), outcome=CONTINUE)
    answer = await run.advance(outcome=AS_NEW, output=payload(1))
    assert answer.outcome == REFUSED


async def test_attempts_to_decide_count_anew_with_each_advance_and_block_the_run_when_they_run_out(code: Code) -> None:
    run_id = await code.start()
    for _ in range(3):
        run = await code.take()
        assert run.task.attempt <= 2
        await code.decider.fail(run.task, retry_after=0.01)
        run = await code.take()
        assert run.task.attempt == 2
        assert not (await run.advance(timer(run.advance_no + 1, 0.01), outcome=WAIT)).advance.end_refused
    for _ in range(10):
        run = await code.take()
        await code.decider.fail(run.task, code="DEADLOCK", retry_after=0.01)
    blocked = await code.scene.api.get(run_id)
    assert (state_of(blocked), blocked.failure.code) == ("BLOCKED", "DECIDER_FAILING")


@pytest.mark.parametrize("outcome", [WAIT, CONTINUE])
async def test_bad_options_are_refused_all_at_once_and_nothing_is_done(code: Code, outcome: pb.AdvanceOutcome) -> None:
    run_id = await code.start()
    run = await code.take()
    answer = await run.advance(
        call(1, "a", retry={"max_attempts": 0}),
        call(2, "no name!"),
        child(3, "kid", on_parent_end="x"),
        outcome=outcome,
    )
    assert answer.outcome == REFUSED
    assert {v.path for v in answer.violations} == {
        "commands[0].schedule_step/options/retry/max_attempts",
        "commands[1].schedule_step.handler",
        "commands[2].start_child/options/on_parent_end",
    }
    assert kinds(await code.scene.api.history(run_id)) == ["run_started"]


async def test_a_run_kept_for_a_process_that_goes_is_for_all_again(code: Code) -> None:
    run_id = await code.start()
    run = await code.take()
    await run.advance(outcome=BLOCK, failure=run_pb2.Failure(code="NONDETERMINISM", message="op 1"))
    other = await another_decider(code.scene, workflow_capacity=0, process_nonce="n" * 16)

    async def kept() -> bool:
        return await fetch(code.scene.dsn, "select handler from task") == [("code@1#" + "n" * 16,)]

    await eventually(kept)
    await code.decider.no_task()
    await other.close()
    again = await code.take()
    assert again.task.task.run_id == run_id
    await again.complete()


async def test_a_history_at_its_limit_blocks_the_run_and_lets_it_end(open_scene: OpenScene) -> None:
    """I12."""
    code = await open_code(open_scene, max_history_events=100)
    run_id = await code.start()
    run = await code.take()
    for op in range(1, 99):
        assert (await run.advance(local(op), outcome=CONTINUE)).advance.kept
    await run.advance(local(100), local(101), outcome=CONTINUE)
    blocked = await code.scene.api.get(run_id)
    assert (state_of(blocked), blocked.failure.code) == ("BLOCKED", "HISTORY_TOO_LONG")
    await code.scene.api.runs.RetryRun(run_service_pb2.RetryRunRequest(run_id=run_id), timeout=DEADLINE)
    again = await code.take()
    await again.complete()
    assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"
    await code.decider.close()


async def test_removing_the_definition_takes_the_run_from_its_worker_and_undoes_it(code: Code) -> None:
    """I9."""
    run = await code.begin(call(1, "a", undo={"step": "undo-a"}))
    await code.scene.worker.complete(await code.scene.worker.task())
    run = await code.again(run)
    run_id = run.task.task.run_id
    found = await code.scene.api.get(run_id)
    request = definition_pb.RemoveDefinitionRequest(workflow_id="code", definition_hash=found.definition_hash)
    await code.scene.api.definitions.RemoveDefinition(request, timeout=DEADLINE)
    assert [r.outcome for r in await send(code.decider, run.item(local(2), outcome=CONTINUE))] == [LEASE_LOST]
    undone = await code.scene.worker.task()
    assert undone.kind == pb.TASK_KIND_UNDO
    await code.scene.worker.complete(undone)
    ended = await code.scene.api.wait(run_id)
    assert (state_of(ended), ended.failure.code) == ("FAILED", "DEFINITION_REMOVED")


async def test_a_terminated_run_is_gone_at_once(code: Code) -> None:
    run = await code.begin(call(1, "zzz"), timer(2, 3600), outcome=CONTINUE)
    run_id = run.task.task.run_id
    await code.scene.api.runs.TerminateRun(run_service_pb2.TerminateRunRequest(run_id=run_id), timeout=DEADLINE)
    assert state_of(await code.scene.api.get(run_id)) == "TERMINATED"
    assert (await code.decider.next(pb.Revoke)).tasks[0] == run.task.task
    assert [r.outcome for r in await send(code.decider, run.item(local(3), outcome=CONTINUE))] == [LEASE_LOST]
    for table in ("task", "timer", "wait"):
        assert await fetch(code.scene.dsn, f"select count(*) from {table}") == [(0,)], table


async def test_a_run_timeout_is_told_to_the_function_and_ends_the_run_as_failed(code: Code) -> None:
    request = code.scene.api.start_request("code")
    request.run_timeout.FromMilliseconds(300)
    run_id = (await code.scene.api.runs.StartRun(request, timeout=DEADLINE)).run_id
    run = await code.take()
    await run.advance(signal(1, "never"))
    run = await code.again(run)
    assert "run_ending" in run.kinds()
    await run.complete()
    ended = await code.scene.api.wait(run_id)
    assert (state_of(ended), ended.failure.code) == ("FAILED", "RUN_TIMEOUT")


async def test_attributes_that_a_run_gives_itself_are_found_by_lists(code: Code) -> None:
    run = await code.begin(attributes={"who": "me", "where": "here"})
    run_id = run.task.task.run_id
    await code.scene.api.runs.SignalRun(
        run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="wake"), timeout=DEADLINE
    )
    run = await code.again(run)
    labels = pb.SetAttributes(attributes={"who": "you", "where": "", "new": "1"})
    await run.advance(pb.Command(op=1, set_attributes=labels), outcome=CONTINUE)
    assert dict((await code.scene.api.get(run_id)).attributes) == {"who": "you", "new": "1"}
    found = await code.scene.api.list_all(attributes={"who": "you"})
    assert [run.run_id for run in found] == [run_id]
    assert await code.scene.api.list_all(attributes={"where": "here"}) == []


async def retry(code: Code, run_id: str) -> None:
    """RetryRun."""
    await code.scene.api.runs.RetryRun(run_service_pb2.RetryRunRequest(run_id=run_id), timeout=DEADLINE)


async def test_a_retried_run_tries_the_step_again_whose_failure_its_function_let_through(code: Code) -> None:
    run = await code.begin(call(1, "a", "in"), call(2, "b"))
    run_id = run.task.task.run_id
    a, b = sorted(await code.scene.worker.tasks(2), key=lambda task: task.handler)
    await code.scene.worker.complete(b, '"b"')
    run = await code.again(run)
    await run.advance()
    await code.scene.worker.fail(a, PERMANENT)
    run = await code.again(run)
    failed_seq = run.seen[-1].seq
    failure = run_pb2.Failure(kind=PERMANENT, code="X", message="let through")
    await run.advance(outcome=FAIL, failure=failure, failed_seq=failed_seq)
    assert state_of(await code.scene.api.wait(run_id)) == "FAILED"
    await retry(code, run_id)
    again = await code.scene.worker.task()
    assert (again.handler, given(again), again.attempt, again.task.task_id) == ("a", "in", 1, a.task.task_id)
    assert again.task.fencing_token > a.task.fencing_token
    run = await code.take()
    retried = next(event for event in run.seen if event.HasField("run_retried"))
    assert retried.run_retried.ignored_seq == failed_seq
    assert run.task.decide.seen_seq < failed_seq
    await run.advance()
    await code.scene.worker.complete(again, '"a"')
    run = await code.again(run)
    await run.complete("both")
    assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"


async def test_a_retried_run_goes_on_from_before_its_function_raised_with_all_that_was_open(code: Code) -> None:
    """With other code, say."""
    run = await code.begin(call(1, "a"), timer(2, 3600), signal(3, "go"), outcome=CONTINUE)
    run_id = run.task.task.run_id
    a = await code.scene.worker.task()
    await run.advance(outcome=FAIL, failure=run_pb2.Failure(kind=PERMANENT, code="BUG", message="x"))
    await code.scene.worker.release(a)
    assert state_of(await code.scene.api.wait(run_id)) == "FAILED"
    await retry(code, run_id)
    run = await code.take()
    assert run.task.decide.seen_seq == 1
    await run.wait()
    told = set(run.kinds())
    await execute(code.scene.dsn, "update timer set fire_at = clock_timestamp()")
    await code.scene.api.runs.SignalRun(
        run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go"), timeout=DEADLINE
    )
    await code.scene.worker.complete(await code.scene.worker.task(), "1")
    while not {"timer_fired", "signal_received", "step_completed"} <= told:
        run = await code.again(run)
        await run.wait()
        told |= set(run.kinds())
    await code.scene.api.runs.SignalRun(
        run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="end"), timeout=DEADLINE
    )
    await (await code.again(run)).complete()
    assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"


async def test_a_function_that_acted_on_the_failure_cannot_be_retried(code: Code) -> None:
    run = await code.begin(call(1, "a"))
    run_id = run.task.task.run_id
    await code.scene.worker.fail(await code.scene.worker.task(), PERMANENT)
    run = await code.again(run)
    failed_seq = run.seen[-1].seq
    await run.advance(local(2, name="clean up"), outcome=CONTINUE)
    failure = run_pb2.Failure(kind=PERMANENT, code="X", message="let through")
    await run.advance(outcome=FAIL, failure=failure, failed_seq=failed_seq)
    assert state_of(await code.scene.api.wait(run_id)) == "FAILED"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await retry(code, run_id)
    assert decode(refused.value).reason == "ILLEGAL_TRANSITION"
