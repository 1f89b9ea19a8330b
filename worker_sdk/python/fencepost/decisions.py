"""What a run wants sent with its next Advance, as the contract's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fencepost.codec import Value
from fencepost.failure import Completed, Failed
from fencepost.models import FAILURE_KIND_NUMBERS, fill_payload
from fencepost.ops import ATTRIBUTES, CHILD, LOCAL, SIGNAL, SLEEP, STEP, Op
from fencepost.v1 import payload_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration


# What is more waits for the next Advance, so that no frame is needlessly large.
_COMMANDS_BYTES = 1 << 20
_MAX_COMMANDS = 5_000
_COMMAND_OVERHEAD = 8


@dataclass(frozen=True, slots=True)
class Cancelled:
    """An op that is to be stopped, in place of the op in a list of what is to be sent."""

    op: Op


Unsent = Op | Cancelled | str
"""An op that was asked for, one that is to be stopped, or the id of a patch."""


@dataclass(slots=True)  # not frozen: as of failure.Completed, one is made for each step
class Decision:
    """What to send with the next Advance of a run: an AdvanceItem but for its task, which `fill` writes.

    ``output`` is what the run completed with, or what the next one begins with; ``failure`` why it failed, and
    ``failed_seq`` the event of the step that failed, if the function let that through.
    """

    advance_no: int
    seen_seq: int
    outcome: pb.AdvanceOutcome.ValueType
    commands: Sequence[pb.Command] = ()
    taken_signals: Sequence[int] = ()
    ended_waits: Sequence[int] = ()
    output: Value | None = None
    failure: Failed | None = None
    failed_seq: int = 0

    def fill(self, item: pb.AdvanceItem) -> None:
        """Write it into an item that has its task already."""
        item.advance_no = self.advance_no
        item.seen_seq = self.seen_seq
        item.outcome = self.outcome
        if self.commands:
            item.commands.extend(self.commands)
        if self.taken_signals:
            item.taken_signals.extend(self.taken_signals)
        if self.ended_waits:
            item.ended_waits.extend(self.ended_waits)
        if self.output is not None:
            fill_payload(item.output, self.output)
            item.output.SetInParent()
        if self.failure is not None:
            fill_failure(item.failure, self.failure)
        if self.failed_seq:
            item.failed_seq = self.failed_seq

    @property
    def size(self) -> int:
        """About how many bytes it takes in a frame."""
        size = 64 + sum(command.ByteSize() + 4 for command in self.commands)
        size += 10 * (len(self.taken_signals) + len(self.ended_waits))
        size += 0 if self.output is None else self.output.size
        return size + (0 if self.failure is None else self.failure.size)


def fill_failure(message: run_pb2.Failure, failure: Failed) -> None:
    """Write a failure into an empty message."""
    message.kind = FAILURE_KIND_NUMBERS[failure.kind]
    message.code = failure.code
    message.message = failure.message
    if failure.feedback is not None:
        fill_payload(message.feedback, failure.feedback)
        message.feedback.SetInParent()


def command_of(unsent: Unsent) -> pb.Command:
    """The command that asks for it."""
    if isinstance(unsent, Op):
        return _BUILDERS[unsent.kind](unsent)
    if isinstance(unsent, Cancelled):
        return pb.Command(cancel_op=pb.CancelOp(op=unsent.op.number, of_seq=unsent.op.seq))
    return pb.Command(mark_patch=pb.MarkPatch(patch_id=unsent))


def fitting(
    waiting: Mapping[int | str, Unsent], max_bytes: int, *, ends: bool
) -> tuple[list[Unsent], list[pb.Command], int]:
    """As many of the commands that wait as one Advance of so many bytes may have, at least one, with what they are of;
    and how many bytes they leave for the payload of an end, if the function has ended.
    """
    if len(waiting) == 1 and not ends:
        # As of most steps: it goes whatever its size, and has the Advance for itself.
        only = list(waiting.values())
        return only, [command_of(only[0])], 0
    unsent: list[Unsent] = []
    commands: list[pb.Command] = []
    size, most = 0, min(_COMMANDS_BYTES, max_bytes)
    for item in waiting.values():
        command = command_of(item)
        more = command.ByteSize() + _COMMAND_OVERHEAD
        if commands and (size + more > most or len(commands) >= _MAX_COMMANDS):
            break
        size += more
        unsent.append(item)
        commands.append(command)
    return unsent, commands, max_bytes - size


def events_before(sent: Sequence[Unsent]) -> int:
    """How many events of its own an Advance of these writes before that of its first command: if that is of a local
    step that has completed and can be undone, the input that its undo will have.
    """
    first = sent[0] if sent else None
    if not isinstance(first, Op) or not first.options or first.result is None:
        return 0
    return int(isinstance(first.result[0], Completed))


def _record(op: Op) -> pb.Command:
    assert op.result is not None  # it was queued because it ended
    result, attempts = op.result
    command = pb.Command()
    command.op = op.number
    record = command.record_local_step
    record.name = op.name
    record.input_hash = op.digest
    record.attempts = attempts
    if isinstance(result, Completed):
        output = result.output
        if output.json is not None and not output.metadata:
            record.output.json = output.json
        else:
            fill_payload(record.output, output)
            record.output.SetInParent()
    else:
        fill_failure(record.failure, result)
    if op.options:
        record.options = op.options
        fill_payload(record.input, op.input)
        record.input.SetInParent()
    return command


def _schedule(op: Op) -> pb.Command:
    step = pb.ScheduleStep(handler=op.name, input=_payload(op.input), input_hash=op.digest, options=op.options)
    return pb.Command(op=op.number, schedule_step=step)


def _start_timer(op: Op) -> pb.Command:
    command = pb.Command(op=op.number)
    _fill_seconds(command.start_timer.delay, op.seconds or 0.0)
    command.start_timer.delay.SetInParent()
    return command


def _await_signal(op: Op) -> pb.Command:
    command = pb.Command(op=op.number, await_signal=pb.AwaitSignal(signal_name=op.name))
    if not op.awaited:
        command.await_signal.ended = True
    elif op.seconds is not None:
        _fill_seconds(command.await_signal.timeout, op.seconds)
        command.await_signal.timeout.SetInParent()
    return command


def _start_child(op: Op) -> pb.Command:
    child = pb.StartChild(workflow_id=op.name, input=_payload(op.input), input_hash=op.digest, options=op.options)
    return pb.Command(op=op.number, start_child=child)


def _set_attributes(op: Op) -> pb.Command:
    return pb.Command(op=op.number, set_attributes=pb.SetAttributes(attributes=op.attributes))


_BUILDERS = {
    LOCAL: _record,
    STEP: _schedule,
    SLEEP: _start_timer,
    SIGNAL: _await_signal,
    CHILD: _start_child,
    ATTRIBUTES: _set_attributes,
}


def _payload(value: Value) -> payload_pb2.Payload:
    payload = payload_pb2.Payload()
    fill_payload(payload, value)
    return payload


def micros(seconds: float) -> int:
    """Seconds in whole microseconds: what is sent of a length of time, and compared."""
    return round(seconds * 1_000_000)


def _fill_seconds(duration: Duration, seconds: float) -> None:
    duration.seconds, rest = divmod(micros(seconds), 1_000_000)
    duration.nanos = rest * 1000
