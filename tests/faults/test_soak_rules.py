"""What the checker of the soak holds is broken here by hand, where the tables of a server can't be brought to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from fencepost.v1 import run_pb2, run_service_pb2
from tests.determinism.programs import program_of
from tests.faults.soak import soaking
from tests.faults.soak.checker import Seen, wrong_codes, wrong_controls, wrong_signals
from tests.faults.soak.conditional_sink import ConditionalSink, Trial
from tests.faults.soak.effects import lost_results, wrong_effects, wrong_trials
from tests.faults.soak.findings import Rule
from tests.faults.soak.legality import illegal_events
from tests.faults.soak.levels import LONG_ENOUGH, Level
from tests.faults.soak.load import Acked, Load
from tests.faults.soak.recovery import BOUNDS
from tests.faults.soak.report import CALLS, LONG, Report
from tests.faults.soak.retracing import differences
from tests.faults.soak.schedules import BEHIND, _behind
from tests.faults.soak.stage import SERVERS, Stage
from tests.faults.soak.watcher import Watcher
from tests.fixtures.api import Api
from tests.fixtures.postgres_server import PostgresServer
from tests.fixtures.processes import Process
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import InProcessServer
from tests.properties.workflows import PARALLEL, handlers

RUN, STEP = "r", "r/2"
START = run_pb2.RunStarted()
SCHEDULED = run_pb2.StepScheduled()
UNDO = run_pb2.UndoScheduled(of_seq=3)
UNDONE = run_pb2.UndoCompleted(task_id=4, fencing_token=9)


def completed(token: int = 5) -> run_pb2.StepCompleted:
    return run_pb2.StepCompleted(task_id=2, fencing_token=token)


def history(*said: Any) -> list[run_pb2.Event]:
    """Events of these kinds, a second apart."""
    kinds = run_pb2.Event.DESCRIPTOR.oneofs_by_name["kind"].fields
    fields = {kind.message_type.full_name: kind.name for kind in kinds if kind.message_type is not None}
    events = []
    for seq, each in enumerate(said, 1):
        event = run_pb2.Event(seq=seq, **{fields[each.DESCRIPTOR.full_name]: each})
        event.event_time.FromSeconds(seq)
        events.append(event)
    return events


def trial(token: int, *, undo: bool = False, attempt: int = 1, verdict: str = "accepted", step: str = STEP) -> Trial:
    return Trial(1, step, RUN, undo, token, attempt, 0, verdict, "")


def test_an_undo_acts_with_the_token_that_it_completes_with_and_not_after_it() -> None:
    histories = {RUN: history(START, SCHEDULED, completed(), UNDO, UNDONE)}

    def found(*undos: Trial) -> list[Rule]:
        return [each.rule for each in wrong_effects(histories, [trial(5), *undos], {STEP: True})]

    assert found(trial(9, undo=True)) == []
    assert found(trial(7, undo=True), trial(9, undo=True)) == []
    assert found(trial(7, undo=True)) == [Rule.EFFECTS]
    assert found(trial(9, undo=True), trial(11, undo=True, verdict="known")) == [Rule.REPEATED]


@pytest.mark.parametrize(
    ("said", "undone", "found"),
    [
        ((run_pb2.StepFailed(task_id=2), run_pb2.RunFailed()), False, ""),
        ((run_pb2.StepFailed(task_id=2), run_pb2.RunFailed()), True, "which did not complete: undone is True"),
        ((run_pb2.RunFailed(),), False, "nothing in its history says what became of it"),
        ((run_pb2.RunTerminated(),), False, ""),
    ],
)
def test_what_has_acted_without_completing_has_failed_or_was_stopped(said: Any, undone: bool, found: str) -> None:
    histories = {RUN: history(START, SCHEDULED, *said)}
    findings = list(wrong_effects(histories, [trial(5)], {STEP: undone}))
    assert [each.rule for each in findings] == [Rule.EFFECTS] * bool(found)
    assert all(found in each.text for each in findings)


def test_a_result_that_was_acknowledged_is_the_one_that_is_recorded() -> None:
    """Not one of a later attempt: the step has run again then, and no effect and no history shows it."""

    def found(*said: Any, told: tuple[str, bool, int]) -> int:
        return len(list(lost_results({RUN: history(START, SCHEDULED, *said)}, [told])))

    assert found(completed(5), told=(STEP, False, 5)) == 0
    assert found(completed(6), told=(STEP, False, 5)) == 1
    assert found(told=(STEP, False, 5)) == 1
    assert found(run_pb2.RunTerminated(), told=(STEP, False, 5)) == 0
    assert found(completed(6), run_pb2.RunTerminated(), told=(STEP, False, 5)) == 1
    assert found(completed(5), UNDO, UNDONE, told=(STEP, True, 9)) == 0
    assert found(completed(5), UNDO, UNDONE, told=(STEP, True, 8)) == 1
    local, recorded = f"{RUN}/-1", run_pb2.LocalStepEnded(op=1, fencing_token=5)
    assert found(recorded, run_pb2.RunTerminated(), told=(local, False, 5)) == 0
    assert found(recorded, told=(local, False, 6)) == 1
    assert found(run_pb2.RunTerminated(), told=(local, False, 5)) == 1, "an Advance is refused when its run has ended"


def test_two_leases_of_a_step_have_two_tokens() -> None:
    def found(*trials: Trial) -> list[str]:
        return [each.text for each in wrong_trials(trials) if "acted twice" in each.text]

    local = "r/-2"
    assert len(found(trial(5), trial(5, attempt=2))) == 1
    assert found(trial(5), trial(6, attempt=2)) == []
    assert found(trial(5, step=local), trial(5, step=local, attempt=2)) == [], "they share the decider's"


def test_an_undo_completes_once_and_a_timer_never_fires_early() -> None:
    twice = illegal_events(history(START, SCHEDULED, completed(), UNDO, UNDONE, UNDONE), code=True)
    assert twice == ["event 6: task 4 ended twice"]
    for due, wrong in ((2, 0), (3, 0), (4, 1)):
        timer, fired = run_pb2.TimerStarted(), run_pb2.TimerFired(timer_seq=2)
        timer.fire_time.FromSeconds(due)
        assert len(illegal_events(history(START, timer, fired), code=False)) == wrong


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("pause", run_pb2.RunPaused()),
        ("retry", run_pb2.RunRetried()),
        ("terminate", run_pb2.RunTerminated()),
        ("cancel", run_pb2.RunCancelled()),
    ],
)
def test_a_call_that_was_answered_and_of_which_nothing_came_is_lost(what: str, said: Any) -> None:
    acked = Acked(controls=[(RUN, "request", what)])
    end = run_pb2.RunCompleted()
    without = Seen({RUN: run_pb2.Run(next_run_id="next"), "next": run_pb2.Run()}, {RUN: history(START), "next": []})
    without.histories["next"] = history(START, end)
    [finding] = wrong_controls(without, acked)
    assert finding.rule is Rule.LOST
    without.histories["next"] = history(START, said, end)
    assert list(wrong_controls(without, acked)) == []


def test_a_signal_is_an_event_of_the_chain_that_it_was_sent_to() -> None:
    acked = Acked(signals=[(RUN, "request")])
    runs = {RUN: run_pb2.Run(next_run_id="next"), "next": run_pb2.Run(), "another": run_pb2.Run()}
    signal = history(START, run_pb2.SignalReceived(request_id="request"))
    for where, lost in ((RUN, 0), ("next", 0), ("another", 1)):
        histories = {**dict.fromkeys(runs, history(START)), where: signal}
        assert [each.rule for each in wrong_signals(Seen(runs, histories), acked)] == [Rule.LOST] * lost


def test_of_two_retries_that_were_answered_both_are_events() -> None:
    acked = Acked(controls=[(RUN, "one", "retry"), (RUN, "two", "retry")])
    [finding] = wrong_controls(Seen({RUN: run_pb2.Run()}, {RUN: history(START, run_pb2.RunRetried())}), acked)
    assert "2 retries" in finding.text


def test_a_code_run_that_is_not_there_ends_no_check() -> None:
    assert list(wrong_codes(Seen(), Acked(codes={"gone": program_of(1)}))) == []


async def test_a_run_may_be_terminated_amid_the_grace_of_its_end(
    server: InProcessServer, api: Api, connect_worker: Callable[..., Awaitable[RawWorker]]
) -> None:
    """Then nothing tells whether a step was leased but that it was not cancelled at once."""
    [plain] = PARALLEL
    await api.register(json.dumps(plain))
    run_id = (await api.start(plain["id"], "{}")).run_id
    worker = await connect_worker(server.grpc_address, capacity=2, handlers=sorted(handlers(plain)))
    tasks = {task.node_id: task for task in await worker.tasks(2)}
    await worker.fail(tasks["a"], run_pb2.FAILURE_KIND_PERMANENT)
    await api.runs.TerminateRun(run_service_pb2.TerminateRunRequest(run_id=run_id), timeout=30)
    run, events = await api.wait(run_id), await api.history(run_id)
    assert [event.WhichOneof("kind") for event in events[-2:]] == ["run_ending", "run_terminated"]
    assert differences(plain, run, events) == []


def test_a_schedule_that_has_stopped_to_fire_is_behind() -> None:
    step, first = timedelta(seconds=2), datetime(2030, 1, 1, tzinfo=UTC)
    times = [first + number * step for number in range(10)]
    assert _behind(step, times, 0, times[-1]) == 0
    assert _behind(step, times, 100, first + 110 * step) <= 2
    assert _behind(step, times, 0, first + 110 * step) > BEHIND


def test_a_process_that_had_ended_before_a_fault_came_to_it_is_told(python_process: Callable[..., Process]) -> None:
    process = python_process("-c", "raise SystemExit(3)")
    process.wait()
    nobody = cast("PostgresServer", None)
    stage = Stage(Path(), nobody, nobody, cast("ConditionalSink", None), "")
    stage.note_end(process)
    process.start()
    stage.note_end(process)
    assert len(stage.ended) == 1
    assert "it has ended with 3" in stage.ended[0]


def test_an_error_that_a_process_tells_of_is_a_fault_of_it_and_a_warning_is_none() -> None:
    server = [
        '{"time": "2030-01-01 00:00:00,000", "level": "warning", "logger": "fencepost.lane", "message": "an error"}',
        '{"time": "2030-01-01 00:00:00,001", "level": "error", "logger": "fencepost.lane", "message": "incident 1"}',
        '{"event": "serving", "level": 1}',
    ]
    worker = [
        "2030-01-01 00:00:00,000 WARNING fencepost.worker step a failed: ERROR",
        "2030-01-01 00:00:00,001 CRITICAL fencepost.worker a run holds up every workflow",
        "  ERROR in a traceback",
    ]
    found = soaking.errors_told({"server-0.log": "\n".join(server), "worker-0.log": "\n".join(worker)})
    assert [finding.rule for finding in found] == [Rule.FAULT, Rule.FAULT]
    assert [finding.text for finding in found] == [f"server-0.log: {server[1]}", f"worker-0.log: {worker[1]}"]


async def test_a_program_whose_caller_gets_no_answer_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run may have ended, or none may be there: the tables say nothing of it."""

    async def never(self: Load, *given: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Load, "_code", never)
    monkeypatch.setattr(Load, "_graph", never)
    monkeypatch.setattr(soaking, "QUIET", 0.05)
    load = Load("127.0.0.1:1", cast("Watcher", None), cast("ConditionalSink", None), 1, 2)
    try:
        await soaking._quiet(asyncio.create_task(load.run(2)))
        assert len(soaking._unanswered(load)) == 2
    finally:
        await load.close()


def test_a_long_soak_that_has_not_measured_something_says_so() -> None:
    report = Report(1, seconds=LONG)
    missing = {finding.text for finding in report.missing()}
    assert len(missing) == len(BOUNDS) + len(CALLS) + SERVERS
    for name in BOUNDS:
        report.recoveries.bounded[name].append(1.0)
    report.acknowledged.update(CALLS)
    report.levels = [Level(0, LONG_ENOUGH, (1, 1), (1, 1))]
    assert [finding.text for finding in report.missing()] == ["server 1 was never judged"]
    report.levels.append(Level(1, LONG_ENOUGH, (1, 1), (1, 1)))
    assert report.missing() == []
    assert Report(1, seconds=LONG - 1).missing() == []
