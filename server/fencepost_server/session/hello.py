"""What Hello has to be, with all of its faults at once."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.config import Config
from fencepost_server.domain.errors import InvalidHello, UnsupportedProtocol
from fencepost_server.domain.graph import decide_handler
from fencepost_server.domain.violation import Violation
from fencepost_server.wire.labels import name_fault

PROTOCOL_VERSION = 1
DEFAULT_FRAME_BYTES = 3 << 20
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_MAX_PREVIOUS, _MAX_HANDLERS, _MAX_WORKFLOWS, _MAX_LABELS = 16, 1000, 1000, 32
_MOST_GIVEN = 10_000
"""Leases of a kind that a session has been given by a server with the default of max_capacity."""
_TOLD = 5
"""So many faults are in the message; all are among its details."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """A valid Hello."""

    namespace: str
    worker_name: str
    nonce: str
    sdk: str
    max_frame_bytes: int
    capacity: int
    handlers: frozenset[tuple[str, str]]
    """(queue, handler) pairs."""
    previous: tuple[str, ...]
    held: tuple[tuple[str, int, int], ...]
    session_id: str = ""
    """Chosen by the worker, or empty."""
    workflows: frozenset[tuple[str, str]] = frozenset()
    """(queue, handler) pairs of DECIDE tasks: those of its workflows, and those that only this process is to try."""
    workflow_capacity: int = 0
    deciders: tuple[tuple[str, str], ...] = ()
    """(queue, handler) pairs of its workflows, for others to see who decides what."""


def greet(hello: pb.Hello, config: Config) -> Greeting:
    """Check a Hello. Raises UnsupportedProtocol, InvalidHello."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise UnsupportedProtocol(
            f"protocol version {hello.protocol_version} is not spoken here; this server speaks {PROTOCOL_VERSION}"
        )
    frame = hello.max_frame_bytes or DEFAULT_FRAME_BYTES
    faults = list(_faults(hello, config, frame))
    if faults:
        told = "; ".join(f"{path}: {text}" if path else text for path, text in faults[:_TOLD])
        raise InvalidHello(f"Hello: {told}", violations=[Violation(path, text) for path, text in faults])
    deciders = sorted(
        {(w.queue or "default", decide_handler(w.workflow_id, w.compatibility_id)) for w in hello.workflows}
    )
    return Greeting(
        hello.namespace or "default",
        hello.worker_name,
        hello.process_nonce,
        f"{hello.sdk_name} {hello.sdk_version}".strip(),
        frame,
        hello.capacity,
        frozenset((handler.queue or "default", handler.name) for handler in hello.handlers),
        tuple(hello.previous_session_ids),
        tuple((ref.run_id, ref.task_id, ref.fencing_token) for ref in hello.held),
        hello.session_id,
        frozenset(deciders),
        hello.workflow_capacity,
        tuple(deciders),
    )


def _faults(hello: pb.Hello, config: Config, frame: int) -> list[tuple[str, str]]:
    faults: list[tuple[str, str]] = []

    def check(ok: bool, path: str, text: str) -> None:
        if not ok:
            faults.append((path, text))

    smallest = round(config.max_payload_bytes * 1.25)
    check(len(hello.namespace) <= 200, "namespace", "at most 200 characters")
    check(1 <= len(hello.worker_name) <= 200, "worker_name", "1 to 200 characters are required")
    check(16 <= len(hello.process_nonce) <= 100, "process_nonce", "16 to 100 characters are required")
    check(len(hello.sdk_name) <= 100, "sdk_name", "at most 100 characters")
    check(len(hello.sdk_version) <= 100, "sdk_version", "at most 100 characters")
    check(smallest <= frame <= 1 << 31, "max_frame_bytes", f"at least {smallest}: 1.25 × the payload limit")
    check(0 <= hello.capacity <= config.max_capacity, "capacity", f"0 to {config.max_capacity}")
    check(0 <= hello.workflow_capacity <= config.max_capacity, "workflow_capacity", f"0 to {config.max_capacity}")
    check(len(hello.handlers) <= _MAX_HANDLERS, "handlers", f"at most {_MAX_HANDLERS}")
    check(bool(hello.handlers or hello.workflows), "handlers", "one of these or of workflows is required")
    check(len(hello.workflows) <= _MAX_WORKFLOWS, "workflows", f"at most {_MAX_WORKFLOWS}")
    for index, workflow in enumerate(hello.workflows[:_MAX_WORKFLOWS]):
        place = f"workflows[{index}]"
        check(name_fault(workflow.workflow_id) is None, f"{place}.workflow_id", "must be the id of a workflow")
        compatible = name_fault(workflow.compatibility_id) is None
        check(compatible, f"{place}.compatibility_id", "must be the compatibility id of a definition")
        check(len(workflow.queue) <= 200, f"{place}.queue", "at most 200 characters")
    for index, handler in enumerate(hello.handlers[:_MAX_HANDLERS]):
        check(1 <= len(handler.name) <= 200, f"handlers[{index}].name", "1 to 200 characters are required")
        # What DECIDE tasks are claimed by: named here they would come as steps, and past the capacity for either.
        check("@" not in handler.name, f"handlers[{index}].name", "must be the name of a step, which has no @")
        check(len(handler.queue) <= 200, f"handlers[{index}].queue", "at most 200 characters")
    check(len(hello.labels) <= _MAX_LABELS, "labels", f"at most {_MAX_LABELS}")
    check(len(hello.previous_session_ids) <= _MAX_PREVIOUS, "previous_session_ids", f"at most {_MAX_PREVIOUS}")
    for index, session_id in enumerate(hello.previous_session_ids[:_MAX_PREVIOUS]):
        former = _UUID.fullmatch(session_id) is not None and session_id != hello.session_id
        check(former, f"previous_session_ids[{index}]", "must be the id of a former session")
    check(not hello.session_id or _UUID.fullmatch(hello.session_id) is not None, "session_id", "must be a UUID")
    most_held = 2 * max(config.max_capacity, _MOST_GIVEN)  # steps and DECIDE tasks, which have a capacity each
    check(len(hello.held) <= most_held, "held", f"at most {most_held}")
    for index, ref in enumerate(hello.held[:most_held]):
        well_formed = _UUID.fullmatch(ref.run_id) is not None and ref.task_id > 0 and ref.fencing_token > 0
        check(well_formed, f"held[{index}]", "must name a lease")
    texts = [hello.worker_name, hello.process_nonce, hello.namespace, hello.sdk_name, hello.sdk_version]
    texts += [text for handler in hello.handlers for text in (handler.name, handler.queue)]
    texts += [workflow.queue for workflow in hello.workflows]
    check(not any("\0" in text for text in texts), "", "NUL characters are not allowed in names")
    return faults[:100]
