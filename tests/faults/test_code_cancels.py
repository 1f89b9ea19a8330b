"""Code runs are cancelled at any time, and by functions that do not want to be: they end, once, and what was done is
undone.

Rows 41 and 16 of the field failures. I9.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable
from typing import LiteralString

from fencepost.v1 import run_pb2, run_service_pb2
from fencepost_server.domain.model import EventType
from tests.engine.code import CODE, CONTINUE, MANIFEST, Held, held, local, send
from tests.engine.flows import state_of
from tests.faults.conftest import StartCodeWorker
from tests.faults.scene import STAYING, Scene, fetch, until_count, until_printed
from tests.fixtures.api import DEADLINE, Api, kinds
from tests.fixtures.raw_worker import LEASE_LOST
from tests.fixtures.waiting import paced

RUNS = 200
WAYS = ("plain", "pair", "remote", "swallow", "shielded")
STEPS_ENDED: LiteralString = f"event where type in ({EventType.STEP_COMPLETED:d}, {EventType.LOCAL_STEP_ENDED:d})"


async def cancel_after(api: Api, run_id: str, delay: float) -> None:
    await paced(delay)
    await api.runs.CancelRun(run_service_pb2.CancelRunRequest(run_id=run_id), timeout=DEADLINE)


def completed_ticks(events: list[run_pb2.Event]) -> list[int]:
    """The numbers of the events by which a tick is known to be done."""
    return [
        event.seq
        for event in events
        if event.WhichOneof("kind") == "step_completed"
        or (event.WhichOneof("kind") == "local_step_ended" and event.local_step_ended.HasField("output"))
    ]


async def test_two_hundred_runs_that_are_cancelled_at_random_instants_end_cancelled_and_undo_what_they_did(
    scene: Scene, code_process: StartCodeWorker
) -> None:
    """Row 41: amid steps of 50 ms, some of which end in the very batch that cancels the run."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    worker = code_process(server.grpc_address, slots=100, workflow_slots=RUNS)
    await until_printed(worker, "connected")
    chance = random.Random(41)

    async def cancel_all(run_ids: list[str]) -> None:
        await asyncio.gather(*(cancel_after(api, run_id, chance.uniform(0.0, 0.8)) for run_id in run_ids))

    requests = [api.start_request("ticking", f'"{WAYS[number % len(WAYS)]}"') for number in range(RUNS)]
    run_ids = [result.started.run_id for result in await api.start_many(requests)]
    # Some at once, however far they have come; the others when there is something to undo, however long that takes.
    early = RUNS // 4
    await cancel_all(run_ids[:early])
    await until_count(scene.dsn, STEPS_ENDED, 2 * RUNS, more=True)
    await cancel_all(run_ids[early:])
    ended = await asyncio.gather(*(api.wait(run_id, 60) for run_id in run_ids))
    assert Counter(map(state_of, ended)) == {"CANCELLED": RUNS}
    assert await asyncio.to_thread(worker.terminate) == 0
    (did,) = worker.events("did")
    assert sum(did["acts"].values()) > RUNS
    assert set(did["acts"].values()) == {1}
    assert did["undone"] == did["acts"]
    assert not any(key.endswith("/never") for key in did["acts"])
    for run_id in run_ids:
        events = await api.history(run_id)
        assert kinds(events)[-1] == "run_cancelled"
        undone = [event.undo_scheduled.of_seq for event in events if event.WhichOneof("kind") == "undo_scheduled"]
        assert undone == completed_ticks(events)[::-1]


async def test_a_function_that_takes_no_cancellation_for_an_answer_ends_with_its_grace(
    scene: Scene, code_process: StartCodeWorker
) -> None:
    """Row 41: it loops over its cancellation without ever waiting; nothing of it is left, and others go on."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    worker = code_process(server.grpc_address, deadlock_timeout=0.3)
    await until_printed(worker, "connected")
    run_id = (await api.start("stubborn")).run_id
    await until_count(scene.dsn, "wait", 1)
    request = run_service_pb2.CancelRunRequest(run_id=run_id)
    request.grace.FromMilliseconds(1000)
    await api.runs.CancelRun(request, timeout=DEADLINE)
    assert state_of(await api.wait(run_id)) == "CANCELLED"
    assert await fetch(scene.dsn, "select task_id from task") == []
    assert kinds(await api.history(run_id)) == [
        "run_started", "signal_awaited", "run_ending", "timer_fired", "run_cancelled",
    ]  # fmt: skip
    other = (await api.start("plain", "1")).run_id
    assert (await api.wait(other)).output.json == "4"
    assert await asyncio.to_thread(worker.terminate) == 0


async def test_code_runs_that_end_in_several_ways_at_once_on_two_servers_end_once(scene: Scene) -> None:
    """Row 16: completed, failed, cancelled and terminated at the same time, a hundred times."""
    servers = [await scene.serve(**STAYING) for _ in range(2)]
    apis = [scene.api(server.grpc_address) for server in servers]
    await apis[0].register(MANIFEST)
    decider = await scene.raw(
        servers[0].grpc_address, handlers=(), capacity=0, workflows=[CODE], workflow_capacity=1000
    )
    await apis[0].start_many([apis[0].start_request("code") for _ in range(100)])
    runs = [held(decider, task) for task in await decider.tasks(100)]

    async def end(number: int, run: Held) -> None:
        run_id = run.task.task.run_id
        terminate = run_service_pb2.TerminateRunRequest(run_id=run_id)
        cancel = run_service_pb2.CancelRunRequest(run_id=run_id)
        cancel.grace.FromMilliseconds(0)
        advance = run.fail if number % 3 else run.complete
        asked: list[Awaitable[object]] = [advance()]
        if number % 2:
            asked.append(apis[1].runs.CancelRun(cancel, timeout=DEADLINE))
        if number % 5 < 3:
            asked.append(apis[number % 2].runs.TerminateRun(terminate, timeout=DEADLINE))
        await asyncio.gather(*asked, return_exceptions=True)

    await asyncio.gather(*(end(number, run) for number, run in enumerate(runs)))
    finals = {"run_completed": "COMPLETED", "run_failed": "FAILED", "run_cancelled": "CANCELLED"}
    finals["run_terminated"] = "TERMINATED"
    for run in runs:
        run_id = run.task.task.run_id
        state = state_of(await apis[1].wait(run_id))
        told = kinds(await apis[0].history(run_id))
        assert [finals[kind] for kind in told if kind in finals] == [state]
        assert told[-1] in finals
        late = await send(decider, run.item(local(1), outcome=CONTINUE))
        assert [result.outcome for result in late] == [LEASE_LOST]
        assert kinds(await apis[0].history(run_id)) == told
    assert await fetch(scene.dsn, "select task_id from task") == []
