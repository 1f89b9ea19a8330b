"""How code runs end, by hand: cancelled, failed and undone, retried, continued as new (semantics, code runs)."""

from __future__ import annotations

import json

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from fencepost.v1 import definition_service_pb2 as definition_pb
from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.model import EventType
from tests.engine.code import (
    AS_NEW,
    CODE,
    CONTINUE,
    FAIL,
    Code,
    Held,
    another_decider,
    call,
    child,
    local,
    open_code,
    payload,
    seconds,
    send,
    signal,
    timer,
)
from tests.engine.flows import PERMANENT, OpenScene, given, state_of, step, value_of, workflow
from tests.engine.rows import execute, fetch
from tests.fixtures.api import DEADLINE
from tests.fixtures.raw_worker import LEASE_LOST, REFUSED, RawWorker
from tests.fixtures.refusals import decode
from tests.fixtures.waiting import eventually


async def remove_code_of(code: Code, run_id: str) -> None:
    """Remove the definition of a run."""
    found = await code.scene.api.get(run_id)
    request = definition_pb.RemoveDefinitionRequest(workflow_id="code", definition_hash=found.definition_hash)
    await code.scene.api.definitions.RemoveDefinition(request, timeout=DEADLINE)


async def let_through(code: Code, run: Held, failed_seq: int) -> None:
    """The function lets a failure through, and its run fails with it."""
    failure = run_pb2.Failure(kind=PERMANENT, code="X", message="let through")
    while (await run.advance(outcome=FAIL, failure=failure, failed_seq=failed_seq)).advance.kept:
        pass
    assert state_of(await code.scene.api.wait(run.task.task.run_id)) == "FAILED"


async def test_a_cancel_is_an_event_and_the_run_ends_cancelled_whatever_the_function_returns(code: Code) -> None:
    undo = {"undo": {"step": "undo-a"}}
    run = await code.begin(call(1, "a", "in", **undo))
    await code.scene.worker.complete(await code.scene.worker.task(), '"out"')
    run = await code.again(run)
    await run.advance(signal(2, "never"))
    run_id = run.task.task.run_id
    await code.scene.call("Cancel", run_id)
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


async def test_a_child_that_the_clean_up_of_a_cancelled_run_starts_is_started_and_heard_of(code: Code) -> None:
    await code.scene.api.register(workflow(step("b"), workflow_id="kid"))
    run = await code.begin(signal(1, "never"))
    run_id = run.task.task.run_id
    await code.scene.call("Cancel", run_id)
    run = await code.again(run)
    await run.advance(child(2, "kid"))
    await code.scene.worker.complete(await code.scene.worker.task(), '"cleaned"')
    run = await code.again(run)
    assert [(event.child_ended.state, value_of(event.child_ended.output)) for event in run.seen] == [
        (run_pb2.RUN_STATE_COMPLETED, "cleaned")
    ]
    await run.complete()
    assert state_of(await code.scene.api.wait(run_id)) == "CANCELLED"


async def test_a_function_that_does_not_end_in_its_grace_loses_the_run(code: Code) -> None:
    run_id = await code.start()
    run = await code.take()
    await code.scene.call("Cancel", run_id, grace=seconds(0.05))
    assert state_of(await code.scene.api.wait(run_id)) == "CANCELLED"
    assert [r.outcome for r in await send(code.decider, run.item(local(1), outcome=CONTINUE))] == [LEASE_LOST]


@pytest.mark.parametrize("grace", [10, 3600])
async def test_steps_that_a_cancelled_function_leaves_open_have_the_grace_of_the_cancel(code: Code, grace: int) -> None:
    """Not the server's own, which is 30 s."""
    run = await code.begin(call(1, "a"), outcome=CONTINUE)
    run_id = run.task.task.run_id
    await code.scene.task("a")
    await code.scene.call("Cancel", run_id, grace=seconds(grace))
    await run.fail()
    [(left,)] = await fetch(
        code.scene.dsn,
        "select extract(epoch from attempt_deadline_at - clock_timestamp())::float8 from task where run_id = %s",
        [run_id],
    )
    assert grace - 10 < left <= grace


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


async def test_a_run_that_continues_as_new_takes_along_what_it_has(code: Code) -> None:
    undo = {"undo": {"step": "undo-a"}}
    run = await code.begin(call(1, "a", "in", **undo), dedupe_key="k", attributes={"who": "me"})
    first_id = run.task.task.run_id
    await code.scene.worker.complete(await code.scene.worker.task(), '"out"')
    run = await code.again(run)
    await code.scene.call("Signal", first_id, signal_name="go", payload=payload(5))
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
    await code.scene.call("Signal", first_id, signal_name="more")
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


async def test_a_history_at_its_limit_blocks_the_run_and_lets_it_end(open_scene: OpenScene) -> None:
    """I12."""
    code = await open_code(open_scene, max_history_events=100)
    run_id = await code.start()
    run = await code.take()
    for op in range(1, 99):
        assert (await run.advance(local(op), outcome=CONTINUE)).advance.kept
    assert (await run.advance(local(100), local(101), outcome=CONTINUE)).outcome == LEASE_LOST
    blocked = await code.scene.api.get(run_id)
    assert (state_of(blocked), blocked.failure.code) == ("BLOCKED", "HISTORY_TOO_LONG")
    other = await another_decider(code.scene)
    await other.no_task()  # no worker can do anything about it
    await other.close()
    await code.scene.call("Retry", run_id)
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
    await remove_code_of(code, run_id)
    assert [r.outcome for r in await send(code.decider, run.item(local(2), outcome=CONTINUE))] == [LEASE_LOST]
    undone = await code.scene.worker.task()
    assert undone.kind == pb.TASK_KIND_UNDO
    await code.scene.worker.complete(undone)
    ended = await code.scene.api.wait(run_id)
    assert (state_of(ended), ended.failure.code) == ("FAILED", "DEFINITION_REMOVED")


async def test_a_terminated_run_is_gone_at_once(code: Code) -> None:
    run = await code.begin(call(1, "zzz"), timer(2, 3600), outcome=CONTINUE)
    run_id = run.task.task.run_id
    await code.scene.call("Terminate", run_id)
    assert state_of(await code.scene.api.get(run_id)) == "TERMINATED"
    assert (await code.decider.next(pb.Revoke)).tasks[0] == run.task.task
    assert [r.outcome for r in await send(code.decider, run.item(local(3), outcome=CONTINUE))] == [LEASE_LOST]
    for table in ("task", "timer", "wait"):
        assert await fetch(code.scene.dsn, f"select count(*) from {table}") == [(0,)], table


async def test_a_run_timeout_is_told_to_the_function_and_ends_the_run_as_failed(code: Code) -> None:
    run_id = await code.start(run_timeout=seconds(3600))
    run = await code.take()
    await run.advance(signal(1, "never"))
    await code.scene.hurry(run_id, "RUN_TIMEOUT")
    run = await code.again(run)
    assert "run_ending" in run.kinds()
    await run.complete()
    ended = await code.scene.api.wait(run_id)
    assert (state_of(ended), ended.failure.code) == ("FAILED", "RUN_TIMEOUT")


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
    await let_through(code, run, failed_seq)
    await code.scene.call("Retry", run_id)
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
    await code.scene.call("Retry", run_id)
    run = await code.take()
    assert run.task.decide.seen_seq == 1
    await run.wait()
    told = set(run.kinds())
    await execute(code.scene.dsn, "update timer set fire_at = clock_timestamp()")
    await code.scene.call("Signal", run_id, signal_name="go")
    await code.scene.worker.complete(await code.scene.worker.task(), "1")
    while not {"timer_fired", "signal_received", "step_completed"} <= told:
        run = await code.again(run)
        await run.wait()
        told |= set(run.kinds())
    await code.scene.call("Signal", run_id, signal_name="end")
    await (await code.again(run)).complete()
    assert state_of(await code.scene.api.wait(run_id)) == "COMPLETED"


async def test_a_function_that_acted_on_the_failure_cannot_be_retried(code: Code) -> None:
    run = await code.begin(call(1, "a"))
    run_id = run.task.task.run_id
    await code.scene.worker.fail(await code.scene.worker.task(), PERMANENT)
    run = await code.again(run)
    failed_seq = run.seen[-1].seq
    await run.advance(local(2, name="clean up"), outcome=CONTINUE)
    await let_through(code, run, failed_seq)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await code.scene.call("Retry", run_id)
    assert decode(refused.value).reason == "ILLEGAL_TRANSITION"


async def test_a_step_that_has_completed_is_not_tried_again_for_a_failure_of_before(code: Code) -> None:
    """I5, whatever a worker says that its function has let through."""
    run = await code.begin(call(1, "a"))
    run_id = run.task.task.run_id
    await code.scene.worker.fail(await code.scene.worker.task(), PERMANENT)
    run = await code.again(run)
    failed_seq = run.seen[-1].seq
    await let_through(code, run, failed_seq)
    await code.scene.call("Retry", run_id)
    await code.scene.do("a")
    run = await code.take()
    await let_through(code, run, failed_seq)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await code.scene.call("Retry", run_id)
    assert decode(refused.value).reason == "ILLEGAL_TRANSITION"
    await code.scene.worker.no_task()


async def test_a_run_of_a_removed_definition_cannot_continue_as_new(code: Code) -> None:
    """I9: whichever comes first."""
    run_id = await code.start()
    run = await code.take()
    found = await code.scene.api.get(run_id)
    await execute(code.scene.dsn, f"update deployment set removed = array['\\x{found.definition_hash}'::bytea]")
    await run.advance(outcome=AS_NEW, output=payload(1))
    ended = await code.scene.api.wait(run_id)
    assert (state_of(ended), ended.failure.code) == ("FAILED", "DEFINITION_REMOVED")


async def test_a_run_that_continues_as_new_has_its_input_checked_as_any_run(code: Code) -> None:
    stricter = {"id": "code", "compatibility_id": "2", "code": {}, "input_schema": {"type": "integer"}}
    await code.scene.api.register(json.dumps(stricter))
    run_id = (await code.scene.api.start("code", definition_hash=(await old_hash(code)))).run_id
    run = await code.take()
    await run.advance(outcome=AS_NEW, output=payload("no integer"))
    ended = await code.scene.api.wait(run_id)
    assert (state_of(ended), ended.failure.code) == ("FAILED", "INPUT_SCHEMA_MISMATCH")


async def old_hash(code: Code) -> str:
    """The hash of the first definition."""
    rows = await fetch(code.scene.dsn, "select encode(hash, 'hex') from definition where compatibility_id = '1'")
    return str(rows[0][0])


async def test_a_pause_goes_along_with_a_run_that_continues_as_new(code: Code) -> None:
    run_id = await code.start()
    run = await code.take()
    await code.scene.call("Pause", run_id)
    await run.advance(outcome=AS_NEW, output=payload(1))
    following = (await code.scene.api.get(run_id)).next_run_id
    assert state_of(await code.scene.api.get(following)) == "PAUSED"
    await code.decider.no_task()
    await code.scene.call("Resume", run_id)
    run = await code.take()
    assert run.task.task.run_id == following
    await run.complete()


async def test_a_run_timeout_that_has_passed_in_a_pause_goes_along_with_a_run_that_continues_as_new(code: Code) -> None:
    timeout = Duration(seconds=3600)
    run_id = await code.start(run_timeout=timeout)
    run = await code.take()
    await code.scene.call("Pause", run_id)
    await execute(code.scene.dsn, "update timer set fire_at = clock_timestamp()")
    await eventually(lambda: fetch(code.scene.dsn, "select 1 from timer where parked"))
    refused = await run.advance(outcome=AS_NEW, output=payload(1))
    assert refused.advance.end_refused, "it has not seen that its time is over"
    await run.advance(outcome=AS_NEW, output=payload(1))
    next_run = (await code.scene.api.get(run_id)).next_run_id
    await code.scene.call("Resume", next_run)
    run = await code.take()
    await eventually(lambda: fetch(code.scene.dsn, "select 1 from event where type = %s", [int(EventType.RUN_ENDING)]))
    await run.complete()
    ended = await code.scene.api.wait(next_run)
    assert (state_of(ended), ended.failure.code) == ("FAILED", "RUN_TIMEOUT")


async def test_a_paused_run_is_leased_to_nobody(code: Code) -> None:
    code.decider.workflow_capacity_now = 0
    await code.decider.sync()
    run_id = await code.start()
    await code.scene.call("Pause", run_id)
    other = await another_decider(code.scene)
    await other.no_task()
    await code.scene.call("Resume", run_id)
    await (await code.take(other)).complete()
    await other.close()


async def test_a_removal_amid_the_clean_up_of_a_cancelled_run_ends_it_with_its_children(code: Code) -> None:
    await code.scene.api.register(workflow(step("b"), workflow_id="kid"))
    run = await code.begin(child(1, "kid"))
    run_id = run.task.task.run_id
    await code.scene.worker.task()
    await code.scene.call("Cancel", run_id)
    await code.again(run)
    await remove_code_of(code, run_id)
    kid = (await fetch(code.scene.dsn, "select run_id::text from run where workflow_id = 'kid'"))[0][0]
    await code.scene.call("Terminate", kid)
    assert state_of(await code.scene.api.wait(run_id)) == "CANCELLED"


async def test_wake_ups_at_once_stay_within_a_sessions_capacity(code: Code) -> None:
    """However many runs wake in a batch, their worker is leased no more than it takes."""
    await code.start()
    runs = [await code.take()]
    for _ in range(9):
        await code.start()
        runs.append(await code.take())
    for run in runs:
        await run.advance(timer(1, 3600))
    code.decider.workflow_capacity_now = 2
    await code.decider.sync()
    await execute(code.scene.dsn, "update timer set fire_at = clock_timestamp()")
    ended = 0
    while ended < 10:
        first = await code.take()
        assert await fetch(code.scene.dsn, "select count(*) <= 2 from task where lease_session is not null") == [
            (True,)
        ]
        await first.complete()
        ended += 1


async def test_an_undo_that_an_advance_begins_needs_room_for_a_step(code: Code) -> None:
    """The slot of the run, which its worker has free again, is none for a step."""
    await code.decider.goodbye()
    address = code.scene.server.grpc_address
    both = RawWorker(address, handlers=["undo-a"], capacity=0, workflows=[CODE], workflow_capacity=1)
    await both.connect()
    await code.start()
    run = await code.take(both)
    await run.advance(call(1, "a", undo={"step": "undo-a"}), outcome=CONTINUE)
    await code.scene.do("a")
    await code.scene.worker.goodbye()
    while (await run.fail()).advance.kept:
        pass
    assert await fetch(code.scene.dsn, "select count(*) from task where lease_session is not null") == [(0,)]
    await both.capacity(1)
    assert (await both.task()).handler == "undo-a"
    await both.close()


async def test_a_chain_is_reached_by_its_first_run_also_if_the_clock_of_the_database_was_put_back(code: Code) -> None:
    """As when a replica is promoted whose clock is late: the newest run is the last one all the same."""
    first = await code.start()
    for _ in range(3):
        run = await code.take()
        await execute(
            code.scene.dsn,
            """update run set created_at = created_at + interval '1 hour',
                              last_event_at = last_event_at + interval '1 hour' where run_id = %s""",
            [run.task.task.run_id],
        )
        await run.advance(outcome=AS_NEW, output=payload(1))
    run = await code.take()
    await run.advance(signal(1, "go"))
    await code.scene.signal(first, "go")
    run = await code.again(run)
    await code.scene.call("Cancel", first)
    await run.advance()
    assert "run_ending" in run.kinds()
    await run.complete()
    ended = await code.scene.api.wait(first)
    assert (ended.run_id, state_of(ended)) == (run.task.task.run_id, "CANCELLED")
