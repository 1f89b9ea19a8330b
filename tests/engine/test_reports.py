"""What a worker's report does, once, and what its repeats and forgeries do: nothing (I2, I6)."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.engine.histories import check_run
from tests.engine.rows import count, execute, fetch, holding
from tests.fixtures.api import Api, kinds
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, REFUSED, RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import until_blocked

Connect = Callable[[str], Api]
ConnectWorker = Callable[..., Awaitable[RawWorker]]

AT_ONCE = {"initial_delay": "0s", "max_attempts": 5}
OPERATIONAL, CORRECTIVE, PERMANENT = (
    run_pb2.FAILURE_KIND_OPERATIONAL,
    run_pb2.FAILURE_KIND_CORRECTIVE,
    run_pb2.FAILURE_KIND_PERMANENT,
)


async def rows_of_all(dsn: str) -> list[Any]:
    """Every row that a report could change."""
    return [
        await fetch(dsn, "select * from run order by run_id"),
        await fetch(dsn, "select * from task order by run_id, task_id"),
        await fetch(dsn, "select run_id, seq, type, at, token from event order by run_id, seq"),
    ]


def changed(ref: pb.TaskRef, **fields: Any) -> pb.TaskRef:
    """Another reference."""
    other = pb.TaskRef()
    other.CopyFrom(ref)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


async def every_report(worker: RawWorker, ref: pb.TaskRef) -> list[pb.ItemResult]:
    """All that a worker can say of a lease."""
    [released] = await worker.release(ref)
    [renewed] = await worker.heartbeat([ref], 0)
    failures = [await worker.fail(ref, kind) for kind in (OPERATIONAL, CORRECTIVE, PERMANENT)]
    return [await worker.complete(ref, "1"), *failures, released, renewed]


async def test_a_token_that_is_not_the_current_one_changes_nothing(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """I2: older, newer, of another task, of a task or run that does not exist."""
    await api.register(manifest(2, retry=AT_ONCE))
    for _ in range(2):
        await api.start()
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2), capacity=2)
    first, second = await worker.tasks(2)
    await worker.fail(first, message="before")
    again = await worker.task()
    assert again.task.fencing_token > first.task.fencing_token
    assert second.task.fencing_token != again.task.fencing_token
    before = await rows_of_all(dsn)
    forged = [
        first.task,
        changed(again.task, fencing_token=again.task.fencing_token + 1),
        changed(again.task, fencing_token=again.task.fencing_token - 1),
        changed(second.task, fencing_token=again.task.fencing_token),
        changed(again.task, task_id=1),
        changed(again.task, task_id=3),
        changed(again.task, task_id=(1 << 63) - 1, fencing_token=(1 << 63) - 1),
        changed(again.task, run_id=str(uuid.uuid4())),
    ]
    for ref in forged:
        for result in await every_report(worker, ref):
            assert (result.outcome, result.reason) == (LEASE_LOST, error_pb2.ERROR_REASON_LEASE_LOST), ref
    assert await rows_of_all(dsn) == before
    for task in (again, second):
        assert (await worker.complete(task)).outcome == OK


async def test_a_worker_of_another_namespace_has_no_say(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """I14: not even with the current token, nor by claiming to hold the lease."""
    for namespace in ("one", "two"):
        await api.register(manifest(), namespace=namespace)
    run_id = (await api.start(namespace="one")).run_id
    owner = await connect_worker(server.grpc_address, namespace="one")
    task = await owner.task()
    stranger = await connect_worker(server.grpc_address, namespace="two")
    before = await rows_of_all(dsn)
    for result in await every_report(stranger, task.task):
        assert result.outcome == LEASE_LOST
    welcome = await stranger.reconnect(held=[task.task], previous_session_ids=owner.sessions)
    assert [held.kept for held in welcome.held] == [False]
    await stranger.sync()
    assert await rows_of_all(dsn) == before
    assert (await owner.complete(task)).outcome == OK
    assert (await api.wait(run_id, namespace="one")).state == run_pb2.RUN_STATE_COMPLETED
    assert stranger.unread(pb.Tasks) == []


async def test_a_completion_that_is_sent_again_is_already_done(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """I6: in the same frame, in another one, over another server, by the process's next session; also when the
    run has long ended.
    """
    servers = [await in_process_server(dsn) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    await api.register(manifest(2))
    run_id = (await api.start()).run_id
    worker = await connect_worker(servers[0].grpc_address, handlers=handler_names(2))
    elsewhere = await connect_worker(servers[1].grpc_address, handlers=["none"])
    done = []
    for output in ('{"a": 1}', "null"):
        task = await worker.task()
        twice = await worker.complete_all([(task, output)] * 3)
        assert [result.outcome for result in twice] == [OK, ALREADY_DONE, ALREADY_DONE]
        done.append((task, output))
        for (old, told), by in itertools.product(done, (worker, elsewhere)):
            assert (await by.complete(old, told)).outcome == ALREADY_DONE
    await api.wait(run_id)
    await worker.reconnect(held=[task.task for task, _ in done])
    for (task, output), by in itertools.product(done, (worker, elsewhere)):
        assert (await by.complete(task, output)).outcome == ALREADY_DONE
    events = await check_run(api, dsn, run_id, ["n1", "n2"])
    assert kinds(events).count("step_completed") == 2


async def test_another_outcome_under_the_same_token_is_lost(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """I2, I5: the first outcome stands."""
    await api.register(manifest(1, retry=AT_ONCE))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    await worker.complete(task, "1")
    before = await rows_of_all(dsn)
    for output in ("1.0", "2", " 1", '"1"'):
        assert (await worker.complete(task, output)).outcome == LEASE_LOST
    binary = pb.CompleteItem(task=task.task, output=Payload(binary=b"1"))
    with_metadata = pb.CompleteItem(task=task.task, output=Payload(json="1", metadata={"a": "b"}))
    for item in (binary, with_metadata):
        [result] = await worker.results(await worker.send(pb.Complete(items=[item])), 1)
        assert result.outcome == LEASE_LOST
    for result in (await every_report(worker, task.task))[1:]:
        assert result.outcome == LEASE_LOST
    assert await rows_of_all(dsn) == before
    assert (await api.get(run_id)).output.json == "1"


@pytest.mark.parametrize("kind", [OPERATIONAL, CORRECTIVE])
async def test_a_failure_that_is_sent_again_counts_once_though_the_step_went_on(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    kind: run_pb2.FailureKind.ValueType,
) -> None:
    """I6, and row 49 of the field's failures: the repeat reaches another server, and a task that lives on."""
    servers = [await in_process_server(dsn) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    await api.register(manifest(1, retry=AT_ONCE))
    run_id = (await api.start()).run_id
    worker = await connect_worker(servers[0].grpc_address)
    elsewhere = await connect_worker(servers[1].grpc_address, handlers=["none"])
    task = await worker.task()
    assert (await worker.fail(task, kind, message="m")).outcome == OK
    second = await worker.task()
    before = await rows_of_all(dsn)
    for by in (worker, elsewhere):
        assert (await by.fail(task, kind, message="m")).outcome == ALREADY_DONE
        assert (await by.fail(task, kind, message="other")).outcome == LEASE_LOST
        assert (await by.fail(task, PERMANENT, message="m")).outcome == LEASE_LOST
        assert (await by.complete(task)).outcome == LEASE_LOST
    assert await rows_of_all(dsn) == before
    [step] = (await api.get(run_id)).open_steps
    assert (step.attempt, step.operational_failures + step.corrective_failures) == (2, 1)
    assert (await worker.fail(second, PERMANENT)).outcome == OK
    for by in (worker, elsewhere):
        assert (await by.fail(second, PERMANENT)).outcome == ALREADY_DONE
        assert (await by.fail(task, kind, message="m")).outcome == LEASE_LOST  # only the last outcome outlives a step
    events = await check_run(api, dsn, run_id, ["n1"])
    assert kinds(events)[-2:] == ["step_failed", "run_failed"]


async def test_two_outcomes_of_one_lease_at_once_are_one_and_a_loss(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """I2, I5: over two servers, whoever is first."""
    servers = [await in_process_server(dsn) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    await api.register(manifest(1, retry=AT_ONCE))
    n = 40
    runs = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(n)])]
    worker = await connect_worker(servers[0].grpc_address, capacity=n)
    elsewhere = await connect_worker(servers[1].grpc_address, handlers=["none"])
    tasks = await worker.tasks(n)
    failing = [asyncio.create_task(elsewhere.fail(task, PERMANENT)) for task in tasks]
    completed = await worker.complete_all([(task, "1") for task in tasks])
    failed = await asyncio.gather(*failing)
    for task, one, other in zip(tasks, completed, failed, strict=True):
        assert sorted([one.outcome, other.outcome]) == [OK, LEASE_LOST]
        run = await api.get(task.task.run_id)
        expected = run_pb2.RUN_STATE_COMPLETED if one.outcome == OK else run_pb2.RUN_STATE_FAILED
        assert run.state == expected
    for run_id in runs:
        await check_run(api, dsn, run_id, ["n1"])


async def test_a_release_that_is_sent_again_is_already_done(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    await api.start()
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    assert [r.outcome for r in await worker.release(task, task)] == [OK, ALREADY_DONE]
    again = await worker.task()
    assert again.attempt == 1
    assert [r.outcome for r in await worker.release(task)] == [ALREADY_DONE]
    assert (await worker.complete(task)).outcome == LEASE_LOST
    assert (await worker.complete(again)).outcome == OK
    assert [r.outcome for r in await worker.release(again)] == [LEASE_LOST]


OUTPUT = {"type": "object", "required": ["a"], "properties": {"b/c": {"type": "integer"}}}


async def test_an_output_that_breaks_its_schema_is_refused_recorded_and_told_to_the_next_attempt(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Recorded once, however often it is sent and wherever to (I6, row 49 of the field's failures)."""
    servers = [await in_process_server(dsn) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    await api.register(manifest(1, output_schema=OUTPUT, retry={"max_corrective_attempts": 2}))
    run_id = (await api.start()).run_id
    worker = await connect_worker(servers[0].grpc_address)
    elsewhere = await connect_worker(servers[1].grpc_address, handlers=["none"])
    bad = '{"b/c": "x"}'
    task = await worker.task()
    first = await worker.complete(task, bad)
    assert (first.outcome, first.reason) == (REFUSED, error_pb2.ERROR_REASON_OUTPUT_SCHEMA_MISMATCH)
    assert sorted(violation.path for violation in first.violations) == ["", "/b~1c"]
    second = await worker.task()
    assert second.attempt == 2
    assert (second.feedback.kind, second.feedback.code) == (CORRECTIVE, "OUTPUT_SCHEMA_MISMATCH")
    told = json.loads(second.feedback.feedback.json)
    assert [(fault["path"], fault["message"]) for fault in told] == [(v.path, v.message) for v in first.violations]
    for by in (worker, elsewhere):
        again = await by.complete(task, bad)
        assert (again.outcome, again.reason, list(again.violations)) == (REFUSED, first.reason, list(first.violations))
        assert (await by.complete(task, '{"a": 1}')).outcome == LEASE_LOST
    [step] = (await api.get(run_id)).open_steps
    assert (step.corrective_failures, step.operational_failures, step.attempt) == (1, 0, 2)
    last = await worker.complete(second, bad)
    assert last.outcome == REFUSED
    for by in (worker, elsewhere):
        again = await by.complete(second, bad)
        assert (again.outcome, again.reason, list(again.violations)) == (REFUSED, last.reason, list(last.violations))
    run = await api.wait(run_id)
    assert (run.state, run.failure.code, run.failure.attempt) == (
        run_pb2.RUN_STATE_FAILED,
        "OUTPUT_SCHEMA_MISMATCH",
        2,
    )
    events = await check_run(api, dsn, run_id, ["n1"])
    assert events[-2].step_failed.corrective_failures == 2


async def test_what_cannot_be_recorded_is_refused_and_leaves_the_lease_with_the_worker(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Rows 13 and 28 of the field's failures: at the limit it counts, past it the worker is told and may fail."""
    limit = 2048
    server = await in_process_server(dsn, max_payload_bytes=limit, max_frame_bytes=64 << 10)
    api = connect_api(server.grpc_address)
    await api.register(manifest(4))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=handler_names(4))
    task = await worker.task()
    before = await rows_of_all(dsn)
    refused = {
        "NaN": "INVALID_JSON",
        r'"\ud800"': "INVALID_JSON",
        '{"a":1,"a":1}': "INVALID_JSON",
        json.dumps("x" * (limit - 1)): "PAYLOAD_TOO_LARGE",
        json.dumps("ä" * limit, ensure_ascii=False): "PAYLOAD_TOO_LARGE",
    }
    for output, reason in refused.items():
        result = await worker.complete(task, output)
        assert result.outcome == REFUSED
        assert error_pb2.ErrorReason.Name(result.reason) == f"ERROR_REASON_{reason}"
        assert [violation.path for violation in result.violations] == ["output.json"]
    large = await worker.fail(task, feedback=json.dumps("x" * limit))
    assert (large.outcome, large.reason) == (REFUSED, error_pb2.ERROR_REASON_PAYLOAD_TOO_LARGE)
    for retry_after in (-1.0, 31 * 86400.0):
        late = await worker.fail(task, retry_after=retry_after)
        assert (late.outcome, late.reason) == (REFUSED, error_pb2.ERROR_REASON_INVALID_FRAME)
    assert await rows_of_all(dsn) == before
    assert [result.outcome for result in await worker.heartbeat([task])] == [OK]
    for size in (limit - 1, limit):
        assert (await worker.complete(task, json.dumps("x" * (size - 2)))).outcome == OK
        task = await worker.task()
    nothing = pb.CompleteItem(task=task.task)
    [result] = await worker.results(await worker.send(pb.Complete(items=[nothing])), 1)
    assert result.outcome == OK
    assert (await worker.complete(await worker.task(), r'"\u0000"')).outcome == OK
    run = await api.wait(run_id)
    assert run.output.json == r'"\u0000"'
    assert (await api.history(run_id))[6].step_completed.output == Payload(json="null")


async def test_the_texts_of_a_failure_are_cut_and_whatever_they_hold_is_recorded(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """Row 13 of the field's failures."""
    await api.register(manifest())
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address)
    message = "\0😀" * 10_000
    await worker.fail(await worker.task(), PERMANENT, code="C\0" * 200, message=message, feedback=r'"\u0000"')
    failure = (await api.wait(run_id)).failure
    assert failure.code == "C\0" * 100
    assert failure.message == message[:10_000]
    assert (failure.kind, failure.node_id, failure.attempt) == (PERMANENT, "n1", 1)
    event = (await api.history(run_id))[-2].step_failed
    assert event.failure.feedback.json == r'"\u0000"'


async def test_a_binary_output_is_handed_on_and_no_schema_is_checked_on_it(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(2, output_schema={"type": "integer"}))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    value = Payload(binary=bytes(range(256)), metadata={"encoding": "x", "": "\0"})
    for _ in range(2):
        item = pb.CompleteItem(task=(await worker.task()).task, output=value)
        [result] = await worker.results(await worker.send(pb.Complete(items=[item])), 1)
        assert result.outcome == OK
    assert (await api.wait(run_id)).output == value
    assert (await api.history(run_id))[2].step_completed.output == value


async def test_each_step_gets_the_output_of_the_one_before_byte_for_byte(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    await api.register(manifest(3))
    texts = ['{"b": 1.0, "a": "\\u00e4"}', " [ 1e400 ] ", '"ä"', "18446744073709551617"]
    run_id = (await api.start(input=texts[0], user_id="u")).run_id
    worker = await connect_worker(server.grpc_address, handlers=handler_names(3))
    keys = set()
    for before, after in itertools.pairwise(texts):
        task = await worker.task()
        assert task.input == Payload(json=before)
        assert (task.workflow_id, task.user_id, task.kind) == ("wf", "u", pb.TASK_KIND_STEP)
        keys.add(task.idempotency_key)
        await worker.complete(task, after)
    assert (await api.wait(run_id)).output.json == texts[-1]
    assert len(keys) == 3
    assert await count(dsn, "event", "payload is not null") == 4  # nothing is stored twice


async def test_a_report_is_answered_only_after_its_commit(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """I1: no Ack and no next task leave while the transaction may still fail."""
    server = await in_process_server(dsn, lock_timeout=5)
    api = connect_api(server.grpc_address)
    await api.register(manifest(2))
    await api.start()
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    task = await worker.task()
    async with holding(dsn, "select from run for update"):
        completing = asyncio.create_task(worker.complete(task))
        await until_blocked(dsn)
        await worker.sync()
        assert not completing.done()
        assert worker.unread(pb.Tasks) == []
        assert await count(dsn, "event") == 2
    assert (await completing).outcome == OK
    assert (await worker.task()).node_id == "n2"


async def test_tokens_of_a_later_epoch_are_larger_than_all_before(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """I3: raised after a restored backup, which has forgotten tokens that it gave out."""
    await api.register(manifest(2, retry=AT_ONCE))
    await api.start()
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    task = await worker.task()
    await execute(dsn, "update cluster set epoch = epoch + 1")
    assert (await worker.fail(task)).outcome == OK
    again = await worker.task()
    assert again.task.fencing_token > 1 << 40 > task.task.fencing_token
    assert (await worker.complete(again)).outcome == OK
    assert (await worker.task()).task.fencing_token > 1 << 40
