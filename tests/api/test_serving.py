"""What a server tells of itself: health, reflection, readiness, metrics, and ports that are taken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fencepost.v1 import run_service_pb2 as pb
from fencepost_server.api.server import SERVICES, PortInUse
from fencepost_server.engine import backlog as counting
from fencepost_server.engine import reading
from fencepost_server.engine.engine import Engine
from fencepost_server.engine.reading import RunView
from fencepost_server.store import cluster
from fencepost_server.web.app import HttpPortInUse
from tests.engine.rows import execute, holding
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.refusals import refused
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

ConnectWorker = Callable[..., Awaitable[RawWorker]]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(api: Api, service: str = "") -> int:
    check: Any = api.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE)
    return int(answer.status)


async def healths(api: Api) -> dict[str, int]:
    """As `health`, of all services at once."""
    messages: Any = health_pb2  # the stubs lack some
    ask: Any = api.channel.unary_unary(
        "/grpc.health.v1.Health/List",
        request_serializer=messages.HealthListRequest.SerializeToString,
        response_deserializer=messages.HealthListResponse.FromString,
    )
    answer = await ask(messages.HealthListRequest(), timeout=DEADLINE)
    return {name: int(found.status) for name, found in answer.statuses.items()}


async def page(server: InProcessServer, path: str) -> tuple[int, str]:
    """Status and body of a page of the HTTP side."""

    def read() -> tuple[int, str]:
        try:
            with urlopen(f"http://127.0.0.1:{server.app.http.port}{path}", timeout=30) as response:
                return response.status, response.read().decode()
        except OSError as error:
            return getattr(error, "code", 0), ""

    return await asyncio.to_thread(read)


async def test_a_server_is_healthy_and_ready_while_it_serves_and_not_while_it_drains(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Callable[[str], Api],
    connect_worker: ConnectWorker,
) -> None:
    server = await in_process_server(dsn, shutdown_grace=40)
    api = connect_api(server.grpc_address)

    async def serves() -> bool:
        return [await health(api, name) for name in ("", *SERVICES)] == [SERVING] * (1 + len(SERVICES))

    await eventually(serves)
    assert await healths(api) == dict.fromkeys(("", *SERVICES), SERVING)
    assert (await page(server, "/healthz"))[0] == (await page(server, "/readyz"))[0] == 200
    await api.register(manifest())
    await api.start()
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    stopping = asyncio.create_task(server.stop())

    async def drains() -> bool:
        return [await health(api, name) for name in ("", *SERVICES)] == [NOT_SERVING] * (1 + len(SERVICES))

    await eventually(drains)
    assert (await page(server, "/healthz"))[0] == 200
    assert (await page(server, "/readyz"))[0] == 503
    await worker.complete(task)
    await stopping


async def test_a_server_without_a_database_says_that_it_does_not_serve(
    server: InProcessServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serves() -> bool:
        return await health(api) == SERVING

    await eventually(serves)
    monkeypatch.setattr(type(server.app.engine), "healthy", False)

    async def does_not() -> bool:
        return await health(api) == NOT_SERVING and (await page(server, "/readyz"))[0] == 503

    await eventually(does_not)
    monkeypatch.undo()
    await eventually(serves)


async def test_reflection_tells_of_every_service_and_every_file_of_the_contract(api: Api) -> None:
    """So that grpcurl and buf curl work with no files."""
    info: Any = api.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def ask(**question: Any) -> Any:
        call = info(iter([reflection_pb2.ServerReflectionRequest(**question)]), timeout=DEADLINE)
        return await call.read()

    listed = {service.name for service in (await ask(list_services="")).list_services_response.service}
    assert {*SERVICES, "grpc.health.v1.Health"} <= listed
    for service in SERVICES:
        answer = await ask(file_containing_symbol=service)
        files = [FileDescriptorProto.FromString(data) for data in answer.file_descriptor_response.file_descriptor_proto]
        assert service.rsplit(".", 1)[1] in [s.name for file in files for s in file.service]


async def test_metrics_name_every_loop_and_lane(server: InProcessServer) -> None:
    status, text = await page(server, "/metrics")
    assert status == 200
    for loop in server.app.engine.loops:
        assert f'fencepost_loop_last_good_seconds{{loop="{loop.name}"}}' in text
    assert 'fencepost_lane_depth{lane="0"} 0.0' in text
    assert "fencepost_sessions 0.0" in text


async def test_events_are_counted_once_they_are_committed(server: InProcessServer, api: Api) -> None:
    await api.register(manifest())
    for _ in range(3):
        await api.start()
    _, text = await page(server, "/metrics")
    assert 'fencepost_events_total{type="RUN_STARTED"} 3.0' in text
    assert 'fencepost_events_total{type="STEP_SCHEDULED"} 3.0' in text
    assert 'fencepost_events_total{type="STEP_COMPLETED"} 0.0' in text


def backlog(text: str) -> dict[str, float]:
    """What the metrics say of READY tasks: each series with its value."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("fencepost_ready_")]
    return {series.removeprefix("fencepost_ready_"): float(value) for series, value in lines}


async def test_tasks_that_wait_for_a_worker_are_told_by_namespace_and_queue(
    server: InProcessServer, api: Api, dsn: str, connect_worker: ConnectWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is leased, parked or not due yet does not wait for one."""
    monkeypatch.setattr(counting, "_TIMEOUT", 30.0)
    engine = server.app.engine
    await engine.probe_once()
    assert backlog((await page(server, "/metrics"))[1]) == {}
    await api.register(manifest(1))
    slow = {"id": "slow", "compatibility_id": "1", "sequence": [{"id": "n", "step": "s2", "queue": "slow"}]}
    await api.register(json.dumps(slow))
    run_ids = [(await api.start()).run_id for _ in range(3)] + [(await api.start("slow")).run_id for _ in range(4)]
    parked, later = run_ids[-2:]
    await api.runs.PauseRun(pb.PauseRunRequest(run_id=parked), timeout=DEADLINE)
    await execute(dsn, "update task set visible_at = visible_at - interval '1 h' where run_id = %s", [run_ids[0]])
    await execute(dsn, "update task set visible_at = visible_at + interval '1 h' where run_id = %s", [later])
    worker = await connect_worker(server.grpc_address, handlers=["s1"], capacity=1)
    task = await worker.task()
    assert task.task.run_id == run_ids[0]
    await engine.probe_once()
    told = backlog((await page(server, "/metrics"))[1])
    ages = {series: value for series, value in told.items() if series.startswith("oldest")}
    assert {series: value for series, value in told.items() if series not in ages} == {
        'tasks{namespace="default",queue="default"}': 2,
        'tasks{namespace="default",queue="slow"}': 2,
    }
    assert ages.keys() == {f'oldest_seconds{{namespace="default",queue="{name}"}}' for name in ("default", "slow")}
    assert all(0 < age < 600 for age in ages.values())
    await execute(dsn, "update task set visible_at = visible_at - interval '1 h' where queue = 'slow'")
    told = backlog((await page(server, "/metrics"))[1])
    assert told['oldest_seconds{namespace="default",queue="slow"}'] > 3600


async def test_waiting_tasks_are_counted_up_to_a_limit_and_not_while_the_database_is_too_slow(
    server: InProcessServer, api: Api, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: a scrape costs a bounded look, and gets its other metrics in any case."""
    await api.register(manifest(1))
    for _ in range(3):
        await api.start()
    await server.app.engine.probe_once()
    monkeypatch.setattr(cluster, "MAX_COUNTED", 2)
    with monkeypatch.context() as patient:
        patient.setattr(counting, "_TIMEOUT", 30.0)
        text = (await page(server, "/metrics"))[1]
    assert 'fencepost_ready_tasks{namespace="default",queue="default"} 2.0' in text
    async with holding(dsn, "lock table task in access exclusive mode"):
        status, text = await page(server, "/metrics")
    assert (status, backlog(text)) == (200, {})
    assert "fencepost_healthy" in text


async def test_a_port_in_use_is_noticed_and_nothing_is_left_behind(
    in_process_server: StartInProcessServer, dsn: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            await in_process_server(dsn, grpc_port=port)
        with pytest.raises(HttpPortInUse, match=str(port)):
            await in_process_server(dsn, http_port=port)
    server = await in_process_server(dsn)
    with pytest.raises(PortInUse):
        await in_process_server(dsn, grpc_port=server.app.grpc.port)


async def test_an_address_that_is_not_of_this_machine_is_told_as_such(
    in_process_server: StartInProcessServer, dsn: str
) -> None:
    with pytest.raises(HttpPortInUse, match=r"can't listen on 203\.0\.113\.7:0: Cannot assign requested address"):
        await in_process_server(dsn, http_host="203.0.113.7", insecure=True)


async def test_an_address_of_ipv6_is_served_and_told_with_brackets_whether_or_not_it_is_set_with_them(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Callable[[str], Api]
) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    for host in ("::1", "[::1]"):
        server = await in_process_server(dsn, grpc_host=host, http_host=host)
        assert server.grpc_address == f"[::1]:{server.app.grpc.port}"
        assert server.app.http_address == f"[::1]:{server.app.http.port}"
        await connect_api(server.grpc_address).register(manifest())


async def test_a_message_past_every_limit_is_refused_and_the_server_goes_on(api: Api) -> None:
    """I12: gRPC's own limit, at twice that of a frame."""
    await api.register(manifest())
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await api.start(input='"' + "x" * (8 << 20) + '"')
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await api.start()).created


async def test_a_caller_that_goes_while_his_run_is_read_is_waited_for_no_more_though_the_driver_loses_that(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Callable[[str], Api],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = await in_process_server(dsn)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    run_id = (await api.start()).run_id
    read, reads = asyncio.Event(), reading.get

    async def loses_a_cancel(engine: Engine, namespace: str, run_id: str) -> RunView:
        view = await reads(engine, namespace, run_id)
        read.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return view

    monkeypatch.setattr(reading, "get", loses_a_cancel)
    call = asyncio.create_task(api.wait(run_id, 50))
    await asyncio.wait_for(read.wait(), 30)
    assert server.app.engine.watches.run_ids == [run_id]
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await eventually(lambda: not server.app.engine.watches.run_ids)


async def test_no_more_calls_are_open_than_may_and_who_is_refused_is_told_when_to_come_again(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Callable[[str], Api]
) -> None:
    """I12: gRPC's own limit told neither why nor until when."""
    server = await in_process_server(dsn, max_concurrent_calls=10)
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    run_ids = [(await api.start()).run_id for _ in range(10)]
    waiting = [asyncio.create_task(api.wait(run_id)) for run_id in run_ids]
    await eventually(lambda: len(server.app.engine.watches.run_ids) == 10)
    with refused("OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED) as refusal:
        await api.start()
    assert refusal.error.retry_after
    for call in waiting:
        call.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)

    async def taken() -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return (await api.start()).created
        return False

    await eventually(taken)


async def test_connections_that_ask_for_nothing_are_ended_and_take_no_room_from_health_checks(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fencepost_server.web import app

    monkeypatch.setattr(app, "_FIRST_REQUEST_TIMEOUT", 0.1)
    port = server.app.http.port
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
    idle[0][1].write(b"GET /healthz HTTP/1.1\r\nHost:")  # a request without an end is none
    try:

        async def healthy() -> bool:
            return (await page(server, "/healthz"))[0] == 200

        await eventually(healthy)
    finally:
        for _, writer in idle:
            writer.close()
