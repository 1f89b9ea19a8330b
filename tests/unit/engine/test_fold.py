"""Decisions of a batch without a database: any reports, in any order, in batches of any size (I2–I6)."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost_server.domain.graph import Graph, compile_graph
from fencepost_server.domain.manifest import parse_manifest
from fencepost_server.domain.model import (
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
from fencepost_server.engine.fold import Changes, Fold
from fencepost_server.engine.operations import Answer, Report, ReportKind, Start
from tests.fixtures.manifests import manifest

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RUN = "00000000-0000-4000-8000-000000000001"
POLICY = {"max_attempts": 4, "max_corrective_attempts": 3}
GRAPH: Graph = compile_graph(parse_manifest(manifest(3, output_schema={"type": "integer"}, retry=POLICY)).canonical)
NEVER = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Store:
    """What the database would hold, with one run of three steps."""

    now: datetime = NOW
    epoch: int = 0
    runs: dict[str, RunRow] = field(default_factory=dict)
    tasks: dict[tuple[str, int], TaskRow] = field(default_factory=dict)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """The tokens that each task was leased with."""

    def fold(self) -> Fold:
        """A batch over copies of the rows, as a transaction reads them."""
        ended = {
            (RUN, event[5]): Ended(event[2], event[6], event[9], event[13])
            for event in self.events
            if event[2] in (EventType.STEP_COMPLETED, EventType.STEP_FAILED)
        }
        return Fold(
            self.now, self.epoch, NEVER, copy.deepcopy(self.runs), copy.deepcopy(self.tasks), ended,
            {GRAPH.hash: GRAPH}, 3, lambda: 0.5, lambda *_: None,
        )  # fmt: skip

    def apply(self, changes: Changes) -> None:
        """What the statements of a batch write."""
        for run, _ in changes.new_runs:
            assert self.runs.setdefault(run.run_id, run) is run
        for run_id, run in changes.changed_runs.items():
            assert run_id in self.runs
            self.runs[run_id] = run
        for key in changes.gone_tasks:
            del self.tasks[key]
        for key, task in changes.changed_tasks.items():
            assert key in self.tasks, "a task that is gone was updated"
            task.lease_session = task.lease_expires_at = None
            self.tasks[key] = task
        for new in changes.new_tasks:
            key = (new.row.run_id, new.row.task_id)
            assert key not in self.tasks
            self.tasks[key] = new.row
        self.events += changes.events

    def claim(self) -> None:
        """Lease what is ready, as the statement does."""
        for task in self.tasks.values():
            if task.lease_session is None:
                task.lease_session = "s"
                task.token = max(task.token + 1, (self.epoch << 40) + 1)
                task.attempt += 1
                task.lease_expires_at = self.now + timedelta(minutes=1)
                self.tokens.setdefault(task.task_id, []).append(task.token)


def started() -> Store:
    store = Store()
    fold = store.fold()
    null = Payload(json="null")
    start = Start(RUN, "default", "wf", None, null, None, b"", b"", "", "", "", 3, result=None)  # type: ignore[arg-type]  # nobody waits
    fold.start(start, GRAPH)
    store.apply(fold.changes)
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
    final = [event for event in store.events if event[2] in (EventType.RUN_COMPLETED, EventType.RUN_FAILED)]
    assert final in ([], [store.events[-1]]), "something was written after the end"
    assert bool(final) == RunState(run.state).final == (run.ended_at is not None) == (not store.tasks)
    scheduled = [event[1] for event in store.events if event[2] == EventType.STEP_SCHEDULED]
    assert set(store.tasks) <= {(RUN, scheduled[-1])}
    for task_id in scheduled:
        ends = [
            e for e in store.events if e[5] == task_id and e[2] in (EventType.STEP_COMPLETED, EventType.STEP_FAILED)
        ]
        assert len(ends) <= 1, "a step ended twice (I5)"
        tokens = store.tokens.get(task_id, [])
        assert tokens == sorted(set(tokens)), "tokens only grow (I3)"
        if ends:
            assert ends[0][6] == tokens[-1]
    for task in store.tasks.values():
        free = min(task.redeliveries, 3)
        assert task.attempt == len(store.tokens.get(task.task_id, [])) - free
        assert task.operational_failures <= POLICY["max_attempts"]
        assert task.corrective_failures < POLICY["max_corrective_attempts"]


@given(steps=st.lists(STEPS, max_size=25))
@settings(max_examples=300, deadline=None)
def test_any_reports_in_any_batches_leave_a_legal_history(steps: list[tuple[str, Any]]) -> None:
    store = started()
    for what, value in steps:
        if what == "claim":
            store.claim()
        elif what == "time":
            store.now += timedelta(seconds=value)  # the clock of a new primary may be behind
        elif what == "epoch":
            store.epoch += 1
        else:
            reports = [r for args in value if (r := report_of(store, *args)) is not None]
            fold = store.fold()
            for report in reports:
                fold.report(report)
            assert [answered for answered, _ in fold.changes.reports] == reports
            store.apply(fold.changes)
        check(store)


@given(steps=st.lists(REPORTS, min_size=1, max_size=12), seed=st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_a_report_repeated_at_once_or_later_has_its_first_answer_and_no_effect(
    steps: list[tuple[str, int, int]], seed: int
) -> None:
    """I6: OK becomes ALREADY_DONE, what was refused is refused again, what was lost stays lost."""
    store = started()
    chance = random.Random(seed)
    done: list[tuple[Report, Answer]] = []
    for args in steps:
        store.claim()
        report = report_of(store, *args)
        assert report is not None
        fold = store.fold()
        fold.report(report)
        answer = fold.changes.reports[-1][1]
        fold.report(report)
        assert repeated(report, answer, fold.changes.reports[-1][1])
        store.apply(fold.changes)
        done.append((report, answer))
        if chance.random() < 0.5:
            store.claim()
        earlier, first = done[-1 - chance.randrange(min(3, len(done)))]
        before = copy.deepcopy((store.runs, store.tasks, store.events))
        fold = store.fold()
        fold.report(earlier)
        store.apply(fold.changes)
        assert (store.runs, store.tasks, store.events) == before
        again = fold.changes.reports[0][1]
        assert repeated(earlier, first, again) or again.outcome is Outcome.LEASE_LOST
        check(store)


def repeated(report: Report, first: Answer, again: Answer) -> bool:
    """Whether ``again`` is what a repeat of something answered with ``first`` hears."""
    if report.kind is ReportKind.EXPIRE:
        return True  # nobody waits for its answer
    if first.outcome is Outcome.OK:
        return again.outcome is Outcome.ALREADY_DONE
    return again == first or (first.outcome, again.outcome) == (Outcome.ALREADY_DONE, Outcome.ALREADY_DONE)
