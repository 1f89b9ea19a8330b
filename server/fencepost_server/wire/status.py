"""Errors as google.rpc.Status, and the one place where what is not ours becomes INTERNAL."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from fencepost.v1 import error_pb2, run_service_pb2
from fencepost_server.domain import errors
from fencepost_server.domain.violation import Violation, cut_message

log = logging.getLogger("fencepost.api")

DOMAIN = "fencepost"
_MAX_VIOLATIONS = 100
# A status travels in headers, 8 KiB of them by default, where bytes grow by a third and what is not ASCII
# threefold: a status past that limit reaches its caller as RESOURCE_EXHAUSTED without any reason.
_MAX_STATUS_BYTES = 4096
_MAX_MESSAGE_BYTES = 1500
_CODES: list[tuple[type[errors.FencepostError], grpc.StatusCode]] = [
    (errors.InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
    (errors.FailedPrecondition, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Aborted, grpc.StatusCode.ABORTED),
    (errors.ResourceExhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Internal, grpc.StatusCode.INTERNAL),
]

Aborting = tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]
"""Code, details and trailing metadata: the arguments of a context's ``abort``."""


def code_of(error: errors.FencepostError) -> grpc.StatusCode:
    """The gRPC code of an error."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def sanitised(error: BaseException) -> errors.FencepostError:
    """The error itself if it is one of ours; anything else is logged under an incident id and told as INTERNAL."""
    if isinstance(error, errors.FencepostError):
        return error
    incident = uuid.uuid4().hex[:12]
    log.error("incident %s", incident, exc_info=error)
    return errors.Internal(f"internal error, incident {incident}")


def aborting(error: errors.FencepostError) -> Aborting:
    """What to abort a call with."""
    code = code_of(error)
    message = _short(error.message)
    status = status_pb2.Status(code=code.value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status.details.append(_pack(info))
    if error.retry_after is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after * 1000))
        status.details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    if error.violations:
        status.details.append(_pack(_bad_request(error.violations, _MAX_STATUS_BYTES - status.ByteSize())))
    return code, message, (("grpc-status-details-bin", status.SerializeToString()),)


def _short(message: str) -> str:
    """As much of a message as fits into a header, where a byte beyond ASCII takes three."""
    size = 0
    for end, character in enumerate(message):
        size += 1 if character.isascii() else 3 * len(character.encode())
        if size > _MAX_MESSAGE_BYTES:
            return message[:end] + " …"
    return message


def _bad_request(violations: Sequence[Violation], budget: int) -> error_details_pb2.BadRequest:
    """All violations, or as many as fit and how many more there are."""
    bad = error_details_pb2.BadRequest()
    for index, violation in enumerate(violations):
        bad.field_violations.add(field=cut_message(violation.path), description=cut_message(violation.message))
        if index == _MAX_VIOLATIONS or bad.ByteSize() > budget - 200:
            del bad.field_violations[-1]
            more = len(violations) - index
            bad.field_violations.add(description=f"and {more} more" if index else "too long to be told here")
            break
    return bad


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed


def reason_number(reason: str) -> error_pb2.ErrorReason.ValueType:
    """The contract's number of a reason."""
    return error_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")


def item_error(error: errors.FencepostError) -> run_service_pb2.ItemError:
    """An error of one item of a batch."""
    return run_service_pb2.ItemError(
        reason=reason_number(error.reason),
        message=error.message,
        violations=[
            run_service_pb2.Violation(path=v.path, message=v.message) for v in error.violations[:_MAX_VIOLATIONS]
        ],
        metadata=error.metadata,
    )
