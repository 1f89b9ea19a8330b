"""An Advance that brings results of local steps and nothing else, folded at once: most of what a busy server does for
code runs. What engine.deciding would do, without a RunContext and without reading JSON; whatever is not that simple is
left to it.
"""

from __future__ import annotations

import json
from functools import lru_cache

from fencepost_server.domain.graph import Graph
from fencepost_server.domain.model import DECIDE_TASK, NULL, EventType, Outcome, RunRow, RunState
from fencepost_server.domain.ops import AdvanceAnswer, AdvanceOutcome, LocalStep
from fencepost_server.domain.rows import Control
from fencepost_server.engine.context import Environment
from fencepost_server.engine.operations import Answer, Report
from fencepost_server.store.batch import LeasedDecider

_KIND = int(EventType.LOCAL_STEP_ENDED)
_RUNNING = int(RunState.RUNNING)
_CONTINUE, _OK = AdvanceOutcome.CONTINUE, Outcome.OK
_DECIDER = '"decider": '
_UNTROUBLED = ", false, 0, false, 0, []]}"
"""How a decider ends that has nothing which an accepted Advance would begin anew: refusals, and who has tried."""


def fold(env: Environment, run: RunRow, decider: LeasedDecider, graph: Graph, report: Report) -> Answer | None:
    """The answer to such an Advance, with its events in the changes; None: nothing was done."""
    advance = report.advance
    if advance is None or run.control is None or report.task_id != DECIDE_TASK:
        return None
    if (
        advance.outcome is not _CONTINUE
        or run.state != _RUNNING
        or decider.token != report.token
        or graph.code is None
        or decider.handler != graph.code.handler
        or not decider.fresh
        or advance.taken_signals
        or advance.ended_waits
        or advance.seen_seq != run.next_seq - 1
        or run.next_seq + len(advance.commands) > env.limits.max_history_events
    ):
        return None
    head, mark, tail = run.control.rpartition(_DECIDER)
    if not mark or not _is_plain(head):
        return None
    advance_no, _digest, _seen, rest = tail.split(", ", 3)
    if advance.advance_no != int(advance_no[1:]) + 1 or not rest.endswith(_UNTROUBLED):
        return None
    for command in advance.commands:
        if type(command) is not LocalStep or command.options:
            return None
    seqs = _events(env, run, decider.token, advance.commands)  # type: ignore[arg-type]  # as was looked at above
    run.control = f'{head}{_DECIDER}[{advance.advance_no}, "{report.digest.hex()}", {advance.seen_seq}, {rest}'
    changes = env.changes
    changes.changed.add(run.run_id)
    changes.rows.changed_runs[run.run_id] = run
    return Answer(_OK, advance=AdvanceAnswer(seqs, run.last_event_at, (), run.next_seq - 1, True))


def _events(env: Environment, run: RunRow, token: int, steps: tuple[LocalStep, ...]) -> tuple[int, ...]:
    first = seq = run.next_seq
    at = run.last_event_at = max(run.last_event_at, env.now)
    run_id, events = run.run_id, env.changes.rows.events
    for step in steps:
        output = NULL if step.output is None else step.output
        json_text, binary, metadata = output.json, output.binary, output.metadata
        if step.failure is not None:
            json_text = binary = metadata = None
        events.append(
            (run_id, seq, _KIND, at, None, None, token, None, None, None, json_text, binary, metadata, detail_of(step))
        )
        seq += 1
    run.next_seq = seq
    return tuple(range(first, seq))


def detail_of(step: LocalStep) -> str:
    """JSON text of ``detail`` of the event of a local step."""
    text = f'{{"op": {step.op}, "node": {_quoted(step.name)}, "attempts": {step.attempts}'
    if step.input_hash:
        text = f'{text}, "input_hash": "{step.input_hash.hex()}"'
    if step.failure is not None:
        text = f'{text}, "failure": {step.failure.to_json()}'
    return text + "}"


@lru_cache(maxsize=2000)
def _quoted(name: str) -> str:
    return json.dumps(name)


@lru_cache(maxsize=4000)
def _is_plain(head: str) -> bool:
    """The control of a run up to its decider: nothing is going on but that."""
    control = Control.from_json(f"{head}{_DECIDER}null}}")
    return control.began and control.ending is None and not (control.paused or control.blocked or control.undo_failed)
