"""The worker that docs/protocol.md shows keeps the page's rules: over broken streams, lost answers and shutdowns."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.docs.pages import blocks
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.processes import START_TIMEOUT, Process
from tests.fixtures.proxy import Proxy
from tests.fixtures.raw_worker import OPTIONS
from tests.fixtures.refusals import decode
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

QUICK = {"disconnect_grace": 20.0, "heartbeat_interval": 0.3}

# In place of the page's steps: one that notes that it has begun, and ends when it is let go.
GATED = """
def gated(value):
    with open("begun", "a") as file:
        file.write("x")
    while not os.path.exists("go"):
        time.sleep(0.01)
    return float("nan") if value == "nan" else value

import os
STEPS = {"s1": gated}
"""

StartWorker = Callable[[str], Process]


@pytest.fixture
def start_worker(tmp_path: Path, python_process: Callable[..., Process]) -> StartWorker:
    """Starts the page's worker with the gated step: ``start_worker(address)``."""
    code = next(block.text for block in blocks("docs/protocol.md") if block.value == "worker.py")
    changed, count = re.subn(r"^STEPS = .*\n", lambda _: GATED, code, flags=re.MULTILINE)
    assert count == 1
    (tmp_path / "worker.py").write_text(changed, "utf-8")
    return lambda address: python_process("-X", "dev", "worker.py", address, cwd=tmp_path)


async def begun(tmp_path: Path) -> None:
    """Wait until the step has begun."""
    await eventually((tmp_path / "begun").exists, START_TIMEOUT)


def attempts(tmp_path: Path) -> int:
    return len((tmp_path / "begun").read_text())


async def test_a_stream_that_breaks_amid_a_step_costs_no_attempt(
    in_process_server: StartInProcessServer,
    connect_api: Callable[[str], Api],
    new_proxy: Callable[[str], Proxy],
    start_worker: StartWorker,
    tmp_path: Path,
    dsn: str,
) -> None:
    server = await in_process_server(dsn, ping_interval=2.0, **QUICK)
    proxy = new_proxy(server.grpc_address)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1))
    worker = start_worker(proxy.address)
    run = await api.start(input='"x"')
    await begun(tmp_path)
    (first,) = server.app.engine.dispatcher.sessions
    proxy.reset()
    second = await eventually(lambda: [it for it in server.app.engine.dispatcher.sessions if it is not first])
    # Heartbeats over the new stream carry its lease on, and pongs keep that stream.
    moment = await lease_end(api, run.run_id)
    await eventually(later_than(api, run.run_id, moment, by=1.2), 30)
    await eventually(lambda: second[0]._pulse._pong > 0, 30, what="a ping is answered over the new stream")
    assert list(server.app.engine.dispatcher.sessions) == second
    (tmp_path / "go").touch()
    ended = await api.wait(run.run_id)
    assert (ended.state, ended.output.json) == (run_pb2.RUN_STATE_COMPLETED, '"x"')
    assert attempts(tmp_path) == 1
    assert await asyncio.to_thread(worker.terminate) == 0
    # asyncio's debug mode tells of each step that took long, as any may where all CPUs are busy.
    assert re.sub(r"^Executing .+ took [\d.]+ seconds\n", "", worker.logs, flags=re.MULTILINE) == ""


async def lease_end(api: Api, run_id: str) -> float:
    """When the lease of the run's one step runs out, in seconds since 1970; it is LEASED."""
    (step,) = (await api.get(run_id)).open_steps
    assert step.state == run_pb2.STEP_STATE_LEASED
    return step.lease_expire_time.ToDatetime().timestamp()


def later_than(api: Api, run_id: str, moment: float, *, by: float) -> Callable[[], object]:
    async def is_later() -> bool:
        return await lease_end(api, run_id) > moment + by

    return is_later


async def test_an_outcome_whose_answer_was_lost_is_told_again_and_counts_once(
    in_process_server: StartInProcessServer,
    connect_api: Callable[[str], Api],
    new_proxy: Callable[[str], Proxy],
    start_worker: StartWorker,
    tmp_path: Path,
    dsn: str,
) -> None:
    server = await in_process_server(dsn, **QUICK)
    proxy = new_proxy(server.grpc_address)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1))
    worker = start_worker(proxy.address)
    run = await api.start(input='"x"')
    await begun(tmp_path)
    proxy.blackhole("down")
    (tmp_path / "go").touch()
    ended = await api.wait(run.run_id)
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    proxy.reset()
    proxy.heal()
    # It still holds the step, for all it knows, and gets rid of it only by an answer.
    assert await asyncio.to_thread(worker.terminate) == 0
    events = await api.history(run.run_id)
    assert [event.WhichOneof("kind") for event in events].count("step_completed") == 1
    assert attempts(tmp_path) == 1


async def test_a_worker_that_is_told_to_end_finishes_its_step_first(
    in_process_server: StartInProcessServer,
    connect_api: Callable[[str], Api],
    start_worker: StartWorker,
    tmp_path: Path,
    dsn: str,
) -> None:
    server = await in_process_server(dsn, **QUICK)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1, retry={"max_attempts": 1}))
    worker = start_worker(server.grpc_address)
    run = await api.start(input='"nan"')
    await begun(tmp_path)
    worker.signal(signal.SIGTERM)
    (session,) = server.app.engine.dispatcher.sessions
    await eventually(lambda: session.room() == 0, what="it has said Goodbye")
    later = await api.start(input='"x"')
    (tmp_path / "go").touch()
    assert await asyncio.to_thread(worker.wait) == 0
    failure = (await api.wait(run.run_id)).failure
    assert failure.code == "ValueError", "what is no JSON is a failure, not a lost step"
    (step,) = (await api.get(later.run_id)).open_steps
    assert (step.state, step.attempt) == (run_pb2.STEP_STATE_READY, 0)


async def rest_of(call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]) -> None:
    """Read until the stream ends. Raises AioRpcError if it does not end well."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_worker_that_breaks_the_protocol_is_always_told_why(server: InProcessServer) -> None:
    async def reason() -> str:
        async with grpc.aio.insecure_channel(server.grpc_address, options=OPTIONS) as channel:
            call = WorkerServiceStub(channel).Session(timeout=30)
            hello = pb.Hello(
                protocol_version=1, worker_name="w", process_nonce="n" * 16, handlers=[pb.Handler(name="s1")]
            )
            # The second comes while the answer to the first is being written.
            for _ in range(2):
                await call.write(pb.SessionRequest(frame_id=1, hello=hello))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rest_of(call)
        return decode(refused.value).reason

    for _ in range(10):
        assert set(await asyncio.gather(*(reason() for _ in range(10)))) == {"FRAME_OUT_OF_ORDER"}
