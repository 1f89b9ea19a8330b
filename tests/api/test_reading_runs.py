"""GetRun, ListRuns, GetHistory, WaitRun and WatchRun: what they show, and when."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from fencepost.v1 import definition_service_pb2 as definition_pb
from fencepost.v1 import run_pb2
from fencepost.v1 import run_service_pb2 as pb
from fencepost_server.store import runs as stored_runs
from tests.engine.rows import execute
from tests.engine.tasks import end
from tests.fixtures.api import DEADLINE, Api, kinds
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import OK, RawWorker, seconds
from tests.fixtures.refusals import refused
from tests.fixtures.servers import PATIENT, InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

Connect = Callable[[str], Api]
ConnectWorker = Callable[..., Awaitable[RawWorker]]
NOBODY = "00000000-0000-4000-8000-000000000000"


async def test_a_run_is_found_as_soon_as_its_start_has_returned(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """I1, and row 32 of the field's failures: by id, by key and in lists, from the other server too."""
    servers = [await in_process_server(dsn, **PATIENT) for _ in range(2)]
    apis = [connect_api(server.grpc_address) for server in servers]
    await apis[0].register(manifest())

    async def start_and_look(n: int) -> None:
        run_id = (await apis[n % 2].start(request_key=f"{n}")).run_id
        other = apis[(n + n // 2) % 2]
        assert (await other.get(run_id)).run_id == run_id
        key = pb.RequestKey(workflow_id="wf", request_key=f"{n}")
        found = await other.runs.GetRun(pb.GetRunRequest(request_key=key), timeout=DEADLINE)
        assert found.run.run_id == run_id
        newest = await other.runs.ListRuns(pb.ListRunsRequest(page_size=50), timeout=DEADLINE)
        assert run_id in [run.run_id for run in newest.runs]

    for n in range(0, 200, 20):
        await asyncio.gather(*(start_and_look(n + i) for i in range(20)))


async def test_lists_have_the_newest_first_in_pages_of_any_size(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    for workflow_id in ("a", "b"):
        await api.register(manifest(workflow_id=workflow_id))
    started = await api.start_many([api.start_request("ab"[n % 2]) for n in range(23)])
    worker = await connect_worker(server.grpc_address, capacity=5)
    done = [task.task.run_id for task in await worker.tasks(5)]
    await worker.goodbye()
    for ref in list(worker.held.values()):
        assert (await worker.complete(ref)).outcome == OK
    everything = await api.list_all()
    assert {run.run_id for run in everything} == {result.started.run_id for result in started}
    times = [run.create_time.ToNanoseconds() for run in everything]
    assert times == sorted(times, reverse=True)
    assert all(not run.HasField("input") and not run.open_steps for run in everything)
    completed, pending = run_pb2.RUN_STATE_COMPLETED, run_pb2.RUN_STATE_PENDING
    for size in (1, 2, 7, 22, 23, 24):
        pages = await api.list_all(page_size=size)
        assert [run.run_id for run in pages] == [run.run_id for run in everything]
        some = await api.list_all(page_size=size, states=[completed])
        assert sorted(run.run_id for run in some) == sorted(done)
        rest = await api.list_all(page_size=size, workflow_id="a", states=[pending])
        expected = [r.run_id for r in everything if r.workflow_id == "a" and r.run_id not in done]
        assert [run.run_id for run in rest] == expected
    assert await api.list_all(workflow_id="c") == await api.list_all(namespace="other") == []


async def test_runs_started_while_pages_are_read_neither_repeat_nor_hide_others(api: Api) -> None:
    await api.register(manifest())
    before = [(await api.start()).run_id for _ in range(10)]
    page = await api.runs.ListRuns(pb.ListRunsRequest(page_size=4), timeout=DEADLINE)
    seen = [run.run_id for run in page.runs]
    while page.next_page_token:
        await api.start()
        request = pb.ListRunsRequest(page_size=4, page_token=page.next_page_token)
        page = await api.runs.ListRuns(request, timeout=DEADLINE)
        seen += [run.run_id for run in page.runs]
    assert sorted(seen) == sorted(before)


async def test_a_page_of_runs_that_failed_at_length_fits_into_a_message(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """I12: a client takes messages of 4 MiB unless told otherwise."""
    await api.register(manifest())
    await api.start_many([api.start_request() for _ in range(130)])
    worker = await connect_worker(server.grpc_address, capacity=130)
    large = json.dumps("x" * 900_000)
    for n, task in enumerate(await worker.tasks(130)):
        feedback = large if n < 8 else None
        await worker.fail(task, run_pb2.FAILURE_KIND_PERMANENT, message="😀" * 10_000, feedback=feedback)
    token, sizes, seen = "", [], set()
    while True:
        request = pb.ListRunsRequest(page_size=1000, page_token=token)
        page = await api.runs.ListRuns(request, timeout=DEADLINE)
        sizes.append(page.ByteSize())
        seen |= {run.run_id for run in page.runs}
        assert all(run.failure.code == "TEST" for run in page.runs)
        token = page.next_page_token
        if not token:
            break
    assert max(sizes) < 3 << 20
    assert len(seen) == 130


BAD_TOKENS = {
    "no base64": "!",
    "no JSON": base64.b64encode(b"{").decode(),
    "no list": base64.b64encode(b"1").decode(),
    "another list's": base64.b64encode(b'["other", 1]').decode(),
    "nested without end": base64.b64encode(b"[" * 100_000).decode(),
    "a huge number": base64.b64encode(b'["runs", ' + b"9" * 10_000 + b"]").decode(),
}


def token(*values: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")


async def test_a_history_is_read_from_after_an_event_on(api: Api) -> None:
    """As a worker does, which knows the first ones; the pages that follow have their tokens."""
    await api.register(manifest(1))
    run_id = (await api.start()).run_id
    for after, seqs in ((0, [1, 2]), (1, [2]), (2, []), (1 << 61, [])):
        request = pb.GetHistoryRequest(run_id=run_id, after_seq=after)
        page = await api.runs.GetHistory(request, timeout=DEADLINE)
        assert [event.seq for event in page.events] == seqs
    for after in (-1, 1 << 62):
        with refused("INVALID_REQUEST") as refusal:
            await api.runs.GetHistory(pb.GetHistoryRequest(run_id=run_id, after_seq=after), timeout=DEADLINE)
        assert refusal.error.paths == ["after_seq"]


async def test_a_page_token_that_was_not_issued_for_the_list_is_refused(api: Api) -> None:
    await api.register(manifest())
    run_id = (await api.start()).run_id
    at = "2026-01-01T00:00:00+00:00"
    of_runs = [
        token("runs", at),
        token("runs", at, 1),
        token("runs", at, "no uuid"),
        token("runs", "no time", NOBODY),
        token("runs", "2026-01-01T00:00:00", NOBODY),
        token("runs", at, "\ud800"),
    ]
    of_history = [token("history", run_id, -1), token("history", run_id, 1 << 63), token("history", NOBODY, 1)]
    of_definitions = [
        token("definitions", "wf", at, "xyz"),
        token("definitions", "\ud800", at, "00"),
        token("definitions", "\0", at, "00"),
    ]
    for text in [*BAD_TOKENS.values(), *of_runs]:
        with refused("INVALID_PAGE_TOKEN", grpc.StatusCode.INVALID_ARGUMENT):
            await api.runs.ListRuns(pb.ListRunsRequest(page_token=text), timeout=DEADLINE)
    for text in [*BAD_TOKENS.values(), *of_history]:
        with refused("INVALID_PAGE_TOKEN", grpc.StatusCode.INVALID_ARGUMENT):
            await api.runs.GetHistory(pb.GetHistoryRequest(run_id=run_id, page_token=text), timeout=DEADLINE)
    for text in [*BAD_TOKENS.values(), *of_definitions]:
        with refused("INVALID_PAGE_TOKEN", grpc.StatusCode.INVALID_ARGUMENT):
            request = definition_pb.ListDefinitionsRequest(page_token=text)
            await api.definitions.ListDefinitions(request, timeout=DEADLINE)


async def test_what_does_not_exist_is_told_so_whoever_asks(api: Api) -> None:
    """I14: another namespace's run does not exist."""
    await api.register(manifest(), namespace="one")
    run_id = (await api.start(namespace="one")).run_id

    async def watch(run_id: str) -> None:
        async for _ in api.watch(run_id):
            pass

    for unknown in (NOBODY, run_id):
        for call in (api.get, api.wait, api.history, watch):
            with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND) as refusal:
                await call(unknown)
            assert unknown in refusal.error.message
    assert (await api.get(run_id.upper(), namespace="one")).run_id == run_id


async def test_requests_to_read_are_told_all_of_their_faults(api: Api) -> None:
    requests: list[tuple[Callable[..., Awaitable[Any]], Any, list[str]]] = [
        (api.runs.GetRun, pb.GetRunRequest(namespace="ä", run_id="x"), ["namespace", "run_id"]),
        (api.runs.GetRun, pb.GetRunRequest(), ["run_id"]),
        (
            api.runs.GetRun,
            pb.GetRunRequest(request_key=pb.RequestKey(user_id="\0")),
            ["request_key.workflow_id", "request_key.user_id", "request_key.request_key"],
        ),
        (api.runs.ListRuns, pb.ListRunsRequest(page_size=1001, states=[99]), ["states[0]", "page_size"]),  # type: ignore[list-item]  # no state
        (api.runs.ListRuns, pb.ListRunsRequest(page_size=-1), ["page_size"]),
        (api.runs.GetHistory, pb.GetHistoryRequest(run_id="", page_size=2000), ["run_id", "page_size"]),
        (api.runs.WaitRun, pb.WaitRunRequest(run_id="-", timeout=seconds(-1)), ["run_id", "timeout"]),
        (api.runs.WaitRun, pb.WaitRunRequest(run_id=NOBODY, timeout=seconds(301)), ["timeout"]),
    ]
    for call, request, paths in requests:
        with refused("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
            await call(request, timeout=DEADLINE)
        assert refusal.error.paths == paths
    for after_seq in (-1, 1 << 62):
        with refused("INVALID_REQUEST") as refusal:
            await anext(api.watch(NOBODY, after_seq=after_seq))
        assert refusal.error.violations == (("after_seq", "must be between 0 and 2^62"),)


async def test_a_history_is_read_in_pages_of_any_size(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(4))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=handler_names(4))
    for n in range(4):
        await worker.complete(await worker.task(), str(n))
    whole = await api.history(run_id)
    assert len(whole) == 10
    for size in (1, 3, 9, 10, 11):
        assert await api.history(run_id, page_size=size) == whole
    first = await api.runs.GetHistory(pb.GetHistoryRequest(run_id=run_id, page_size=10), timeout=DEADLINE)
    assert first.next_page_token == ""


async def test_a_page_of_history_ends_before_it_is_too_large_for_a_message(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """I12."""
    await api.register(manifest(6))
    large = json.dumps("ä" * 450_000, ensure_ascii=False)
    run_id = (await api.start(input=large)).run_id
    worker = await connect_worker(server.grpc_address, handlers=handler_names(6))
    for _ in range(6):
        await worker.complete(await worker.task(), large)
    events: list[run_pb2.Event] = []
    token, pages = "", 0
    while True:
        request = pb.GetHistoryRequest(run_id=run_id, page_size=1000, page_token=token)
        page = await api.runs.GetHistory(request, timeout=DEADLINE)
        assert page.ByteSize() < 3 << 20
        events += page.events
        pages += 1
        token = page.next_page_token
        if not token:
            break
    assert [event.seq for event in events] == list(range(1, 15))
    assert pages > 2
    assert [event.seq async for event in api.watch(run_id)] == list(range(1, 15))


async def test_wait_returns_at_the_end_of_the_run_or_of_its_timeout(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """From the server where it ends and from another one, which only polls (I10)."""
    servers = [await in_process_server(dsn, poll_interval=0.1) for _ in range(2)]
    apis = [connect_api(server.grpc_address) for server in servers]
    await apis[0].register(manifest())
    run_id = (await apis[0].start()).run_id
    for api, timeout in itertools.product(apis, (0.0, 0.2)):
        began = time.monotonic()
        request = pb.WaitRunRequest(run_id=run_id, timeout=seconds(timeout))
        answer = await api.runs.WaitRun(request, timeout=DEADLINE)
        assert not answer.ended
        assert answer.run.state == run_pb2.RUN_STATE_PENDING
        assert timeout <= time.monotonic() - began < timeout + 20
    waiting = [asyncio.create_task(api.wait(run_id)) for api in apis for _ in range(2)]
    worker = await connect_worker(servers[0].grpc_address)
    await worker.complete(await worker.task(), "7")
    for run in await asyncio.gather(*waiting):
        assert (run.state, run.output.json) == (run_pb2.RUN_STATE_COMPLETED, "7")
    request = pb.WaitRunRequest(run_id=run_id, timeout=seconds(0))
    assert (await apis[1].runs.WaitRun(request, timeout=DEADLINE)).ended


async def test_a_wait_that_times_out_tells_the_run_as_it_is_then_and_not_as_it_was_at_first(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(2))
    worker = await connect_worker(server.grpc_address, handlers=["s1"])

    async def answer_after_a_step(timeout: float) -> pb.WaitRunResponse | None:
        run_id = (await api.start()).run_id
        task = await worker.task()
        waiting = api.runs.WaitRun(pb.WaitRunRequest(run_id=run_id, timeout=seconds(timeout)), timeout=DEADLINE)
        await eventually(lambda: run_id in server.app.engine.watches.run_ids)
        await worker.complete(task, "2")
        return None if waiting.done() else await waiting

    answer = None
    for timeout in (0.3, 3.0, 10.0):  # the first is enough, unless the machine is busy
        answer = answer or await answer_after_a_step(timeout)
    assert answer is not None
    assert not answer.ended
    assert answer.run.state == run_pb2.RUN_STATE_RUNNING
    assert [step.node_id for step in answer.run.open_steps] == ["n2"]


async def test_watch_gives_events_as_they_come_and_ends_after_the_last(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """From another server than the one that the worker is on (I10)."""
    servers = [await in_process_server(dsn, poll_interval=0.1) for _ in range(2)]
    apis = [connect_api(server.grpc_address) for server in servers]
    await apis[0].register(manifest(2))
    run_id = (await apis[0].start()).run_id
    watches = [apis[0].watch(run_id), apis[1].watch(run_id), apis[1].watch(run_id, after_seq=1)]
    assert [(await anext(watch)).seq for watch in watches] == [1, 1, 2]
    worker = await connect_worker(servers[0].grpc_address, handlers=handler_names(2))
    await worker.complete(await worker.task())
    for watch in watches:
        async for event in watch:
            if event.WhichOneof("kind") == "step_completed":
                break
    await worker.complete(await worker.task())
    rest = [[event.seq async for event in watch] for watch in watches]
    assert rest == [[4, 5, 6]] * 3
    for after in range(8):
        expected = list(range(after + 1, 7))
        assert [event.seq async for event in apis[1].watch(run_id, after_seq=after)] == expected


async def test_a_watch_ends_although_the_run_ended_between_its_two_reads(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Connect,
    connect_worker: ConnectWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I10: nobody tells the second server of the end, which it saw among the events and not yet in the run."""
    servers = [await in_process_server(dsn, poll_interval=0.1) for _ in range(2)]
    apis = [connect_api(server.grpc_address) for server in servers]
    await apis[0].register(manifest(2))
    run_id = (await apis[0].start()).run_id
    worker = await connect_worker(servers[0].grpc_address, handlers=handler_names(2))
    first = await worker.task()
    watch = apis[1].watch(run_id, timeout=30)
    events = [await anext(watch), await anext(watch)]
    read_history = stored_runs.history

    async def late(*arguments: Any) -> Any:
        """The run has been read; it ends before its events are."""
        monkeypatch.setattr(stored_runs, "history", read_history)
        await worker.complete(await worker.task())
        return await read_history(*arguments)

    monkeypatch.setattr(stored_runs, "history", late)
    await worker.complete(first)
    events += [event async for event in watch]
    assert kinds(events)[-1] == "run_completed"


async def test_no_more_calls_wait_than_may(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """I12."""
    server = await in_process_server(dsn, max_waiters=2)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    run_id, other = [(await api.start()).run_id for _ in range(2)]
    waiting = [asyncio.create_task(api.wait(awaited)) for awaited in (run_id, other)]
    await eventually(lambda: len(server.app.engine.watches.run_ids) == 2)
    with refused("OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED) as refusal:
        await anext(api.watch(run_id))
    assert refusal.error.retry_after
    with refused("OVERLOADED"):
        await api.wait(run_id)
    waiting[0].cancel()

    async def fits() -> bool:
        request = pb.WaitRunRequest(run_id=run_id, timeout=seconds(0))
        try:
            return not (await api.runs.WaitRun(request, timeout=DEADLINE)).ended
        except grpc.aio.AioRpcError:
            return False

    await eventually(fits)
    await end(waiting)


async def test_a_running_run_shows_its_open_step_and_what_became_of_its_attempts(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(2, nodes={"n2": {"retry": {"initial_delay": "1m", "jitter": 0}}}))
    run_id = (await api.start(input="1", user_id="u", request_key="k", priority=2)).run_id
    run = await api.get(run_id)
    assert (run.state, run.user_id, run.request_key, run.priority) == (run_pb2.RUN_STATE_PENDING, "u", "k", 2)
    [step] = run.open_steps
    assert (step.node_id, step.handler, step.queue, step.attempt) == ("n1", "s1", "default", 0)
    assert step.state == run_pb2.STEP_STATE_READY
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2), worker_name="w")
    task = await worker.task()
    [step] = (await api.get(run_id)).open_steps
    assert (step.state, step.attempt, step.worker_name) == (run_pb2.STEP_STATE_LEASED, 1, "w")
    assert step.lease_expire_time.ToNanoseconds() > time.time_ns() + 50e9
    await worker.complete(task, "2")
    await worker.fail(await worker.task(), code="BUSY", message="later")
    run = await api.get(run_id)
    [step] = run.open_steps
    assert (step.state, step.attempt, step.operational_failures) == (run_pb2.STEP_STATE_RETRYING, 1, 1)
    assert (step.last_failure.code, step.last_failure.node_id, step.last_failure.attempt) == ("BUSY", "n2", 1)
    assert step.ready_time.ToNanoseconds() > time.time_ns() + 50e9
    assert (run.state, run.last_seq, run.HasField("output")) == (run_pb2.RUN_STATE_RUNNING, 5, False)


async def test_a_run_shows_no_output_before_it_shows_its_end(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """Run and output are read one after the other: here the run was read before its end, the output after it."""
    await api.register(manifest())
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address)
    await worker.complete(await worker.task(), "1")
    await execute(dsn, "update run set ended_at = null, state = 2")
    run = await api.get(run_id)
    assert not run.HasField("output")
