"""Claims are bounded in bytes: large inputs come in several, and each task all the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.engine.rows import fetch
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import StartInProcessServer


async def test_a_claim_stops_at_its_bytes_and_the_next_one_goes_on(
    dsn: str,
    in_process_server: StartInProcessServer,
    connect_api: Callable[[str], Api],
    connect_worker: Callable[..., Awaitable[RawWorker]],
) -> None:
    """I12: what one transaction reads does not grow with how much a worker can take."""
    server = await in_process_server(dsn, claim_batch_bytes=30_000)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1))
    big = '"' + "x" * 10_000 + '"'
    started = await api.start_many([api.start_request(input=big) for _ in range(20)])
    await api.start_many([api.start_request(input='"' + "y" * 50_000 + '"')])  # larger than a claim may be: alone
    worker = await connect_worker(server.grpc_address, capacity=100)
    tasks = await worker.tasks(21)
    assert {result.started.run_id for result in started} <= {task.task.run_id for task in tasks}
    leased = await fetch(dsn, "select lease_expires_at, sum(input_bytes)::int, count(*)::int from task group by 1")
    # What came before the last task of a claim is below the limit.
    assert all(size < 30_000 + 50_002 for _, size, _ in leased)
    assert sum(number for _, _, number in leased) == 21
    assert len(leased) >= 6
