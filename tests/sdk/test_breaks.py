"""The worker over broken streams, servers that die, and workers that freeze: each effect once, nothing lost."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fencepost import AsyncClient, AsyncRunHandle, SessionRefused, StartRun, Step, StepContext, Worker, link, step
from fencepost.session import Session
from tests.fixtures.manifests import manifest
from tests.fixtures.processes import Process
from tests.fixtures.proxy import Proxy
from tests.fixtures.servers import InProcessServer, ServerProcess
from tests.fixtures.waiting import eventually
from tests.sdk.peeking import pongs, sessions
from tests.sdk.running import Running, running

PATIENT = {"disconnect_grace": 30.0}
"""For workers that are to keep their leases, however long the machine holds them up on their way back."""
PINGED = PATIENT | {"ping_interval": 0.2}
"""For what only silence tells of."""
STRICT = {"disconnect_grace": 0.3, "heartbeat_interval": 0.3}
"""For workers that are to lose theirs, soon: a server that was held up itself keeps them for both of these times."""
StartServer = Callable[..., Any]


class Gate:
    """A step s1 that waits until it is let through, and what it has seen."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[int] = []
        self.ended: list[str] = []
        self.step = step("s1")(self.run)

    async def run(self, ctx: StepContext) -> int:
        self.begun.append(ctx.attempt)
        try:
            while not self.open.is_set():  # noqa: ASYNC110 - the test and the step are in different loops
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.ended.append(str(ctx.cancel_reason))
            raise
        self.ended.append("done")
        return ctx.attempt


async def started(address: str, **node: Any) -> tuple[AsyncClient, Any]:
    client = AsyncClient(address)
    await client.register_definition(manifest(1, **node))
    return client, await client.start_run("wf")


def reconnected(run: Running, times: int) -> bool:
    return run.worker.stats().reconnects >= times


async def attempts_of(run: Any) -> list[int]:
    return [event.attempt async for event in run.history() if event.kind == "step_completed"]


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def test_a_stream_that_breaks_amid_a_step_costs_nothing(
    in_process_server: StartServer, dsn: str, new_proxy: Callable[[str], Proxy], gate: Gate
) -> None:
    server = await in_process_server(dsn, **PATIENT)
    proxy = new_proxy(server.grpc_address)
    async with running(Worker(proxy.address, [gate.step])) as (run,):
        client, started_run = await started(server.grpc_address)
        await eventually(lambda: gate.begun)
        for number in range(3):
            proxy.cut()
            await eventually(partial(reconnected, run, number + 1))
        gate.open.set()
        assert await started_run.result(timeout=30) == 1
        await client.close()
    assert gate.begun == [1]
    assert gate.ended == ["done"]
    assert await attempts_of(started_run) == [1]
    await client.close()


async def test_an_outcome_whose_ack_was_lost_is_sent_again_and_counts_once(
    in_process_server: StartServer, dsn: str, new_proxy: Callable[[str], Proxy], gate: Gate
) -> None:
    server = await in_process_server(dsn, **PATIENT)
    proxy = new_proxy(server.grpc_address)
    async with running(Worker(proxy.address, [gate.step])) as (run,):
        client, started_run = await started(server.grpc_address)
        await eventually(lambda: gate.begun)
        proxy.blackhole("down")
        gate.open.set()
        assert await started_run.result(timeout=30) == 1
        assert run.worker.stats().completed == 0
        proxy.heal()
        proxy.cut()
        await eventually(lambda: run.worker.stats().completed == 1)
    assert run.worker.stats().lost == 0
    assert [event.kind async for event in started_run.history()].count("step_completed") == 1
    await client.close()


async def test_tasks_that_were_lost_on_the_way_are_offered_again_and_cost_no_attempt(
    in_process_server: StartServer, dsn: str, new_proxy: Callable[[str], Proxy], gate: Gate
) -> None:
    server = await in_process_server(dsn, **PATIENT)
    proxy = new_proxy(server.grpc_address)
    async with running(Worker(proxy.address, [gate.step])):
        proxy.blackhole("down")
        gate.open.set()
        client, started_run = await started(server.grpc_address, retry={"max_attempts": 1})
        await eventually(lambda: any(not session.idle for session in sessions(server)), what="the task is on its way")
        proxy.heal()
        proxy.cut()
        assert await started_run.result(timeout=30) == 1
    assert gate.begun == [1]
    await client.close()


async def test_tasks_that_were_lost_on_the_way_to_a_worker_that_ends_cost_no_attempt(
    in_process_server: StartServer,
    dsn: str,
    new_proxy: Callable[[str], Proxy],
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "LAST_WORD_SECONDS", 20.0)  # a stall of the machine is no part of this
    server = await in_process_server(dsn, **PATIENT)
    proxy = new_proxy(server.grpc_address)
    gate.open.set()
    async with running(Worker(proxy.address, [gate.step])) as (run,):
        proxy.blackhole("down")
        client, started_run = await started(server.grpc_address, retry={"max_attempts": 1})
        await eventually(lambda: any(not session.idle for session in sessions(server)), what="the task is on its way")
        run.worker.stop()
        proxy.cut()
        proxy.heal()
        await run.end()
    assert gate.begun == []
    async with running(Worker(server.grpc_address, [gate.step])):
        assert await started_run.result(timeout=30) == 1
    await client.close()


async def test_a_stream_that_is_dead_one_way_is_rebuilt(
    in_process_server: StartServer, dsn: str, new_proxy: Callable[[str], Proxy], gate: Gate
) -> None:
    server = await in_process_server(dsn, **PINGED)
    proxy = new_proxy(server.grpc_address)
    async with running(Worker(proxy.address, [gate.step])) as (run,):
        proxy.blackhole("down")
        connections = proxy.connections
        await eventually(lambda: proxy.connections > connections or run.worker.stats().reconnects, 30)
        proxy.heal()
        proxy.cut()
        gate.open.set()
        client, started_run = await started(server.grpc_address)
        assert await started_run.result(timeout=30) == 1
    await client.close()


async def test_a_worker_that_is_away_for_longer_than_the_grace_loses_its_lease_and_its_step_is_cancelled(
    in_process_server: StartServer, dsn: str, new_proxy: Callable[[str], Proxy], gate: Gate
) -> None:
    server = await in_process_server(dsn, **STRICT)
    proxy = new_proxy(server.grpc_address)
    second = Gate()
    async with running(Worker(proxy.address, [gate.step])) as (run,):
        client, started_run = await started(server.grpc_address, retry={"initial_delay": "10ms"})
        await eventually(lambda: gate.begun)
        proxy.refuse()
        proxy.cut()
        second.open.set()
        async with running(Worker(server.grpc_address, [second.step])):
            assert await started_run.result(timeout=30) == 2
            assert gate.ended == [], "it goes on until it hears"
            proxy.heal()
            await eventually(lambda: gate.ended)
        assert run.worker.stats().lost == 1
    assert gate.ended == ["LEASE_LOST"]
    assert await attempts_of(started_run) == [2]
    await client.close()


async def test_a_server_that_dies_amid_a_step_and_returns_gets_its_result_once(
    server_process: Callable[..., ServerProcess], dsn: str, gate: Gate
) -> None:
    server = server_process(dsn, **PATIENT)
    async with running(Worker(server.grpc_address, [gate.step])) as (run,):
        client, started_run = await started(server.grpc_address)
        await eventually(lambda: gate.begun)
        await asyncio.to_thread(server.kill)
        server.start()
        gate.open.set()
        await asyncio.to_thread(server.wait_serving)
        assert await started_run.result(timeout=30) == 1
        await eventually(lambda: run.worker.stats().completed == 1)
    assert gate.begun == [1]
    await client.close()


async def test_a_worker_goes_to_another_server_when_one_is_gone(
    server_process: Callable[..., ServerProcess], dsn: str, gate: Gate
) -> None:
    servers = [server_process(dsn, **PATIENT) for _ in range(2)]
    target = ",".join(server.grpc_address for server in servers)
    gate.open.set()
    async with running(Worker(target, [gate.step])) as (run,):
        await asyncio.to_thread(servers[0].kill)
        await eventually(partial(reconnected, run, 1))
        client, started_run = await started(target)
        assert await started_run.result(timeout=30) == 1
        await client.close()


async def test_streams_that_break_all_the_time_lose_nothing_and_burn_no_attempt(
    in_process_server: StartServer, dsn: str, new_proxy: Callable[[str], Proxy]
) -> None:
    server = await in_process_server(dsn, **PATIENT, free_redeliveries=100)
    proxy = new_proxy(server.grpc_address)
    ran: Counter[str] = Counter()

    def handler(name: str) -> Step[..., Any]:
        async def run(x: int, ctx: StepContext) -> int:
            await asyncio.sleep(0.01)
            ran[ctx.idempotency_key] += 1
            return x + 1

        return step(name)(run)

    steps = [handler(name) for name in ("s1", "s2", "s3")]
    async with AsyncClient(server.grpc_address) as client, running(Worker(proxy.address, steps, slots=20)) as (run,):
        await client.register_definition(manifest(3, retry={"max_attempts": 1}))
        handles = await client.start_runs([StartRun("wf", number) for number in range(100)])
        runs = [handle for handle in handles if isinstance(handle, AsyncRunHandle)]
        breaks = 0
        while run.worker.stats().completed < 300:
            await eventually(partial(more_done, run, run.worker.stats().completed), 30)
            proxy.reset() if breaks % 2 else proxy.cut()
            breaks += 1
        assert [await each.result(timeout=30) for each in runs] == [number + 3 for number in range(100)]
    assert breaks > 5
    assert len(ran) == 300
    assert set(ran.values()) == {1}, "no step ran twice"


def more_done(run: Running, before: int) -> bool:
    return run.worker.stats().completed > before


async def test_a_session_that_is_asked_to_go_is_replaced_before_it_ends(
    in_process_server: StartServer, dsn: str, gate: Gate
) -> None:
    server = await in_process_server(dsn, **PINGED, session_max_age=0.3)
    async with running(Worker(server.grpc_address, [gate.step], slots=3)) as (run,):
        client, held_up = await started(server.grpc_address)
        await eventually(lambda: gate.begun)
        await eventually(lambda: run.worker.stats().reconnects >= 2, 30)
        # Both at a time, if they had to come back.
        await eventually(lambda: len(sessions(server)) >= 2, what="the old one is there while its step runs")
        assert gate.begun == [1]
        gate.open.set()
        assert await held_up.result(timeout=30) == 1
        more = [await client.start_run("wf") for _ in range(20)]
        assert [await each.result(timeout=30) for each in more] == [1] * 20
        await client.close()
    assert run.worker.stats().lost == 0


async def test_a_frozen_worker_loses_its_step_and_is_told_when_it_wakes(
    in_process_server: StartServer, dsn: str, python_process: Callable[..., Process], gate: Gate
) -> None:
    server = await in_process_server(dsn, ping_interval=0.2, **STRICT)
    worker = python_process("-m", "tests.sdk.worker_program", server.grpc_address, "hold")
    client, started_run = await started(server.grpc_address, retry={"max_attempts": 20, "initial_delay": "10ms"})
    await eventually(lambda: worker.events("begun"), 60)
    worker.pause()
    gate.open.set()
    async with running(Worker(server.grpc_address, [gate.step])):
        # Either of the two is also taken for frozen when the machine holds it up.
        assert await started_run.result(timeout=30) == gate.begun[-1] > 1
    before = [event async for event in started_run.history()]
    worker.resume()

    def told() -> bool:
        return len(worker.events("cancelled")) == len(worker.events("begun"))

    await eventually(told, what="each attempt of the frozen worker is cancelled")
    assert {event["reason"] for event in worker.events("cancelled")} == {"LEASE_LOST"}
    assert [event async for event in started_run.history()] == before
    assert await asyncio.to_thread(worker.terminate) == 0
    await client.close()


async def test_an_idle_worker_is_idle(
    in_process_server: StartServer, dsn: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await in_process_server(dsn, **PINGED)
    ticks = 0
    tick = Session.tick

    def count(session: Session, now: float) -> Any:
        nonlocal ticks
        ticks += 1
        return tick(session, now)

    monkeypatch.setattr(Session, "tick", count)
    async with running(Worker(server.grpc_address, [gate.step])):
        await eventually(lambda: pongs(server) >= 5)
    assert ticks < 30


async def test_a_worker_that_the_server_will_never_take_says_so(server: InProcessServer, gate: Gate) -> None:
    run = Running(Worker(server.grpc_address, [gate.step], max_frame_bytes=1000))
    await run.end()
    assert isinstance(run.error, SessionRefused)
    assert run.error.reason == "INVALID_HELLO"
    assert [violation.path for violation in run.error.violations] == ["max_frame_bytes"]


async def test_a_worker_waits_for_a_server_that_is_not_there_yet(
    in_process_server: StartServer, dsn: str, new_proxy: Callable[[str], Proxy], gate: Gate
) -> None:
    proxy = new_proxy("127.0.0.1:1")
    gate.open.set()
    run = Running(Worker(proxy.address, [gate.step]))
    server = await in_process_server(dsn, **PATIENT)
    await eventually(lambda: proxy.connections or True)
    proxy.retarget(server.grpc_address)
    await run.connected()
    client, started_run = await started(server.grpc_address)
    assert await started_run.result(timeout=30) == 1
    await run.stop()
    await client.close()


async def test_a_worker_that_never_found_a_server_stops_at_once(gate: Gate) -> None:
    run = Running(Worker("127.0.0.1:1", [gate.step]))
    await run.stop()
    assert run.error is None
