"""procrastinate, a task queue: ten single tasks in place of a run: `python procrastinate_job.py DSN RUNS IN_FLIGHT`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import sys
import time

import psycopg
from procrastinate import App, PsycopgConnector

STEPS = 10
_SUCCEEDED = "select count(*) from procrastinate_jobs where status = 'succeeded'"


async def main(dsn: str, runs: int, in_flight: int) -> None:
    """Defer all tasks, then work them off in this process."""
    logging.disable(logging.CRITICAL)
    app = App(connector=PsycopgConnector(conninfo=dsn, max_size=20))

    @app.task(queue="peer")
    async def step(number: int) -> int:
        return number + 1

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await step.batch_defer_async(*({"number": number} for number in range(runs * STEPS)))
        began = time.perf_counter()
        await app.run_worker_async(
            queues=["peer"], concurrency=in_flight, wait=False, install_signal_handlers=False, listen_notify=False
        )
        seconds = time.perf_counter() - began
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        [steps] = await (await connection.execute(_SUCCEEDED)).fetchone() or (0,)
    version = importlib.metadata.version("procrastinate")
    print(json.dumps({"event": "result", "version": version, "steps": steps, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
