"""How long it takes with one run in flight: from the start to its first step, and from each step to the next.

A step's time is when its handler is entered in the worker; the clock is the machine's monotonic one, which all
processes share. From one step to the next is therefore the whole way: the handler returns, its outcome goes to the
server, is committed, and the next task comes back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.processes import Worker
from benchmarks.workflow import INPUT, WORKFLOW
from fencepost import AsyncClient

_END_TIMEOUT = 30.0


@dataclass(slots=True)
class Latencies:
    """Milliseconds, a value for each run or each step after the first."""

    submit: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)

    def add(self, submitted: float, entered: Sequence[float]) -> None:
        """One run: when its start was asked for, and when its steps were entered, in seconds."""
        self.submit.append((entered[0] - submitted) * 1000)
        self.step.extend((after - before) * 1000 for before, after in pairwise(entered))


async def one_by_one(client: AsyncClient, worker: Worker, runs: int, slots: int) -> Latencies:
    """Make ``runs`` runs, each after the one before has ended. The first one is not counted: it warms up."""
    found = Latencies()
    await worker.work(slots, timed=True)
    for number in range(runs + 1):
        submitted = time.monotonic()
        handle = await client.start_run(WORKFLOW, INPUT)
        entered = (await worker.event("run"))["entered"]
        if number:
            found.add(submitted, entered)
        # The commit of its last step is no part of any time, but would be in the way of the next run's start.
        await handle.wait(_END_TIMEOUT)
    await worker.stop()
    return found
