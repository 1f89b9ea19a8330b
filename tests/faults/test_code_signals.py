"""Signals come in a stream to a run that continues as new over and over, and at the very time at which a local step
ends: each is handled once, in order, and a replay sees what was seen first.

Rows 42 and 54 of the field failures.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any

import pytest

from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1.payload_pb2 import Payload
from tests.engine.flows import state_of
from tests.faults.conftest import StartCodeWorker
from tests.faults.scene import QUICK, STAYING, Scene, fetch, until_count, until_printed
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import paced

SIGNALS, SENDERS, RATE, CHAIN_AFTER = 800, 4, 200, 100
RUNS, ROUNDS = 100, 5


async def send_numbers(apis: list[Api], run_id: str, first: int) -> None:
    """Every fourth number, at a quarter of the rate; the next one when the one before is known to be there."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for sent, number in enumerate(range(first, SIGNALS, SENDERS)):
        await paced(max(0.0, began + sent * SENDERS / RATE - loop.time()))
        request = run_service_pb2.SignalRunRequest(
            run_id=run_id, signal_name="number", payload=Payload(json=str(number)), request_id=f"{run_id}/{number}"
        )
        await apis[sent % len(apis)].runs.SignalRun(request, timeout=DEADLINE)


async def test_a_stream_of_signals_to_a_run_that_continues_as_new_is_handled_once_and_in_order(
    scene: Scene, server_process: StartServerProcess, code_process: StartCodeWorker
) -> None:
    """Row 42: 200 a second through two servers, a new run every 100, workers killed amid it."""
    settings = QUICK | {"disconnect_grace": 0.3}
    servers = [server_process(scene.dsn, wait=False, **settings) for _ in range(2)]
    for server in servers:
        await asyncio.to_thread(server.wait_serving)
    addresses = [server.grpc_address for server in servers]
    apis = [scene.api(address) for address in addresses]
    workers = [code_process(*addresses), code_process(*addresses, workflow_cache=0)]
    for worker in workers:
        await until_printed(worker, "connected")
    first = (await apis[0].start("chain", json.dumps({"handled": [], "total": SIGNALS}))).run_id
    sending = [asyncio.create_task(send_numbers(apis, first, number)) for number in range(SENDERS)]
    await until_count(scene.dsn, "run", 2, more=True)
    last = code_process(*addresses)
    await until_printed(last, "connected")
    for worker in workers:
        worker.kill()
    await asyncio.gather(*sending)
    ended = await apis[1].wait(first, 60)
    assert state_of(ended) == "COMPLETED", ended.failure
    handled = json.loads(ended.output.json)
    assert sorted(handled) == list(range(SIGNALS))
    for sender in range(SENDERS):
        assert [number for number in handled if number % SENDERS == sender] == list(range(sender, SIGNALS, SENDERS))
    runs = await fetch(scene.dsn, "select state from run")
    assert len(runs) == SIGNALS // CHAIN_AFTER
    assert await fetch(scene.dsn, "select * from signal") == []
    assert await asyncio.to_thread(last.terminate) == 0


def meetings(events: list[run_pb2.Event]) -> tuple[list[str], list[str]]:
    """What a history says of a run of the workflow meeting: what came first in each round, and what it did then."""
    arrived: dict[int, list[str]] = defaultdict(list)
    done: list[str] = []
    for event in events:
        if event.WhichOneof("kind") == "signal_received":
            arrived[int(event.signal_received.payload.json)].append("signal")
        elif event.WhichOneof("kind") == "local_step_ended":
            step = event.local_step_ended
            if step.name == "short":
                arrived[int(step.output.json)].append("step")
            else:
                done.append(step.name)
    return [f"{what} {number}" for number in sorted(arrived) for what in arrived[number]], done


@pytest.mark.parametrize(
    "options", [{"always_replay": True}, {"workflow_cache": 0}], ids=["after-each-event", "after-each-wait"]
)
async def test_a_local_step_never_overtakes_a_signal_that_was_numbered_before_it(
    scene: Scene, code_process: StartCodeWorker, options: dict[str, Any]
) -> None:
    """Row 54: five hundred times at once, and again. The worker forgets a run after each event, or whenever it waits:
    what it decides between, from memory, has to be what a replay decides.
    """
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    worker = code_process(server.grpc_address, **options)
    await until_printed(worker, "connected")
    requests = [api.start_request("meeting", str(ROUNDS)) for _ in range(RUNS)]
    run_ids = [result.started.run_id for result in await api.start_many(requests)]
    first: list[str] = []
    for run_id in run_ids:
        ended = await api.wait(run_id, 120)
        assert state_of(ended) == "COMPLETED", ended.failure
        order, done = meetings(await api.history(run_id))
        assert len(order) == 2 * ROUNDS
        assert json.loads(ended.output.json) == order
        came_first = [what.partition(" ")[0] for what in order[::2]]
        assert done == [f"{what}_was_first" for what in came_first]
        first += came_first
    # Else it was no race.
    assert min(first.count("signal"), first.count("step")) > len(first) // 20
    assert worker.events("not-sent") == []
    assert await asyncio.to_thread(worker.terminate) == 0
    assert worker.events("ended")[0]["failed"] == 0
