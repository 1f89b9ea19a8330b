"""SignalRun, CancelRun, TerminateRun, PauseRun, ResumeRun, RetryRun as their callers see them: what is refused before
any run is asked, what is answered, and what a repeat gets. What each does in which state is tested with the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import run_service_pb2 as pb
from fencepost.v1 import worker_service_pb2 as worker_pb
from fencepost.v1.payload_pb2 import Payload
from fencepost_server.domain.errors import ServerDraining
from fencepost_server.domain.model import Payload as StoredPayload
from fencepost_server.engine.control import fingerprint
from fencepost_server.engine.operations import Command, CommandKind
from tests.fixtures.api import DEADLINE, Api, kinds
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import LEASE_LOST, OK, RawWorker, seconds
from tests.fixtures.refusals import refused
from tests.fixtures.servers import InProcessServer, StartInProcessServer

Connect = Callable[[str], Api]
ConnectWorker = Callable[..., Awaitable[RawWorker]]
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOBODY = "00000000-0000-4000-8000-000000000000"
REQUESTS: dict[str, Any] = {
    "SignalRun": pb.SignalRunRequest,
    "CancelRun": pb.CancelRunRequest,
    "TerminateRun": pb.TerminateRunRequest,
    "PauseRun": pb.PauseRunRequest,
    "ResumeRun": pb.ResumeRunRequest,
    "RetryRun": pb.RetryRunRequest,
}
WITH_REASON = [name for name in REQUESTS if name != "SignalRun"]
PENDING, RUNNING, CANCELLED = run_pb2.RUN_STATE_PENDING, run_pb2.RUN_STATE_RUNNING, run_pb2.RUN_STATE_CANCELLED
PAUSED, TERMINATED = run_pb2.RUN_STATE_PAUSED, run_pb2.RUN_STATE_TERMINATED


async def ask(api: Api, method: str, run_id: str, **fields: Any) -> Any:
    """One of the calls."""
    if method == "SignalRun":
        fields.setdefault("signal_name", "go")
    return await getattr(api.runs, method)(REQUESTS[method](run_id=run_id, **fields), timeout=DEADLINE)


# What is refused before any run is asked


@pytest.mark.parametrize("method", REQUESTS)
async def test_every_fault_of_a_request_is_told_at_once(api: Api, method: str) -> None:
    fields: dict[str, Any] = {"namespace": "a b", "request_id": "x" * 201}
    paths = ["namespace", "run_id", "request_id"]
    if method == "SignalRun":
        fields["signal_name"] = ".no"
        paths.append("signal_name")
    else:
        fields["reason"] = "r" * 1001
        paths.append("reason")
    if method == "CancelRun":
        fields["grace"] = seconds(86_400.5)
        paths.append("grace")
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await ask(api, method, "no-uuid", **fields)
    assert refusal.error.paths == paths


@pytest.mark.parametrize("method", REQUESTS)
async def test_a_run_has_to_be_named(api: Api, method: str) -> None:
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await ask(api, method, "")
    assert refusal.error.paths == ["run_id"]


async def test_a_signal_needs_a_name_and_a_payload_within_the_limits(api: Api) -> None:
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await ask(api, "SignalRun", NOBODY, signal_name="")
    assert refusal.error.paths == ["signal_name"]
    with refused("INVALID_JSON", INVALID) as refusal:
        await ask(api, "SignalRun", NOBODY, payload=Payload(json='{"a": 1, "a": 2}'))
    assert refusal.error.paths == ["payload.json"]
    for payload in (Payload(json='"' + "x" * (1 << 20) + '"'), Payload(binary=b"\0" * ((1 << 20) + 1))):
        with refused("PAYLOAD_TOO_LARGE", INVALID) as refusal:
            await ask(api, "SignalRun", NOBODY, payload=payload)


@pytest.mark.parametrize("grace", [-0.001, 86_400.001])
async def test_a_grace_is_between_none_and_a_day(api: Api, grace: float) -> None:
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await ask(api, "CancelRun", NOBODY, grace=seconds(grace))
    assert refusal.error.paths == ["grace"]


async def test_an_undo_is_skipped_for_a_reason_only(api: Api) -> None:
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await ask(api, "RetryRun", NOBODY, skip_undo=True)
    assert refusal.error.paths == ["reason"]


@pytest.mark.parametrize("method", WITH_REASON)
async def test_a_reason_may_have_a_thousand_characters_of_any_kind_but_nul(api: Api, method: str) -> None:
    with refused("INVALID_REQUEST", INVALID) as refusal:
        await ask(api, method, NOBODY, reason="a\0b")
    assert refusal.error.paths == ["reason"]
    with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await ask(api, method, NOBODY, reason="\U0001f9ee" * 1000)


async def test_a_server_that_is_leaving_takes_no_command(server: InProcessServer, api: Api) -> None:
    server.app.engine.drain()
    with pytest.raises(ServerDraining):
        server.app.engine.submit(Command(CommandKind.PAUSE, NOBODY, "default"))
    with refused("SERVER_DRAINING", grpc.StatusCode.UNAVAILABLE) as refusal:
        await ask(api, "PauseRun", NOBODY)
    assert refusal.error.retry_after


# By what a repeat is known


async def test_a_request_is_known_by_all_that_it_asks() -> None:
    """I7."""
    signal: dict[str, Any] = {"kind": CommandKind.SIGNAL, "run_id": NOBODY, "namespace": "default", "name": "go"}
    cancel: dict[str, Any] = {"kind": CommandKind.CANCEL, "run_id": NOBODY, "namespace": "default"}
    different = [
        signal,
        {**signal, "name": "gone"},
        {**signal, "payload": StoredPayload(json="1")},
        {**signal, "payload": StoredPayload(binary=b"1")},
        {**signal, "payload": StoredPayload(binary=b"2")},
        {**signal, "payload": StoredPayload(binary=b"1", metadata='{"fingerprint": "f"}')},
        {**signal, "name": "", "reason": "go"},
        cancel,
        {**cancel, "reason": "r"},
        {**cancel, "grace": 0.0},
        {**cancel, "grace": 1.0},
        {**cancel, "kind": CommandKind.TERMINATE},
        {**cancel, "kind": CommandKind.RETRY},
        {**cancel, "kind": CommandKind.RETRY, "skip_undo": True},
    ]
    assert len({fingerprint(Command(**fields)) for fields in different}) == len(different)


async def test_payloads_that_say_the_same_are_the_same_request() -> None:
    def of(payload: StoredPayload) -> bytes:
        return fingerprint(Command(CommandKind.SIGNAL, NOBODY, "default", "q", name="go", payload=payload))

    assert of(StoredPayload(json='{"b": 1.0, "a": [ ]}')) == of(StoredPayload(json='{"a":[],"b":1}'))
    encrypted = [StoredPayload(binary=nonce, metadata='{"fingerprint": "f"}') for nonce in (b"1", b"2")]
    assert of(encrypted[0]) == of(encrypted[1])


# Answers


@pytest.mark.parametrize("method", REQUESTS)
async def test_a_run_that_is_not_there_is_told_and_so_is_one_of_another_namespace(api: Api, method: str) -> None:
    await api.register(manifest())
    run_id = (await api.start()).run_id
    for unknown, namespace in ((NOBODY, ""), (run_id, "other")):
        with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND) as refusal:
            await ask(api, method, unknown, namespace=namespace)
        assert unknown in refusal.error.message
    assert (await api.get(run_id)).last_seq == 2


async def test_a_signal_is_an_event_when_its_call_has_returned(api: Api) -> None:
    await api.register(manifest())
    run_id = (await api.start()).run_id
    payload = Payload(json='{"a":  1.10}', metadata={"k": "v"})
    first = await ask(api, "SignalRun", run_id, signal_name="a", payload=payload, request_id="q")
    second = await ask(api, "SignalRun", run_id.upper(), signal_name="b")
    assert (first.state, first.seq, second.seq) == (PENDING, 3, 4)
    events = (await api.history(run_id))[2:]
    assert kinds(events) == ["signal_received"] * 2
    assert events[0].signal_received == run_pb2.SignalReceived(signal_name="a", payload=payload, request_id="q")
    assert (events[1].signal_received.signal_name, events[1].signal_received.payload.json) == ("b", "null")


async def test_a_repeat_gets_the_first_answer_and_another_request_under_its_id_a_conflict(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """I6 and I7: also when the run has ended meanwhile."""
    await api.register(manifest())
    run_id, other = (await api.start()).run_id, (await api.start()).run_id
    first = await ask(api, "SignalRun", run_id, payload=Payload(json="[1.0]"), request_id="q")
    paused = await ask(api, "PauseRun", run_id, reason="r", request_id="p")
    assert (await ask(api, "SignalRun", other, request_id="q")).seq == 3, "another run's ids are its own"

    async def repeat() -> None:
        again = await ask(api, "SignalRun", run_id, payload=Payload(json="[1]"), request_id="q")
        assert again == first
        assert await ask(api, "PauseRun", run_id, reason="r", request_id="p") == paused
        for method, fields in (
            ("SignalRun", {"payload": Payload(json="[2]"), "request_id": "q"}),
            ("PauseRun", {"reason": "s", "request_id": "p"}),
            ("ResumeRun", {"reason": "r", "request_id": "p"}),
        ):
            with refused("REQUEST_ID_CONFLICT", grpc.StatusCode.ALREADY_EXISTS):
                await ask(api, method, run_id, **fields)

    await repeat()
    await ask(api, "TerminateRun", run_id)
    await repeat()
    assert kinds(await api.history(run_id)).count("signal_received") == 1


@pytest.mark.parametrize("request_id", ["p", "~p"])
async def test_a_repeat_of_what_changed_nothing_gets_its_answer_too(api: Api, request_id: str) -> None:
    """However a caller spells his request id."""
    await api.register(manifest())
    run_id = (await api.start()).run_id
    await ask(api, "PauseRun", run_id)
    first = await ask(api, "PauseRun", run_id, request_id=request_id)
    await ask(api, "ResumeRun", run_id)
    assert await ask(api, "PauseRun", run_id, request_id=request_id) == first
    assert (await api.get(run_id)).state != run_pb2.RUN_STATE_PAUSED


async def test_without_a_request_id_each_signal_is_another(api: Api) -> None:
    await api.register(manifest())
    run_id = (await api.start()).run_id
    assert [(await ask(api, "SignalRun", run_id)).seq for _ in range(3)] == [3, 4, 5]


async def test_a_hundred_equal_signals_at_once_over_two_servers_are_one(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    apis = [connect_api((await in_process_server(dsn)).grpc_address) for _ in range(2)]
    await apis[0].register(manifest())
    run_id = (await apis[0].start()).run_id
    answers = await asyncio.gather(*(ask(apis[n % 2], "SignalRun", run_id, request_id="q") for n in range(100)))
    assert {(answer.state, answer.seq) for answer in answers} == {(PENDING, 3)}
    assert kinds(await apis[0].history(run_id)) == ["run_started", "step_scheduled", "signal_received"]


async def test_a_run_that_is_paused_is_leased_to_nobody_until_it_is_resumed(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    run_id = (await api.start()).run_id
    assert (await ask(api, "PauseRun", run_id, reason="later")).state == PAUSED
    run = await api.get(run_id)
    assert (run.state, [step.state for step in run.open_steps]) == (PAUSED, [run_pb2.STEP_STATE_PARKED])
    assert not run.open_steps[0].HasField("ready_time")
    worker = await connect_worker(server.grpc_address)
    await worker.no_task()
    assert (await ask(api, "ResumeRun", run_id, reason="now")).state in {PENDING, RUNNING}
    await worker.complete(await worker.task())
    events = await api.history(run_id)
    assert kinds(events)[2:4] == ["run_paused", "run_resumed"]
    assert (events[2].run_paused.reason, events[3].run_resumed.reason) == ("later", "now")


async def test_a_cancel_is_told_to_who_has_the_step_and_what_it_reports_in_the_grace_counts(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(2))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=["s1", "s2"])
    task = await worker.task()
    answer = await ask(api, "CancelRun", run_id, reason="ordered twice", grace=seconds(20))
    assert answer.state == run_pb2.RUN_STATE_ENDING
    cancel = await worker.next(worker_pb.Cancel)
    assert list(cancel.tasks) == [task.task]
    assert cancel.reason == error_pb2.ERROR_REASON_RUN_CANCELLED
    assert 15 < cancel.remaining.ToTimedelta().total_seconds() <= 20
    [result] = await worker.heartbeat()
    assert result.cancel_wanted
    assert result.lease_duration.ToTimedelta().total_seconds() <= 20
    assert (await api.get(run_id)).ending == CANCELLED
    assert (await worker.complete(task, "1")).outcome == OK
    run = await api.wait(run_id)
    assert (run.state, run.failure.code) == (CANCELLED, "RUN_CANCELLED")
    assert "ordered twice" in run.failure.message
    events = await api.history(run_id)
    assert kinds(events)[2:] == ["run_ending", "step_completed", "run_cancelled"]
    assert events[2].run_ending.grace.ToTimedelta().total_seconds() == 20
    assert (await ask(api, "CancelRun", run_id)).state == CANCELLED


async def test_a_run_that_is_terminated_ends_at_once_and_its_steps_are_revoked(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    assert (await ask(api, "TerminateRun", run_id, reason="stop")).state == TERMINATED
    revoke = await worker.next(worker_pb.Revoke)
    assert (list(revoke.tasks), revoke.reason) == ([task.task], error_pb2.ERROR_REASON_RUN_TERMINATED)
    assert (await worker.complete(task)).outcome == LEASE_LOST
    events = await api.history(run_id)
    assert events[-1].run_terminated.reason == "stop"


async def test_a_run_that_failed_goes_on_when_it_is_retried(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(2, retry={"max_attempts": 1}))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=["s1", "s2"])
    await worker.complete(await worker.task(), "1")
    first = await worker.task()
    await worker.fail(first)
    assert (await api.wait(run_id)).state == run_pb2.RUN_STATE_FAILED
    assert (await ask(api, "RetryRun", run_id, reason="mended")).state == RUNNING
    again = await worker.task()
    assert (again.node_id, again.attempt, again.input.json) == ("n2", 1, "1")
    assert again.task.fencing_token > first.task.fencing_token
    assert again.idempotency_key == first.idempotency_key
    await worker.complete(again, "2")
    run = await api.wait(run_id)
    assert (run.state, run.output.json) == (run_pb2.RUN_STATE_COMPLETED, "2")
    assert "run_retried" in kinds(await api.history(run_id))


async def test_what_the_state_forbids_is_refused_with_the_state(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest())
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address)
    await worker.complete(await worker.task())
    for method in REQUESTS:
        with refused("ILLEGAL_TRANSITION", grpc.StatusCode.FAILED_PRECONDITION) as refusal:
            await ask(api, method, run_id)
        assert refusal.error.metadata["state"] == "COMPLETED"
        assert refusal.error.metadata["event"]
    assert (await api.get(run_id)).last_seq == 4


async def test_a_child_whose_parent_has_gone_on_with_its_failure_is_not_retried(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(1, workflow_id="invoicing", retry={"max_attempts": 1}))
    await api.register('{"id": "wf", "compatibility_id": "1", "sequence": [{"id": "bill", "workflow": "invoicing"}]}')
    parent_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    await worker.fail(task)
    parent = await api.wait(parent_id)
    assert (parent.state, parent.failure.code) == (run_pb2.RUN_STATE_FAILED, "CHILD_FAILED")
    with refused("PARENT_DECIDED", grpc.StatusCode.FAILED_PRECONDITION) as refusal:
        await ask(api, "RetryRun", task.task.run_id)
    assert parent_id in refusal.error.message
    assert (await ask(api, "RetryRun", parent_id)).state != run_pb2.RUN_STATE_FAILED
    again = await worker.task()
    assert again.task.run_id != task.task.run_id, "the parent is what goes on, with another child"
