"""Lanes: a try that Postgres was still committing when it was repeated, and operations that were put off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.model import Payload
from fencepost_server.engine.operations import Started
from fencepost_server.engine.starting import StartRequest, make_start
from tests.engine.rows import count, holding
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually, until_blocked

FIRST_TRY = """
    insert into run (run_id, namespace, workflow_id, definition_hash, user_id, request_key, priority, state, node_index,
                     next_seq, last_event_at, created_at)
    select %(run_id)s, namespace, workflow_id, active_hash, '', '', 3, 1, 0, 1, now(), now() from deployment
"""


@pytest.fixture
async def server(in_process_server: StartInProcessServer, dsn: str) -> InProcessServer:
    """One that waits for no lock for long."""
    return await in_process_server(dsn, lanes=1, lock_timeout=0.3)


async def test_a_start_that_is_repeated_while_postgres_still_commits_its_first_try_is_answered_with_its_run(
    server: InProcessServer, api: Api, dsn: str
) -> None:
    """I1, I6: it waits for its own first try, and was told INTERNAL although the run had been made."""
    await api.register(manifest(1, workflow_id="wf"))
    start = make_start(StartRequest("default", "wf", None, Payload(json="null"), None, "", "", "", 3))
    start.again = True
    async with holding(dsn, FIRST_TRY, {"run_id": start.run_id}) as first_try:
        server.app.engine.lanes[0].submit_one(start)
        await until_blocked(dsn)
        await first_try.commit()
    outcome = await asyncio.wait_for(start.result, 30)
    assert isinstance(outcome, Started)
    assert (outcome.run_id, outcome.created) == (start.run_id, True)
    assert await count(dsn, "run") == 1


async def test_a_lane_is_not_drained_while_an_operation_waits_for_a_run_that_somebody_holds(
    server: InProcessServer, api: Api, connect_worker: Callable[..., Awaitable[RawWorker]], dsn: str
) -> None:
    """I13: a server that stops has written what was reported to it."""
    await api.register(manifest(1))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address)
    task = await worker.task()
    lane = server.app.engine.lanes[0]
    async with holding(dsn, "select from run for update"):
        before = lane.batches
        await worker.send(pb.Complete(items=[pb.CompleteItem(task=task.task)]))
        await eventually(lambda: lane.depth or lane.batches > before)
        drained = asyncio.create_task(lane.drain())
        await eventually(lambda: lane.batches >= before + 3)
        assert not drained.done()
    await asyncio.wait_for(drained, 30)
    assert (await api.get(run_id)).HasField("end_time")
