"""A step that a test holds, for workers in threads of the test."""

from __future__ import annotations

import threading

from fencepost import StepContext, step
from tests.faults.sink import Sink


class HeldStep:
    """The step s1: it waits until it is let on, then acts on the sink, whether it was cancelled meanwhile or not."""

    def __init__(self, sink: Sink) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self._sink = sink
        self.step = step("s1")(self._run)

    def _run(self, ctx: StepContext) -> int:
        self.begun.set()
        self.go_on.wait(30)
        self._sink.act(ctx.idempotency_key, ctx.fencing_token)
        return ctx.attempt
