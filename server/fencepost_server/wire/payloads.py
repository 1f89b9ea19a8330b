"""Payloads and failures in both directions."""

from __future__ import annotations

import json
from datetime import datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost.v1 import payload_pb2, run_pb2
from fencepost_server.domain.errors import InvalidFrame, InvalidJson, PayloadTooLarge
from fencepost_server.domain.jsontext import JsonError, parse
from fencepost_server.domain.model import NULL, Failure, FailureKind, Payload
from fencepost_server.domain.violation import Violation

MAX_METADATA_ENTRIES, MAX_METADATA_BYTES = 32, 4096
MAX_CODE, MAX_MESSAGE = 200, 10_000


def payload_in(message: payload_pb2.Payload, limit: int, path: str) -> tuple[Payload, object]:
    """The payload and, for JSON, its parsed value. Raises InvalidJson, PayloadTooLarge with ``path`` as the place."""
    metadata = None
    if message.metadata:
        metadata = json.dumps(dict(message.metadata), sort_keys=True)
        if len(message.metadata) > MAX_METADATA_ENTRIES or len(metadata.encode()) > MAX_METADATA_BYTES:
            raise _too_large(
                f"{path}.metadata", f"more than {MAX_METADATA_ENTRIES} entries or {MAX_METADATA_BYTES} bytes"
            )
    text = message.json  # nearly all have it, and to ask which one it is takes a call more
    if not text and (which := message.WhichOneof("data")) != "json":
        if which is None:
            return NULL if metadata is None else Payload("null", None, metadata), None
        if len(message.binary) > limit:
            raise _too_large(f"{path}.binary", f"{len(message.binary)} bytes are more than {limit}")
        return Payload(None, message.binary, metadata), None
    # A character has one byte at least: only long texts have to be encoded to be measured.
    if len(text) * 4 > limit and len(text.encode()) > limit:
        raise _too_large(f"{path}.json", f"{len(text.encode())} bytes are more than {limit}")
    try:
        value = parse(text)
    except JsonError as error:
        raise InvalidJson(
            f"{path}.json is not valid: {error}", violations=[Violation(f"{path}.json", str(error))]
        ) from None
    return Payload(text, None, metadata), value


def _too_large(path: str, text: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"{path}: {text}", violations=[Violation(path, text)])


def payload_out(payload: Payload) -> payload_pb2.Payload:
    """A stored payload as sent."""
    message = payload_pb2.Payload()
    fill_payload(message, payload)
    return message


def fill_payload(message: payload_pb2.Payload, payload: Payload) -> None:
    """Write a stored payload into an empty one, which is there afterwards although there may be nothing in it."""
    if payload.binary is not None:
        message.binary = payload.binary
    elif payload.json is not None:
        message.json = payload.json
    else:
        message.SetInParent()
    if payload.metadata:
        message.metadata.update(json.loads(payload.metadata))


def payload_text(payload: Payload) -> str:
    """A payload as JSON text that keeps all of it, for columns that are read by people only."""
    binary = None if payload.binary is None else payload.binary.hex()
    return json.dumps({"json": payload.json, "binary": binary, "metadata": payload.metadata})


def payload_of_text(text: str) -> Payload:
    """The inverse of ``payload_text``."""
    value = json.loads(text)
    binary = value["binary"]
    return Payload(value["json"], None if binary is None else bytes.fromhex(binary), value["metadata"])


def failure_in(message: run_pb2.Failure, limit: int) -> Failure:
    """A worker's failure; an unknown kind counts as OPERATIONAL. Raises as ``payload_in``, for the feedback."""
    feedback = None
    if message.HasField("feedback"):
        feedback, _ = payload_in(message.feedback, limit, "failure.feedback")
    try:
        kind = FailureKind(message.kind)
    except ValueError:
        kind = FailureKind.OPERATIONAL
    return Failure(kind, message.code[:MAX_CODE] or "UNKNOWN", message.message[:MAX_MESSAGE], feedback)


def failure_out(failure: Failure) -> run_pb2.Failure:
    """A stored failure."""
    return run_pb2.Failure(
        kind=int(failure.kind),  # type: ignore[arg-type]  # the numbers are the contract's
        code=failure.code,
        message=failure.message,
        feedback=None if failure.feedback is None else payload_out(failure.feedback),
        node_id=failure.node_id,
        attempt=failure.attempt,
    )


def retry_after_in(message: Duration) -> float:
    """Seconds, from 0 to 30 days. Raises InvalidFrame."""
    seconds = message.seconds + message.nanos / 1e9
    if not 0 <= seconds <= 30 * 86_400:
        raise InvalidFrame("retry_after must be between 0 and 30 days")
    return seconds


def duration(seconds: float) -> Duration:
    """A Duration message."""
    whole, nanos = divmod(round(seconds * 1e9), 10**9)
    return Duration(seconds=whole, nanos=nanos)


def timestamp(at: datetime | None) -> Timestamp | None:
    """A Timestamp message, or None."""
    if at is None:
        return None
    delta = at - _EPOCH
    return Timestamp(seconds=delta.days * 86_400 + delta.seconds, nanos=delta.microseconds * 1000)


_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
