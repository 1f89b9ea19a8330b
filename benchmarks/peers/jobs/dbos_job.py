"""DBOS Transact: ten inline steps a workflow: `python dbos_job.py DSN RUNS IN_FLIGHT`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
import time

from dbos import DBOS

STEPS = 10
WARM_UP = 20


@DBOS.step()
async def step(number: int) -> int:
    """A step that does nothing but count."""
    return number + 1


@DBOS.workflow()
async def flow(number: int) -> int:
    """Ten steps, one after the other."""
    for _ in range(STEPS):
        number = await step(number)
    return number


async def main(runs: int, in_flight: int) -> None:
    """Keep ``in_flight`` workflows going until ``runs`` are done."""
    DBOS.launch()
    gate = asyncio.Semaphore(in_flight)

    async def one(_number: int) -> int:
        async with gate:
            handle = await DBOS.start_workflow_async(flow, 0)
            return int(await handle.get_result())

    await asyncio.gather(*(one(number) for number in range(WARM_UP)))
    began = time.perf_counter()
    steps = sum(await asyncio.gather(*(one(number) for number in range(runs))))
    seconds = time.perf_counter() - began
    version = importlib.metadata.version("dbos")
    print(json.dumps({"event": "result", "version": version, "steps": steps, "seconds": seconds}), flush=True)
    # Its threads go on, and nothing that they could still do is of interest.
    os._exit(0)


if __name__ == "__main__":
    DBOS(config={"name": "peer", "system_database_url": sys.argv[1], "log_level": "ERROR", "sys_db_pool_size": 20})
    asyncio.run(main(int(sys.argv[2]), int(sys.argv[3])))
