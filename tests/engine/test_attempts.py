"""Attempts: retries by kind, time limits, expiry."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.store import tasks as stored_tasks
from tests.engine.histories import check_run
from tests.engine.rows import count, execute, fetch, holding
from tests.fixtures.api import Api, kinds
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import LEASE_LOST, OK, RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

Connect = Callable[[str], Api]
ConnectWorker = Callable[..., Awaitable[RawWorker]]
OPERATIONAL, CORRECTIVE, PERMANENT = (
    run_pb2.FAILURE_KIND_OPERATIONAL,
    run_pb2.FAILURE_KIND_CORRECTIVE,
    run_pb2.FAILURE_KIND_PERMANENT,
)
AT_ONCE = {"initial_delay": "0s"}
FAILED, BLOCKED = run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_BLOCKED


@pytest.fixture
async def quick(in_process_server: StartInProcessServer, dsn: str) -> InProcessServer:
    """A server that looks for expired leases twenty times a second, and takes no slow machine for an outage."""
    return await in_process_server(dsn, poll_interval=0.05, outage_gap=60)


@pytest.fixture
def may_expire(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Tokens of leases: no other one is found to have run out, however late a test comes with what it does first."""
    tokens: set[int] = set()
    look = stored_tasks.expired

    async def found(*arguments: Any) -> Any:
        return [lease for lease in await look(*arguments) if lease.token in tokens]

    monkeypatch.setattr(stored_tasks, "expired", found)
    return tokens


@pytest.fixture
def api(quick: InProcessServer, connect_api: Connect) -> Api:
    return connect_api(quick.grpc_address)


async def expire(dsn: str) -> None:
    """Let the leases that are out now run out now."""
    await execute(dsn, "update task set lease_expires_at = clock_timestamp() where lease_session is not null")


async def test_an_operational_failure_is_tried_again_up_to_max_attempts(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    await api.register(manifest(1, retry={"max_attempts": 3, **AT_ONCE}))
    run_id = (await api.start()).run_id
    worker = await connect_worker(quick.grpc_address)
    tokens, keys = [], set()
    for attempt in (1, 2, 3):
        task = await worker.task()
        assert task.attempt == attempt
        assert not task.HasField("feedback")
        tokens.append(task.task.fencing_token)
        keys.add(task.idempotency_key)
        assert (await worker.fail(task, code=f"E{attempt}")).outcome == OK
    assert tokens == sorted(set(tokens))
    assert len(keys) == 1
    run = await api.wait(run_id)
    assert (run.state, run.failure.code, run.failure.attempt) == (FAILED, "E3", 3)
    events = await check_run(api, dsn, run_id, ["n1"])
    assert kinds(events)[2:] == ["step_retrying", "step_failed", "run_failed"]
    assert events[2].step_retrying.failure.code == "E1"
    assert (events[3].step_failed.operational_failures, events[3].step_failed.corrective_failures) == (3, 0)


async def test_a_permanent_failure_is_not_tried_again(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    await api.register(manifest(2, retry={"max_attempts": 9, **AT_ONCE}))
    run_id = (await api.start()).run_id
    worker = await connect_worker(quick.grpc_address, handlers=handler_names(2))
    await worker.fail(await worker.task(), PERMANENT, code="NO", retry_after=0)
    run = await api.wait(run_id)
    assert (run.state, run.failure.code, run.failure.kind, run.failure.node_id) == (FAILED, "NO", PERMANENT, "n1")
    await check_run(api, dsn, run_id, ["n1", "n2"])
    await worker.sync()
    assert worker.unread(pb.Tasks) == []


async def test_corrective_failures_are_counted_apart_and_their_feedback_is_for_the_next_attempt_only(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    policy = {"max_attempts": 3, "max_corrective_attempts": 3, "jitter": 0, **AT_ONCE}
    await api.register(manifest(1, retry=policy))
    run_id = (await api.start()).run_id
    worker = await connect_worker(quick.grpc_address)
    last: run_pb2.FailureKind.ValueType | None = None
    for attempt, kind in enumerate([CORRECTIVE, OPERATIONAL, OPERATIONAL, CORRECTIVE, CORRECTIVE], 1):
        task = await worker.task()
        assert task.attempt == attempt
        assert task.HasField("feedback") == (last == CORRECTIVE)
        if last == CORRECTIVE:
            assert task.feedback.feedback.json == f'"do {attempt - 1}"'
            assert (task.feedback.kind, task.feedback.attempt) == (CORRECTIVE, attempt - 1)
        await worker.fail(task, kind, feedback=f'"do {attempt}"')
        last = kind
    assert (await api.wait(run_id)).state == FAILED
    events = await check_run(api, dsn, run_id, ["n1"])
    assert [event.step_retrying.failure.kind for event in events[2:4]] == [CORRECTIVE, OPERATIONAL]
    assert (events[4].step_failed.operational_failures, events[4].step_failed.corrective_failures) == (2, 3)


async def test_a_failure_of_no_kind_or_of_an_unknown_one_is_operational(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(1, retry=AT_ONCE))
    run_id = (await api.start()).run_id
    worker = await connect_worker(quick.grpc_address)
    task = await worker.task()
    bare = pb.FailItem(task=task.task)
    [result] = await worker.results(await worker.send(pb.Fail(items=[bare])), 1)
    assert result.outcome == OK
    await worker.fail(await worker.task(), 99)  # type: ignore[arg-type]  # of a later release
    await worker.task()
    [step] = (await api.get(run_id)).open_steps
    assert (step.operational_failures, step.attempt, step.last_failure.kind) == (2, 3, OPERATIONAL)
    event = (await api.history(run_id))[2].step_retrying
    assert (event.failure.code, event.failure.message) == ("UNKNOWN", "")


async def delay(dsn: str, run_id: str) -> float:
    """Seconds from a run's last event to its next attempt."""
    rows = await fetch(
        dsn,
        "select extract(epoch from t.visible_at - r.last_event_at)::float8 from task t join run r using (run_id)"
        " where run_id = %s",
        [run_id],
    )
    return float(rows[0][0])


async def test_a_retry_waits_as_long_as_its_policy_or_its_worker_says(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    policy = {"initial_delay": "1h", "max_delay": "2h", "jitter": 0.5}
    await api.register(manifest(1, retry=policy))
    worker = await connect_worker(quick.grpc_address)
    for retry_after, low, high in ((None, 1800.0, 5400.0), (90.5, 90.5, 90.5), (30 * 86400.0, 2592000.0, 2592000.0)):
        run_id = (await api.start()).run_id
        task = await worker.task()
        await worker.fail(task, retry_after=retry_after)
        assert low - 0.001 <= await delay(dsn, run_id) <= high + 0.001
        event = (await api.history(run_id))[2].step_retrying
        waited = event.ready_time.ToNanoseconds() - (await api.history(run_id))[2].event_time.ToNanoseconds()
        assert waited / 1e9 == pytest.approx(await delay(dsn, run_id), abs=0.001)
    await api.start()
    await worker.fail(await worker.task(), retry_after=0)
    assert (await worker.task()).attempt == 2
    await api.start()
    await worker.fail(await worker.task(), CORRECTIVE, retry_after=90)
    assert (await worker.task()).attempt == 2


async def test_a_retry_that_falls_due_is_taken_although_nothing_else_happens(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(1, retry={"initial_delay": "300ms", "jitter": 0}))
    await api.start()
    worker = await connect_worker(quick.grpc_address)
    task = await worker.task()
    began = time.monotonic()  # before the failure: its answer may come late
    await worker.fail(task)
    assert (await worker.task()).attempt == 2
    assert time.monotonic() - began > 0.25


async def test_a_lease_that_ran_out_costs_an_attempt_and_its_holder_is_told(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """The last attempt's expiry fails the step: OPERATIONAL, LEASE_EXPIRED."""
    await api.register(manifest(1, retry={"max_attempts": 2, **AT_ONCE}))
    run_id = (await api.start()).run_id
    worker = await connect_worker(quick.grpc_address)
    tasks = []
    for attempt in (1, 2):
        tasks.append(await worker.task())
        assert tasks[-1].attempt == attempt
        await expire(dsn)
        revoked = await worker.next(pb.Revoke)
        assert list(revoked.tasks) == [tasks[-1].task]
        assert revoked.reason == error_pb2.ERROR_REASON_LEASE_EXPIRED
    assert (await worker.complete(tasks[0])).outcome == LEASE_LOST
    run = await api.wait(run_id)
    assert (run.state, run.failure.code, run.failure.kind) == (FAILED, "LEASE_EXPIRED", OPERATIONAL)
    events = await check_run(api, dsn, run_id, ["n1"])
    assert events[2].step_retrying.failure.code == "LEASE_EXPIRED"
    assert events[3].step_failed.operational_failures == 2
    assert (await worker.complete(tasks[1])).outcome == LEASE_LOST


async def test_a_lease_that_ran_out_but_was_not_taken_over_still_counts(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """The token decides, not the time."""
    server = await in_process_server(dsn, poll_interval=60, outage_gap=120)
    # Nobody looks a first time when the lease has run out.
    await eventually(lambda: server.app.engine.last_probe and server.app.engine.sweeper.loop.last_good)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    await expire(dsn)
    [renewed] = await worker.heartbeat()
    assert renewed.outcome == OK
    await expire(dsn)
    assert (await worker.complete(task)).outcome == OK
    await api.wait(run_id)


async def test_a_lease_renewed_while_the_sweeper_looked_is_left_alone(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 9 of the field's failures: what the sweep found is checked again under the locks."""
    await api.register(manifest(2))
    for _ in range(2):
        await api.start()
    worker = await connect_worker(quick.grpc_address, handlers=handler_names(2), capacity=2)
    first, second = await worker.tasks(2)
    seen: list[Any] = []
    look = stored_tasks.expired

    async def slow(*arguments: Any) -> Any:
        found = await look(*arguments)
        if found and not seen:
            seen.extend(found)
            assert [r.outcome for r in await worker.heartbeat()] == [OK, OK]
            assert (await worker.complete(first)).outcome == OK
        return found

    monkeypatch.setattr(stored_tasks, "expired", slow)
    await expire(dsn)
    await eventually(lambda: seen)
    assert len(seen) == 2
    third = await worker.task()
    assert [r.outcome for r in await worker.heartbeat()] == [OK, OK]
    assert (await worker.complete(second)).outcome == OK
    assert (await worker.complete(third)).outcome == OK
    assert worker.unread(pb.Revoke) == []
    assert await count(dsn, "event", "type = 3") == 0


async def test_leases_that_cannot_be_expired_now_do_not_hide_those_behind_them(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """The sweep goes on behind a page whose rows it can't change: here their runs are locked."""
    server = await in_process_server(dsn, poll_interval=0.05, outage_gap=60, sweep_batch=3, lock_timeout=0.05)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1, retry=AT_ONCE))
    runs = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(8)])]
    worker = await connect_worker(server.grpc_address, capacity=8)
    tasks = {task.task.run_id: task for task in await worker.tasks(8)}
    order = "update task set lease_expires_at = clock_timestamp() - interval '1 s' * (10 - array_position(%s, run_id))"
    async with holding(dsn, "select from run where run_id = any(%s) for update", [runs[:4]]):
        await execute(dsn, order, [runs])
        again = {task.task.run_id: task for task in await worker.tasks(4)}
        assert set(again) == set(runs[4:])
    again |= {task.task.run_id: task for task in await worker.tasks(4)}
    assert all(task.attempt == 2 for task in again.values())
    assert set(again) == set(tasks)


async def test_after_an_outage_no_lease_runs_out_before_workers_had_time_to_come_back(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Row 47 of the field's failures: the time of the last good pass is in the database."""
    settings = {"poll_interval": 0.05, "heartbeat_interval": 0.4, "disconnect_grace": 0.6, "outage_gap": 0.5}
    server = await in_process_server(dsn, **settings)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1, retry=AT_ONCE))
    await api.start()
    worker = await connect_worker(server.grpc_address)
    await worker.task()
    # As if nobody had looked for a minute.
    began = time.monotonic()
    [(since,)] = await fetch(
        dsn,
        "with a as (update cluster set last_pass_at = last_pass_at - interval '1 m'),"
        " b as (update task set lease_expires_at = clock_timestamp() - interval '30 s') select clock_timestamp()",
    )
    await eventually(lambda: count(dsn, "cluster", "hold_until > %s + interval '800 ms'", [since]))
    task = await worker.task()
    assert task.attempt == 2
    assert time.monotonic() - began > 0.9


async def test_an_attempt_has_its_time_and_no_heartbeat_makes_it_longer(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str, may_expire: set[int]
) -> None:
    """Three attempts that all hang: each times out once, the run fails after the third."""
    await api.register(manifest(1, timeout="300ms", retry={"max_attempts": 3, **AT_ONCE}))
    before = time.monotonic()
    run_id = (await api.start()).run_id
    worker = await connect_worker(quick.grpc_address)
    for attempt in (1, 2, 3):
        task = await worker.task()
        assert task.attempt == attempt
        assert task.attempt_timeout.ToTimedelta().total_seconds() == 0.3
        assert task.lease_duration.ToTimedelta().total_seconds() == 0.3, "a lease is not longer than the attempt"
        if attempt > 1:
            [renewed] = await worker.heartbeat()
            assert renewed.outcome == OK
            assert renewed.lease_duration.ToTimedelta().total_seconds() <= 0.3
        began, before = before, time.monotonic()  # the next attempt begins after this
        may_expire.add(task.task.fencing_token)
        revoked = await worker.next(pb.Revoke)
        assert revoked.reason == error_pb2.ERROR_REASON_ATTEMPT_TIMEOUT
        assert list(revoked.tasks) == [task.task]
        assert time.monotonic() - began > 0.25
    run = await api.wait(run_id)
    assert (run.state, run.failure.code, run.failure.kind) == (FAILED, "ATTEMPT_TIMEOUT", OPERATIONAL)
    events = await check_run(api, dsn, run_id, ["n1"])
    assert events[-2].step_failed.operational_failures == 3


async def test_the_time_of_an_attempt_goes_on_over_a_reconnect_and_into_the_next_step_at_once(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker, may_expire: set[int]
) -> None:
    """Also for a step that was handed on without a claim."""
    await api.register(manifest(2, lease="1m", nodes={"n2": {"timeout": "500ms", "retry": AT_ONCE}}))
    await api.start()
    worker = await connect_worker(quick.grpc_address, handlers=handler_names(2))
    await worker.complete(await worker.task())
    task = await worker.task()
    assert task.lease_duration.ToTimedelta().total_seconds() == 0.5
    welcome = await worker.reconnect()
    assert welcome.held[0].kept
    assert welcome.held[0].lease_duration.ToTimedelta().total_seconds() <= 0.5
    may_expire.add(task.task.fencing_token)
    revoked = await worker.next(pb.Revoke, 30)  # not when the lease ends
    assert revoked.reason == error_pb2.ERROR_REASON_ATTEMPT_TIMEOUT


async def test_a_step_waits_for_a_worker_that_has_its_handler_in_its_queue(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """Waited for and shown, not failed."""
    await api.register(manifest(1, queue="slow"))
    run_id = (await api.start()).run_id
    others = [
        await connect_worker(quick.grpc_address, handlers=["s1", ("s2", "slow")]),
        await connect_worker(quick.grpc_address, handlers=[("s1", "slow")], namespace="other"),
    ]
    for other in others:
        await other.sync()
    [step] = (await api.get(run_id)).open_steps
    assert (step.queue, step.handler, step.state) == ("slow", "s1", run_pb2.STEP_STATE_READY)
    right = await connect_worker(quick.grpc_address, handlers=[("s1", "slow"), ("s1", "default")])
    assert (await right.complete(await right.task())).outcome == OK
    await api.wait(run_id)
    for other in others:
        await other.sync()
        assert other.unread(pb.Tasks) == []


async def test_leases_are_capped_by_the_node_and_counted_by_the_databases_clock(
    quick: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """I11."""
    await api.register(manifest(2, nodes={"n1": {"lease": "2m"}, "n2": {"lease": "50s"}}))
    await api.start()
    worker = await connect_worker(quick.grpc_address, handlers=handler_names(2))
    left = "select extract(epoch from lease_expires_at - clock_timestamp())::float8 from task"
    for lease in (120, 50):
        task = await worker.task()
        assert task.lease_duration.ToTimedelta().total_seconds() == lease
        [(rest,)] = await fetch(dsn, left)
        assert lease - 30 < rest <= lease
        await execute(dsn, "update task set lease_expires_at = clock_timestamp() + interval '15 s'")
        [renewed] = await worker.heartbeat()
        assert lease - 30 < renewed.lease_duration.ToTimedelta().total_seconds() <= lease
        [(rest,)] = await fetch(dsn, left)
        assert lease - 30 < rest <= lease
        await worker.complete(task)
