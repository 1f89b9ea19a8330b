"""A status becomes the error of its reason, with all that its details say."""

from __future__ import annotations

import pickle

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

import fencepost
from fencepost import FencepostError, Violation, errors, step_errors
from fencepost.errors import BY_REASON
from fencepost.status import error_of, error_of_item
from fencepost.v1 import error_pb2, run_service_pb2

# Said in failures of steps or on a command line, never as the answer to a call or the end of a stream.
NOT_OF_CALLS = {
    "UNSPECIFIED",
    "OUTPUT_SCHEMA_MISMATCH",
    "LEASE_EXPIRED",
    "ATTEMPT_TIMEOUT",
    "NOT_DELIVERED",
    "SCHEMA_VERSION_MISMATCH",
    "QUEUE_TIMEOUT",
    "TOTAL_TIMEOUT",
    "RUN_TIMEOUT",
    "SIGNAL_TIMEOUT",
    "INVALID_NODE_INPUT",
    "RUN_CANCELLED",
    "RUN_TERMINATED",
    "RUN_ENDED",
    "UNDO_FAILED",
    "CHILD_FAILED",
    "ADVANCE_OUT_OF_ORDER",
    "NONDETERMINISM",
    "DECIDER_FAILING",
    "HISTORY_TOO_LONG",
}
REASONS = {name.removeprefix("ERROR_REASON_") for name in error_pb2.ErrorReason.keys()}  # noqa: SIM118 - no dict


def trailing(*details: Message) -> list[tuple[str, bytes]]:
    status = status_pb2.Status()
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return [("x", b""), ("grpc-status-details-bin", status.SerializeToString())]


def info(reason: str, domain: str = "fencepost", **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata)


def test_every_reason_that_a_caller_can_meet_has_a_class() -> None:
    assert set(BY_REASON) == REASONS - NOT_OF_CALLS


@pytest.mark.parametrize("reason", sorted(BY_REASON))
def test_a_reason_decides_the_class_whatever_the_code(reason: str) -> None:
    error = error_of(grpc.StatusCode.UNKNOWN, "text", trailing(info(reason)))
    assert type(error) is BY_REASON[reason]
    assert (error.reason, error.message) == (reason, "text")


def test_details_are_kept() -> None:
    request = error_details_pb2.BadRequest(
        field_violations=[error_details_pb2.BadRequest.FieldViolation(field="/a", description="bad")]
    )
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000))
    details = trailing(info("REQUEST_KEY_CONFLICT", existing_run_id="r1"), request, retry)
    error = error_of(grpc.StatusCode.ALREADY_EXISTS, "taken", details)
    assert isinstance(error, errors.RequestKeyConflict)
    assert error.existing_run_id == "r1"
    assert error.violations == (Violation("/a", "bad"),)
    assert error.retry_after == 2.5
    assert str(error) == "REQUEST_KEY_CONFLICT: taken\n  /a: bad"


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest, "A_NEW_ONE"),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable, "A_NEW_ONE"),
        (grpc.StatusCode.INTERNAL, errors.ServerFault, "A_NEW_ONE"),
    ],
)
def test_a_reason_that_is_not_known_is_classed_by_its_code(
    code: grpc.StatusCode, kind: type[FencepostError], reason: str
) -> None:
    error = error_of(code, "", trailing(info(reason)))
    assert isinstance(error, kind)
    assert error.reason == reason


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unreachable, "UNREACHABLE"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.Unreachable, "UNREACHABLE"),
        (grpc.StatusCode.CANCELLED, errors.Unreachable, "UNREACHABLE"),
        (grpc.StatusCode.PERMISSION_DENIED, errors.AccessDenied, "PERMISSION_DENIED"),
        (grpc.StatusCode.UNIMPLEMENTED, errors.ServerFault, "UNIMPLEMENTED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.ServerFault, "RESOURCE_EXHAUSTED"),
        (grpc.StatusCode.NOT_FOUND, errors.NotFound, "NOT_FOUND"),
        (grpc.StatusCode.UNKNOWN, errors.ServerFault, "UNKNOWN"),
    ],
)
@pytest.mark.parametrize(
    "details", [None, (("grpc-status-details-bin", b"\xff"),), trailing(info("X", domain="a.proxy"))]
)
def test_without_a_reason_of_ours_the_code_decides(
    code: grpc.StatusCode, kind: type[FencepostError], reason: str, details: list[tuple[str, bytes]] | None
) -> None:
    error = error_of(code, None, details)
    assert type(error) is kind
    assert error.reason == reason


def test_an_item_of_a_batch_has_the_same_errors() -> None:
    item = run_service_pb2.ItemError(
        reason=error_pb2.ERROR_REASON_INPUT_SCHEMA_MISMATCH,
        message="no",
        violations=[run_service_pb2.Violation(path="/a", message="bad")],
    )
    error = error_of_item(item)
    assert isinstance(error, errors.InputSchemaMismatch)
    assert error.violations == (Violation("/a", "bad"),)


def test_a_conflict_over_a_dedupe_key_names_the_run_that_holds_it() -> None:
    metadata = {"existing_run_id": "r1", "existing_fingerprint": "aa", "request_fingerprint": "bb"}
    item = run_service_pb2.ItemError(
        reason=error_pb2.ERROR_REASON_DEDUPE_KEY_CONFLICT, message="held", metadata=metadata
    )
    details = trailing(info("DEDUPE_KEY_CONFLICT", **metadata))
    for error in (error_of_item(item), error_of(grpc.StatusCode.ALREADY_EXISTS, "held", details)):
        assert isinstance(error, errors.DedupeKeyConflict)
        assert isinstance(error, errors.Conflict)
        assert error.existing_run_id == "r1"
        assert error.metadata == metadata


def test_an_item_with_an_unknown_reason_is_a_fault() -> None:
    item = run_service_pb2.ItemError.FromString(b"\x08\xe7\x07")
    error = error_of_item(item)
    assert type(error) is errors.ServerFault
    assert error.reason == "REASON_999"


def test_errors_survive_pickling() -> None:
    error = error_of(grpc.StatusCode.NOT_FOUND, "gone", trailing(info("RUN_NOT_FOUND", k="v")))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.reason, again.metadata) == (errors.RunNotFound, "RUN_NOT_FOUND", {"k": "v"})


def test_every_error_is_exported() -> None:
    known = {**vars(errors), **vars(step_errors)}
    public = {name for name, kind in known.items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert public <= set(fencepost.__all__)


def test_an_illegal_transition_tells_the_state_and_the_event() -> None:
    details = trailing(info("ILLEGAL_TRANSITION", state="COMPLETED", event="CANCEL"))
    error = error_of(grpc.StatusCode.FAILED_PRECONDITION, "no", details)
    assert isinstance(error, errors.IllegalTransition)
    assert isinstance(error, errors.InvalidState)
    assert (error.state, error.event) == ("COMPLETED", "CANCEL")


def test_a_key_that_is_taken_names_the_run_that_holds_it() -> None:
    error = error_of(grpc.StatusCode.FAILED_PRECONDITION, "no", trailing(info("KEY_TAKEN", existing_run_id="r2")))
    assert isinstance(error, errors.KeyTaken)
    assert error.existing_run_id == "r2"


def test_what_may_last_is_not_tried_again_blindly() -> None:
    error = error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailing(info("TOO_MANY_SIGNALS")))
    assert not isinstance(error, errors.Unavailable)
