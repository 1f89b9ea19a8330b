"""From a request to a Start: ids, fingerprints."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from fencepost_server.domain.jsontext import canonical, fingerprint
from fencepost_server.domain.model import Payload
from fencepost_server.engine.operations import Start


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A valid request. ``value`` is the parsed JSON input, or None if it is binary. ``start_delay`` and ``run_timeout``
    are seconds; None: no timeout. ``schedule_key`` names one fire time of one schedule, ``schedule_origin`` what the
    run was started by.
    """

    namespace: str
    workflow_id: str
    definition_hash: bytes | None
    input: Payload
    value: object
    user_id: str
    request_key: str
    request_id: str
    priority: int
    dedupe_key: str = ""
    bind_duplicate: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)
    start_delay: float = 0.0
    run_timeout: float | None = None
    schedule_key: str = ""
    schedule_origin: str = ""


def new_run_id() -> str:
    """A UUIDv7: new runs lie side by side in the index. Its time decides nothing (I11)."""
    stamp = time.time_ns() // 1_000_000
    value = (stamp << 80) | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    return str(uuid.UUID(int=value))


def make_start(request: StartRequest) -> Start:
    """The operation for a request. Fingerprints are made only for the keys that are there."""
    print_ = _fingerprint(request) if request.request_key or request.request_id or request.dedupe_key else b""
    return Start(
        new_run_id(),
        request.namespace,
        request.workflow_id,
        request.definition_hash,
        request.input,
        request.value,
        print_,
        _request_fingerprint(request, print_) if request.request_id else b"",
        request.user_id,
        request.request_key,
        request.request_id,
        request.priority,
        request.dedupe_key,
        request.bind_duplicate,
        request.attributes,
        request.start_delay,
        request.run_timeout,
        request.schedule_key,
        request.schedule_origin,
    )


def _fingerprint(request: StartRequest) -> bytes:
    """SHA-256 of what the run is asked to do: workflow and input."""
    return fingerprint(request.workflow_id, comparable(request.input))


def comparable(payload: Payload) -> str:
    """A text that is equal for payloads that say the same: canonical JSON; for a binary one its codec's fingerprint,
    in the metadata, if there is one (two encryptions of one text differ), else its digest.
    """
    if payload.binary is None:
        return canonical(payload.json or "null")
    codec = json.loads(payload.metadata or "{}").get("fingerprint")
    return f"codec:{codec}" if codec else "binary:" + hashlib.sha256(payload.binary).hexdigest()


def _request_fingerprint(request: StartRequest, print_: bytes) -> bytes:
    """SHA-256 of the whole request: another one under the same request id is a conflict (I7). What a request leaves out
    leaves no trace, so that one remembered by an older server is still known.
    """
    optional: dict[str, object] = {}
    if request.attributes:
        optional["attributes"] = sorted(request.attributes.items())
    if request.start_delay:
        optional["start_delay"] = request.start_delay
    if request.run_timeout is not None:
        optional["run_timeout"] = request.run_timeout
    rest = json.dumps(
        [
            request.definition_hash.hex() if request.definition_hash else "",
            request.user_id,
            request.request_key,
            request.priority,
            *([request.dedupe_key, request.bind_duplicate] if request.dedupe_key else []),
            *([optional] if optional else []),
        ]
    )
    return hashlib.sha256(print_ + rest.encode()).digest()
