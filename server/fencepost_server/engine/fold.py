"""Folds the operations of a batch, in their order, over the rows that the batch has locked.

No I/O: rows, time, epoch and randomness come in, changed rows, events and answers go out. Each run is folded by a
coroutine that asks for what it needs to see (engine.context); engine.commit drives those of a batch together. The rules
are in engine.flow (what follows a node), engine.steps (tasks and their tokens), engine.ending and engine.undoing (how
runs end), engine.commands (signals, control, timers) and engine.children.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from fencepost_server.domain.errors import RunNotFound, UnknownDefinition
from fencepost_server.domain.graph import Graph
from fencepost_server.domain.model import DECIDE_TASK, Ended, EventType, RunRow, RunState, TaskRow, TimerKind
from fencepost_server.domain.rows import TOP, Control
from fencepost_server.engine import children, commands, deciding, flow, local_steps, steps
from fencepost_server.engine.changes import NewRun, TaskKey
from fencepost_server.engine.context import Environment, RunContext, Value
from fencepost_server.engine.operations import (
    LEASE_LOST,
    Command,
    CommandKind,
    Deliver,
    Fire,
    MessageKind,
    Report,
    ReportKind,
    Start,
    Started,
)
from fencepost_server.store.batch import LeasedDecider

_ADVANCE, _COMPLETE = ReportKind.ADVANCE, ReportKind.COMPLETE

Folding = Coroutine[Any, Any, None]
Act = Report | Command | Fire | Deliver
"""What is done to a run that exists."""


async def _see_task(ctx: RunContext, report: Report) -> None:
    """Read the task of an Advance that keeps its lease: nobody has locked it."""
    if report.keeps_lease and not ctx.is_known(DECIDE_TASK):
        for row in await ctx.read("open_task", ctx.run.run_id, DECIDE_TASK):
            ctx.tasks[DECIDE_TASK] = TaskRow(*row)


def _priority(start: tuple[Start, Graph]) -> int:
    return start[0].priority


@dataclass(slots=True)
class Fold:
    """One batch under decision. ``ended`` has, for tasks that are gone, how each ended."""

    env: Environment
    runs: Mapping[str, RunRow]
    tasks: Mapping[TaskKey, TaskRow]
    deciders: Mapping[str, LeasedDecider]
    ended: Mapping[TaskKey, Ended]
    graphs: Mapping[bytes, Graph]

    def foldings(self, starts: Sequence[tuple[Start, Graph]], acts: Sequence[Act]) -> list[Folding]:
        """A coroutine for each run, to be driven until all are done. A run that starts may be acted on at once. Those
        of a higher priority start first: there may be less room for first steps than there are runs.
        """
        by_run: dict[str, list[Act]] = {}
        for act in acts:
            by_run.setdefault(act.run_id, []).append(act)
        new = {start.run_id: (start, graph) for start, graph in sorted(starts, key=_priority)}
        foldings = [self._start_and_fold(*new[run_id], by_run.pop(run_id, ())) for run_id in new]
        by_run = {run_id: some for run_id, some in by_run.items() if not self._fold_local_steps(some)}
        contexts = self._contexts(by_run)
        for run_id, some in by_run.items():
            ctx = contexts.get(run_id)
            if ctx is None or not ctx.graph.simple or not self._fold_plain(ctx, some):
                foldings.append(self._fold(ctx, some))
        return foldings

    def _fold_local_steps(self, acts: Sequence[Act]) -> bool:
        """Fold the one Advance of a code run that brings results of local steps. False: nothing was done."""
        act = acts[0]
        if len(acts) > 1 or type(act) is not Report or act.kind is not _ADVANCE:
            return False
        run = self.runs.get(act.run_id)
        if run is None or run.namespace != act.namespace:
            return False
        decider = self.deciders.get(act.run_id)
        if decider is None:
            return False
        answer = local_steps.fold(self.env, run, decider, self.graphs[run.definition_hash], act)
        if answer is None:
            return False
        self.env.changes.reports.append((act, answer))
        return True

    def _fold_plain(self, ctx: RunContext, acts: Sequence[Act]) -> bool:
        """Fold the one completion of a plain sequence at once. False if it is something else, and nothing was done."""
        act = acts[0]
        if len(acts) > 1 or ctx.plain is not None or type(act) is not Report or act.kind is not _COMPLETE:
            return False
        if act.namespace != ctx.run.namespace:
            return False
        answer = steps.complete_plain(ctx, act)
        if answer is None:
            return False
        self.env.changes.reports.append((act, answer))
        return True

    def _contexts(self, run_ids: Mapping[str, object]) -> dict[str, RunContext]:
        found = {
            run_id: RunContext(self.env, run, self.graphs[run.definition_hash])
            for run_id in run_ids
            if (run := self.runs.get(run_id)) is not None
        }
        for (run_id, task_id), task in self.tasks.items():
            if run_id in found:
                found[run_id].tasks[task_id] = task
        for (run_id, task_id), ended in self.ended.items():
            if run_id in found:
                found[run_id].ended[task_id] = ended
        return found

    async def _fold(self, ctx: RunContext | None, acts: Sequence[Act]) -> None:
        changes = self.env.changes
        if ctx is not None and ctx.graph.broken:
            await self._fold_broken(ctx, acts)
            return
        for act in acts:
            match act:
                case Report():
                    if ctx is None or ctx.run.namespace != act.namespace:
                        changes.reports.append((act, LEASE_LOST))
                        continue
                    await _see_task(ctx, act)
                    answer = await steps.report(ctx, act)
                    await flow.pump(ctx)
                    ctx.settle()
                    ctx.report = None
                    changes.reports.append((act, answer))
                case Command():
                    changes.commands.append((act, await self._command(ctx, act)))
                case Fire():
                    changes.handled.append(act)
                    if ctx is not None:
                        await commands.fire(ctx, act)
                case Deliver():
                    changes.handled.append(act)
                    changes.rows.add("delete_message", act.message_id)
                    if ctx is not None:
                        await self._deliver(ctx, act)
        if ctx is not None and ctx.graph.code is not None:
            await deciding.settle(ctx)

    async def _fold_broken(self, ctx: RunContext, acts: Sequence[Act]) -> None:
        """Nothing can be decided without the definition: the run is BLOCKED until it is there again, or terminated."""
        changes = self.env.changes
        for act in acts:
            match act:
                case Report() if act.namespace != ctx.run.namespace:
                    changes.reports.append((act, LEASE_LOST))
                case Report():
                    await _see_task(ctx, act)
                    changes.reports.append((act, steps.report_broken(ctx, act)))
                    ctx.settle()
                case Command():
                    parked = ctx.plain is not None and ctx.plain.blocked and act.kind is CommandKind.RETRY
                    if act.namespace != ctx.run.namespace or parked or act.kind is CommandKind.TERMINATE:
                        changes.commands.append((act, await self._command(ctx, act)))
                    else:
                        changes.commands.append((act, UnknownDefinition(ctx.graph.broken)))
                case Deliver() if ctx.state.final:  # whatever it says, it changes nothing any more
                    changes.handled.append(act)
                    changes.rows.add("delete_message", act.message_id)
                case Fire() | Deliver():  # found again
                    changes.handled.append(act)
                    steps.block_broken(ctx)
                    ctx.settle()

    async def _command(self, ctx: RunContext | None, command: Command) -> Any:
        if ctx is None or ctx.run.namespace != command.namespace:
            return RunNotFound(f"no run {command.run_id} in namespace {command.namespace!r}")
        return await commands.command(ctx, command)

    async def _deliver(self, ctx: RunContext, deliver: Deliver) -> None:
        if deliver.kind is MessageKind.CHILD_ENDED:
            await children.ended(ctx, deliver)
        elif deliver.kind is not MessageKind.START_CHILD:  # that of a run that exists was applied before
            await children.told_to_end(ctx, deliver)
        await flow.pump(ctx)
        ctx.settle()

    async def _start_and_fold(self, start: Start, graph: Graph, acts: Sequence[Act]) -> None:
        ctx = self._new_run(start, graph)
        await self._begin(ctx, start)
        self.env.changes.starts.append((start, Started(start.run_id, True, graph.hash)))
        if acts:
            await self._fold(ctx, acts)

    def _new_run(self, start: Start, graph: Graph) -> RunContext:
        """The row of a run that begins. A plain sequence that starts at once needs no control."""
        control = None
        if not graph.simple or start.parent is not None or start.start_delay or start.run_timeout is not None:
            control = Control(parent=start.parent, depth=start.depth)
        run = RunRow(
            start.run_id, start.namespace, start.workflow_id, graph.hash, start.user_id, start.priority,
            RunState.PENDING, 0, 1, self.env.now, start.dedupe_key, None if control is None else control.to_json(),
        )  # fmt: skip
        attributes = json.dumps(dict(start.attributes)) if start.attributes else None
        parent = None if start.parent is None else start.parent[0]
        rows = self.env.changes.rows
        rows.new_runs[run.run_id] = NewRun(run, start.request_key, attributes, parent)
        for key, value in start.attributes.items():
            rows.add("insert_attribute", run.run_id, key, value, run.namespace, self.env.now)
        return RunContext(self.env, run, graph)

    async def _begin(self, ctx: RunContext, start: Start) -> None:
        ctx.event(EventType.RUN_STARTED, payload=start.input)
        value = Value(1, start.input.size, start.input)
        if start.run_timeout is not None:
            fire_at = self.env.now + timedelta(seconds=start.run_timeout)
            milliseconds = round(start.run_timeout * 1000)
            ctx.start_timer(1, TimerKind.RUN_TIMEOUT, fire_at, 0, TOP, value, ms=milliseconds)
        if start.start_delay:
            fire_at = self.env.now + timedelta(seconds=start.start_delay)
            seq = ctx.event(EventType.TIMER_STARTED, input_seq=1, detail={"fire_at": fire_at.isoformat()})
            ctx.control.open_waits += 1
            ctx.start_timer(seq, TimerKind.START_DELAY, fire_at, 0, TOP, value)
        else:
            ctx.enter(0, TOP, value)
            await flow.pump(ctx)
        ctx.settle()
