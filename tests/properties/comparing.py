"""What servers say of a run and what their tables hold, in the oracle's words, and where the two differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration

from fencepost.v1 import run_pb2
from fencepost.v1.payload_pb2 import Payload
from tests.properties.oracle_model import Event, Failure, Task
from tests.properties.oracle_run import Run

PREFIXES = {"state": "RUN_STATE_", "ending": "RUN_STATE_", "kind": "TIMER_KIND_"}
ENUMS = {"state": run_pb2.RunState, "ending": run_pb2.RunState, "kind": run_pb2.TimerKind}
TIMERS = {name.removeprefix("TIMER_KIND_"): number for name, number in run_pb2.TimerKind.items()}


def run_state(number: int) -> str:
    """RUNNING and the like."""
    name = run_pb2.RunState.Name(run_pb2.RunState.ValueType(number)).removeprefix("RUN_STATE_")
    return "" if name == "UNSPECIFIED" else name


def failure_of(message: run_pb2.Failure) -> Failure:
    """A failure of the contract as the oracle's."""
    kind = run_pb2.FailureKind.Name(message.kind).removeprefix("FAILURE_KIND_")
    return Failure(kind, message.code, message.node_id, message.attempt)


def plain(name: str, value: Any) -> Any:
    """A field of a message as a value that the oracle may have."""
    if isinstance(value, run_pb2.Failure):
        return failure_of(value)
    if isinstance(value, Payload):
        return json.loads(value.json or "null")
    if isinstance(value, Duration):
        return value.ToNanoseconds() / 1e9
    if name in ENUMS:
        return ENUMS[name].Name(value).removeprefix(PREFIXES[name])
    return value


def differing_events(expected: Sequence[Event], events: Sequence[run_pb2.Event]) -> Iterator[str]:
    """Where a history is another than the oracle's."""
    kinds = [str(event.WhichOneof("kind")) for event in events]
    if kinds != [event.kind for event in expected]:
        yield f"events are {kinds}, expected {[event.kind for event in expected]}"
        return
    for wanted, event in zip(expected, events, strict=True):
        message = getattr(event, wanted.kind)
        for name, value in wanted.fields.items():
            found = plain(name, getattr(message, name))
            if found != value:
                yield f"event {event.seq}, {wanted.kind}.{name} is {found!r}, expected {value!r}"


def step_state(run: Run, task: Task) -> str:
    """What a caller is told of an open step."""
    if task.holder:
        return "LEASED"
    if task.stuck or run.fixed_state in ("BLOCKED", "PAUSED"):
        return "PARKED"
    return "RETRYING" if task.ready_at > run.now else "READY"


def expected_steps(run: Run) -> dict[int, dict[str, object]]:
    """The open steps of a run by their tasks."""
    return {
        task.task_id: {
            "node_id": task.node_id,
            "handler": task.handler,
            "state": step_state(run, task),
            "attempt": task.attempt,
            "operational_failures": task.operational,
            "corrective_failures": task.corrective,
            "undo": task.undoes is not None,
            "scope_id": task.place.scope_id,
            "item": task.place.item,
            "checkpoint_number": task.checkpoint[0] if task.checkpoint else 0,
            "last_failure": task.last_failure,
        }
        for task in run.tasks.values()
    }


def told_steps(message: run_pb2.Run) -> dict[int, dict[str, object]]:
    """The same of a server's answer."""
    return {
        step.task_id: {
            "node_id": step.node_id,
            "handler": step.handler,
            "state": run_pb2.StepState.Name(step.state).removeprefix("STEP_STATE_"),
            "attempt": step.attempt,
            "operational_failures": step.operational_failures,
            "corrective_failures": step.corrective_failures,
            "undo": step.undo,
            "scope_id": step.scope_id,
            "item": step.item,
            "checkpoint_number": step.checkpoint_number,
            "last_failure": failure_of(step.last_failure) if step.HasField("last_failure") else None,
        }
        for step in message.open_steps
    }


def expected_waits(run: Run) -> set[tuple[int, str]]:
    """What else a run waits for: the event, and the name of the signal or ``time``."""
    waits = {(wait.seq, wait.name) for wait in run.waits}
    return waits | {(timer.seq, "time") for timer in run.timers if timer.kind in ("SLEEP", "START_DELAY")}


def told_waits(message: run_pb2.Run) -> set[tuple[int, str]]:
    """The same of a server's answer; what only limits something else is left out."""
    waits = {(w.seq, w.signal_name) for w in message.open_waits if w.WhichOneof("kind") == "signal_name"}
    waiting = {seq for seq, _ in waits} | {step.task_id for step in message.open_steps} | {1}
    times = {(w.seq, "time") for w in message.open_waits if w.WhichOneof("kind") == "fire_time"}
    return waits | {(seq, kind) for seq, kind in times if seq not in waiting}


def differing_run(run: Run, message: run_pb2.Run) -> Iterator[str]:
    """Where GetRun says something else than the oracle."""
    told: dict[str, tuple[object, object]] = {
        "state": (run_state(message.state), run.state),
        "last_seq": (message.last_seq, len(run.events)),
        "ended": (message.HasField("end_time"), run.final),
        "ending": (run_state(message.ending), run.ending[0] if run.ending and not run.final else ""),
    }
    if run.state in ("FAILED", "BLOCKED"):
        told["failure"] = (failure_of(message.failure), run.failure)
    if run.output is not None:
        told["output"] = (json.loads(message.output.json or "null"), run.output.data)
    if not run.final:
        told["open_steps"] = (told_steps(message), expected_steps(run))
        told["open_waits"] = (told_waits(message), expected_waits(run))
    for name, (found, wanted) in told.items():
        if found != wanted:
            yield f"{name} is {found!r}, expected {wanted!r}"


@dataclass(slots=True)
class Rows:
    """The rows of one run that is open."""

    next_seq: int = 0
    seqs: tuple[int, int] = (0, 0)
    tasks: dict[int, tuple[int, bool]] = field(default_factory=dict)
    undo: list[tuple[int, bool]] = field(default_factory=list)
    timers: set[tuple[int, int]] = field(default_factory=set)
    waits: set[tuple[int, str]] = field(default_factory=set)
    signals: set[tuple[int, str]] = field(default_factory=set)


def differing_rows(run: Run, rows: Rows) -> Iterator[str]:
    """Where the tables hold something else than the oracle: I3, I4, and what keeps I8."""
    count = len(run.events)
    told: dict[str, tuple[object, object]] = {
        "next_seq": (rows.next_seq, count + 1),
        "number and last of events": (rows.seqs, (count, count)),
        "tasks": (
            {task_id: leased for task_id, (_, leased) in rows.tasks.items()},
            {task.task_id: task.holder is not None for task in run.tasks.values()},
        ),
    }
    if not run.final:
        log = sorted((entry.of_seq, entry.unfinished) for entry in run.undo_log)
        told["undo log"] = (sorted(rows.undo), log)
        open_timers = {(timer.seq, TIMERS[timer.kind]) for timer in run.timers if not timer.fired}
        # Claims write no timers: one for the time until a worker takes a step stays behind, and does nothing.
        taken = {(task.task_id, TIMERS["QUEUE_TIMEOUT"]) for task in run.tasks.values() if task.leased_once}
        told["timers"] = (rows.timers - taken, open_timers)
    if not run.final and run.ending is None:
        told["waits"] = (rows.waits, {(wait.seq, wait.name) for wait in run.waits})
        told["signals"] = (rows.signals, {(seq, name) for seq, name, _ in run.signals})
    for name, (found, wanted) in told.items():
        if found != wanted:
            yield f"table: {name}: {found!r}, expected {wanted!r}"
    for task_id, (token, _) in rows.tasks.items():
        task = run.tasks.get(task_id)
        if task and token < task.token:
            yield f"table: the token of task {task_id} is {token}, it was {task.token}"
