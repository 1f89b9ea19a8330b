"""A worker as a program: ``python -m tests.faults.worker_program TARGET SINK_DSN STEPS SLOTS [GATE]``.

It has the steps s1, s2 … of tests' manifests. Each acts on the sink with its fencing token and returns its attempt.
With a GATE it waits for that first and prints what happens to it, a line of JSON each; when it is cancelled meanwhile
it acts all the same, as code does that looks too late.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
from typing import Any

from fencepost import Step, StepContext, Worker, step
from tests.faults.sink import Sink

_printing = threading.Lock()


def say(event: str, **details: Any) -> None:
    with _printing:
        sys.stdout.write(json.dumps({"event": event, **details}) + "\n")
        sys.stdout.flush()


def tell_connected(worker: Worker) -> None:
    if worker.wait_connected(60):
        say("connected")


def make_step(name: str, sink: Sink, gate: str) -> Step[[StepContext], int]:
    @step(name)
    def run(ctx: StepContext) -> int:
        if gate:
            hold(ctx)
        accepted = sink.act(ctx.idempotency_key, ctx.fencing_token)
        if gate:
            say("acted", run_id=ctx.run_id, accepted=accepted)
        return ctx.attempt

    def hold(ctx: StepContext) -> None:
        say("begun", run_id=ctx.run_id, attempt=ctx.attempt)
        while not sink.is_open(gate):
            if ctx.wait_cancelled(0.02):
                say("cancelled", run_id=ctx.run_id, reason=ctx.cancel_reason)
                return

    return run


def main(target: str, sink_dsn: str, steps: str, slots: str, gate: str = "", drain_timeout: str = "30") -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    sink = Sink(sink_dsn)
    handlers = [make_step(f"s{number}", sink, gate) for number in range(1, int(steps) + 1)]
    worker = Worker(target, handlers, slots=int(slots), drain_timeout=float(drain_timeout))
    threading.Thread(target=tell_connected, args=(worker,), daemon=True).start()
    worker.run()
    say("ended", **dataclasses.asdict(worker.stats()))
    sink.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
