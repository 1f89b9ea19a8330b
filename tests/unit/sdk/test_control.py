"""Control of runs, definitions and schedules over a channel that a test answers, and what the client makes of it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

import fencepost
from fencepost import (
    Client,
    EventKind,
    OverlapPolicy,
    RunCancelled,
    RunFailed,
    RunNotCompleted,
    RunState,
    RunTerminated,
    ScheduleSpec,
    StartRun,
    TimerKind,
    Value,
)
from fencepost.models import DefinitionState, StepState
from fencepost.v1 import definition_service_pb2 as definitions
from fencepost.v1 import run_pb2
from fencepost.v1 import run_service_pb2 as runs
from fencepost.v1 import schedule_service_pb2 as schedules
from tests.fixtures.waiting import wait_until
from tests.unit.sdk.answering import HISTORY, LIST, OK, START, WAIT, WATCH, Server, event_of, method, run_of

UTC = dt.UTC
NOON = dt.datetime(2026, 1, 1, 12, tzinfo=UTC)


def names(enum: Any, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in enum.keys()}  # noqa: SIM118 - no dict


def test_every_state_kind_and_policy_of_the_contract_is_known() -> None:
    assert set(RunState) == names(run_pb2.RunState, "RUN_STATE_")
    assert set(StepState) == names(run_pb2.StepState, "STEP_STATE_")
    assert set(TimerKind) == names(run_pb2.TimerKind, "TIMER_KIND_")
    assert set(DefinitionState) == names(definitions.DefinitionState, "DEFINITION_STATE_")
    assert set(OverlapPolicy) == names(schedules.OverlapPolicy, "OVERLAP_POLICY_")
    kinds = {field.name for field in run_pb2.Event.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert set(EventKind) == kinds | {"unknown"}


def test_the_final_states_are_those_of_the_contract() -> None:
    final = {state for state in RunState if state.is_final}
    assert final == {"COMPLETED", "FAILED", "CANCELLED", "TERMINATED", "CONTINUED"}


# Starting and listing.


def test_a_start_may_be_labelled_delayed_and_limited(server: Server, client: Client) -> None:
    asked = server.ask(client.start_run, "order", attributes={"zone": "a"}, start_delay=1.5, run_timeout=60)
    request = server.answer(START, runs.StartRunResponse(run_id="r1", created=True))
    assert dict(request.attributes) == {"zone": "a"}
    assert (request.start_delay.ToMilliseconds(), request.run_timeout.ToSeconds()) == (1500, 60)
    asked.result(30)
    asked = server.ask(client.start_run, "order")
    request = server.answer(START, runs.StartRunResponse(run_id="r1", created=True))
    assert not request.HasField("start_delay")
    assert not request.HasField("run_timeout")
    asked.result(30)
    many = server.ask(client.start_runs, [StartRun("order", attributes={"zone": "b"}, run_timeout=0.25)])
    started = runs.BatchStartRunsResult(started=runs.StartRunResponse(run_id="r1"))
    batch = server.answer(method("BatchStartRuns"), runs.BatchStartRunsResponse(results=[started]))
    assert dict(batch.runs[0].attributes) == {"zone": "b"}
    assert batch.runs[0].run_timeout.ToMilliseconds() == 250
    many.result(30)


def test_runs_are_listed_by_all_that_is_asked_for(server: Server, client: Client) -> None:
    chosen: dict[str, Any] = {
        "user_id": "u",
        "attributes": {"zone": "a"},
        "created_after": NOON,
        "created_before": NOON.astimezone(dt.timezone(dt.timedelta(hours=3))) + dt.timedelta(seconds=1),
        "failure_code": "C",
        "parent_run_id": "p",
    }
    asked = server.ask(lambda: list(client.list_runs("order", ["UNDOING"], **chosen)))
    request = server.answer(LIST, runs.ListRunsResponse())
    assert (request.workflow_id, list(request.states)) == ("order", [run_pb2.RUN_STATE_UNDOING])
    assert (request.user_id, dict(request.attributes)) == ("u", {"zone": "a"})
    assert request.created_after.ToDatetime(tzinfo=UTC) == NOON
    assert request.created_before.ToDatetime(tzinfo=UTC) == NOON + dt.timedelta(seconds=1)
    assert (request.failure_code, request.parent_run_id) == ("C", "p")
    assert asked.result(30) == []


def test_a_time_without_a_zone_is_refused(client: Client) -> None:
    naive = NOON.replace(tzinfo=None)
    with pytest.raises(ValueError, match="no time zone"):
        next(client.list_runs(created_after=naive))
    with pytest.raises(ValueError, match="no time zone"):
        client.schedules.fire_times("s", naive)


def test_a_run_shows_what_it_waits_for_and_what_its_steps_tell(server: Server, client: Client) -> None:
    run = run_of("ENDING", ending=run_pb2.RUN_STATE_CANCELLED, parent_run_id="p", attributes={"zone": "a"})
    run.open_waits.add(seq=3, node_id="nap").fire_time.FromSeconds(0)
    run.open_waits.add(seq=4, node_id="approval", signal_name="approve")
    run.open_waits.add(seq=5, node_id="invoice", child_run_id="c")
    step = run.open_steps.add(undo=True, scope_id=7, item=2, checkpoint_number=3)
    step.progress.json = "[1]"
    asked = server.ask(client.get_run, "r1")
    server.answer(method("GetRun"), runs.GetRunResponse(run=run))
    found = asked.result(30)
    assert (found.state, found.ending, found.ended) == ("ENDING", RunState.CANCELLED, False)
    assert (found.parent_run_id, found.attributes) == ("p", {"zone": "a"})
    nap, approval, invoice = found.open_waits
    assert nap.fire_time == dt.datetime(1970, 1, 1, tzinfo=UTC)
    assert (approval.fire_time, approval.signal_name, invoice.child_run_id) == (None, "approve", "c")
    (open_step,) = found.open_steps
    assert (open_step.undo, open_step.scope_id, open_step.item, open_step.checkpoint_number) == (True, 7, 2, 3)
    assert open_step.progress == Value(json="[1]")
    asked = server.ask(client.get_run, "r1")
    server.answer(method("GetRun"), runs.GetRunResponse(run=run_of()))
    assert (asked.result(30).ending, asked.result(30).open_waits) == (None, ())


# Control.

CONTROLS: list[tuple[str, str, type[Message]]] = [
    ("cancel", "CancelRun", runs.CancelRunResponse),
    ("terminate", "TerminateRun", runs.TerminateRunResponse),
    ("pause", "PauseRun", runs.PauseRunResponse),
    ("resume", "ResumeRun", runs.ResumeRunResponse),
    ("retry", "RetryRun", runs.RetryRunResponse),
]


@pytest.mark.parametrize(("verb", "rpc", "response"), CONTROLS, ids=[verb for verb, _, _ in CONTROLS])
def test_control_is_repeated_with_the_same_request_id_until_it_is_answered(
    server: Server, client: Client, verb: str, rpc: str, response: Callable[..., Message]
) -> None:
    asked = server.ask(getattr(client.handle("r1"), verb), "because")
    first = server.refuse(method(rpc), grpc.StatusCode.UNAVAILABLE, "DATABASE_UNAVAILABLE")
    second = server.answer(method(rpc), response(state=run_pb2.RUN_STATE_ENDING))
    assert first == second
    assert (first.namespace, first.run_id, first.reason, len(first.request_id)) == ("shop", "r1", "because", 36)
    assert asked.result(30) is RunState.ENDING
    asked = server.ask(getattr(client, f"{verb}_run"), "r1", request_id="mine")
    assert server.answer(method(rpc), response()).request_id == "mine"
    asked.result(30)


@pytest.mark.parametrize(("verb", "rpc", "response"), CONTROLS, ids=[verb for verb, _, _ in CONTROLS])
def test_what_the_state_of_a_run_forbids_is_an_illegal_transition(
    server: Server, client: Client, verb: str, rpc: str, response: Callable[..., Message]
) -> None:
    asked = server.ask(getattr(client, f"{verb}_run"), "r1")
    server.refuse(method(rpc), grpc.StatusCode.FAILED_PRECONDITION, "ILLEGAL_TRANSITION")
    with pytest.raises(fencepost.IllegalTransition):
        asked.result(30)


def test_a_cancel_may_have_a_grace_of_its_own_and_a_retry_may_skip_an_undo(server: Server, client: Client) -> None:
    asked = server.ask(client.cancel_run, "r1", grace=0)
    request = server.answer(method("CancelRun"), runs.CancelRunResponse())
    assert (request.HasField("grace"), request.grace.ToSeconds()) == (True, 0)
    asked.result(30)
    asked = server.ask(client.cancel_run, "r1")
    assert not server.answer(method("CancelRun"), runs.CancelRunResponse()).HasField("grace")
    asked.result(30)
    asked = server.ask(client.handle("r1").retry, "repaired by hand", skip_undo=True)
    assert server.answer(method("RetryRun"), runs.RetryRunResponse()).skip_undo
    asked.result(30)


def test_a_signal_is_given_once_however_often_it_is_sent(server: Server, client: Client) -> None:
    asked = server.ask(client.handle("r1").signal, "approve", {"by": "ann"})
    first = server.refuse(method("SignalRun"), grpc.StatusCode.UNAVAILABLE)
    answer = runs.SignalRunResponse(state=run_pb2.RUN_STATE_WAITING, seq=7)
    second = server.answer(method("SignalRun"), answer)
    assert first == second
    assert (first.signal_name, first.payload.json, len(first.request_id)) == ("approve", '{"by":"ann"}', 36)
    assert asked.result(30) == fencepost.Signalled(RunState.WAITING, 7)
    asked = server.ask(client.signal_run, "r1", "approve", request_id="mine")
    assert server.answer(method("SignalRun"), answer).request_id == "mine"
    asked.result(30)


def test_a_signal_that_the_run_has_no_room_for_is_raised_at_once(server: Server, client: Client) -> None:
    asked = server.ask(client.signal_run, "r1", "approve")
    server.refuse(method("SignalRun"), grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SIGNALS", retry=0.1)
    with pytest.raises(fencepost.TooManySignals):
        asked.result(30)


# Ends.


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        ("FAILED", RunFailed, "run r1 failed: PERMANENT C: m"),
        ("CANCELLED", RunCancelled, "run r1 was cancelled: PERMANENT C: m"),
        ("TERMINATED", RunTerminated, "run r1 was terminated: PERMANENT C: m"),
        ("CONTINUED", RunNotCompleted, "run r1 was continued: PERMANENT C: m"),
    ],
)
def test_a_run_that_ends_without_an_output_raises_how_and_why(
    server: Server, client: Client, state: str, kind: type[RunNotCompleted], text: str
) -> None:
    asked = server.ask(client.handle("r1").result)
    failure = run_pb2.Failure(kind=run_pb2.FAILURE_KIND_PERMANENT, code="C", message="m")
    server.answer(WAIT, runs.WaitRunResponse(run=run_of(state, failure=failure), ended=True))
    with pytest.raises(RunNotCompleted, match=text) as caught:
        asked.result(30)
    assert type(caught.value) is kind
    assert (caught.value.state, caught.value.failure.code) == (state, "C")


def test_a_terminated_run_without_a_failure_raises_all_the_same(server: Server, client: Client) -> None:
    asked = server.ask(client.handle("r1").result)
    server.answer(WAIT, runs.WaitRunResponse(run=run_of("TERMINATED"), ended=True))
    with pytest.raises(RunTerminated, match="TERMINATED") as caught:
        asked.result(30)
    assert caught.value.failure.code == "TERMINATED"


def follow(server: Server, client: Client) -> tuple[Future[None], list[str]]:
    seen: list[str] = []

    def watch() -> None:
        seen.extend(event.kind for event in client.watch_run("r1"))

    return server.ask(watch), seen


def show(server: Server, seen: list[str], *events: run_pb2.Event, code: grpc.StatusCode = OK) -> int:
    """Answer the next WatchRun with events, then end it once they were seen; returns after which event it asked."""
    _, request, call = server.channel.take_unary_stream(WATCH)
    call.send_initial_metadata(())
    for event in events:
        call.send_response(runs.WatchRunResponse(event=event))
    wait_until(lambda: len(seen) >= request.after_seq + len(events))
    call.terminate((), code, "")
    after_seq: int = request.after_seq
    return after_seq


@pytest.mark.parametrize("kind", ["run_completed", "run_cancelled", "run_terminated"])
def test_a_break_after_the_last_event_of_a_run_is_its_end(server: Server, client: Client, kind: str) -> None:
    asked, seen = follow(server, client)
    show(server, seen, event_of(1, kind), code=grpc.StatusCode.UNAVAILABLE)
    asked.result(30)
    assert seen == [kind]


def test_a_failure_may_not_be_the_last_event_because_runs_are_retried(server: Server, client: Client) -> None:
    asked, seen = follow(server, client)
    show(server, seen, event_of(1, "run_failed"), code=grpc.StatusCode.UNAVAILABLE)
    assert show(server, seen, event_of(2, "run_retried"), event_of(3, "run_failed")) == 1
    asked.result(30)
    assert seen == ["run_failed", "run_retried", "run_failed"]


# Events.


def shown(server: Server, client: Client, *events: run_pb2.Event) -> list[fencepost.Event]:
    asked = server.ask(lambda: list(client.history("r1")))
    server.answer(HISTORY, runs.GetHistoryResponse(events=events))
    return asked.result(30)


def test_every_field_of_every_event_is_shown(server: Server, client: Client) -> None:
    """Fields that go by another name are told in `Event`; any other one must be there by its own."""
    renamed = {"input": "payload", "output": "payload", "kind": "timer_kind", "name": "node_id", "attempts": "attempt"}
    shown_fields = set(fencepost.Event.__slots__)
    for kind in run_pb2.Event.DESCRIPTOR.oneofs_by_name["kind"].fields:
        assert kind.message_type is not None
        fields = {renamed.get(field.name, field.name) for field in kind.message_type.fields}
        assert fields <= shown_fields, kind.name


def test_events_of_control_flow_tell_what_they_are_about(server: Server, client: Client) -> None:
    fired, awaited, received = event_of(1, "timer_fired"), event_of(2, "signal_awaited"), event_of(3, "signal_received")
    fired.timer_fired.kind = run_pb2.TIMER_KIND_SLEEP
    fired.timer_fired.timer_seq = 9
    awaited.signal_awaited.timeout_time.FromSeconds(0)
    awaited.signal_awaited.signal_name = "approve"
    received.signal_received.payload.json = "5"
    child, failed_child, ending = event_of(4, "child_ended"), event_of(5, "child_ended"), event_of(6, "run_ending")
    child.child_ended.state = run_pb2.RUN_STATE_COMPLETED
    failed_child.child_ended.state = run_pb2.RUN_STATE_FAILED
    failed_child.child_ended.failure.code = "C"
    ending.run_ending.state = run_pb2.RUN_STATE_CANCELLED
    ending.run_ending.grace.FromMilliseconds(1500)
    seen = shown(server, client, fired, awaited, received, child, failed_child, ending)
    assert (seen[0].timer_kind, seen[0].timer_seq) == (TimerKind.SLEEP, 9)
    assert seen[1].timeout_time == dt.datetime(1970, 1, 1, tzinfo=UTC)
    assert str(seen[1]) == "2 signal_awaited approve"
    assert seen[2].payload == Value(json="5")
    assert (seen[3].state, seen[3].payload) == (RunState.COMPLETED, Value())
    assert (seen[4].state, seen[4].payload) == (RunState.FAILED, None)
    assert seen[4].failure is not None
    assert (seen[5].state, seen[5].grace) == (RunState.CANCELLED, 1.5)


def test_events_of_undo_tell_what_is_undone(server: Server, client: Client) -> None:
    scheduled, completed, skipped = (
        event_of(1, "undo_scheduled"),
        event_of(2, "undo_completed"),
        event_of(3, "undo_skipped"),
    )
    scheduled.undo_scheduled.of_seq = 4
    skipped.undo_skipped.reason = "refunded by hand"
    seen = shown(server, client, scheduled, completed, skipped)
    assert seen[0].of_seq == 4
    assert seen[1].payload == Value()
    assert str(seen[2]) == "3 undo_skipped refunded by hand"


# Definitions.


def test_a_definition_is_activated_and_removed(server: Server, client: Client) -> None:
    activating = server.ask(client.activate_definition, "order", "h1")
    activated = definitions.Definition(definition_hash="h1", state=definitions.DEFINITION_STATE_ACTIVE)
    request = server.answer(
        method("ActivateDefinition"),
        definitions.ActivateDefinitionResponse(definition=activated, previous_hash="h2"),
    )
    assert (request.namespace, request.workflow_id, request.definition_hash) == ("shop", "order", "h1")
    assert request.request_id
    assert (activating.result(30).definition.state, activating.result(30).previous_hash) == ("ACTIVE", "h2")
    removing = server.ask(client.remove_definition, "order", "h2")
    removed = definitions.Definition(definition_hash="h2", state=definitions.DEFINITION_STATE_REMOVED)
    server.answer(
        method("RemoveDefinition"), definitions.RemoveDefinitionResponse(definition=removed, remaining_runs=3)
    )
    assert (removing.result(30).definition.state, removing.result(30).remaining_runs) == ("REMOVED", 3)


# Schedules.

FULL = ScheduleSpec(
    "order",
    interval=90.5,
    offset=1.0,
    input={"n": 1},
    user_id="u",
    priority=2,
    attributes={"zone": "a"},
    run_timeout=60.0,
    overlap=OverlapPolicy.QUEUE_ONE,
    catch_up_window=120.0,
    jitter=3.0,
    start_time=NOON,
    end_time=NOON + dt.timedelta(days=1),
)


def stored(spec: schedules.ScheduleSpec | None = None) -> schedules.Schedule:
    schedule = schedules.Schedule(schedule_id="s", spec=spec, etag="e", started_runs=4, last_error="no")
    schedule.create_time.GetCurrentTime()
    return schedule


def test_a_schedule_is_made_of_all_that_was_given_and_read_back(server: Server, client: Client) -> None:
    asked = server.ask(client.schedules.create, "s", FULL, paused=True)
    request = server.refuse(method("CreateSchedule"), grpc.StatusCode.UNAVAILABLE)
    response = schedules.CreateScheduleResponse(schedule=stored(request.spec), created=False)
    assert server.answer(method("CreateSchedule"), response) == request
    assert (request.namespace, request.schedule_id, request.paused, len(request.request_id)) == ("shop", "s", True, 36)
    made = asked.result(30)
    assert (made.created, made.etag, made.started_runs, made.last_error) == (False, "e", 4, "no")
    assert (made.next_fire_time, made.last_fire_time) == (None, None)
    assert isinstance(made.spec.input, Value)
    assert made.spec.input.decode() == {"n": 1}
    assert {name: getattr(made.spec, name) for name in ScheduleSpec.__slots__ if name != "input"} == {
        name: getattr(FULL, name) for name in ScheduleSpec.__slots__ if name != "input"
    }
    updating = server.ask(client.schedules.update, "s", made.spec, etag=made.etag)
    update = server.answer(method("UpdateSchedule"), schedules.UpdateScheduleResponse(schedule=stored()))
    assert (update.spec, update.etag) == (request.spec, "e")
    updating.result(30)


def test_what_is_not_given_of_a_schedule_is_left_to_the_server(server: Server, client: Client) -> None:
    asked = server.ask(client.schedules.create, "s", ScheduleSpec("order", cron="5 4 * * *", time_zone="Europe/Berlin"))
    request = server.answer(method("CreateSchedule"), schedules.CreateScheduleResponse(schedule=stored(), created=True))
    given = {field.name for field, _ in request.spec.ListFields()}
    assert given == {"cron", "time_zone", "workflow_id", "overlap"}
    assert asked.result(30).created


def test_a_schedule_that_can_not_be_is_refused_before_anything_is_sent(client: Client) -> None:
    policy: Any = "SOMETIMES"
    for spec, text in (
        (ScheduleSpec("order", cron="* * * * *", interval=1), "not both"),
        (ScheduleSpec("order", interval=1, overlap=policy), "SOMETIMES"),
        (ScheduleSpec("order", interval=1, start_time=NOON.replace(tzinfo=None)), "no time zone"),
    ):
        with pytest.raises(ValueError, match=text):
            client.schedules.create("s", spec)


@pytest.mark.parametrize(
    ("method_name", "code", "reason", "kind"),
    [
        ("CreateSchedule", grpc.StatusCode.ALREADY_EXISTS, "SCHEDULE_EXISTS", fencepost.ScheduleExists),
        ("UpdateSchedule", grpc.StatusCode.ABORTED, "STALE_ETAG", fencepost.StaleEtag),
        ("UpdateSchedule", grpc.StatusCode.NOT_FOUND, "SCHEDULE_NOT_FOUND", fencepost.ScheduleNotFound),
    ],
)
def test_what_is_wrong_with_a_schedule_is_told(
    server: Server, client: Client, method_name: str, code: grpc.StatusCode, reason: str, kind: type[Exception]
) -> None:
    call = client.schedules.create if method_name == "CreateSchedule" else client.schedules.update
    asked = server.ask(call, "s", FULL)
    server.refuse(method(method_name), code, reason)
    with pytest.raises(kind):
        asked.result(30)


def calls(client: Client) -> Iterator[tuple[Callable[[], Any], str, Message, Callable[[Any], bool]]]:
    """Each remaining call on schedules: how it is made, its RPC, an answer, and what must be true of the result."""
    schedule = stored()
    one = client.schedules
    yield lambda: one.get("s"), "GetSchedule", schedules.GetScheduleResponse(schedule=schedule), lambda r: r.etag == "e"
    yield (
        lambda: list(one.list()),
        "ListSchedules",
        schedules.ListSchedulesResponse(schedules=[schedule]),
        lambda r: [found.schedule_id for found in r] == ["s"],
    )
    yield lambda: one.delete("s"), "DeleteSchedule", schedules.DeleteScheduleResponse(deleted=True), lambda r: r is True
    paused = schedules.Schedule(paused=True, pause_reason="why")
    yield (
        lambda: one.pause("s", "why"),
        "PauseSchedule",
        schedules.PauseScheduleResponse(schedule=paused),
        lambda r: (r.paused, r.pause_reason) == (True, "why"),
    )
    yield lambda: one.resume("s"), "ResumeSchedule", schedules.ResumeScheduleResponse(), lambda r: not r.paused
    yield (
        lambda: one.trigger("s", request_id="mine"),
        "TriggerSchedule",
        schedules.TriggerScheduleResponse(run_id="r1"),
        lambda r: r.run_id == "r1",
    )
    yield (
        lambda: one.backfill("s", NOON, NOON + dt.timedelta(hours=1)),
        "BackfillSchedule",
        schedules.BackfillScheduleResponse(run_ids=["r1", "r2"]),
        lambda r: [handle.run_id for handle in r] == ["r1", "r2"],
    )
    times = schedules.ListFireTimesResponse()
    times.fire_times.add().FromSeconds(0)
    yield (
        lambda: one.fire_times("s", NOON, limit=1),
        "ListFireTimes",
        times,
        lambda r: r == [dt.datetime(1970, 1, 1, tzinfo=UTC)],
    )


@pytest.mark.parametrize("index", range(8))
def test_schedules_are_read_and_steered(server: Server, client: Client, index: int) -> None:
    function, rpc, response, right = list(calls(client))[index]
    asked = server.ask(function)
    request = server.answer(method(rpc), response)
    assert request.namespace == "shop"
    fields = {field.name for field in request.DESCRIPTOR.fields}
    if "request_id" in fields:
        assert request.request_id == "mine" if rpc == "TriggerSchedule" else len(request.request_id) == 36
    if "from_time" in fields:
        assert request.from_time.ToDatetime(tzinfo=UTC) == NOON
    assert right(asked.result(30))
