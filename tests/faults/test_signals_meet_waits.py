"""Signals and the waits for them come at the same moment, by two connections, each to another server: every wait gets
its signal, and every signal its wait (row 6 of the field's failures).

10,000 of each with SIGNALS_AND_WAITS=10000; a tenth of that else.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import LiteralString

from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from fencepost_server.domain.model import EventType
from tests.engine.flows import step, workflow
from tests.faults.scene import STAYING, Scene, count
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.raw_worker import OK, RawWorker
from tests.fixtures.servers import StartServerProcess

ROUNDS = 10
TAKEN: LiteralString = f"event where type = {EventType.SIGNAL_TAKEN:d}"
RUNS = int(os.environ.get("SIGNALS_AND_WAITS", "1000")) // ROUNDS


def rounds() -> str:
    """A step, a wait, a step, a wait …: the end of each step begins the next wait."""
    nodes = [(step("a") | {"id": f"a{n}"}, {"id": f"w{n}", "wait_signal": "go"}) for n in range(ROUNDS)]
    return workflow(*(node for pair in nodes for node in pair))


async def test_signals_that_come_as_their_waits_begin_are_all_taken_and_nothing_hangs(
    scene: Scene, server_process: StartServerProcess
) -> None:
    servers = [server_process(scene.dsn, wait=False, **STAYING) for _ in range(2)]
    for server in servers:
        await asyncio.to_thread(server.wait_serving)
    here, there = (scene.api(server.grpc_address) for server in servers)
    await here.register(rounds())
    worker = await scene.raw(servers[0].grpc_address, handlers=["a"], capacity=RUNS)
    results = await here.start_many([here.start_request() for _ in range(RUNS)])
    run_ids = [result.started.run_id for result in results]
    for number in range(ROUNDS):
        tasks = {task.task.run_id: task for task in await worker.tasks(RUNS, 30)}
        assert set(tasks) == set(run_ids), "a run hangs"
        await _meet(worker, list(tasks.values()), there if number % 2 else here, number)
    for run_id in run_ids:
        assert (await here.wait(run_id, 30)).state == run_pb2.RUN_STATE_COMPLETED
    for run_id in random.sample(run_ids, 20):
        _check_each_once(await here.history(run_id))
    assert await count(scene.dsn, TAKEN) == RUNS * ROUNDS
    assert await count(scene.dsn, "signal") == await count(scene.dsn, "wait") == 0


async def _meet(worker: RawWorker, tasks: list[pb.Task], api: Api, number: int) -> None:
    """Let the waits of all runs begin while their signals come, in no order."""

    async def complete(some: list[pb.Task]) -> None:
        assert {result.outcome for result in await worker.complete_all([(task, "null") for task in some])} == {OK}

    async def signal(task: pb.Task) -> None:
        request = run_service_pb2.SignalRunRequest(
            run_id=task.task.run_id, signal_name="go", payload=Payload(json=json.dumps(number))
        )
        await api.runs.SignalRun(request, timeout=DEADLINE)

    random.shuffle(tasks)
    work = [complete(tasks[at : at + 10]) for at in range(0, len(tasks), 10)] + [signal(task) for task in tasks]
    random.shuffle(work)
    await asyncio.gather(*work)


def _check_each_once(events: list[run_pb2.Event]) -> None:
    """The waits of a run took its signals in their order, each once."""
    waits = [event.seq for event in events if event.HasField("signal_awaited")]
    signals = [event.seq for event in events if event.HasField("signal_received")]
    taken = [event.signal_taken for event in events if event.HasField("signal_taken")]
    assert [event.wait_seq for event in taken] == waits
    assert [event.signal_seq for event in taken] == signals
    assert [json.loads(events[seq - 1].signal_received.payload.json) for seq in signals] == list(range(ROUNDS))
