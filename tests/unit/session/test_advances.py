"""Advances as they come from workers, right and hostile: what becomes of an item, and that all its faults are told."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload as PayloadMessage
from fencepost_server.domain.errors import FencepostError, InvalidFrame, InvalidJson, PayloadTooLarge
from fencepost_server.domain.model import DECIDE_TASK, Failure, FailureKind, Payload
from fencepost_server.domain.ops import (
    Advance,
    AdvanceOutcome,
    AwaitSignal,
    CancelOp,
    LocalStep,
    MarkPatch,
    ScheduleStep,
    SetAttributes,
    StartChild,
    StartTimer,
)
from fencepost_server.engine.operations import Report, ReportKind
from fencepost_server.session.advances import MAX_COMMANDS, MAX_NUMBERS, advanced

LIMIT = 4096
RUN = str(uuid.UUID(int=7))
ONE = PayloadMessage(json="1")
UNDO = '{"undo": {"step": "uncharge"}}'


def item(*commands: pb.Command, **fields: Any) -> pb.AdvanceItem:
    """An item that is right but for what is given."""
    ref = pb.TaskRef(run_id=RUN, task_id=DECIDE_TASK, fencing_token=5)
    given: dict[str, Any] = {"advance_no": 3, "seen_seq": 9, "outcome": pb.ADVANCE_OUTCOME_CONTINUE, "task": ref}
    return pb.AdvanceItem(commands=commands, **{**given, **fields})


def local(op: int = 1, **fields: Any) -> pb.Command:
    given: dict[str, Any] = {"name": "charge", "input_hash": b"\1\2", "attempts": 1}
    if "failure" not in fields:
        given["output"] = ONE
    return pb.Command(op=op, record_local_step=pb.RecordLocalStep(**{**given, **fields}))


def read(message: pb.AdvanceItem) -> Report:
    return advanced(message, "default", LIMIT)


def decided(message: pb.AdvanceItem) -> Advance:
    advance = read(message).advance
    assert advance is not None
    return advance


def refused(message: pb.AdvanceItem) -> tuple[type[FencepostError], dict[str, str]]:
    """Why an item is refused: the kind of error, and each fault by its place."""
    with pytest.raises(FencepostError) as caught:
        read(message)
    return type(caught.value), {fault.path: fault.message for fault in caught.value.violations}


def test_every_command_is_read_with_all_that_it_says() -> None:
    commands = [
        local(1),
        local(2, failure=run_pb2.Failure(kind=run_pb2.FAILURE_KIND_PERMANENT, code="NO", message="not so")),
        local(3, options=UNDO, input=PayloadMessage(json="[2]")),
        pb.Command(op=4, schedule_step=pb.ScheduleStep(handler="s", input=ONE, input_hash=b"h", options="{}")),
        pb.Command(op=5, start_timer=pb.StartTimer(delay=Duration(seconds=86_400, nanos=500_000_000))),
        pb.Command(op=6, await_signal=pb.AwaitSignal(signal_name="go")),
        pb.Command(op=7, await_signal=pb.AwaitSignal(signal_name="go", timeout=Duration(seconds=2))),
        pb.Command(op=8, start_child=pb.StartChild(workflow_id="w2", input=ONE, input_hash=b"h")),
        pb.Command(cancel_op=pb.CancelOp(op=5, of_seq=4)),
        pb.Command(mark_patch=pb.MarkPatch(patch_id="fix \u2713")),
        pb.Command(op=9, set_attributes=pb.SetAttributes(attributes={"b": "", "a": "x"})),
    ]
    report = read(item(*commands, taken_signals=[4, 2], ended_waits=[7]))
    assert (report.kind, report.run_id, report.task_id, report.token) == (ReportKind.ADVANCE, RUN, 1, 5)
    assert report.advance == Advance(
        3,
        9,
        (
            LocalStep(1, "charge", b"\1\2", Payload("1"), None, 1),
            LocalStep(2, "charge", b"\1\2", None, Failure(FailureKind.PERMANENT, "NO", "not so"), 1),
            LocalStep(3, "charge", b"\1\2", Payload("1"), None, 1, UNDO, Payload("[2]")),
            ScheduleStep(4, "s", Payload("1"), b"h", "{}"),
            StartTimer(5, 86_400.5),
            AwaitSignal(6, "go", None),
            AwaitSignal(7, "go", 2.0),
            StartChild(8, "w2", Payload("1"), b"h", ""),
            CancelOp(5, 4),
            MarkPatch("fix \u2713"),
            SetAttributes(9, {"a": "x", "b": ""}),
        ),
        AdvanceOutcome.CONTINUE,
        taken_signals=(4, 2),
        ended_waits=(7,),
    )


def test_an_output_is_read_only_of_an_end_that_has_one() -> None:
    output = PayloadMessage(json='{"a": 1}')
    for outcome in (pb.ADVANCE_OUTCOME_COMPLETE, pb.ADVANCE_OUTCOME_CONTINUE_AS_NEW):
        ended = decided(item(outcome=outcome, output=output))
        assert (ended.output, ended.value, ended.failure) == (Payload('{"a": 1}'), {"a": 1}, None)
    assert decided(item(outcome=pb.ADVANCE_OUTCOME_COMPLETE)).output == Payload("null")
    for outcome in (pb.ADVANCE_OUTCOME_CONTINUE, pb.ADVANCE_OUTCOME_WAIT):
        assert decided(item(outcome=outcome, output=output)).output is None
    failure = run_pb2.Failure(kind=run_pb2.FAILURE_KIND_PERMANENT, code="NONDETERMINISM", message="op 1: no")
    for outcome in (pb.ADVANCE_OUTCOME_FAIL, pb.ADVANCE_OUTCOME_BLOCK):
        told = decided(item(outcome=outcome, failure=failure)).failure
        assert told == Failure(FailureKind.PERMANENT, "NONDETERMINISM", "op 1: no")
        assert refused(item(outcome=outcome)) == (InvalidFrame, {"failure": "is required"})


def test_an_output_that_is_left_out_is_null() -> None:
    """So for a step of a worker as for the whole run: what is JSON null travels as nothing."""
    empty = pb.Command(op=1, record_local_step=pb.RecordLocalStep(name="s", attempts=1))
    [step] = decided(item(empty)).commands
    assert isinstance(step, LocalStep)
    assert step.output == Payload("null")


RULES: dict[str, tuple[pb.AdvanceItem, type[FencepostError], str]] = {
    "no outcome": (item(outcome=0), InvalidFrame, "outcome"),
    "an unknown outcome": (item(outcome=77), InvalidFrame, "outcome"),
    "no number": (item(advance_no=0), InvalidFrame, "advance_no"),
    "a number that no column takes": (item(advance_no=1 << 62), InvalidFrame, "advance_no"),
    "a negative seen_seq": (item(seen_seq=-1), InvalidFrame, "seen_seq"),
    "a huge seen_seq": (item(seen_seq=(1 << 63) - 1), InvalidFrame, "seen_seq"),
    "another task": (
        item(task=pb.TaskRef(run_id=RUN, task_id=2, fencing_token=5)),
        InvalidFrame,
        "task.task_id",
    ),
    "signal 0": (item(taken_signals=[0]), InvalidFrame, "taken_signals"),
    "a signal twice": (item(taken_signals=[4, 5, 4]), InvalidFrame, "taken_signals"),
    "many signals": (item(taken_signals=range(1, MAX_NUMBERS + 2)), InvalidFrame, "taken_signals"),
    "a wait twice": (item(ended_waits=[4, 4]), InvalidFrame, "ended_waits"),
    "many commands": (item(*[local(n + 1) for n in range(MAX_COMMANDS + 1)]), InvalidFrame, "commands"),
    "an empty command": (item(pb.Command(op=1)), InvalidFrame, "commands[0]"),
    "op 0": (item(local(0)), InvalidFrame, "commands[0].op"),
    "a negative op": (item(local(-1)), InvalidFrame, "commands[0].op"),
    "an op twice": (item(local(2), local(2)), InvalidFrame, "commands[1].op"),
    "an op of two kinds": (
        item(local(2), pb.Command(op=2, start_timer=pb.StartTimer())),
        InvalidFrame,
        "commands[1].op",
    ),
    "a step without a name": (item(local(name="")), InvalidFrame, "commands[0].record_local_step.name"),
    "a long name": (item(local(name="n" * 201)), InvalidFrame, "commands[0].record_local_step.name"),
    "NUL in a name": (item(local(name="a\0")), InvalidFrame, "commands[0].record_local_step.name"),
    "a long digest": (item(local(input_hash=b"h" * 33)), InvalidFrame, "commands[0].record_local_step.input_hash"),
    "no attempt": (item(local(attempts=0)), InvalidFrame, "commands[0].record_local_step.attempts"),
    "negative attempts": (item(local(attempts=-3)), InvalidFrame, "commands[0].record_local_step.attempts"),
    "an output that is no JSON": (
        item(local(output=PayloadMessage(json="{"))),
        InvalidJson,
        "commands[0].record_local_step.output.json",
    ),
    "an output with a key twice": (
        item(local(output=PayloadMessage(json='{"a":1,"a":2}'))),
        InvalidJson,
        "commands[0].record_local_step.output.json",
    ),
    "a lone surrogate": (
        item(local(output=PayloadMessage(json='"\\ud800"'))),
        InvalidJson,
        "commands[0].record_local_step.output.json",
    ),
    "a large output": (
        item(local(output=PayloadMessage(json=f'"{"x" * LIMIT}"'))),
        PayloadTooLarge,
        "commands[0].record_local_step.output.json",
    ),
    "much metadata": (
        item(local(output=PayloadMessage(json="1", metadata={str(n): "" for n in range(33)}))),
        PayloadTooLarge,
        "commands[0].record_local_step.output.metadata",
    ),
    "feedback that is no JSON": (
        item(local(failure=run_pb2.Failure(feedback=PayloadMessage(json="nope")))),
        InvalidJson,
        "commands[0].record_local_step.failure.feedback.json",
    ),
    "options of another kind of op": (
        item(local(options='{"timeout": "3s"}')),
        InvalidFrame,
        "commands[0].record_local_step/options/timeout",
    ),
    "options that are no object": (item(local(options="[]")), InvalidFrame, "commands[0].record_local_step/options"),
    "long options": (
        item(local(options='{"undo": {"step": "' + "u" * 10_001 + '"}}')),
        InvalidFrame,
        "commands[0].record_local_step/options",
    ),
    "an input of an undo that is no JSON": (
        item(local(options=UNDO, input=PayloadMessage(json="x"))),
        InvalidJson,
        "commands[0].record_local_step.input.json",
    ),
    "a step without a handler": (
        item(pb.Command(op=1, schedule_step=pb.ScheduleStep())),
        InvalidFrame,
        "commands[0].schedule_step.handler",
    ),
    "a negative delay": (
        item(pb.Command(op=1, start_timer=pb.StartTimer(delay=Duration(seconds=-1)))),
        InvalidFrame,
        "commands[0].start_timer.delay",
    ),
    "a delay past all time": (
        item(pb.Command(op=1, start_timer=pb.StartTimer(delay=Duration(seconds=315_576_000_000)))),
        InvalidFrame,
        "commands[0].start_timer.delay",
    ),
    "a delay that is none": (
        item(pb.Command(op=1, start_timer=pb.StartTimer(delay=Duration(nanos=2_000_000_000)))),
        InvalidFrame,
        "commands[0].start_timer.delay",
    ),
    "a signal without a name": (
        item(pb.Command(op=1, await_signal=pb.AwaitSignal())),
        InvalidFrame,
        "commands[0].await_signal.signal_name",
    ),
    "a signal that nobody can send": (
        item(pb.Command(op=1, await_signal=pb.AwaitSignal(signal_name="a b"))),
        InvalidFrame,
        "commands[0].await_signal.signal_name",
    ),
    "a negative timeout": (
        item(pb.Command(op=1, await_signal=pb.AwaitSignal(signal_name="a", timeout=Duration(seconds=-1)))),
        InvalidFrame,
        "commands[0].await_signal.timeout",
    ),
    "a child of no workflow": (
        item(pb.Command(op=1, start_child=pb.StartChild())),
        InvalidFrame,
        "commands[0].start_child.workflow_id",
    ),
    "a cancel of no op": (item(pb.Command(cancel_op=pb.CancelOp())), InvalidFrame, "commands[0].cancel_op.op"),
    "a cancel of a negative event": (
        item(pb.Command(cancel_op=pb.CancelOp(op=1, of_seq=-1))),
        InvalidFrame,
        "commands[0].cancel_op.of_seq",
    ),
    "a patch without a name": (
        item(pb.Command(mark_patch=pb.MarkPatch())),
        InvalidFrame,
        "commands[0].mark_patch.patch_id",
    ),
    "a label with a bad key": (
        item(pb.Command(op=1, set_attributes=pb.SetAttributes(attributes={"a b": ""}))),
        InvalidFrame,
        "commands[0].set_attributes.attributes['a b']",
    ),
    "many labels": (
        item(pb.Command(op=1, set_attributes=pb.SetAttributes(attributes={f"k{n}": "" for n in range(33)}))),
        InvalidFrame,
        "commands[0].set_attributes.attributes",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_breaks_a_rule_is_refused_with_its_place(rule: str) -> None:
    message, kind, path = RULES[rule]
    found, faults = refused(message)
    assert (found, list(faults)) == (kind, [path])


def test_all_faults_of_an_item_are_told_at_once() -> None:
    message = item(local(0, name="", attempts=0), local(output=PayloadMessage(json="{")), advance_no=0, outcome=0)
    kind, faults = refused(message)
    assert kind is InvalidFrame
    assert set(faults) == {
        "advance_no",
        "outcome",
        "commands[0].op",
        "commands[0].record_local_step.name",
        "commands[0].record_local_step.attempts",
        "commands[1].record_local_step.output.json",
    }


def test_the_faults_that_are_told_have_a_limit() -> None:
    """I12: a frame of faults is not answered by many more bytes."""
    _, faults = refused(item(*[local(n + 1, name="") for n in range(5000)]))
    assert len(faults) == 100


def test_a_repeat_has_the_same_digest_whatever_the_lease_and_the_order_of_its_maps() -> None:
    """I6."""
    labels = {f"k{n}": str(n) for n in range(20)}
    first = item(pb.Command(op=1, set_attributes=pb.SetAttributes(attributes=labels)))
    again = item(pb.Command(op=1, set_attributes=pb.SetAttributes(attributes=dict(reversed(labels.items())))))
    again.task.fencing_token = 1 << 60
    assert read(first).digest == read(again).digest
    again.commands[0].set_attributes.attributes["k3"] = "4"
    assert read(first).digest != read(again).digest


def test_the_quick_way_and_the_long_way_come_to_the_same() -> None:
    """A command that is all plain takes a shorter way than one with metadata."""
    plain = decided(item(local())).commands[0]
    longer = decided(item(local(output=PayloadMessage(json="1", metadata={"k": "v"})))).commands[0]
    assert isinstance(plain, LocalStep)
    assert longer == replace(plain, output=Payload("1", None, '{"k": "v"}'))
