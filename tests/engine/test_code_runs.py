"""Code runs, decided by hand: what the server does with Advances, and who gets a run when (semantics: code runs)."""

from __future__ import annotations

import pytest

from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.code import (
    BLOCK,
    COMPLETE,
    CONTINUE,
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
from tests.engine.rows import execute, fetch, until_listening
from tests.fixtures.api import DEADLINE, kinds
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, REFUSED
from tests.fixtures.waiting import eventually


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


async def test_a_blocked_run_is_offered_to_a_worker_that_was_busy_before(code: Code) -> None:
    """I13: no server has to know of it."""
    run_id = await code.start()
    run = await code.take()
    other = await another_decider(code.scene, workflow_capacity=0)
    await run.advance(outcome=BLOCK, failure=run_pb2.Failure(code="NONDETERMINISM", message="op 1"))
    assert state_of(await code.scene.api.get(run_id)) == "BLOCKED"
    other.workflow_capacity_now = 1
    await other.sync()
    again = await code.take(other)
    assert again.task.task.run_id == run_id
    await again.complete()
    await other.close()


@pytest.mark.parametrize("extra", ['{"kind": "NOVEL"}', '{"novel": 1}'])
async def test_a_task_that_a_newer_release_has_made_keeps_no_other_from_its_worker(code: Code, extra: str) -> None:
    """Row 12: both are claimed at once."""
    code.decider.workflow_capacity_now = 0
    await code.decider.sync()
    strange, run_id = [await code.start() for _ in range(2)]
    await execute(code.scene.dsn, "update task set extra = %s where run_id = %s", [extra, strange])
    code.decider.workflow_capacity_now = 2
    await code.decider.sync()
    run = await code.take()
    assert (run.task.task.run_id, run.task.attempt) == (run_id, 1)
    await run.complete()


async def test_a_process_that_could_not_go_on_with_a_run_is_not_asked_again(code: Code) -> None:
    """I12: else a misfit that reconnects makes a history grow without end."""
    run_id = await code.start()
    for worker in (code.decider, await another_decider(code.scene, process_nonce="m" * 16)):
        run = await code.take(worker)
        await run.advance(outcome=BLOCK, failure=run_pb2.Failure(code="NONDETERMINISM", message="op 1"))
    told = kinds(await code.scene.api.history(run_id))
    assert told == ["run_started", "run_blocked", "run_retried", "run_blocked"]
    for _ in range(3):
        await worker.reconnect([])
    fits = await another_decider(code.scene)
    await (await code.take(fits)).complete()
    assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"
    assert kinds(await code.scene.api.history(run_id)) == [*told, "run_retried", "run_completed"]
    for one in (worker, fits):
        await one.close()


async def test_a_process_that_could_not_go_on_is_asked_again_once_another_has_gone_on(code: Code) -> None:
    """Also if that was by a local step alone."""
    run_id = await code.start()
    misfit = run_pb2.Failure(code="NONDETERMINISM", message="op 1")
    run = await code.take()
    await run.advance(local(1), outcome=CONTINUE)
    await run.advance(outcome=BLOCK, failure=misfit)
    fits = await another_decider(code.scene)
    run = await code.take(fits)
    assert (await run.advance(local(2), outcome=CONTINUE)).outcome == OK
    await run.advance(outcome=BLOCK, failure=misfit)
    run = await code.take()
    assert run.task.task.run_id == run_id
    await run.complete()
    assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"
    await fits.close()


async def test_an_end_is_refused_three_times_in_a_row_and_a_local_step_between_begins_the_count_anew(
    code: Code,
) -> None:
    run_id = await code.start()
    run = await code.take()
    for op in range(1, 6):
        await code.scene.api.runs.SignalRun(
            run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go"), timeout=DEADLINE
        )
        assert (await run.complete()).advance.end_refused, op
        assert (await run.advance(local(op), outcome=CONTINUE)).advance.kept
    await run.complete()
    assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"


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


async def test_what_comes_at_another_server_is_told_to_the_worker_that_holds_the_run(
    open_scene: OpenScene, dsn: str
) -> None:
    """By a notification; the next heartbeat's answer would say the same."""
    code = await open_code(open_scene, listen_dsn=dsn)
    other = await open_scene(listen_dsn=dsn)

    async def knows_of_the_other() -> bool:
        return bool(other.server.app.engine.notifier.others > 0)

    await eventually(knows_of_the_other)
    await until_listening(dsn, 2)
    run_id = await code.start()
    run = await code.take()
    await run.advance(local(1), outcome=CONTINUE)
    await other.api.runs.SignalRun(run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go"), timeout=DEADLINE)
    pushed = (await code.decider.next(pb.Events)).runs[0]
    assert (pushed.task, pushed.after_seq, pushed.last_seq) == (run.task.task, 2, 3)
    await code.decider.close()


async def test_a_wait_that_has_met_its_signal_already_is_recorded_and_leaves_nothing(code: Code) -> None:
    wait = pb.Command(op=1, await_signal=pb.AwaitSignal(signal_name="go", ended=True))
    run = await code.begin(wait, outcome=CONTINUE)
    found = await code.scene.api.get(run.task.task.run_id)
    assert list(found.open_waits) == []
    assert kinds(await code.scene.api.history(run.task.task.run_id)) == ["run_started", "signal_awaited"]


async def test_what_a_function_waits_for_is_not_counted(code: Code) -> None:
    """It may stop what has ended meanwhile: a count would go below what there is."""
    run = await code.begin(timer(1, 3600), timer(2, 3600), signal(3, "go", 3600))
    run_id = run.task.task.run_id
    hurry = "update timer set fire_at = clock_timestamp() where run_id = %s and seq = %s"
    for op, seq in enumerate((2, 3, 4), 1):
        assert await execute(code.scene.dsn, hurry, [run_id, seq]) == 1
        run = await code.again(run)
        await run.advance(*([cancel(op, seq)] if op < 3 else []))
    assert state_of(await code.scene.api.get(run_id)) == "WAITING"
    assert await fetch(code.scene.dsn, "select control -> 'open_waits' from run where run_id = %s", [run_id]) == [
        (None,)
    ]


@pytest.mark.parametrize("how", ["stopped", "timed out"])
async def test_a_run_is_blocked_no_more_when_the_step_that_blocked_it_is_over(code: Code, how: str) -> None:
    """A second one blocks it yet."""
    options = {"retry": {"max_attempts": 1}, "total_timeout": "1h"}
    run = await code.begin(call(1, "a", **options), call(2, "b", **options), timer(3, 3600))
    run_id = run.task.task.run_id
    for _ in range(2 * 4):  # three are free
        await code.scene.worker.release(await code.scene.worker.task())
    assert (await code.scene.until(run_id, "BLOCKED")).failure.code == "NOT_DELIVERED"
    for op, seq in ((1, 2), (2, 3)):
        if how == "stopped":
            await code.scene.signal(run_id)
            run = await code.again(run)
            await run.advance(cancel(op, seq))
        else:
            due = "update timer set fire_at = clock_timestamp() where run_id = %s and seq = %s"
            assert await execute(code.scene.dsn, due, [run_id, seq]) == 1
            run = await code.again(run)
            await run.wait()
        found = await code.scene.api.get(run_id)
        assert (state_of(found), found.failure.code) == [("BLOCKED", "NOT_DELIVERED"), ("WAITING", "")][op - 1]
