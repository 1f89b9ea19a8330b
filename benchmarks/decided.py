"""Runs whose every step is decided beforehand, by the server's own fold: the rows that a server would write.

They are for replay.py, which writes them without deciding anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import cast

from benchmarks.plan import STEPS
from benchmarks.workflow import INPUT, WORKFLOW, manifest
from fencepost_server.config import Config
from fencepost_server.domain.graph import Graph, compile_graph
from fencepost_server.domain.model import Outcome, Payload, RunRow, TaskRow, next_token
from fencepost_server.engine.changes import Changes, EventRow, Limits, NewTask, TaskKey
from fencepost_server.engine.context import Environment, UndoOrders
from fencepost_server.engine.fold import Fold, Folding
from fencepost_server.engine.operations import Report, ReportKind, Start, WorkerSession
from fencepost_server.engine.starting import new_run_id

NAMESPACE = "default"
SESSION_ID = "00000000-0000-4000-8000-000000000001"
_EPOCH = 0
_PRIORITY = 3
_STEP_TIME = timedelta(microseconds=50)


@dataclass(frozen=True, slots=True)
class DecidedStep:
    """What completing one step changes."""

    key: TaskKey
    run: RunRow
    new_task: NewTask | None
    events: Sequence[EventRow]


@dataclass(frozen=True, slots=True)
class DecidedRun:
    """A run as it is started, with its first task, and its steps."""

    run: RunRow
    task: NewTask
    events: Sequence[EventRow]
    steps: Sequence[DecidedStep]


@dataclass(frozen=True, slots=True)
class _Seat:
    """As much of a worker's session as a fold looks at when it leases a task to it."""

    session_id: str = SESSION_ID


def decide_runs(config: Config, runs: int, slots: int) -> list[DecidedRun]:
    """Decide ``runs`` runs from their start to their end. Call it in an event loop.

    Their times grow in the order in which ``slots`` slots would come to them, as they do in a server: the order of
    insertion into an index matters for what it costs.
    """
    graph = compile_graph(json.dumps(manifest()))
    outputs = [Payload(json=json.dumps({"n": n + 1}, separators=(",", ":"))) for n in range(STEPS)]
    began = datetime.now(UTC)
    decided = []
    for number in range(runs):
        wave, place = divmod(number, slots)
        times = [began + _STEP_TIME * ((wave * STEPS + index) * slots + place) for index in range(STEPS)]
        decided.append(_decide_run(config, graph, outputs, times))
    return decided


def _decide_run(config: Config, graph: Graph, outputs: Sequence[Payload], times: Sequence[datetime]) -> DecidedRun:
    fold = _fold(config, graph, times[0], {}, {})
    value = Payload(json=json.dumps(INPUT, separators=(",", ":")))
    unasked = asyncio.get_running_loop().create_future()
    start = Start(
        new_run_id(), NAMESPACE, WORKFLOW, None, value, INPUT, b"", b"", "", "", "", _PRIORITY, result=unasked
    )
    rows = _decided(fold, fold.foldings([(start, graph)], [])).rows
    run, task = rows.new_runs[start.run_id].row, rows.new_tasks[0]
    first = (replace(run), NewTask(replace(task.row), task.namespace), tuple(rows.events))
    leased = replace(
        task.row, attempt=1, token=next_token(0, _EPOCH), lease_session=SESSION_ID, lease_expires_at=times[0]
    )
    steps = []
    for output, now in zip(outputs, times, strict=True):
        step = _decide_step(config, graph, run, leased, output, now)
        steps.append(step)
        if step.new_task is not None:
            leased = replace(step.new_task.row)
    return DecidedRun(*first, steps)


def _decide_step(
    config: Config, graph: Graph, run: RunRow, task: TaskRow, output: Payload, now: datetime
) -> DecidedStep:
    """Complete ``task``, which changes ``run``."""
    key = (task.run_id, task.task_id)
    fold = _fold(config, graph, now, {run.run_id: run}, {key: task})
    session = cast("WorkerSession", _Seat())
    value = json.loads(output.json or "null")
    report = Report(
        ReportKind.COMPLETE, *key, task.token, NAMESPACE, output.digest(), output, value, session=session, frame_id=1
    )
    changes = _decided(fold, fold.foldings([], [report]))
    answer = changes.reports[0][1]
    if answer.outcome is not Outcome.OK:
        raise AssertionError(f"the fold refused a step of the benchmark: {answer}")
    new_task = changes.rows.new_tasks[0] if changes.rows.new_tasks else None
    return DecidedStep(key, replace(run), new_task, tuple(changes.rows.events))


def _decided(fold: Fold, foldings: Sequence[Folding]) -> Changes:
    """What the foldings change: those of a plain sequence ask for nothing."""
    for folding in foldings:
        with contextlib.suppress(StopIteration):
            need = folding.send(None)
            raise AssertionError(f"a plain sequence asks for {need}")
    return fold.env.changes


def _fold(config: Config, graph: Graph, now: datetime, runs: dict[str, RunRow], tasks: dict[TaskKey, TaskRow]) -> Fold:
    limits = Limits(
        config.free_redeliveries,
        config.max_payload_bytes,
        config.max_map_items,
        config.max_pending_signals,
        config.cancel_grace,
        config.max_history_events,
    )
    environment = Environment(
        now,
        _EPOCH,
        now,
        limits,
        lambda: 0.5,
        lambda _report, _run, _queue, _handler: 1,
        lambda _run, _queue, _handler: None,
        Changes(now),
        UndoOrders(),
        lambda _session: None,
        {},
        {},
    )
    return Fold(environment, runs, tasks, {}, {}, {graph.hash: graph})
