"""A worker with a code workflow, in the SDK of whichever release: ``python -m tests.environments.code_worker TARGET
SINK_DSN``. Its remote steps act on the sink; what it returns is the sum of all that its steps have returned.
"""

from __future__ import annotations

import sys

from fencepost import Step, StepContext, Worker, Workflow, WorkflowContext, step, workflow
from tests.faults.sink import Sink

LOCAL, REMOTE, WORKFLOW = 4, 3, "upgraded"
SUM = sum(range(LOCAL)) + sum(range(REMOTE))


def acting(sink: Sink) -> Step[[StepContext, int], int]:
    """The remote step."""

    @step("act")
    def act(ctx: StepContext, number: int) -> int:
        sink.act(ctx.idempotency_key, ctx.fencing_token)
        return number

    return act


async def count(number: int) -> int:
    """The local step."""
    return number


def summing(act: Step[[StepContext, int], int]) -> Workflow[[WorkflowContext], int]:
    """The workflow: local steps, remote ones, a timer and a signal."""

    @workflow(WORKFLOW, compatibility_id="1")
    async def run(ctx: WorkflowContext) -> int:
        total = 0
        for number in range(LOCAL):
            total += await ctx.run(count, number)
        await ctx.signal("go")
        for number in range(REMOTE):
            total += await ctx.call(act, number)
            await ctx.sleep(0.01)
        return total

    return run


def main(target: str, sink_dsn: str) -> None:
    """Run it until it is told to end."""
    act = acting(Sink(sink_dsn))
    Worker(target, [act], workflows=[summing(act)]).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
