"""What a worker says, or does, about code that a replay could not repeat or that has been changed."""

from __future__ import annotations

import datetime as dt
from time import monotonic
from typing import Any

import pytest

from fencepost import AsyncClient, RunState, Worker, Workflow, WorkflowContext, workflow
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually
from tests.sdk.running import running


def test_a_worker_warns_at_its_start_of_clocks_that_no_guard_sees(caplog: pytest.LogCaptureFixture) -> None:
    @workflow("late", compatibility_id="1")
    async def late(ctx: WorkflowContext) -> str:
        return f"{dt.datetime.now()} {monotonic()}"  # noqa: DTZ005 - the clock is the point

    @workflow("careful", compatibility_id="1")
    async def careful(ctx: WorkflowContext) -> str:
        return f"{ctx.now()}"

    worker = Worker("127.0.0.1:1", workflows=[late, careful])
    worker.stop()
    worker.run()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    why = "(no guard sees this, and a replay gets another value)"
    assert said == [
        f"workflow late: monotonic is time.monotonic: use ctx.now() {why}",
        f"workflow late: datetime.now() reads the clock: use ctx.now() {why}",
    ]


def test_a_worker_knows_two_ways_to_take_a_changed_input() -> None:
    with pytest.raises(ValueError, match="on_input_change is 'warn' or 'block', not 'stop'"):
        Worker("127.0.0.1:1", workflows=[changed(1)], on_input_change="stop")  # type: ignore[arg-type]  # the point


def changed(number: int) -> Workflow[..., Any]:
    @workflow("changed", compatibility_id="1")
    async def flow(ctx: WorkflowContext) -> int:
        before: int = await ctx.run(abs, number)
        return before + await ctx.signal("go", type=int)

    return flow


async def test_a_run_whose_step_has_another_input_goes_on_or_is_blocked_as_the_worker_is_told(
    server: InProcessServer,
) -> None:
    async with AsyncClient(server.grpc_address) as client:
        async with running(Worker(server.grpc_address, workflows=[changed(1)])) as [first]:
            one, other = [await client.start_run("changed") for _ in range(2)]
            await eventually(lambda: first.worker.stats().advanced >= 4 and not first.worker.stats().held)
        async with running(Worker(server.grpc_address, workflows=[changed(2)], on_input_change="block")):
            await one.signal("go", 10)
            await eventually_blocked(client, one.run_id)
            failure = (await one.get()).failure
            assert failure is not None
            assert (failure.code, failure.message) == (
                "NONDETERMINISM",
                "op 1: history has another input of local step abs",
            )
        async with running(Worker(server.grpc_address, workflows=[changed(2)])):
            await other.signal("go", 20)
            assert await other.result(timeout=30) == 21
            # The one that was blocked is tried by this worker, too.
            assert await one.result(timeout=30) == 11


async def eventually_blocked(client: AsyncClient, run_id: str) -> None:
    async def blocked() -> bool:
        return (await client.get_run(run_id)).state is RunState.BLOCKED

    await eventually(blocked, 30)
