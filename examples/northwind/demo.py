"""The story that the demo tells: orders are submitted, a worker is killed amid its steps, and all comes out right.

`tell` tells it from beginning to end; __main__.py sets the stage and sums up.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import psycopg

from examples.northwind.books import Books, Takeover
from examples.northwind.dataset import Dataset, Order
from examples.northwind.display import Display
from examples.northwind.killing import OPEN_STATES, Killed, kill_amid_refund
from examples.northwind.processes import Processes, PythonProcess
from examples.northwind.reconciliation import Reconciliation, expected_orders, is_refused, reconcile
from fencepost import Client, FencepostError, StartRun

MANIFEST = Path(__file__).with_name("workflow.yaml")
BATCH = 200  # runs that one call starts
KILL_AFTER = 0.4  # of the orders
LAST_STEPS = ("notify", "unreserve")  # an order is done after the one or the other
LOOK_INTERVAL = 0.05
TIME_LIMIT = 300.0

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
    workers = {name: stage.start_worker(name) for name in ("worker-1", "worker-2")}
    with Display(expected_orders(dataset), total, LAST_STEPS) as display:
        watch = _Watch(stage, books, display, total)
        display.say(f"{workflow_id} is registered; worker-1 and worker-2 are starting")
        started = time.monotonic()
        stalled = order_to_stall(dataset)
        with books.refund_stalled(stalled):
            submit(client, workflow_id, dataset.orders)
            display.say(f"{total} orders are submitted: the server has stored each of them as a run")
            watch.until(lambda: watch.done >= int(KILL_AFTER * total))
            killed = watch.until(lambda: kill_amid_refund(client, books, workers, stalled))
        if killed is None:
            display.say(f"order {stalled} was never refunded, so no worker is killed amid that")
        else:
            stage.start_worker("worker-3")
            count, victim = len(killed.held), killed.worker
            display.say(f"{victim} is killed (SIGKILL) while it holds {count} steps: {_listed(killed)}")
            display.say(f"worker-3 takes its place; those steps wait a little, in case {victim} was only cut off")
            takeover = watch.until(lambda: books.takeover(killed.refund, victim))
            if takeover is not None:
                display.say(_told(takeover, killed))
        watch.until(lambda: None)
        seconds = time.monotonic() - started
    without_effect = books.without_effect()
    return Outcome(
        reconcile(dataset, stage.ledger, ends_by_order(client, workflow_id)),
        seconds,
        repeated_attempts=without_effect.get("repeated", 0),
        stale_attempts=without_effect.get("stale", 0),
    )


def order_to_stall(dataset: Dataset) -> int:
    """The order amid whose refund a worker is killed: one that comes up about then, for the refund waits until then."""
    refused = [(place, order.order_id) for place, order in enumerate(dataset.orders) if is_refused(order, dataset)]
    later = [order_id for place, order_id in refused if place >= KILL_AFTER * len(dataset.orders)]
    return later[0] if later else refused[-1][1]


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
            self.done = sum(effects.get(step, 0) for step in LAST_STEPS)
            if found := condition():
                return found
            if not any(self._stage.client.list_runs(states=OPEN_STATES, limit=1)):
                return condition()  # it may have come true since it was asked, with the end of the last run
            self._stage.processes.check()
            if time.monotonic() > self._give_up:
                raise DemoFailed(f"only {self.done} of {self._total} orders were done within {TIME_LIMIT:g} s")
            time.sleep(LOOK_INTERVAL)


def ends_by_order(client: Client, workflow_id: str) -> Mapping[str, list[str]]:
    """How all runs ended that the server has, by the order that they are for: the state, and of failures the cause."""
    ends: dict[str, list[str]] = defaultdict(list)
    for run in client.list_runs(workflow_id):
        failure = run.failure
        cause = f" at {failure.node_id} ({failure.kind} {failure.code})" if failure else ""
        ends[run.request_key].append(f"{run.state}{cause}")
    return ends


def _told(takeover: Takeover, killed: Killed) -> str:
    seconds = (takeover.at - killed.at).total_seconds()
    step = f"{takeover.step} of order {takeover.order_id}"
    return f"{takeover.worker} goes on with {step}, {seconds:.1f} s after the kill of {killed.worker}"


def _listed(killed: Killed) -> str:
    """The refund and a few of the others, in words."""
    shown = [killed.refund, *sorted(killed.held - {killed.refund})[:2]]
    words = [f"{step} of order {order_id}" for order_id, step in shown]
    return ", ".join(words) + (", …" if len(killed.held) > len(words) else "")
