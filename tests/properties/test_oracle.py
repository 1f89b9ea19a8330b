"""The oracle by itself: worked examples of the rules, and random operations that must not break what always holds.

These need no server; they say that the second opinion is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.properties import workflows
from tests.properties.oracle import Oracle
from tests.properties.oracle_model import Complete, Event, Fail, Outcome, Release
from tests.properties.oracle_run import Limits, Run
from tests.properties.workflows import step, workflow

ANY = st.integers(0, 11)


def started(*nodes: Any, data: Any = None) -> Run:
    """A run of a sequence."""
    oracle = Oracle()
    oracle.register(workflow("wf", *nodes))
    oracle.start("wf", data, 0.0)
    return oracle.runs[0]


def ready(run: Run) -> list[int]:
    """The tasks that a worker may be given."""
    return [task_id for task_id, task in run.tasks.items() if run.may_lease(task)]


def do(run: Run, outcome: Outcome | None = None) -> str:
    """Lease the one task that is ready and report on it; the name of its handler."""
    [task_id] = ready(run)
    task = run.lease(task_id, run.tasks[task_id].token + 1, "w", run.now)
    assert run.report(task_id, task.token, outcome or Complete(task.handler), run.now).code == "OK"
    return task.handler


def kinds(events: Sequence[Event]) -> list[str]:
    """What happened."""
    return [event.kind for event in events]


def test_a_sequence_completes_with_what_its_last_step_returned() -> None:
    run = started(step("a"), step("b"))
    assert [do(run), do(run)] == ["do-a", "do-b"]
    assert (run.state, run.output and run.output.data) == ("COMPLETED", "do-b")
    assert kinds(run.events) == ["run_started", *["step_scheduled", "step_completed"] * 2, "run_completed"]


def test_what_completed_is_undone_in_the_reverse_order_before_the_run_has_failed() -> None:
    run = started(step("a", undo={}), step("b", undo={}), step("c"))
    done = [do(run), do(run), do(run, Fail("PERMANENT"))]
    assert run.state == "UNDOING"
    assert [*done, do(run), do(run)] == ["do-a", "do-b", "do-c", "undo-b", "undo-a"]
    assert run.state == "FAILED"


def test_what_may_have_acted_is_undone_before_what_completed() -> None:
    run = started(step("a", undo={}), step("b", undo={"undo_unfinished": True}))
    assert [do(run), do(run, Fail("PERMANENT")), do(run), do(run)] == ["do-a", "do-b", "undo-b", "undo-a"]


def test_a_sibling_that_completes_in_its_grace_is_undone_first() -> None:
    branches = {"id": "both", "parallel": [[step("a", undo={})], [step("b", undo={})], [step("c")]]}
    run = started(branches)
    a, b, c = (run.lease(task_id, 1, "w", 0.0) for task_id in ready(run))
    run.report(a.task_id, 1, Complete(1), 0.0)
    run.report(c.task_id, 1, Fail("PERMANENT"), 0.0)
    assert (run.state, run.heartbeat(b.task_id, 1, 0.0)[1]) == ("ENDING", True)
    run.report(b.task_id, 1, Complete(2), 0.0)
    assert [do(run), do(run)] == ["undo-b", "undo-a"]


def test_a_grace_that_passes_ends_the_leases() -> None:
    run = started(step("a"))
    run.lease(2, 1, "w", 0.0)
    assert run.cancel(5.0, 0.0).state == "ENDING"
    run.pass_time(4.9)
    assert run.state == "ENDING"
    run.pass_time(5.0)
    assert run.state == "CANCELLED"
    assert run.report(2, 1, Complete(1), 5.0).code == "LEASE_LOST"


def test_an_undo_that_fails_blocks_the_run_until_an_operator_tries_again_or_skips_it() -> None:
    run = started(step("a", undo={}), step("b", undo={}), step("c"))
    [do(run), do(run), do(run, Fail("PERMANENT")), do(run, Fail("PERMANENT"))]
    assert (run.state, run.failure and run.failure.code) == ("BLOCKED", "UNDO_FAILED")
    assert run.retry("again", False, False, 0.0).state == "UNDOING"
    assert do(run, Fail("PERMANENT")) == "undo-b"
    assert run.retry("leave it", True, False, 0.0).state == "UNDOING"
    assert do(run) == "undo-a"
    assert run.state == "FAILED"
    assert run.retry("again", False, False, 0.0).code == "ALREADY_UNDONE"


def test_a_failed_run_that_was_not_undone_goes_on_with_fresh_attempts() -> None:
    run = started(step("a"), step("b"))
    [do(run), do(run, Fail("PERMANENT"))]
    assert run.state == "FAILED"
    assert run.retry("again", False, False, 0.0).state == "RUNNING"
    assert (do(run), run.state) == ("do-b", "COMPLETED")


def test_a_map_begins_as_many_items_as_it_may_and_joins_them_in_their_order() -> None:
    run = started({"id": "each", "map": {"over": "", "do": [step("a")], "max_parallel": 2}}, data=[5, 6, 7])
    first, second = ready(run)
    for task_id, output in ((second, "y"), (first, "x")):
        run.lease(task_id, 1, "w", 0.0)
        run.report(task_id, 1, Complete(output), 0.0)
    do(run, Complete("z"))
    assert (run.state, run.output and run.output.data) == ("COMPLETED", ["x", "y", "z"])


def test_signals_are_taken_in_order_each_once_and_wait_for_their_wait() -> None:
    run = started(step("a"), {"id": "w1", "wait_signal": "go"}, {"id": "w2", "wait_signal": "go"})
    assert run.signal("go", 1, "", 0.0).seq == 3
    do(run)
    assert run.state == "WAITING"
    run.signal("go", 2, "", 0.0)
    assert (run.state, run.output and run.output.data) == ("COMPLETED", 2)


def test_what_happens_in_a_pause_acts_when_it_is_over() -> None:
    run = started({"id": "nap", "sleep": "1h"}, {"id": "wait", "wait_signal": "go"}, step("a"))
    run.pause(0.0)
    run.signal("go", 1, "", 0.0)
    run.pass_time(3600.0)
    assert (run.state, kinds(run.events)[-2:]) == ("PAUSED", ["signal_received", "timer_fired"])
    run.resume(3600.0)
    assert do(run) == "do-a"


def test_requests_are_remembered_and_other_ones_with_their_id_refused() -> None:
    run = started({"id": "wait", "wait_signal": "go"}, step("a"))
    first = run.signal("go", 1, "s", 0.0)
    run.terminate("", 0.0)
    assert run.signal("go", 1, "s", 0.0) == first
    assert run.signal("go", 2, "s", 0.0).code == "REQUEST_ID_CONFLICT"
    assert run.signal("go", 2, "", 0.0).code == "ILLEGAL_TRANSITION"


class Alone(RuleBasedStateMachine):
    """Random operations on the oracle."""

    @initialize(kind=ANY, data=st.sampled_from(workflows.INPUTS))
    def begin(self, kind: int, data: Any) -> None:
        every = (*workflows.PLAIN, *workflows.WHOLE)
        self.oracle = Oracle(Limits(1))
        manifest = every[kind % len(every)]
        self.oracle.register(manifest)
        self.oracle.start(manifest["id"], data, 0.0)
        self.run = self.oracle.runs[0]
        self.now = 0.0
        self.last: tuple[str, int] = ("", 0)

    @rule(index=ANY)
    def lease(self, index: int) -> None:
        if tasks := ready(self.run):
            task_id = tasks[index % len(tasks)]
            self.run.lease(task_id, self.run.tasks[task_id].token + 1, "w", self.now)

    @rule(
        index=ANY,
        outcome=st.sampled_from(
            [*map(Complete, workflows.INPUTS), Complete(7), Release()]
            + [Fail(kind) for kind in ("OPERATIONAL", "CORRECTIVE", "PERMANENT")]
        ),
    )
    def report(self, index: int, outcome: Outcome) -> None:
        if held := [task for task in self.run.tasks.values() if task.holder]:
            task = held[index % len(held)]
            answer = self.run.report(task.task_id, task.token, outcome, self.now)
            again = self.run.report(task.task_id, task.token, outcome, self.now)
            assert again.code == ("ALREADY_DONE" if answer.code == "OK" else answer.code)

    @rule(hours=st.sampled_from([0.001, 2.0, 48.0, 2000.0]))
    def pass_time(self, hours: float) -> None:
        self.now += hours * 3600
        self.oracle.pass_time(self.now)

    @rule(what=st.sampled_from(["signal", "cancel", "terminate", "pause", "resume", "retry", "skip"]))
    def call(self, what: str) -> None:
        run, now = self.run, self.now
        match what:
            case "signal":
                run.signal("go", 1, "", now)
            case "cancel":
                run.cancel(5.0, now)
            case "terminate":
                run.terminate("", now)
            case "pause":
                run.pause(now)
            case "resume":
                run.resume(now)
            case _:
                self.oracle.retry(0, "again", what == "skip", now)

    @invariant()
    def what_has_ended_stays_and_has_nothing_open(self) -> None:
        state, events = self.last
        if state in ("COMPLETED", "CANCELLED", "TERMINATED"):
            assert (self.run.state, len(self.run.events)) == self.last
        if self.run.final:
            assert not self.run.tasks
            assert self.run.events[-1].kind in ("run_completed", "run_failed", "run_cancelled", "run_terminated")
        assert len(self.run.events) >= events
        self.last = (self.run.state, len(self.run.events))

    @invariant()
    def what_has_not_ended_waits_for_something(self) -> None:
        if not self.run.final and self.run.state != "BLOCKED":
            run = self.run
            assert run.tasks or run.timers or run.waits

    @invariant()
    def each_step_is_undone_once_and_the_latest_first(self) -> None:
        undone = [event.fields["of_seq"] for event in self.run.events if event.kind == "undo_scheduled"]
        completed = [seq for seq in undone if self.run.events[int(str(seq)) - 1].kind == "step_completed"]
        assert completed == sorted(completed, key=lambda seq: -int(str(seq)))
        finished = [event.fields["task_id"] for event in self.run.events if event.kind == "undo_completed"]
        assert len(finished) == len(set(finished))


def test_what_always_holds_holds_in_the_oracle() -> None:
    run_state_machine_as_test(
        Alone,
        settings=settings(
            max_examples=150,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
