"""A worker that is told to end takes nothing new, finishes what it can, gives back the rest, and does end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from fencepost import AsyncClient
from tests.fixtures.manifests import manifest
from tests.fixtures.processes import Process
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually
from tests.sdk.peeking import leased, paused

ProgramStarter = Callable[..., Process]
RETRY = {"max_attempts": 2, "initial_delay": "10ms"}


async def begun(python_process: ProgramStarter, server: InProcessServer, *arguments: str) -> Process:
    worker = python_process("-m", "tests.sdk.worker_program", server.grpc_address, *arguments)
    await eventually(lambda: worker.events("begun"), 60)
    return worker


async def start(client: AsyncClient, **node: Any) -> Any:
    await client.register_definition(manifest(1, retry=RETRY, **node))
    return await client.start_run("wf")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_step_under_way_is_finished_and_nothing_new_is_taken(
    server: InProcessServer, python_process: ProgramStarter, number: signal.Signals
) -> None:
    async with AsyncClient(server.grpc_address) as client:
        run = await start(client)
        worker = await begun(python_process, server, "finish")
        worker.signal(number)
        await eventually(lambda: paused(server))
        later = await client.start_run("wf")
        assert await asyncio.to_thread(worker.wait) == 0
        assert await run.result(timeout=30) == 1
        assert (await later.get()).state == "PENDING"
        (ended,) = worker.events("ended")
        assert (ended["started"], ended["completed"]) == (1, 1)


async def test_past_its_limit_a_worker_cuts_off_what_runs_and_says_so(
    server: InProcessServer, python_process: ProgramStarter
) -> None:
    async with AsyncClient(server.grpc_address) as client:
        run = await start(client)
        worker = await begun(python_process, server, "hold", "0.3")
        assert await asyncio.to_thread(worker.terminate) == 0
        assert worker.events("cancelled")[0]["reason"] == "WORKER_SHUTDOWN"
        history = [event async for event in run.history()]
        assert history[-1].kind == "step_retrying"
        assert history[-1].failure is not None
        assert history[-1].failure.code == "WORKER_SHUTDOWN"


@pytest.mark.parametrize("mode", ["block", "block-loop"])
async def test_a_step_that_can_not_be_interrupted_does_not_keep_its_worker(
    server: InProcessServer, python_process: ProgramStarter, mode: str
) -> None:
    async with AsyncClient(server.grpc_address) as client:
        run = await start(client)
        worker = await begun(python_process, server, mode, "0.3")
        assert await asyncio.to_thread(worker.terminate) == 0
        await eventually(lambda: worker.events("ended"))
        events = [event async for event in run.history()]
        assert events[-1].kind == "step_retrying"


async def test_a_second_signal_does_not_wait(server: InProcessServer, python_process: ProgramStarter) -> None:
    async with AsyncClient(server.grpc_address) as client:
        await start(client)
        worker = await begun(python_process, server, "hold")
        worker.signal(signal.SIGTERM)
        await eventually(lambda: "the worker stops" in worker.logs)
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait) == 0


async def test_a_second_interrupt_amid_the_end_leaves_no_traceback(
    server: InProcessServer, python_process: ProgramStarter
) -> None:
    async with AsyncClient(server.grpc_address) as client:
        await start(client)
        worker = await begun(python_process, server, "block-loop", "0.1")
        worker.signal(signal.SIGINT)
        await eventually(lambda: "cut off" in worker.logs)
        worker.signal(signal.SIGINT)
        assert await asyncio.to_thread(worker.wait) == 0
        assert "KeyboardInterrupt" not in worker.logs


PLAIN_PROGRAM = """\
import sys
from fencepost import Worker, step

@step("s1")
def s1() -> None: ...

Worker(sys.argv[1], [s1], slots=3, name="plain").run()
"""


async def test_a_program_without_logging_shows_where_its_worker_is_connected(
    server: InProcessServer, python_process: ProgramStarter
) -> None:
    worker = python_process("-c", PLAIN_PROGRAM, server.grpc_address)
    line = f"worker plain connected to {server.grpc_address}: 1 handler on queue default, 3 slots, session "
    await eventually(lambda: line in worker.logs, 60)
    worker.signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait) == 0
    assert worker.logs.count(line) == 1


async def test_steps_that_were_not_begun_are_given_back_at_once(
    server: InProcessServer, python_process: ProgramStarter
) -> None:
    """One step blocks the loop of the steps, so the other one's task is here but not begun."""
    async with AsyncClient(server.grpc_address) as client:
        await start(client)
        worker = await begun(python_process, server, "block-loop", "1")
        second = await client.start_run("wf")
        await eventually(lambda: leased(server, second.run_id))
        worker.signal(signal.SIGTERM)

        async def given_back() -> bool:
            (open_step,) = (await second.get()).open_steps
            return open_step.state == "READY" and open_step.attempt == 0

        await eventually(given_back)
        assert await asyncio.to_thread(worker.wait) == 0
        assert worker.events("ended")[0]["released"] == 1


async def test_a_worker_that_is_killed_costs_its_step_one_lease(
    in_process_server: Callable[..., Any], dsn: str, python_process: ProgramStarter
) -> None:
    server = await in_process_server(dsn, disconnect_grace=0.3)
    async with AsyncClient(server.grpc_address) as client:
        run = await start(client)
        await begun(python_process, server, "exit")
        await begun(python_process, server, "exit")
        assert await run.result(timeout=30) == 2
