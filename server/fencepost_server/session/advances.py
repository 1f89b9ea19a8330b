"""What an Advance has to be, with all the faults of an item at once: the contract's commands as the domain's.

Nearly every item has one local step that returned something short. So that has a way of its own, without a thought for
the places of faults.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload as PayloadMessage
from fencepost_server.domain.code import op_node
from fencepost_server.domain.errors import FencepostError, InvalidFrame, InvalidJson, PayloadTooLarge
from fencepost_server.domain.jsontext import JsonError, parse
from fencepost_server.domain.manifest import ManifestInvalid
from fencepost_server.domain.model import DECIDE_TASK, NULL, Failure, Payload
from fencepost_server.domain.ops import (
    Advance,
    AdvanceOutcome,
    AwaitSignal,
    CancelOp,
    LocalStep,
    MarkPatch,
    OpCommand,
    ScheduleStep,
    SetAttributes,
    StartChild,
    StartTimer,
)
from fencepost_server.domain.violation import Violation
from fencepost_server.engine.operations import Report, ReportKind
from fencepost_server.session.frames import Ref, ref_of
from fencepost_server.wire.labels import attribute_faults, name_fault
from fencepost_server.wire.payloads import failure_in, payload_in

MAX_COMMANDS = 10_000
MAX_NUMBERS = 10_000
_MAX_NAME = 200
_MAX_HASH_BYTES = 32
_LONGEST_SECONDS = 100 * 366 * 86_400
_MAX_NUMBER = 1 << 62
_MAX_FAULTS = 100
_OUTCOMES = {int(outcome): outcome for outcome in AdvanceOutcome}
_CONTINUE = AdvanceOutcome.CONTINUE
_ENDS_WITH_OUTPUT = (AdvanceOutcome.COMPLETE, AdvanceOutcome.CONTINUE_AS_NEW)
_ENDS_WITH_FAILURE = (AdvanceOutcome.FAIL, AdvanceOutcome.BLOCK)


def advanced(item: pb.AdvanceItem, namespace: str, limit: int) -> Report:
    """The report of what a code run's function has decided. Raises InvalidFrame with every fault; if all of them are of
    payloads and of one kind, InvalidJson or PayloadTooLarge.
    """
    ref = ref_of(item.task)
    advance = _plain(item, limit) if ref[1] == DECIDE_TASK else None
    if advance is None:
        advance = _any(item, ref, limit)
    return Report(ReportKind.ADVANCE, *ref, namespace, _digest(item), advance=advance)


def _plain(item: pb.AdvanceItem, limit: int) -> Advance | None:
    """What nearly every item is: one local step, and nothing more. None: look closer."""
    given = item.commands
    if (
        len(given) != 1
        or item.outcome != pb.ADVANCE_OUTCOME_CONTINUE
        or item.taken_signals
        or item.ended_waits
        or item.failed_seq
    ):
        return None
    number, seen = item.advance_no, item.seen_seq
    if not (1 <= number < _MAX_NUMBER and 0 <= seen < _MAX_NUMBER):
        return None
    step = _plain_step(given[0], limit)
    return None if step is None else Advance(number, seen, (step,), _CONTINUE)


def _plain_step(command: pb.Command, limit: int) -> LocalStep | None:
    """What nearly every command is: a step that returned a short JSON text. None: look closer."""
    step = command.record_local_step
    output = step.output
    op, name, digest, attempts, text = command.op, step.name, step.input_hash, step.attempts, output.json
    if (
        not 1 <= op < _MAX_NUMBER
        or not 1 <= len(name) <= _MAX_NAME
        or not name.isprintable()
        or len(digest) > _MAX_HASH_BYTES
        or attempts < 1
        or not text
        or 4 * len(text) > limit
        or step.options
        or output.metadata
    ):
        return None
    try:
        parse(text)
    except JsonError:
        return None
    return LocalStep(op, name, digest, Payload(text), None, attempts, "", None)


def _any(item: pb.AdvanceItem, ref: Ref, limit: int) -> Advance:
    reading = _Reading(limit)
    if ref[1] != DECIDE_TASK:
        reading.fault("task.task_id", "is not that of a DECIDE task")
    outcome = _OUTCOMES.get(item.outcome)
    if outcome is None:
        reading.fault("outcome", "is none that this server knows")
        outcome = _CONTINUE
    if not 1 <= item.advance_no < _MAX_NUMBER:
        reading.fault("advance_no", "must be 1 or more")
    if not 0 <= item.seen_seq < _MAX_NUMBER:
        reading.fault("seen_seq", "must be 0 or more")
    commands = reading.commands(item)
    output: Payload | None = None
    value: object = None
    failure: Failure | None = None
    if outcome in _ENDS_WITH_OUTPUT:
        output, value = reading.payload(item.output, "output")
    elif outcome in _ENDS_WITH_FAILURE:
        failure = reading.failure(item, "failure")
    taken = reading.numbers(item.taken_signals, "taken_signals") if item.taken_signals else ()
    waits = reading.numbers(item.ended_waits, "ended_waits") if item.ended_waits else ()
    if not 0 <= item.failed_seq < _MAX_NUMBER:
        reading.fault("failed_seq", "must be 0 or more")
    if reading.faults:
        raise reading.error()
    return Advance(
        item.advance_no, item.seen_seq, commands, outcome, output, value, failure, taken, waits, item.failed_seq
    )


def _digest(item: pb.AdvanceItem) -> bytes:
    """Of all but the lease: the first field, whose length takes one byte. Maps are put in order, because a repeat may
    be read by another process.
    """
    data = item.SerializeToString(deterministic=True)
    return hashlib.sha256(data[2 + data[1] :]).digest()


class _Reading:
    """Gathers the faults of one item. Each method returns something usable even so."""

    __slots__ = ("_kinds", "_limit", "faults")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.faults: list[Violation] = []
        self._kinds: set[type[FencepostError]] = set()

    def fault(self, path: str, message: str) -> None:
        """Something is wrong."""
        self._note(InvalidFrame, [Violation(path, message)])

    def error(self) -> FencepostError:
        """All that is wrong."""
        kind = self._kinds.pop() if len(self._kinds) == 1 else InvalidFrame
        text = "; ".join(f"{fault.path}: {fault.message}" for fault in self.faults[:5])
        return kind(f"advance: {text}", violations=self.faults)

    def _note(self, kind: type[FencepostError], faults: list[Violation]) -> None:
        self._kinds.add(kind)
        self.faults.extend(faults[: max(0, _MAX_FAULTS - len(self.faults))])

    def payload(self, message: PayloadMessage, path: str) -> tuple[Payload, object]:
        """A payload, and its parsed value."""
        try:
            return payload_in(message, self._limit, path)
        except (InvalidJson, PayloadTooLarge) as error:
            self._note(type(error), list(error.violations))
            return NULL, None

    def failure(self, message: pb.AdvanceItem | pb.RecordLocalStep, path: str) -> Failure | None:
        """Why something failed."""
        if not message.HasField("failure"):
            self.fault(path, "is required")
            return None
        try:
            return failure_in(message.failure, self._limit)
        except (InvalidJson, PayloadTooLarge) as error:
            places = [
                Violation(f"{path.removesuffix('failure')}{fault.path}", fault.message) for fault in error.violations
            ]
            self._note(type(error), places)
            return None

    def numbers(self, given: Sequence[int], path: str) -> tuple[int, ...]:
        """Numbers of events."""
        numbers = tuple(given)
        if len(numbers) > MAX_NUMBERS:
            self.fault(path, f"at most {MAX_NUMBERS}")
        elif min(numbers) < 1 or max(numbers) >= _MAX_NUMBER or len(set(numbers)) < len(numbers):
            self.fault(path, "must be numbers of events, each once")
        return numbers

    def commands(self, item: pb.AdvanceItem) -> tuple[OpCommand, ...]:
        """All commands of the item."""
        given = item.commands
        if len(given) > MAX_COMMANDS:
            self.fault("commands", f"at most {MAX_COMMANDS} at a time")
            return ()
        commands: list[OpCommand] = []
        ops: set[int] = set()
        for index, command in enumerate(given):
            which = command.WhichOneof("kind")
            if (
                which == "record_local_step"
                and (plain := _plain_step(command, self._limit)) is not None
                and plain.op not in ops
            ):
                ops.add(plain.op)
                commands.append(plain)
                continue
            if which is None:
                self.fault(f"commands[{index}]", "is none that this server knows")
                continue
            op = command.op
            if which not in _NO_OPS:
                if not 1 <= op < _MAX_NUMBER:
                    self.fault(f"commands[{index}].op", "must be 1 or more")
                elif op in ops:
                    self.fault(f"commands[{index}].op", f"op {op} is there twice")
                ops.add(op)
            if which == "record_local_step":
                commands.append(self._local_step(op, command.record_local_step, index))
            else:
                content = getattr(command, which)
                commands.append(_OTHERS[which](self, op, content, f"commands[{index}].{which}"))
            if len(self.faults) >= _MAX_FAULTS:
                break
        return tuple(commands)

    def _local_step(self, op: int, step: pb.RecordLocalStep, index: int) -> LocalStep:
        name, digest, options = step.name, step.input_hash, step.options
        output: Payload | None = None
        failure: Failure | None = None
        given: Payload | None = None
        if step.HasField("failure"):
            failure = self.failure(step, f"commands[{index}].record_local_step.failure")
        else:
            output, _ = self.payload(step.output, f"commands[{index}].record_local_step.output")
        if not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
            self.fault(f"commands[{index}].record_local_step.name", _NAME_RULE)
        if len(digest) > _MAX_HASH_BYTES:
            self.fault(f"commands[{index}].record_local_step.input_hash", _HASH_RULE)
        if step.attempts < 1:
            self.fault(f"commands[{index}].record_local_step.attempts", "must be 1 or more")
        if options:
            self._plan("local", name, options, f"commands[{index}].record_local_step")
            given, _ = self.payload(step.input, f"commands[{index}].record_local_step.input")
        return LocalStep(op, name, digest, output, failure, step.attempts, options, given)

    def _schedule_step(self, op: int, step: pb.ScheduleStep, path: str) -> ScheduleStep:
        self._plan("step", step.handler, step.options, path, "handler")
        self._hash(step.input_hash, path)
        given, _ = self.payload(step.input, f"{path}.input")
        return ScheduleStep(op, step.handler, given, step.input_hash, step.options)

    def _start_timer(self, op: int, timer: pb.StartTimer, path: str) -> StartTimer:
        return StartTimer(op, self._seconds(timer.delay, f"{path}.delay"))

    def _await_signal(self, op: int, wait: pb.AwaitSignal, path: str) -> AwaitSignal:
        if (fault := name_fault(wait.signal_name)) is not None:
            self.fault(f"{path}.signal_name", fault)
        timeout = self._seconds(wait.timeout, f"{path}.timeout") if wait.HasField("timeout") else None
        return AwaitSignal(op, wait.signal_name, timeout, wait.ended)

    def _start_child(self, op: int, child: pb.StartChild, path: str) -> StartChild:
        self._plan("child", child.workflow_id, child.options, path, "workflow_id")
        self._hash(child.input_hash, path)
        given, _ = self.payload(child.input, f"{path}.input")
        return StartChild(op, child.workflow_id, given, child.input_hash, child.options)

    def _cancel_op(self, _op: int, cancel: pb.CancelOp, path: str) -> CancelOp:
        if not 1 <= cancel.op < _MAX_NUMBER:
            self.fault(f"{path}.op", "must be 1 or more")
        if not 0 <= cancel.of_seq < _MAX_NUMBER:
            self.fault(f"{path}.of_seq", "must be 0 or more")
        return CancelOp(cancel.op, cancel.of_seq)

    def _mark_patch(self, _op: int, patch: pb.MarkPatch, path: str) -> MarkPatch:
        if not 1 <= len(patch.patch_id) <= _MAX_NAME or not patch.patch_id.isprintable():
            self.fault(f"{path}.patch_id", _NAME_RULE)
        return MarkPatch(patch.patch_id)

    def _set_attributes(self, op: int, labels: pb.SetAttributes, path: str) -> SetAttributes:
        faults = list(attribute_faults(labels.attributes, f"{path}.attributes"))
        if faults:
            self._note(InvalidFrame, faults)
        return SetAttributes(op, dict(sorted(labels.attributes.items())))

    def _hash(self, digest: bytes, path: str) -> None:
        if len(digest) > _MAX_HASH_BYTES:
            self.fault(f"{path}.input_hash", _HASH_RULE)

    def _seconds(self, value: Duration, path: str) -> float:
        seconds: float = value.seconds + value.nanos / 1e9
        if not -1_000_000_000 < value.nanos < 1_000_000_000 or not 0 <= seconds <= _LONGEST_SECONDS:
            self.fault(path, "must be between 0 and 100 years")
            return 0.0
        return seconds

    def _plan(self, kind: str, name: str, options: str, path: str, name_field: str = "name") -> None:
        """A step, child or undo is made of its name and options later on: they have to be right now."""
        try:
            op_node(kind, name, options)
        except ManifestInvalid as error:
            self._note(
                InvalidFrame,
                [
                    Violation(f"{path}.{name_field}" if fault.path == "/name" else f"{path}{fault.path}", fault.message)
                    for fault in error.violations
                ],
            )


_NAME_RULE = f"must be 1 to {_MAX_NAME} printable characters"
_HASH_RULE = f"at most {_MAX_HASH_BYTES} bytes"
_NO_OPS = frozenset(("cancel_op", "mark_patch"))
_OTHERS: Mapping[str, Callable[[_Reading, int, Any, str], OpCommand]] = {
    "schedule_step": _Reading._schedule_step,
    "start_timer": _Reading._start_timer,
    "await_signal": _Reading._await_signal,
    "start_child": _Reading._start_child,
    "cancel_op": _Reading._cancel_op,
    "mark_patch": _Reading._mark_patch,
    "set_attributes": _Reading._set_attributes,
}
