"""Servers of tests serve, in the test's loop or as processes that take real signals, and workers find
them again.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable

import grpc
import psutil
import pytest

from fencepost.v1.run_service_pb2 import ListRunsRequest
from tests.fixtures.api import Api, kinds
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.processes import environment
from tests.fixtures.proxy import Proxy
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, RawWorker
from tests.fixtures.refusals import decode, refused
from tests.fixtures.servers import InProcessServer, StartInProcessServer, StartServerProcess
from tests.fixtures.waiting import eventually

ConnectWorker = Callable[..., Awaitable[RawWorker]]


async def test_a_server_in_the_tests_loop_runs_a_workflow_to_its_end(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(2))
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    run_id = (await api.start(input="1")).run_id
    for step, output in (("n1", "2"), ("n2", "3")):
        task = await worker.task()
        assert (task.node_id, task.attempt) == (step, 1)
        assert (await worker.complete(task, output)).outcome == OK
        assert (await worker.complete(task, output)).outcome == ALREADY_DONE
        assert (await worker.complete(task, "9")).outcome == LEASE_LOST
    run = await api.wait(run_id)
    assert run.output.json == "3"
    events = await api.history(run_id, page_size=2)
    one = ["step_scheduled", "step_completed"]
    assert kinds(events) == ["run_started", *one, *one, "run_completed"]
    assert kinds([event async for event in api.watch(run_id, after_seq=2)]) == kinds(events)[2:]
    assert [found.run_id for found in await api.list_all(page_size=1)] == [run_id]


async def test_a_refusal_of_the_server_can_be_taken_apart(api: Api) -> None:
    with refused("UNKNOWN_WORKFLOW", grpc.StatusCode.NOT_FOUND):
        await api.start("nobody-knows")
    with refused("INVALID_MANIFEST", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await api.register('{"id": "x"}')
    assert len(refusal.error.violations) >= 2


async def test_two_servers_in_one_loop_share_a_database(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Callable[[str], Api],
    connect_worker: ConnectWorker,
) -> None:
    first, second = await in_process_server(dsn), await in_process_server(dsn, lanes=1)
    await connect_api(first.grpc_address).register(manifest())
    run_id = (await connect_api(first.grpc_address).start()).run_id
    worker = await connect_worker(second.grpc_address)
    assert (await worker.complete(await worker.task())).outcome == OK
    await connect_api(first.grpc_address).wait(run_id)
    await second.stop()
    await second.stop()


async def test_a_worker_comes_back_through_a_proxy_with_what_it_holds(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, new_proxy: Callable[[str], Proxy]
) -> None:
    proxy = new_proxy(server.grpc_address)
    worker = await connect_worker(proxy.address)
    await api.register(manifest())
    run_id = (await api.start()).run_id
    task = await worker.task()
    proxy.reset()
    error = await worker.ended()
    assert error is not None
    assert error.code is grpc.StatusCode.UNAVAILABLE
    welcome = await worker.reconnect()
    assert [result.kept for result in welcome.held] == [True]
    assert (await worker.complete(task)).outcome == OK
    await api.wait(run_id)


async def test_a_server_process_serves_again_on_its_ports_after_a_kill(
    server_process: StartServerProcess, dsn: str, connect_api: Callable[[str], Api]
) -> None:
    process = server_process(dsn, heartbeat_interval=1.0)
    api = connect_api(process.grpc_address)
    await api.register(manifest())
    run_id = (await api.start()).run_id
    address, pid = process.grpc_address, process.pid
    process.kill()
    assert process.returncode == -signal.SIGKILL
    process.restart()
    assert process.grpc_address == address
    assert process.pid != pid

    async def found() -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):  # the channel backs off before it connects again
            return (await api.get(run_id)).run_id == run_id
        return False

    await eventually(found, 30)


async def test_a_server_process_can_be_frozen_and_stopped(
    server_process: StartServerProcess, dsn: str, connect_api: Callable[[str], Api]
) -> None:
    process = server_process(dsn)
    api = connect_api(process.grpc_address)
    process.pause()
    with pytest.raises(grpc.aio.AioRpcError) as silence:
        await api.runs.ListRuns(ListRunsRequest(), timeout=0.3)
    assert decode(silence.value).code is grpc.StatusCode.DEADLINE_EXCEEDED
    process.resume()
    assert await api.list_all() == []
    assert process.terminate() == 0
    assert not psutil.pid_exists(process.pid)
    assert "stopped" in process.logs


def test_a_server_process_that_cannot_serve_says_so(server_process: StartServerProcess, fresh_dsn: str) -> None:
    with pytest.raises(RuntimeError, match=r"SCHEMA_VERSION_MISMATCH|migrate"):
        server_process(fresh_dsn)


def test_what_a_process_compiles_is_kept_for_the_next_one_whatever_the_environment_said() -> None:
    assert "PYTHONDONTWRITEBYTECODE" not in environment({})
    assert not sys.dont_write_bytecode, "nor is a test worker kept from it, which compiles all tests"
