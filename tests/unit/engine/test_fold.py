"""Decisions of a batch without a database: any reports, in any order, in batches of any size (I2–I6, I8)."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost_server.domain.graph import Graph, compile_graph
from fencepost_server.domain.manifest import parse_manifest
from fencepost_server.domain.model import (
    PARKED_UNTIL,
    Ended,
    EventType,
    Failure,
    FailureKind,
    Outcome,
    Payload,
    RunRow,
    RunState,
    TaskRow,
)
from fencepost_server.engine.changes import Changes, Limits, Rows
from fencepost_server.engine.context import Environment, UndoOrders
from fencepost_server.engine.fold import Fold
from fencepost_server.engine.operations import Answer, Report, ReportKind, Start
from fencepost_server.store.extras import Need
from tests.fixtures.manifests import manifest

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RUN = "00000000-0000-4000-8000-000000000001"
POLICY = {"max_attempts": 4, "max_corrective_attempts": 3}
LIMITS = Limits(
    free_redeliveries=3,
    max_payload_bytes=1 << 20,
    max_map_items=10,
    max_pending_signals=10,
    cancel_grace=30.0,
    max_history_events=1000,
)
NEVER = datetime(1970, 1, 1, tzinfo=UTC)
NULL = Payload(json="null")


def graph(**nodes: Any) -> Graph:
    """Three steps."""
    return compile_graph(
        parse_manifest(manifest(3, output_schema={"type": "integer"}, retry=POLICY, **nodes)).canonical
    )


PLAIN = graph()
UNDOING = graph(undo={"step": "u", "retry": POLICY})
GRAPHS = [pytest.param(PLAIN, id="plain"), pytest.param(UNDOING, id="with undo")]
STEP_ENDS = (EventType.STEP_COMPLETED, EventType.STEP_FAILED, EventType.STEP_CANCELLED)
UNDO_ENDS = (EventType.UNDO_COMPLETED, EventType.UNDO_FAILED)
RUN_ENDS = (EventType.RUN_COMPLETED, EventType.RUN_FAILED)


@dataclass(slots=True)
class Store:
    """What the database would hold, with one run of three steps."""

    graph: Graph
    now: datetime = NOW
    epoch: int = 0
    runs: dict[str, RunRow] = field(default_factory=dict)
    tasks: dict[tuple[str, int], TaskRow] = field(default_factory=dict)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    undos: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """The undo log, by the event of what is undone."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """The tokens that each task was leased with."""

    def batch(self, reports: Sequence[Report], starts: Sequence[Start] = ()) -> list[tuple[Report, Answer]]:
        """One transaction: decide over copies of the rows, write, answer."""
        ended = {
            (RUN, event[5]): Ended(event[2], event[6], event[9], event[13])
            for event in self.events
            if event[2] in (EventType.STEP_COMPLETED, EventType.STEP_FAILED, *UNDO_ENDS)
        }
        changes = Changes(self.now)
        env = Environment(
            self.now,
            self.epoch,
            NEVER,
            LIMITS,
            lambda: 0.5,
            lambda *_: None,
            lambda *_: None,
            changes,
            UndoOrders(),
            lambda _: None,
            {},
            {},
        )
        fold = Fold(env, copy.deepcopy(self.runs), copy.deepcopy(self.tasks), {}, ended, {self.graph.hash: self.graph})
        for folding in fold.foldings([(start, self.graph) for start in starts], reports):
            rows: list[tuple[Any, ...]] | None = None
            while True:
                try:
                    need = folding.send(rows)
                except StopIteration:
                    break
                self.apply(changes.take_rows())
                rows = self.read(need)
        self.apply(changes.take_rows())
        return changes.reports

    def read(self, need: Need) -> list[tuple[Any, ...]]:
        """What a decision has to see beyond the locked rows."""
        assert need == Need("next_undo", (RUN,)), "a sequence of steps needs nothing else"
        of = max(self.undos)
        input_seq, output_seq = self.undos[of][5], self.undos[of][7]
        return [(*self.undos[of], None, None, *self.events[input_seq - 1][10:13], *self.events[output_seq - 1][10:13])]

    def apply(self, rows: Rows) -> None:
        """What the statements of a batch write."""
        for run_id, new in rows.new_runs.items():
            assert self.runs.setdefault(run_id, new.row) is new.row
        for run_id, run in rows.changed_runs.items():
            assert run_id in self.runs
            self.runs[run_id] = copy.deepcopy(run)
        for key in rows.gone_tasks:
            del self.tasks[key]
        for key, task in rows.changed_tasks.items():
            assert key in self.tasks, "a task that is gone was updated"
            task.lease_session = task.lease_expires_at = None
            self.tasks[key] = task
        for new_task in rows.new_tasks:
            key = (new_task.row.run_id, new_task.row.task_id)
            assert key not in self.tasks
            self.tasks[key] = new_task.row
        self.events += rows.events
        for row in rows.extra.get("insert_undo", ()):
            assert self.undos.setdefault(row[1], row) is row
        for _, of, token in rows.extra.get("update_undo", ()):
            self.undos[of] = (*self.undos[of][:8], token, *self.undos[of][9:])
        for _, of in rows.extra.get("delete_undo", ()):
            del self.undos[of]
        known = {"insert_undo", "update_undo", "delete_undo", "insert_stopped", "delete_stopped", "clear_ended"}
        assert rows.extra.keys() <= known | {"stop_timers"}

    def claim(self) -> None:
        """Lease what is ready, as the statement does."""
        for task in self.tasks.values():
            if task.lease_session is None and task.visible_at < PARKED_UNTIL:
                task.lease_session = "s"
                task.token = max(task.token + 1, (self.epoch << 40) + 1)
                task.attempt += 1
                task.lease_expires_at = self.now + timedelta(minutes=1)
                self.tokens.setdefault(task.task_id, []).append(task.token)


def started(graph: Graph) -> Store:
    store = Store(graph)
    start = Start(RUN, "default", "wf", None, NULL, None, b"", b"", "", "", "", 3, result=None)  # type: ignore[arg-type]  # nobody waits
    store.batch([], [start])
    return store


KINDS = st.sampled_from(
    ["complete", "bad output", "fail", "corrective", "permanent", "release", "undelivered", "expire"]
)
REPORTS = st.tuples(KINDS, st.integers(0, 3), st.sampled_from([0, 0, 0, -1, -2, 1]))
STEPS = st.one_of(
    st.tuples(st.just("batch"), st.lists(REPORTS, min_size=1, max_size=4)),
    st.tuples(st.just("claim"), st.none()),
    st.tuples(st.just("time"), st.integers(-1000, 1000)),
    st.tuples(st.just("epoch"), st.none()),
)


def report_of(store: Store, what: str, which: int, stale: int) -> Report | None:
    """A report on the open task or an earlier one, by its current token or another one."""
    leased = sorted(store.tokens)
    if not leased:
        return None
    task_id = leased[-1 - which % len(leased)]
    tokens = store.tokens[task_id]
    token = tokens[max(-len(tokens), stale - 1)] if stale <= 0 else tokens[-1] + 1
    kind = {
        "complete": ReportKind.COMPLETE,
        "bad output": ReportKind.COMPLETE,
        "release": ReportKind.RELEASE,
        "undelivered": ReportKind.UNDELIVERED,
        "expire": ReportKind.EXPIRE,
    }.get(what, ReportKind.FAIL)
    report = Report(kind, RUN, task_id, token, "default")
    if kind is ReportKind.COMPLETE:
        report.value = 1 if what == "complete" else "x"
        report.output = Payload(json=json.dumps(report.value))
        report.digest = report.output.digest()
    elif kind is ReportKind.FAIL:
        failure = {"fail": FailureKind.OPERATIONAL, "corrective": FailureKind.CORRECTIVE}
        report.failure = Failure(failure.get(what, FailureKind.PERMANENT), "C", "m")
        report.digest = what.encode()
    elif kind is ReportKind.EXPIRE:
        report.digest = b"expire"
    return report


def check(store: Store) -> None:
    """Whatever happened, the rows and the history agree."""
    run = store.runs[RUN]
    assert [event[1] for event in store.events] == list(range(1, run.next_seq))
    times = [event[3] for event in store.events]
    assert times == sorted(times)
    assert run.last_event_at == times[-1]
    final = [event for event in store.events if event[2] in RUN_ENDS]
    assert final in ([], [store.events[-1]]), "something was written after the end"
    assert bool(final) == RunState(run.state).final == (run.ended_at is not None)
    blocked = [event[1] for event in store.events if event[2] == EventType.UNDO_FAILED]
    assert len(store.tasks) == (0 if final or blocked else 1)
    assert blocked == [] or run.state == RunState.BLOCKED
    scheduled = [e[1] for e in store.events if e[2] in (EventType.STEP_SCHEDULED, EventType.UNDO_SCHEDULED)]
    assert set(store.tasks) <= {(RUN, scheduled[-1])}
    for task_id in scheduled:
        check_task(store, task_id)
    for task in store.tasks.values():
        free = min(task.redeliveries, 3)
        assert task.attempt == len(store.tokens.get(task.task_id, [])) - free
        assert task.operational_failures <= POLICY["max_attempts"]
        assert task.corrective_failures < POLICY["max_corrective_attempts"]
    if store.graph is UNDOING:
        check_undo(store)


def check_task(store: Store, task_id: int) -> None:
    ends = [e for e in store.events if e[5] == task_id and e[2] in (*STEP_ENDS, *UNDO_ENDS)]
    assert len(ends) <= 1, "a step ended twice (I5)"
    tokens = store.tokens.get(task_id, [])
    assert tokens == sorted(set(tokens)), "tokens only grow (I3)"
    if ends:
        assert ends[0][6] == tokens[-1]


def check_undo(store: Store) -> None:
    """I8: what was completed is undone in reverse order, each once; its tokens go on from the step's (I3)."""
    completed = [e for e in store.events if e[2] == EventType.STEP_COMPLETED]
    undone = [json.loads(e[13])["of"] for e in store.events if e[2] == EventType.UNDO_SCHEDULED]
    assert undone == [e[1] for e in reversed(completed)][: len(undone)]
    if undone:
        assert all(e[2] != EventType.STEP_COMPLETED for e in store.events[undone[0] :])
    done = sum(e[2] == EventType.UNDO_COMPLETED for e in store.events)
    if store.runs[RUN].state == RunState.FAILED:
        assert done == len(undone) == len(completed)
        assert store.undos == {}
    else:
        assert sorted(store.undos) == [e[1] for e in completed][: len(completed) - done]
    for e in store.events:
        if e[2] == EventType.UNDO_SCHEDULED and e[1] in store.tokens:
            step = store.events[json.loads(e[13])["of"] - 1][5]
            assert store.tokens[e[1]][0] > store.tokens[step][-1]


@pytest.mark.parametrize("graph", GRAPHS)
@given(steps=st.lists(STEPS, max_size=25))
@settings(max_examples=250, deadline=None)
def test_any_reports_in_any_batches_leave_a_legal_history(graph: Graph, steps: list[tuple[str, Any]]) -> None:
    store = started(graph)
    for what, value in steps:
        if what == "claim":
            store.claim()
        elif what == "time":
            store.now += timedelta(seconds=value)  # the clock of a new primary may be behind
        elif what == "epoch":
            store.epoch += 1
        else:
            reports = [r for args in value if (r := report_of(store, *args)) is not None]
            assert [answered for answered, _ in store.batch(reports)] == reports
        check(store)


@pytest.mark.parametrize("graph", GRAPHS)
@given(steps=st.lists(REPORTS, min_size=1, max_size=12), seed=st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_a_report_repeated_at_once_or_later_has_its_first_answer_and_no_effect(
    graph: Graph, steps: list[tuple[str, int, int]], seed: int
) -> None:
    """I6: OK becomes ALREADY_DONE, what was refused is refused again, what was lost stays lost."""
    store = started(graph)
    chance = random.Random(seed)
    done: list[tuple[Report, Answer]] = []
    for args in steps:
        store.claim()
        report = report_of(store, *args)
        assert report is not None
        (_, answer), (_, at_once) = store.batch([report, report])
        assert repeated(report, answer, at_once)
        done.append((report, answer))
        if chance.random() < 0.5:
            store.claim()
        earlier, first = done[-1 - chance.randrange(min(3, len(done)))]
        before = copy.deepcopy((store.runs, store.tasks, store.events, store.undos))
        [(_, again)] = store.batch([earlier])
        assert (store.runs, store.tasks, store.events, store.undos) == before
        assert repeated(earlier, first, again) or again.outcome is Outcome.LEASE_LOST
        check(store)


def repeated(report: Report, first: Answer, again: Answer) -> bool:
    """Whether ``again`` is what a repeat of something answered with ``first`` hears."""
    if report.kind is ReportKind.EXPIRE:
        return True  # nobody waits for its answer
    if first.outcome is Outcome.OK:
        return again.outcome is Outcome.ALREADY_DONE
    return again == first or (first.outcome, again.outcome) == (Outcome.ALREADY_DONE, Outcome.ALREADY_DONE)
