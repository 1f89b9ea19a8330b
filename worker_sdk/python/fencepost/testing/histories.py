"""Histories as files and values: what `fencepost runs history RUN --json` has printed, what a client has read, or the
contract's messages, all as these messages, which is what a replay is fed.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from fencepost.codec import Value
from fencepost.events import Event, EventKind, TimerKind
from fencepost.models import Failure, FailureKind, RunState
from fencepost.v1 import payload_pb2, run_pb2

History: TypeAlias = "str | os.PathLike[str] | Iterable[Event] | Iterable[run_pb2.Event]"

SUFFIXES = (".json", ".jsonl")
_PAYLOAD_FIELDS = ("input", "output", "payload")
_OTHER_NAMES = {("local_step_ended", "name"): "node_id", ("local_step_ended", "attempts"): "attempt"}
_EVENT_FIELDS = {field.name for field in dataclasses.fields(Event)}
_KINDS = frozenset(field.name for field in run_pb2.Event.DESCRIPTOR.oneofs_by_name["kind"].fields)
_ENUMS: Mapping[str, Callable[[str], Any]] = {"state": RunState, "timer_kind": TimerKind}
_SECONDS = {"delay", "grace"}
_TIMES = {"ready_time", "fire_time", "timeout_time", "deadline_time"}


class HistoryUnreadable(ValueError):
    """A file, or a list of events, is no history. The message says where."""


def read(history: History) -> tuple[list[run_pb2.Event], str]:
    """The events of a history, from the first one on, without gaps; and the run's id, if a file says it.

    Raises HistoryUnreadable, OSError.
    """
    run_id = ""
    if isinstance(history, str | os.PathLike):
        path = Path(history)
        found, run_id = _from_file(path)
        where = f"{path}: "
    else:
        found = [event if isinstance(event, run_pb2.Event) else message_of(event) for event in history]
        where = ""
    if not found:
        raise HistoryUnreadable(f"{where}there is no event")
    for number, event in enumerate(found, 1):
        if event.seq != number:
            raise HistoryUnreadable(f"{where}event {number} is missing: event {event.seq} stands there")
    if found[0].WhichOneof("kind") != "run_started":
        raise HistoryUnreadable(f"{where}event 1 is no run_started")
    return found, run_id


def files(folder: str | os.PathLike[str]) -> list[Path]:
    """The histories in a folder and the folders in it, sorted. Raises HistoryUnreadable if there is none."""
    root = Path(folder)
    found = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not found:
        raise HistoryUnreadable(f"{root}: no file of it ends with {' or '.join(SUFFIXES)}")
    return found


def _from_file(path: Path) -> tuple[list[run_pb2.Event], str]:
    """A document a line, as the command line prints them, or one array of them; the first one names the run."""
    data = path.read_bytes()
    try:
        if data.lstrip()[:1] == b"[":
            documents = msgspec.json.decode(data, type=list[dict[str, msgspec.Raw]])
        else:
            documents = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode_lines(data)
    except msgspec.DecodeError as error:
        raise HistoryUnreadable(f"{path}: {error}") from error
    found = []
    for number, document in enumerate(documents, 1):
        try:
            found.append(message_of(event_of_document(document)))
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            raise HistoryUnreadable(f"{path}: event {number}: {_said(error)}") from error
    named = documents[0].get("run_id") if documents else None
    try:
        return found, "" if named is None else msgspec.json.decode(named, type=str)
    except msgspec.DecodeError as error:
        raise HistoryUnreadable(f"{path}: run_id: {error}") from error


def _said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def event_of_document(document: Mapping[str, msgspec.Raw]) -> Event:
    """An event from what the command line prints of it. Keys that this release does not know are left out.

    Raises KeyError, ValueError for what is none.
    """
    decode = msgspec.json.decode
    found: dict[str, Any] = {}
    for key, text in document.items():
        if key == "payload":
            found["payload"] = Value(json=bytes(text).decode())
        elif key == "payload_base64":
            found["payload"] = Value(binary=base64.b64decode(decode(text)))
        elif key == "failure":
            found["failure"] = _failure_of(decode(text, type=dict[str, msgspec.Raw]))
        elif key in _TIMES:
            found[key] = dt.datetime.fromisoformat(decode(text, type=str))
        elif key == "input_hash":
            found[key] = base64.b64decode(decode(text, type=str))
        elif key in _ENUMS:
            found[key] = _ENUMS[key](decode(text, type=str))
        elif key in _EVENT_FIELDS and key not in {"seq", "time", "kind"}:
            found[key] = decode(text)
    kind = decode(document["kind"], type=str)
    if kind not in set(EventKind):
        raise ValueError(f"this release knows no event of the kind {kind}")
    time = dt.datetime.fromisoformat(decode(document["event_time"], type=str))
    return Event(seq=decode(document["seq"], type=int), time=time, kind=EventKind(kind), **found)


def _failure_of(document: Mapping[str, msgspec.Raw]) -> Failure:
    decode = msgspec.json.decode
    feedback = None
    if bytes(document.get("feedback", msgspec.Raw(b"null"))) != b"null":
        feedback = Value(json=bytes(document["feedback"]).decode())
    elif "feedback_base64" in document:
        feedback = Value(binary=base64.b64decode(decode(document["feedback_base64"])))
    return Failure(
        kind=FailureKind(decode(document["kind"])),
        code=decode(document["code"], type=str),
        message=decode(document["message"], type=str),
        feedback=feedback,
        node_id=decode(document.get("node_id", msgspec.Raw(b'""')), type=str),
        attempt=decode(document.get("attempt", msgspec.Raw(b"0")), type=int),
    )


def message_of(event: Event) -> run_pb2.Event:
    """An event as the contract's message: the other way of `fencepost.events.event_of`."""
    message = run_pb2.Event(seq=event.seq)
    message.event_time.FromDatetime(event.time.astimezone(dt.UTC).replace(tzinfo=None))
    kind = event.kind.value
    if kind not in _KINDS:
        raise ValueError(f"event {event.seq}: this release knows no event of the kind {kind}")
    details = getattr(message, kind)
    details.SetInParent()
    for descriptor in details.DESCRIPTOR.fields:
        _fill(details, kind, descriptor.name, event)
    return message


def _fill(details: Any, kind: str, name: str, event: Event) -> None:
    """One field of an event's kind."""
    if name in _PAYLOAD_FIELDS:
        if event.payload is not None:
            getattr(details, name).CopyFrom(_payload(event.payload))
    elif name == "failure":
        if event.failure is not None:
            details.failure.CopyFrom(_failure(event.failure))
    elif name == "state":
        if event.state is not None:
            details.state = run_pb2.RunState.Value(f"RUN_STATE_{event.state.value}")
    elif name == "kind":
        if event.timer_kind is not None:
            details.kind = run_pb2.TimerKind.Value(f"TIMER_KIND_{event.timer_kind.value}")
    elif name == "attributes":
        details.attributes.update(event.attributes)
    else:
        value = getattr(event, _OTHER_NAMES.get((kind, name), name), None)
        if name in _TIMES:
            if value is not None:
                getattr(details, name).FromDatetime(value.astimezone(dt.UTC).replace(tzinfo=None))
        elif name in _SECONDS:
            if value is not None:
                getattr(details, name).FromNanoseconds(round(value * 1e6) * 1000)
        elif value is not None:
            setattr(details, name, value)


def _payload(value: Value) -> payload_pb2.Payload:
    payload = payload_pb2.Payload(metadata=value.metadata)
    if value.binary is not None:
        payload.binary = value.binary
    elif value.json is not None and value.json != "null":
        payload.json = value.json
    return payload


def _failure(failure: Failure) -> run_pb2.Failure:
    message = run_pb2.Failure(
        kind=run_pb2.FailureKind.Value(f"FAILURE_KIND_{failure.kind.value}"),
        code=failure.code,
        message=failure.message,
        node_id=failure.node_id,
        attempt=failure.attempt,
    )
    if failure.feedback is not None:
        message.feedback.CopyFrom(_payload(failure.feedback))
    return message
