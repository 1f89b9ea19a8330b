"""Checks of requests: all faults of one request are gathered, then raised together."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost_server.domain.errors import InvalidPageToken, InvalidRequest
from fencepost_server.domain.violation import Violation
from fencepost_server.wire.labels import MAX_ATTRIBUTES, MAX_NAME, attribute_faults, name_fault

DEFAULT_NAMESPACE = "default"
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_HASH = re.compile(r"[0-9a-f]{64}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICRO = timedelta(microseconds=1)
_FIRST_MICRO = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICRO
_LAST_MICRO = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICRO
T = TypeVar("T")


class Checks:
    """Gathers faults. Each method returns a usable value even if it noted a fault; ``done`` raises
    InvalidRequest if there are any.
    """

    def __init__(self) -> None:
        self.faults: list[Violation] = []

    def note(self, path: str, message: str) -> None:
        """A fault."""
        self.faults.append(Violation(path, message))

    def done(self) -> None:
        """Raise if anything was wrong."""
        if self.faults:
            text = "; ".join(f"{fault.path}: {fault.message}" for fault in self.faults[:5])
            raise InvalidRequest(f"invalid request: {text}", violations=self.faults)

    def namespace(self, value: str) -> str:
        """A namespace's name; the default one if empty."""
        return self.name(value, "namespace") if value else DEFAULT_NAMESPACE

    def name(self, value: str, path: str, *, required: bool = True) -> str:
        """An identifier as in manifests."""
        if not value:
            if required:
                self.note(path, "is required")
        elif (fault := name_fault(value)) is not None:
            self.note(path, fault)
        return value

    def text(self, value: str, path: str, *, required: bool = False, most: int = MAX_NAME) -> str:
        """A free text of a caller's own, such as a key."""
        if required and not value:
            self.note(path, "is required")
        if len(value) > most:
            self.note(path, f"at most {most} characters")
        if "\0" in value:
            self.note(path, "NUL is not allowed")
        return value

    def run_id(self, value: str, path: str = "run_id") -> str:
        """A run's id."""
        value = value.lower()
        if not value:
            self.note(path, "is required")
        elif _UUID.fullmatch(value) is None:
            self.note(path, "must be a UUID")
        return value

    def hash(self, value: str, path: str = "definition_hash") -> bytes | None:
        """A definition's hash, or None if empty."""
        if not value:
            return None
        if _HASH.fullmatch(value.lower()) is None:
            self.note(path, "must be 64 hexadecimal digits")
            return None
        return bytes.fromhex(value)

    def number(self, value: int, path: str, low: int, high: int, default: int) -> int:
        """A number in a range; 0 stands for the default."""
        if value == 0:
            return default
        if not low <= value <= high:
            self.note(path, f"must be between {low} and {high}")
        return value

    def seconds(self, value: Duration, path: str, high: float, low: float = 0) -> float:
        """A duration in seconds."""
        seconds: float = value.seconds + value.nanos / 1e9
        if not -1_000_000_000 < value.nanos < 1_000_000_000:
            self.note(path, "nanos must be below 1,000,000,000")
        elif not low <= seconds <= high:
            self.note(path, f"must be between {low:g} and {high:.15g} s")
        return seconds

    def time(self, value: Timestamp, path: str) -> datetime:
        """A time, to the microsecond that is not before it: all that is stored is as exact."""
        micros = value.seconds * 1_000_000 + -(-value.nanos // 1000)
        if not 0 <= value.nanos < 1_000_000_000 or not _FIRST_MICRO <= micros <= _LAST_MICRO:
            self.note(path, "must be a time of the years 1 to 9999")
            return _EPOCH
        return _EPOCH + timedelta(microseconds=micros)

    def attributes(self, values: Mapping[str, str], path: str, most: int = MAX_ATTRIBUTES) -> dict[str, str]:
        """Labels of a run, or what a list looks for: in the order of their keys, since a map of the wire has none."""
        self.faults.extend(attribute_faults(values, path, most))
        return dict(sorted(values.items()))


def page_token(kind: str, values: list[Any]) -> str:
    """An opaque token for the next page of one kind of list."""
    plain = [value.isoformat() if isinstance(value, datetime) else value for value in values]
    return base64.urlsafe_b64encode(json.dumps([kind, *plain]).encode()).decode().rstrip("=")


def read_page_token(kind: str, token: str, types: tuple[type, ...]) -> list[Any]:
    """The values of a token, an id of type UUID as str. Raises InvalidPageToken for anything that ``page_token`` did
    not make for this list.
    """
    try:
        found_kind, *values = json.loads(
            base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        )
        if found_kind != kind or len(values) != len(types):
            raise ValueError(kind)
        return [_typed(value, type_) for value, type_ in zip(values, types, strict=True)]
    except (ValueError, TypeError, RecursionError):
        raise InvalidPageToken("page_token is not one of this list") from None


def _typed(value: object, type_: type) -> object:
    if type_ is uuid.UUID:
        if not isinstance(value, str) or _UUID.fullmatch(value) is None:
            raise ValueError(value)
        return value
    if type_ is datetime:
        at = datetime.fromisoformat(str(value))
        if at.tzinfo is None:
            raise ValueError(value)
        return at
    if not isinstance(value, type_) or isinstance(value, bool):
        raise TypeError(value)
    if isinstance(value, int) and not 0 <= value < 1 << 62:
        raise ValueError(value)
    if isinstance(value, str) and ("\0" in value or len(value.encode()) > MAX_NAME):
        raise ValueError(value)
    return value
