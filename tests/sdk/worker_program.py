"""A worker as a program, for tests that send it signals: ``python -m tests.sdk.worker_program ADDRESS MODE``.

Its step s1 prints what happens to it, a line of JSON each. MODE says what it does: ``hold`` waits until it is
cancelled, ``finish`` for a second, ``block`` in C code for ever, ``block-loop`` too, on the steps' event loop,
``exit`` kills its process with its first attempt.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from typing import Any

from fencepost import StepContext, Worker, step


def say(event: str, **details: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **details}) + "\n")
    sys.stdout.flush()


def main(address: str, mode: str, drain_timeout: float) -> None:
    @step("s1")
    async def on_loop(ctx: StepContext) -> int:
        say("begun", attempt=ctx.attempt)
        try:
            if mode == "block-loop":
                time.sleep(3600)  # noqa: ASYNC251 - the point
            if mode == "exit" and ctx.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(3600 if mode == "hold" else 1)
        except asyncio.CancelledError:
            say("cancelled", reason=ctx.cancel_reason)
            raise
        say("finished")
        return ctx.attempt

    @step("s1")
    def in_thread(ctx: StepContext) -> int:
        say("begun", attempt=ctx.attempt)
        time.sleep(3600)
        return ctx.attempt

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    handler = in_thread if mode == "block" else on_loop
    worker = Worker(address, [handler], slots=2, drain_timeout=drain_timeout)
    worker.run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever was held up, and sends one only now, is none of its business
    say("ended", **{name: getattr(worker.stats(), name) for name in ("started", "completed", "failed", "released")})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 30.0)
