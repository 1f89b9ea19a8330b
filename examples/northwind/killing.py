"""Kills a worker amid its steps, one of which is a refund. It needs no luck for that: that refund is stalled."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from examples.northwind.books import Books, StepOfOrder
from examples.northwind.processes import PythonProcess
from examples.northwind.worker import SLOTS
from fencepost import Client, OpenStep, RunState, StepState

OPEN_STATES = [state for state in RunState if not state.is_final and state is not RunState.UNSPECIFIED]
REFUND = "refund"


@dataclass(frozen=True, slots=True)
class Killed:
    """A worker that was killed, the steps that it held then, and when that was by the ledger's clock.

    ``refund`` is one of them: the undoing of a charge, which waited for the payment provider.
    """

    worker: str
    held: frozenset[StepOfOrder]
    refund: StepOfOrder
    at: datetime


def kill_amid_refund(
    client: Client, books: Books, workers: Mapping[str, PythonProcess], order_id: int
) -> Killed | None:
    """Kill the worker that has begun to refund an order; None if none has so far. The refund must be stalled.

    It is stopped for a moment first, so that the leases that are counted are those that it dies with.
    """
    victim = _who_refunds(client, workers, order_id)
    if victim is None:
        return None
    victim.send(signal.SIGSTOP)
    held = steps_held_by(client, victim.name)
    victim.kill()
    return Killed(victim.name, frozenset(held), (order_id, REFUND), books.now())


def _who_refunds(client: Client, workers: Mapping[str, PythonProcess], order_id: int) -> PythonProcess | None:
    """Ask the server which worker has the refund of an order on lease."""
    for listed in client.list_runs(states=[RunState.UNDOING]):
        if listed.request_key == str(order_id):
            for step in client.get_run(listed.run_id).open_steps:
                if step.state is StepState.LEASED and _name(step) == REFUND:
                    return workers[step.worker_name]
    return None


def _name(step: OpenStep) -> str:
    """What the ledger calls a step, or the undoing of one."""
    return step.handler.removeprefix("northwind.")


def steps_held_by(client: Client, worker_name: str) -> set[StepOfOrder]:
    """Ask the server which steps a worker has on lease."""
    held: set[StepOfOrder] = set()
    # From the oldest run on, for these are at work; a list leaves out the open steps, so each run is read.
    for listed in reversed(list(client.list_runs(states=OPEN_STATES))):
        run = client.get_run(listed.run_id)
        for step in run.open_steps:
            if step.state is StepState.LEASED and step.worker_name == worker_name:
                held.add((int(run.request_key), _name(step)))
        if len(held) == SLOTS:
            break
    return held
