"""Absurd: ten inline steps a task, one worker: `python absurd_job.py DSN RUNS IN_FLIGHT`."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from typing import Any

import psycopg
from absurd_sdk import Absurd
from absurdctl import BUNDLED_SCHEMA_SQL

STEPS = 10
_COMPLETED = "select count(*) from absurd.t_peer where state = 'completed'"


def main(dsn: str, runs: int, in_flight: int) -> None:
    """Set up its schema, spawn all tasks, and work them off in this process."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(BUNDLED_SCHEMA_SQL)
        app = Absurd(dsn, queue_name="peer")
        app.create_queue()

        @app.register_task("flow")
        def flow(params: Any, ctx: Any) -> Any:
            for index in range(STEPS):
                ctx.step(f"s{index}", lambda index=index: {"n": index})
            return params

        for number in range(runs):
            app.spawn("flow", {"n": number})
        began = time.perf_counter()
        completed = 0
        while completed < runs:
            app.work_batch(batch_size=in_flight)
            [completed] = connection.execute(_COMPLETED).fetchone() or (0,)
        seconds = time.perf_counter() - began
    version = importlib.metadata.version("absurd-sdk")
    print(
        json.dumps({"event": "result", "version": version, "steps": completed * STEPS, "seconds": seconds}), flush=True
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
