"""A server of one code run that is a list of events, and a worker that decides it, for tests without either.

`Story` numbers what comes in and what an Advance asks for, by the rules of the contract. `Decider` holds the run in
memory, runs its local steps at once and can forget it at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fencepost.code_run import CodeRun
from fencepost.codec import NULL, Value, encode
from fencepost.decisions import Decision
from fencepost.failure import Completed, Failed, failed
from fencepost.models import fill_payload
from fencepost.ops import LocalCall
from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.workflow import Workflow

RUN_ID = "0190f000-0000-7000-8000-000000000001"
OPERATIONAL, PERMANENT = run_pb2.FAILURE_KIND_OPERATIONAL, run_pb2.FAILURE_KIND_PERMANENT
CONTINUE, WAIT = pb.ADVANCE_OUTCOME_CONTINUE, pb.ADVANCE_OUTCOME_WAIT
COMPLETE, FAIL = pb.ADVANCE_OUTCOME_COMPLETE, pb.ADVANCE_OUTCOME_FAIL
CONTINUE_AS_NEW = pb.ADVANCE_OUTCOME_CONTINUE_AS_NEW
_ENDS = (COMPLETE, FAIL, CONTINUE_AS_NEW)
_INPUTS = {"step_completed", "step_failed", "timer_fired", "signal_received", "child_ended", "run_ending"}


@dataclass
class Story:
    """The server's side of one run. Time is a second an event."""

    input: object = None
    history: list[run_pb2.Event] = field(default_factory=list)
    advance_no: int = 0
    seen_seq: int = 0
    refusals: int = 0
    kept: bool = True
    outcome: int = 0
    output: Value | None = None
    failure: Failed | None = None
    failed_seq: int = 0
    """The failure that the function let through, which a retry passes by."""
    open: dict[int, str] = field(default_factory=dict)
    """What is open, by its event: step, timer, wait (with a timeout) or child."""

    def __post_init__(self) -> None:
        started = self._event()
        started.run_started.workflow_id = "w"
        fill_payload(started.run_started.input, encode(self.input))

    def _event(self) -> run_pb2.Event:
        event = run_pb2.Event(seq=len(self.history) + 1)
        event.event_time.seconds = 1_700_000_000 + len(self.history)
        self.history.append(event)
        return event

    @property
    def last_seq(self) -> int:
        return len(self.history)

    @property
    def kinds(self) -> list[str]:
        return [event.WhichOneof("kind") or "" for event in self.history]

    # What comes in

    def signal(self, name: str, payload: object = None) -> None:
        event = self._event()
        event.signal_received.signal_name = name
        fill_payload(event.signal_received.payload, encode(payload))

    def complete(self, seq: int, output: object = None) -> None:
        assert self.open.pop(seq) == "step"
        event = self._event()
        event.step_completed.task_id = seq
        fill_payload(event.step_completed.output, encode(output))

    def fail(self, seq: int, code: str, kind: run_pb2.FailureKind.ValueType = PERMANENT) -> None:
        assert self.open.pop(seq) == "step"
        event = self._event()
        event.step_failed.task_id = seq
        event.step_failed.failure.CopyFrom(run_pb2.Failure(kind=kind, code=code, message="it did not work"))

    def fire(self, seq: int) -> None:
        what = self.open.pop(seq)
        event = self._event()
        event.timer_fired.timer_seq = seq
        timer = what == "timer"
        event.timer_fired.kind = run_pb2.TIMER_KIND_SLEEP if timer else run_pb2.TIMER_KIND_SIGNAL_TIMEOUT

    def end_child(self, seq: int, output: object = None, failure: run_pb2.Failure | None = None) -> None:
        self.open.pop(seq)
        event = self._event()
        ended = event.child_ended
        ended.child_seq, ended.child_run_id = seq, "child"
        if failure is None:
            ended.state = run_pb2.RUN_STATE_COMPLETED
            fill_payload(ended.output, encode(output))
        else:
            ended.state = run_pb2.RUN_STATE_FAILED
            ended.failure.CopyFrom(failure)

    def cancel(self) -> None:
        event = self._event()
        event.run_ending.state = run_pb2.RUN_STATE_CANCELLED
        event.run_ending.failure.CopyFrom(
            run_pb2.Failure(kind=PERMANENT, code="RUN_CANCELLED", message="it was cancelled")
        )

    def retry(self) -> None:
        """The run had failed, of itself, and goes on."""
        assert self.outcome == FAIL
        if self.open:
            ending = self._event().run_ending
            ending.state = run_pb2.RUN_STATE_FAILED
            ending.failure.code = "X"
            for seq in self.open:
                if self.open[seq] == "step":
                    self._event().step_cancelled.task_id = seq
        self._event().run_failed.failure.code = "X"
        self._event().run_retried.ignored_seq = self.failed_seq
        if self.failed_seq and self.history[self.failed_seq - 1].HasField("step_failed"):
            self.open[self.history[self.failed_seq - 1].step_failed.task_id] = "step"
        self.outcome, self.failure, self.failed_seq, self.kept = 0, None, 0, True

    def skipped(self) -> None:
        """An event that the function is not told."""
        self._event().run_paused.reason = "for tests"

    def first(self, what: str) -> int:
        """The oldest thing of that kind that is open."""
        return next(seq for seq, kind in self.open.items() if kind == what)

    # What is decided

    def advance(self, decision: Decision) -> pb.AdvanceResult:
        """As a server does it: the commands become events, after those that the worker has not seen."""
        item = pb.AdvanceItem()
        decision.fill(item)
        item = pb.AdvanceItem.FromString(item.SerializeToString())
        assert item.advance_no == self.advance_no + 1
        assert self.seen_seq <= item.seen_seq <= self.last_seq
        self.advance_no = item.advance_no
        if item.outcome == FAIL and not item.commands:
            self.failed_seq = item.failed_seq
        else:
            self.seen_seq = item.seen_seq
        unseen = self.history[item.seen_seq :]
        result = pb.AdvanceResult(events=unseen)
        before = len(self.history)
        for command in item.commands:
            result.seqs.append(self._apply(command))
        for event in self.history[before:]:
            event.event_time.seconds = 1_700_000_000 + before
        result.event_time.seconds = 1_700_000_000 + before
        for seq in item.ended_waits:
            assert self.history[seq - 1].HasField("signal_awaited")
            self.open.pop(seq, None)
        result.kept = item.outcome != WAIT or bool(unseen)
        if item.outcome in _ENDS:
            inputs = [kind for event in unseen if (kind := event.WhichOneof("kind")) in _INPUTS]
            signals_only = all(kind == "signal_received" for kind in inputs)
            if inputs and not (signals_only and (self.refusals >= 3 or item.outcome == CONTINUE_AS_NEW)):
                self.refusals += 1
                result.end_refused = True
            else:
                self.outcome, self.output, self.failure = item.outcome, decision.output, decision.failure
                result.kept = False
        self.kept = result.kept
        result.last_seq = self.last_seq
        return result

    def _apply(self, command: pb.Command) -> int:
        kind = command.WhichOneof("kind")
        record = command.record_local_step
        if kind == "record_local_step" and record.options and not record.HasField("failure"):
            self._event().input_built.node_id = record.name
        event = self._event()
        assert kind is not None
        _APPLY[kind](self, event, command)
        return event.seq

    def _schedule(self, event: run_pb2.Event, command: pb.Command) -> None:
        step, made = command.schedule_step, event.step_scheduled
        made.op, made.handler, made.input_hash = command.op, step.handler, step.input_hash
        made.input.CopyFrom(step.input)
        self.open[event.seq] = "step"

    def _record(self, event: run_pb2.Event, command: pb.Command) -> None:
        record, made = command.record_local_step, event.local_step_ended
        made.op, made.name, made.input_hash = command.op, record.name, record.input_hash
        made.attempts = record.attempts
        if record.HasField("failure"):
            made.failure.CopyFrom(record.failure)
        else:
            made.output.CopyFrom(record.output)

    def _timer(self, event: run_pb2.Event, command: pb.Command) -> None:
        event.timer_started.op = command.op
        event.timer_started.delay.CopyFrom(command.start_timer.delay)
        self.open[event.seq] = "timer"

    def _await(self, event: run_pb2.Event, command: pb.Command) -> None:
        event.signal_awaited.op = command.op
        event.signal_awaited.signal_name = command.await_signal.signal_name
        if command.await_signal.HasField("timeout"):
            event.signal_awaited.timeout_time.seconds = 1
            self.open[event.seq] = "wait"

    def _child(self, event: run_pb2.Event, command: pb.Command) -> None:
        child, made = command.start_child, event.child_scheduled
        made.op, made.workflow_id, made.input_hash = command.op, child.workflow_id, child.input_hash
        self.open[event.seq] = "child"

    def _cancel(self, event: run_pb2.Event, command: pb.Command) -> None:
        made = event.op_cancelled
        made.op, made.of_seq = command.cancel_op.op, command.cancel_op.of_seq
        assert made.of_seq, "no op is asked for and stopped at once"
        if self.open.get(made.of_seq) != "child":
            self.open.pop(made.of_seq, None)

    def _mark(self, event: run_pb2.Event, command: pb.Command) -> None:
        event.patch_marked.patch_id = command.mark_patch.patch_id

    def _label(self, event: run_pb2.Event, command: pb.Command) -> None:
        event.attributes_set.op = command.op
        event.attributes_set.attributes.update(command.set_attributes.attributes)


_APPLY: dict[str, Callable[[Story, run_pb2.Event, pb.Command], None]] = {
    "schedule_step": Story._schedule,
    "record_local_step": Story._record,
    "start_timer": Story._timer,
    "await_signal": Story._await,
    "start_child": Story._child,
    "cancel_op": Story._cancel,
    "mark_patch": Story._mark,
    "set_attributes": Story._label,
}


replays: list[CodeRun] = []
"""Those of the test that runs: they are evicted at its end, or their tasks would complain in another."""


def replayed(workflow: Workflow[..., Any], story: Story, upto: int | None = None, **options: Any) -> CodeRun:
    """A run that was fed the whole history, or its first events as if they were all."""
    upto = story.last_seq if upto is None else upto
    run = CodeRun(workflow, RUN_ID, seen_seq=min(story.seen_seq, upto), advance_no=story.advance_no, **options)
    replays.append(run)
    run.feed(story.history[:upto])
    return run


class Decider:
    """A worker with one run. Local steps are run at once, in the order in which they were begun."""

    def __init__(self, workflow: Workflow[..., Any], story: Story, **options: Any) -> None:
        self.workflow = workflow
        self.story = story
        self.options = options
        self.run = replayed(workflow, story, **options)
        self.sent: list[Decision] = []
        self.ran: list[str] = []

    def evict(self) -> None:
        """Forget the run, and replay it."""
        self.run.evict()
        self.run = replayed(self.workflow, self.story, **self.options)

    def catch_up(self) -> None:
        """Be told what has happened since."""
        self.run.leased(1)
        self.run.feed(self.story.history[self.run.seq :])

    def begin(self) -> list[LocalCall]:
        """Begin local steps, and end them at once."""
        calls = self.run.local_steps()
        for call in calls:
            self.ran.append(call.name)
            self.run.local_ended(call.op, result_of(call), 1)
        return calls

    def step(self) -> bool:
        """Send one Advance, if there is one to send."""
        decision = self.run.decision()
        if decision is None:
            return False
        self.sent.append(decision)
        self.run.accepted(self.story.advance(decision))
        return True

    def go(self) -> None:
        """Decide until the run waits, or is over."""
        self.catch_up()
        while True:
            self.begin()
            if not self.step():
                return

    @property
    def last(self) -> Decision:
        return self.sent[-1]


def result_of(call: LocalCall) -> Completed | Failed:
    """Run a local step, as a worker does it."""
    args, keywords = call.bind()
    try:
        output = call.function(*args, **keywords)
        if call.is_async:
            output = _driven(output)
        return call.completed(output, 1 << 20)
    except Exception as error:  # noqa: BLE001 - whatever the step raises is its failure
        return failed(error, 1 << 20)


def _driven(coroutine: Any) -> Any:
    """The result of a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a step of these tests awaits nothing")


def decided(workflow: Workflow[..., Any], input: object = None, **options: Any) -> Decider:
    """A run that was begun, and has gone as far as it goes by itself."""
    decider = Decider(workflow, Story(input), **options)
    decider.go()
    return decider


def output_of(decider: Decider) -> Any:
    """What the run completed with."""
    assert decider.story.outcome == COMPLETE, decider.story.failure
    return (decider.story.output or NULL).decode()
