"""A worker can't take back what it has not got yet, and would run the step: so one that is stopped in the transaction
that leases it is given to nobody. What else is said of a lease comes behind the frame that gave it: see the tests of
sessions by themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.run_service_pb2 import CancelRunRequest, SignalRunRequest, TerminateRunRequest
from tests.engine.flows import state_of
from tests.engine.rows import holding
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually, until_blocked


class Listening(RawWorker):
    """A worker that knows in which order frames came."""

    kinds: list[str]

    async def _received(self, call: Any, response: pb.SessionResponse) -> None:
        self.kinds.append(str(response.WhichOneof("frame")))
        await super()._received(call, response)


HOLD = "select 1 from run where run_id = %s for update"


@pytest.mark.parametrize("ends", ["Terminate", "Cancel"])
async def test_a_task_that_is_taken_back_as_it_is_given_is_given_to_nobody(
    in_process_server: StartInProcessServer,
    connect_api: Callable[[str], Api],
    dsn: str,
    ends: str,
) -> None:
    # What waits for the lock does so until the test frees it, however long that takes.
    server = await in_process_server(dsn, lanes=1, lock_timeout=30, statement_timeout=60, batch_timeout=60)
    api = connect_api(server.grpc_address)
    await api.register(manifest(2))
    await api.register(manifest(1, workflow_id="other"))
    run_id = (await api.start()).run_id
    worker = Listening(server.grpc_address, handlers=["s1", "s2"], capacity=1)
    worker.kinds = []
    try:
        await worker.connect()
        await _end_as_it_goes_on(server, api, worker, ends, run_id, dsn)
    finally:
        await worker.close()


async def _end_as_it_goes_on(
    server: InProcessServer, api: Api, worker: Listening, ends: str, run_id: str, dsn: str
) -> None:
    first = await worker.task()
    other = (await api.start("other")).run_id
    lane = server.app.engine.lanes[0]
    async with holding(dsn, HOLD, [other]):
        waiting = asyncio.create_task(_of(api, other))
        await until_blocked(dsn)
        frame_id = await worker.send(pb.Complete(items=[pb.CompleteItem(task=first.task)]))
        await eventually(lambda: lane.depth == 1)
        ending = asyncio.create_task(_of(api, run_id, ends))
        await eventually(lambda: lane.depth == 2)
    await asyncio.gather(waiting, ending)
    await worker.results(frame_id, 1)
    assert state_of(await api.get(run_id)) == ("TERMINATED" if ends == "Terminate" else "CANCELLED")
    assert (await worker.task()).task.run_id == other
    assert [kind for kind in worker.kinds if kind in ("tasks", "revoke", "cancel")] == ["tasks", "tasks"]


async def _of(api: Api, run_id: str, what: str = "Signal") -> Message:
    """Signal, cancel or terminate a run."""
    if what == "Cancel":
        cancelled: Message = await api.runs.CancelRun(CancelRunRequest(run_id=run_id), timeout=DEADLINE)
        return cancelled
    if what == "Terminate":
        terminated: Message = await api.runs.TerminateRun(TerminateRunRequest(run_id=run_id), timeout=DEADLINE)
        return terminated
    signalled: Message = await api.runs.SignalRun(SignalRunRequest(run_id=run_id, signal_name="x"), timeout=DEADLINE)
    return signalled
