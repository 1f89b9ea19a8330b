"""What a run tells of why nothing happens to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fencepost.v1 import run_pb2
from tests.engine.rows import execute
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import StartInProcessServer
from tests.fixtures.waiting import eventually

ConnectWorker = Callable[..., Awaitable[RawWorker]]
READY, LEASED = run_pb2.STEP_STATE_READY, run_pb2.STEP_STATE_LEASED


async def shown(api: Api, run_id: str) -> tuple[int, str]:
    [step] = (await api.get(run_id)).open_steps
    return step.state, step.waiting_reason


async def test_a_step_tells_that_no_worker_of_any_server_takes_it(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Callable[[str], Api],
    connect_worker: ConnectWorker,
) -> None:
    first, second = [await in_process_server(dsn, poll_interval=0.05) for _ in range(2)]
    api = connect_api(first.grpc_address)
    await api.register(manifest(1))
    run_id = (await api.start()).run_id
    assert await shown(api, run_id) == (READY, "NO_WORKER")
    await connect_worker(second.grpc_address, handlers=["s2"])
    await connect_worker(second.grpc_address, handlers=[("s1", "another")])
    await connect_worker(second.grpc_address, handlers=["s1"], namespace="another")
    assert await shown(api, run_id) == (READY, "NO_WORKER"), "another handler, another queue, another namespace"
    assert (await api.get(run_id)).waiting_reason == "", "that is of code runs"
    worker = await connect_worker(second.grpc_address, handlers=["s2", "s1"], capacity=1)
    await worker.task()
    assert await shown(api, run_id) == (LEASED, "")
    busy = (await api.start()).run_id
    assert await shown(api, busy) == (READY, ""), "its worker is there, and has its hands full"
    await worker.drop()

    async def told() -> bool:
        return await shown(api, busy) == (READY, "NO_WORKER")

    await eventually(told)


async def test_nothing_is_said_of_workers_whose_server_is_of_an_older_release_or_gone(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Callable[[str], Api],
    connect_worker: ConnectWorker,
) -> None:
    """The older one does not write down what they take."""
    server = await in_process_server(dsn)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1))
    run_id = (await api.start()).run_id
    await connect_worker(server.grpc_address, handlers=["s2"])
    await execute(dsn, "update session set handlers = null, handler_queues = null")
    assert await shown(api, run_id) == (READY, "")
    await execute(
        dsn,
        "with gone as (insert into server (server_id, seen_at) values (gen_random_uuid(), now() - interval '1 h')"
        " returning server_id) update session set server_id = (select server_id from gone)",
    )
    assert await shown(api, run_id) == (READY, "NO_WORKER")
