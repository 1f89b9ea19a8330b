"""Code workflows over broken streams, dying servers, lost leases and deploys: the history decides."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from fencepost import AsyncClient, AsyncRunHandle, RunState, StartRun, Worker, WorkflowContext, workflow
from tests.fixtures.proxy import Proxy
from tests.fixtures.servers import ServerProcess
from tests.fixtures.waiting import eventually
from tests.sdk.running import Running, running

PATIENT = {"disconnect_grace": 30.0}
"""For workers that are to keep their leases, however long the machine holds them up on their way back."""
StartServer = Callable[..., Any]


def advanced_more(run: Running, before: int) -> bool:
    return run.worker.stats().advanced > before


def advanced_to(worker: Worker, count: int) -> bool:
    return worker.stats().advanced >= count


def reconnected(run: Running, times: int) -> bool:
    return run.worker.stats().reconnects >= times


async def local_steps_of(run: AsyncRunHandle) -> list[int]:
    """The ops of the local steps that its history has."""
    return [event.op async for event in run.history() if event.kind == "local_step_ended"]


async def test_streams_that_break_all_the_time_record_each_local_step_once(
    in_process_server: StartServer, dsn: str, new_proxy: Callable[[str], Proxy]
) -> None:
    server = await in_process_server(dsn, **PATIENT, free_redeliveries=100)
    proxy = new_proxy(server.grpc_address)
    ran: Counter[tuple[int, int]] = Counter()

    async def count(run: int, number: int) -> int:
        await asyncio.sleep(0.005)
        ran[run, number] += 1
        return number

    @workflow("counted", compatibility_id="1")
    async def counted(ctx: WorkflowContext, run: int) -> list[int]:
        return [await ctx.run(count, run, number) for number in range(10)]

    worker = Worker(proxy.address, workflows=[counted])
    async with AsyncClient(server.grpc_address) as client, running(worker) as (run,):
        handles = await client.start_runs([StartRun("counted", number) for number in range(50)])
        runs = [handle for handle in handles if isinstance(handle, AsyncRunHandle)]
        breaks = 0
        while worker.stats().advanced < 500:
            await eventually(partial(advanced_more, run, worker.stats().advanced))
            proxy.reset() if breaks % 2 else proxy.cut()
            breaks += 1
        assert [await each.result(timeout=30) for each in runs] == [list(range(10))] * 50
        assert [await local_steps_of(each) for each in runs] == [list(range(1, 11))] * 50
    assert breaks > 5
    assert set(ran.values()) == {1}, "no local step ran twice: its worker held the run all the time"


async def test_an_advance_whose_answer_was_lost_is_sent_again_and_counts_once(
    in_process_server: StartServer, dsn: str, new_proxy: Callable[[str], Proxy]
) -> None:
    server = await in_process_server(dsn, **PATIENT)
    proxy = new_proxy(server.grpc_address)
    begun, go = threading.Event(), threading.Event()
    ran: list[str] = []

    def hold() -> str:
        begun.set()
        go.wait(30)
        ran.append("hold")
        return "held"

    def then() -> str:
        ran.append("then")
        return "done"

    @workflow("answered", compatibility_id="1")
    async def answered(ctx: WorkflowContext) -> list[str]:
        return [await ctx.run(hold), await ctx.run(then)]

    worker = Worker(proxy.address, workflows=[answered])
    async with AsyncClient(server.grpc_address) as client, running(worker) as (run,):
        handle = await client.start_run("answered")
        await asyncio.to_thread(begun.wait, 30)
        proxy.blackhole("down")
        go.set()

        async def is_recorded() -> bool:
            return len(await local_steps_of(handle)) == 1

        await eventually(is_recorded)
        assert ran == ["hold"], "nothing follows before the answer is known"
        proxy.heal()
        proxy.cut()
        await eventually(partial(reconnected, run, 1))
        assert await handle.result(timeout=30) == ["held", "done"]
        assert await local_steps_of(handle) == [1, 2]
    assert ran == ["hold", "then"]
    assert worker.stats().lost == 0


async def test_a_run_that_went_to_another_worker_is_replayed_from_the_history_when_it_comes_back(
    in_process_server: StartServer, dsn: str, new_proxy: Callable[[str], Proxy]
) -> None:
    server = await in_process_server(dsn, disconnect_grace=0.3, heartbeat_interval=0.3)
    proxy = new_proxy(server.grpc_address)
    ran: list[tuple[str, int]] = []
    calls: Counter[str] = Counter()
    begun, dark = threading.Event(), threading.Event()

    def worker_of(name: str, address: str) -> Worker:
        async def note(number: int) -> str:
            if name == "first" and number == 1:
                begun.set()
                await asyncio.to_thread(dark.wait, 30)
            ran.append((name, number))
            return name

        @workflow("moved", compatibility_id="1")
        async def moved(ctx: WorkflowContext) -> list[str]:
            calls[name] += 1
            seen = [await ctx.run(note, 0), await ctx.run(note, 1)]
            await ctx.signal("go-on")
            return [*seen, await ctx.run(note, 2)]

        return Worker(address, workflows=[moved])

    first = worker_of("first", proxy.address)
    async with AsyncClient(server.grpc_address) as client, running(first):
        handle = await client.start_run("moved")
        await asyncio.to_thread(begun.wait, 30)
        # Its local step ends, but nobody hears of it before the lease has gone to the second worker.
        # Cut off, not silent: so no other worker is taken for gone as well when the machine holds it up.
        proxy.refuse()
        proxy.cut()
        dark.set()
        async with running(worker_of("second", server.grpc_address)):
            await eventually(lambda: ("second", 1) in ran)

            async def waits() -> bool:
                return (await handle.get()).state is RunState.WAITING

            await eventually(waits)
        proxy.heal()
        await eventually(lambda: first.stats().lost >= 1)
        await handle.signal("go-on")
        assert await handle.result(timeout=30) == ["first", "second", "first"]
    assert calls == {"first": 2, "second": 1}


async def test_a_server_that_dies_amid_local_steps_gets_their_results_once(
    server_process: Callable[..., ServerProcess], dsn: str
) -> None:
    server = server_process(dsn, **PATIENT)
    ran: Counter[tuple[int, int]] = Counter()

    async def count(run: int, number: int) -> int:
        await asyncio.sleep(0.02)
        ran[run, number] += 1
        return number

    @workflow("outlasting", compatibility_id="1")
    async def outlasting(ctx: WorkflowContext, run: int) -> list[int]:
        return [await ctx.run(count, run, number) for number in range(10)]

    worker = Worker(server.grpc_address, workflows=[outlasting])
    async with AsyncClient(server.grpc_address) as client, running(worker):
        handles = [await client.start_run("outlasting", number) for number in range(10)]
        for wanted in (20, 60):
            await eventually(partial(advanced_to, worker, wanted))
            await asyncio.to_thread(server.kill)
            server.start()
            await asyncio.to_thread(server.wait_serving)
        assert [await each.result(timeout=60) for each in handles] == [list(range(10))] * 10
        assert [await local_steps_of(each) for each in handles] == [list(range(1, 11))] * 10
    assert set(ran.values()) == {1}


async def test_twenty_deploys_under_a_run_do_not_add_up_to_a_failure(in_process_server: StartServer, dsn: str) -> None:
    server = await in_process_server(dsn, **PATIENT)
    begun: Counter[int] = Counter()
    deploys = 0

    async def hold(number: int) -> int:
        begun[number] += 1
        if deploys <= number:
            await asyncio.sleep(60)
        return number

    @workflow("deployed", compatibility_id="1")
    async def deployed(ctx: WorkflowContext) -> list[int]:
        return [await ctx.run(hold, number) for number in range(20)]

    async with AsyncClient(server.grpc_address) as client:
        handle: AsyncRunHandle | None = None
        for number in range(20):
            async with running(Worker(server.grpc_address, workflows=[deployed])) as (run,):
                handle = handle or await client.start_run("deployed")
                await eventually(partial(begun.__contains__, number))
                # Amid a local step, which is cut off.
                await run.stop(now=True)
            deploys += 1
        assert handle is not None
        async with running(Worker(server.grpc_address, workflows=[deployed])):
            assert await handle.result(timeout=30) == list(range(20))
    assert begun == dict.fromkeys(range(20), 2)


async def test_code_that_differs_from_the_history_blocks_its_run_until_code_that_fits_comes(
    in_process_server: StartServer, dsn: str
) -> None:
    server = await in_process_server(dsn, **PATIENT)

    def charge() -> int:
        return 1

    def refund() -> int:
        return 2

    def worker_of(function: Callable[[], int]) -> Worker:
        @workflow("changing", compatibility_id="1")
        async def changing(ctx: WorkflowContext) -> int:
            await ctx.run(function)
            return await ctx.signal("go-on", type=int)

        return Worker(server.grpc_address, workflows=[changing])

    async with AsyncClient(server.grpc_address) as client:
        async with running(worker_of(charge)) as (run,):
            handle = await client.start_run("changing")
            await eventually(lambda: run.worker.stats().advanced >= 2 and run.worker.stats().held == 0)
        async with running(worker_of(refund)):
            await handle.signal("go-on", 3)

            async def is_blocked() -> bool:
                return (await handle.get()).state is RunState.BLOCKED

            await eventually(is_blocked)
            failure = (await handle.get()).failure
            assert failure is not None
            assert failure.code == "NONDETERMINISM"
            assert "op 1: history has" in failure.message
        async with running(worker_of(charge)):
            assert await handle.result(timeout=30) == 3
