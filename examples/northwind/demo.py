"""The story that the demo tells: orders are submitted, a worker is killed amid its steps, and all comes out right.

`tell` tells it from beginning to end; __main__.py sets the stage and sums up.
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TypeVar

import psycopg

from examples.northwind.books import Books, StepOfOrder, Takeover
from examples.northwind.dataset import Dataset, Order
from examples.northwind.display import Display
from examples.northwind.processes import Processes, PythonProcess
from examples.northwind.reconciliation import EFFECTS, Reconciliation, reconcile
from examples.northwind.worker import SLOTS
from fencepost import Client, FencepostError, RunState, StartRun, StepState

MANIFEST = Path(__file__).with_name("workflow.yaml")
BATCH = 200  # runs that one call starts
KILL_AFTER = 0.4  # of the orders
LOOK_INTERVAL = 0.05
TIME_LIMIT = 300.0
OPEN_STATES = [state for state in RunState if not state.is_final and state is not RunState.UNSPECIFIED]

T = TypeVar("T")


class DemoFailed(Exception):
    """The orders did not come to an end."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What runs already: a server with its client, and the ledger. Processes can be started and are ended later."""

    address: str
    client: Client
    ledger_dsn: str
    ledger: psycopg.Connection
    processes: Processes

    def start_worker(self, name: str) -> PythonProcess:
        """Start a worker process."""
        settings = ("--address", self.address, "--ledger", self.ledger_dsn, "--name", name)
        return self.processes.start(name, "examples.northwind.worker", *settings)


@dataclass(frozen=True, slots=True)
class Killed:
    """A worker that was killed, the steps that it held then, and when that was by the ledger's clock."""

    worker: str
    held: frozenset[StepOfOrder]
    at: datetime


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out, how long the orders took, and how many attempts were kept from having an effect again."""

    reconciliation: Reconciliation
    seconds: float
    repeated_attempts: int
    stale_attempts: int


def tell(stage: Stage, dataset: Dataset) -> Outcome:
    """Tell the story. Raises DemoFailed, ProcessEnded, FencepostError."""
    client, books, total = stage.client, Books(stage.ledger), len(dataset.orders)
    workflow_id = client.register_definition(MANIFEST).workflow_id
    victim = stage.start_worker("worker-1")
    stage.start_worker("worker-2")
    with Display(list(EFFECTS), total) as display:
        watch = _Watch(stage, books, display, total)
        display.say(f"{workflow_id} is registered; worker-1 and worker-2 are starting")
        started = time.monotonic()
        submit(client, workflow_id, dataset.orders)
        display.say(f"{total} orders are submitted: the server has stored each of them as a run")

        watch.until(lambda: watch.done >= KILL_AFTER * total)
        killed = watch.until(lambda: kill_amid_steps(client, books, victim))
        if killed is None:
            display.say("all is done before a worker could be killed amid its steps: take more orders")
        else:
            stage.start_worker("worker-3")
            display.say(f"worker-1 is killed (SIGKILL) while it holds {len(killed.held)} steps: {_listed(killed.held)}")
            display.say("worker-3 takes its place; those steps wait a little, in case worker-1 was only cut off")
            takeover = watch.until(lambda: books.first_takeover(killed.held, killed.worker))
            if takeover is not None:
                display.say(_told(takeover, killed))
        watch.until(lambda: None)
        seconds = time.monotonic() - started
    without_effect = books.without_effect()
    return Outcome(
        reconcile(dataset, stage.ledger, states_by_order(client, workflow_id)),
        seconds,
        repeated_attempts=without_effect.get("repeated", 0),
        stale_attempts=without_effect.get("stale", 0),
    )


def submit(client: Client, workflow_id: str, orders: Sequence[Order]) -> None:
    """Start a run for each order.

    The order's id is the request key: who submits an order again, after a crash or a time-out, gets the run that
    exists. Raises FencepostError if one is refused.
    """
    starts = (StartRun(workflow_id, order, request_key=str(order.order_id)) for order in orders)
    while batch := list(islice(starts, BATCH)):
        for answer in client.start_runs(batch):
            if isinstance(answer, FencepostError):
                raise answer


class _Watch:
    """Waits for what is to come, and shows meanwhile how far the orders are; ``done`` of them are."""

    def __init__(self, stage: Stage, books: Books, display: Display, total: int) -> None:
        self._stage = stage
        self._books = books
        self._display = display
        self._total = total
        self._give_up = time.monotonic() + TIME_LIMIT
        self.done = 0

    def until(self, condition: Callable[[], T | None]) -> T | None:
        """Wait for a true value, and return it; None if no run is open any more, so that none will come.

        Raises DemoFailed, or ProcessEnded.
        """
        while True:
            effects = self._books.effects()
            self._display.show(effects)
            self.done = min(effects.get(step, 0) for step in EFFECTS)
            if found := condition():
                return found
            if self.done >= self._total and not any(self._stage.client.list_runs(states=OPEN_STATES, limit=1)):
                return None
            self._stage.processes.check()
            if time.monotonic() > self._give_up:
                raise DemoFailed(f"only {self.done} of {self._total} orders were done within {TIME_LIMIT:g} s")
            time.sleep(LOOK_INTERVAL)


def kill_amid_steps(client: Client, books: Books, worker: PythonProcess) -> Killed | None:
    """Kill a worker that has leases. None if it has none just now.

    It is stopped for a moment first, so that the leases that are counted are those that it dies with.
    """
    worker.send(signal.SIGSTOP)
    held = frozenset(steps_held_by(client, worker.name))
    if not held:
        worker.send(signal.SIGCONT)
        return None
    worker.kill()
    return Killed(worker.name, held, books.now())


def steps_held_by(client: Client, worker_name: str) -> set[StepOfOrder]:
    """Ask the server which steps a worker has on lease."""
    held: set[StepOfOrder] = set()
    # From the oldest run on, for these are at work; a list leaves out the open steps, so each run is read.
    for listed in reversed(list(client.list_runs(states=OPEN_STATES))):
        run = client.get_run(listed.run_id)
        for step in run.open_steps:
            if step.state is StepState.LEASED and step.worker_name == worker_name:
                held.add((int(run.request_key), step.node_id))
        if len(held) == SLOTS:
            break
    return held


def states_by_order(client: Client, workflow_id: str) -> Mapping[str, list[str]]:
    """The states of all runs that the server has, by the order that they are for."""
    states: dict[str, list[str]] = defaultdict(list)
    for run in client.list_runs(workflow_id):
        states[run.request_key].append(run.state)
    return states


def _told(takeover: Takeover, killed: Killed) -> str:
    step = _listed([(takeover.order_id, takeover.step)])
    seconds = (takeover.at - killed.at).total_seconds()
    return f"{takeover.worker} goes on with {step}, {seconds:.1f} s after the kill of {killed.worker}"


def _listed(steps: Collection[StepOfOrder]) -> str:
    """The first few of them, in words."""
    words = [f"{step} of order {order_id}" for order_id, step in sorted(steps)[:3]]
    return ", ".join(words) + (", …" if len(steps) > len(words) else "")
