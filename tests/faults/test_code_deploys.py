"""Code workflows and the code that comes and goes under them: deploys and crashes without number, functions that differ
from their history, functions that never wait, and errors that look like the worker's own.

Rows 39, 44, 56 and 14 of the field failures.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from typing import LiteralString

import pytest

from fencepost.v1 import run_pb2, run_service_pb2
from tests.engine.flows import state_of
from tests.faults.code_program import LOCAL_ROUNDS
from tests.faults.conftest import StartCodeWorker
from tests.faults.scene import STAYING, Scene, fetch, until_printed
from tests.faults.sink import Sink
from tests.fixtures.api import DEADLINE, Api, kinds
from tests.fixtures.processes import Process
from tests.fixtures.waiting import eventually

RESTARTS, POOL = 20, 3
_HURRY = "update task set visible_at = clock_timestamp() where lease_session is null and visible_at < 'infinity'"


async def go(api: Api, run_id: str) -> None:
    request = run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go")
    await api.runs.SignalRun(request, timeout=DEADLINE)


async def until_state(api: Api, run_id: str, state: str) -> run_pb2.Run:
    async def reached() -> run_pb2.Run:
        run = await api.get(run_id)
        assert state_of(run) == state, run
        return run

    return await eventually(reached, 60)  # its worker may only be starting


# Row 56


def begun_in(workers: list[Process], gate: str) -> Process | None:
    """Which worker has begun the step behind a gate."""
    return next((w for w in workers if any(event["gate"] == gate for event in w.events("begun"))), None)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["told-to-end", "killed"])
async def test_twenty_workers_that_end_amid_the_steps_of_a_run_do_not_add_up_to_its_failure(
    scene: Scene, code_process: StartCodeWorker, sink: Sink, how: signal.Signals
) -> None:
    """Row 56: local steps and remote ones, three attempts each; every worker ends amid one of them."""
    server = await scene.serve(**STAYING | {"disconnect_grace": 0.3})
    api = scene.api(server.grpc_address)
    workers = [code_process(server.grpc_address, drain_timeout=0.1) for _ in range(POOL)]
    for worker in workers:
        await until_printed(worker, "connected")
    run_id = (await api.start("deployed", str(RESTARTS + 1))).run_id
    ended: list[Process] = []
    for number in range(RESTARTS):
        gate = f"round-{number}"

        async def begun(gate: str = gate) -> Process:
            await fetch(scene.dsn, _HURRY)  # what pauses after a crash
            worker = begun_in(workers, gate)
            assert worker is not None
            return worker

        worker = await eventually(begun, 60, what=f"{gate} is begun")
        workers.remove(worker)
        workers.append(code_process(server.grpc_address, drain_timeout=0.1))
        worker.signal(how)
        assert await asyncio.to_thread(worker.wait) == (0 if how is signal.SIGTERM else -signal.SIGKILL)
        ended.append(worker)
        sink.open(gate)
    sink.open(f"round-{RESTARTS}")

    async def completed() -> run_pb2.Run:
        await fetch(scene.dsn, _HURRY)
        run = await api.get(run_id)
        assert state_of(run) == "COMPLETED", run
        return run

    run = await eventually(completed)
    assert run.output.json == str(RESTARTS + 1)
    told = Counter(kinds(await api.history(run_id)))
    assert told["local_step_ended"] == LOCAL_ROUNDS + RESTARTS + 1, "those of rounds, and those that bring the run on"
    assert told["step_completed"] == RESTARTS + 1 - LOCAL_ROUNDS
    assert told["run_blocked"] == told["step_failed"] == 0
    assert len(ended) == RESTARTS
    assert len(sink.effects()) == RESTARTS + 1
    for worker in workers:
        await until_printed(worker, "connected")
        assert await asyncio.to_thread(worker.terminate) == 0


# Row 39


async def test_a_step_that_was_swapped_blocks_its_run_with_the_difference_until_the_code_fits_again(
    scene: Scene, code_process: StartCodeWorker
) -> None:
    """Row 39: with the worker that does not fit connected all the time, and doing other work."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    before = code_process(server.grpc_address)
    await until_printed(before, "connected")
    run_id = (await api.start("changing", "3")).run_id
    await until_state(api, run_id, "WAITING")
    assert await asyncio.to_thread(before.terminate) == 0

    misfit = code_process(server.grpc_address, variant="changed")
    await until_printed(misfit, "connected")
    await go(api, run_id)
    blocked = await until_state(api, run_id, "BLOCKED")
    difference = "op 2: history has local step charge, code asks for local step refund"
    assert (blocked.failure.code, blocked.failure.message) == ("NONDETERMINISM", difference)
    told = kinds(await api.history(run_id))
    assert told == [
        "run_started", "local_step_ended", "local_step_ended", "signal_awaited", "signal_received", "run_blocked",
    ]  # fmt: skip
    # The same code again does not help, and says the same.
    again = code_process(server.grpc_address, variant="changed")

    async def blocked_again() -> bool:
        return kinds(await api.history(run_id)).count("run_blocked") == 2

    await eventually(blocked_again, 60)
    assert (await api.get(run_id)).failure.message == difference
    assert await asyncio.to_thread(again.terminate) == 0

    fitting = code_process(server.grpc_address)
    await until_state(api, run_id, "WAITING")
    await go(api, run_id)
    await until_state(api, run_id, "WAITING")
    await go(api, run_id)
    ended = await api.wait(run_id)
    assert json.loads(ended.output.json) == ["charged 1", "charged 2", *["charged 3"] * 3]
    assert misfit.running
    fresh = (await api.start("changing", "0")).run_id
    assert state_of(await api.wait(fresh)) == "COMPLETED"
    for worker in (misfit, fitting):
        assert await asyncio.to_thread(worker.terminate) == 0


# Row 44


async def test_a_function_that_never_waits_fails_its_task_and_the_other_runs_go_on(
    scene: Scene, code_process: StartCodeWorker
) -> None:
    """Row 44: ``while True: pass``, with the limit that workers have unless told otherwise."""
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    worker = code_process(server.grpc_address, deadlock_timeout=None)
    await until_printed(worker, "connected")
    others = await api.start_many([api.start_request("plain", "1") for _ in range(50)])
    stuck = (await api.start("stuck")).run_id
    others += await api.start_many([api.start_request("plain", "1") for _ in range(50)])

    async def failed() -> str:
        query: LiteralString = "select last_failure ->> 'code' as code from task where run_id = %(run_id)s"
        rows = await fetch(scene.dsn, query, run_id=stuck)
        return rows[0]["code"] or ""

    assert await eventually(failed) == "DEADLOCK"
    # At the first attempt it may be out of its loop by the time that its worker looks where it is.
    for told in ("of workflow stuck does not come to a wait", "in stuck\n"):
        await asyncio.to_thread(worker.wait_logged, told)
    for result in others:
        assert (await api.wait(result.started.run_id)).output.json == "4"
    assert kinds(await api.history(stuck)) == ["run_started"]
    later = (await api.start("plain", "1")).run_id
    assert state_of(await api.wait(later)) == "COMPLETED"
    # Mended, it goes on as if nothing had been.
    assert await asyncio.to_thread(worker.terminate) == 0
    mended = code_process(server.grpc_address, variant="changed")
    await fetch(scene.dsn, _HURRY)  # its pause grows with the attempts that it has had
    assert (await api.wait(stuck, 60)).output.json == '"free"'
    assert await asyncio.to_thread(mended.terminate) == 0


# Row 14

CODES = {
    "psycopg": "OperationalError",
    "grpc": "Lost",
    "timeout": "TimeoutError",
    "os": "ConnectionResetError",
    "lease": "LeaseLost",
    "unavailable": "Unavailable",
    "cancelled": "CancelledError",
    "exit": "SystemExit",
    "interrupt": "KeyboardInterrupt",
    "generator": "GeneratorExit",
    "group": "BaseExceptionGroup",
    "recursion": "RecursionError",
    "memory": "MemoryError",
}


async def test_errors_of_functions_and_steps_are_theirs_also_if_they_look_like_the_workers(
    scene: Scene, code_process: StartCodeWorker
) -> None:
    """Row 14: of a database, of gRPC, of time, of the SDK, of the interpreter; raised in the function, in a task of it,
    in its local steps, and in tasks of those.
    """
    server = await scene.serve(**STAYING)
    api = scene.api(server.grpc_address)
    worker = code_process(server.grpc_address)
    await until_printed(worker, "connected")
    cases = [(kind, where) for kind in CODES for where in ("function", "task", "step", "stray")]
    starts = [api.start_request("broken", json.dumps({"kind": kind, "where": where})) for kind, where in cases]
    run_ids = [result.started.run_id for result in await api.start_many(starts)]
    wrong = {}
    waits = await asyncio.gather(*map(api.wait, run_ids), return_exceptions=True)
    for (kind, where), run_id, ended in zip(cases, run_ids, waits, strict=True):
        code = CODES[kind]
        if isinstance(ended, BaseException):
            wrong[kind, where] = str(ended)
            continue
        told = kinds(await api.history(run_id))
        if where == "stray":
            found: object = (state_of(ended), ended.output.json)
            wanted: object = ("COMPLETED", json.dumps([kind]))
        elif where == "step":
            found = (state_of(ended), ended.output.json, told)
            wanted = (
                "COMPLETED", json.dumps([code, code], separators=(",", ":")),
                ["run_started", "local_step_ended", "local_step_ended", "run_completed"],
            )  # fmt: skip
        else:
            found = (state_of(ended), ended.failure.code, told)
            wanted = ("FAILED", code, ["run_started", "run_failed"])
        if found != wanted:
            wrong[kind, where] = str(found)
    assert wrong == {}
    after = (await api.start("plain", "1")).run_id
    assert state_of(await api.wait(after)) == "COMPLETED"
    assert await asyncio.to_thread(worker.terminate) == 0
    (stats,) = worker.events("ended")
    assert (stats["failed"], stats["lost"], stats["reconnects"]) == (0, 0, 0)
