"""Turns gRPC's errors into the SDK's. The only place that looks at codes, details and trailing metadata."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from fencepost import errors
from fencepost.errors import BY_REASON, FencepostError, Violation
from fencepost.frames import seconds_of
from fencepost.models import violations_of
from fencepost.sdk_log import SdkLog
from fencepost.v1 import error_pb2, run_service_pb2

logger = SdkLog("fencepost")

DOMAIN = "fencepost"
_DETAILS_KEY = "grpc-status-details-bin"

_BY_CODE: dict[grpc.StatusCode, type[FencepostError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.Conflict,
    grpc.StatusCode.FAILED_PRECONDITION: errors.InvalidState,
    grpc.StatusCode.ABORTED: errors.LeaseLost,
    grpc.StatusCode.PERMISSION_DENIED: errors.AccessDenied,
    grpc.StatusCode.UNAUTHENTICATED: errors.AccessDenied,
    grpc.StatusCode.UNAVAILABLE: errors.Unreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unreachable,
    # A server that stops ends its calls with this; nobody on our side cancels a call and then asks for its
    # status.
    grpc.StatusCode.CANCELLED: errors.Unreachable,
}


def error_of(code: grpc.StatusCode, details: str | None, trailing: Iterable[Any] | None) -> FencepostError:
    """The error that a status stands for:

    by the ErrorReason in its details, or by its code if it has none.
    """
    found = _details(trailing)
    kind = _BY_CODE.get(code, errors.ServerFault)
    reason: str | None = None
    if found.reason:
        reason = found.reason
        kind = BY_REASON.get(reason, kind)
    elif kind in {errors.ServerFault, errors.LeaseLost, errors.Conflict, errors.NotFound}:
        # Not our server's word: a proxy's, or that of another service at this address.
        reason = code.name
    return kind(
        details or code.name.lower().replace("_", " "),
        reason=reason,
        violations=found.violations,
        metadata=found.metadata,
        retry_after=found.retry_after,
    )


def error_of_call(error: grpc.RpcError) -> FencepostError:
    """The error of a failed call, sync or aio: both kinds know code, details and trailing metadata."""
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    if code is None or not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return errors.ServerFault(str(error))
    return error_of(code, error.details(), error.trailing_metadata())


def error_of_item(item: run_service_pb2.ItemError) -> FencepostError:
    """The error of one item of a batch."""
    name = error_pb2.ErrorReason.Name(item.reason) if item.reason in error_pb2.ErrorReason.values() else ""
    reason = name.removeprefix("ERROR_REASON_") or f"REASON_{item.reason}"
    return BY_REASON.get(reason, errors.ServerFault)(
        item.message,
        reason=reason,
        violations=violations_of(item.violations),
        metadata=dict(item.metadata),
    )


@dataclass(slots=True)
class _Details:
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    retry_after: float | None = None


def _details(trailing: Iterable[Any] | None) -> _Details:
    """What the google.rpc.Status in the trailing metadata says; nothing if there is none that can be read."""
    found = _Details()
    try:
        for key, value in trailing or ():
            if key == _DETAILS_KEY:
                _read(status_pb2.Status.FromString(value), found)
    except DecodeError:
        logger.warning("the details of an error can't be read: they are no google.rpc.Status")
    return found


def _read(status: status_pb2.Status, found: _Details) -> None:
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            if info.domain == DOMAIN:
                found.reason = info.reason
                found.metadata = dict(info.metadata)
        elif detail.Unpack(request):
            found.violations += [Violation(fault.field, fault.description) for fault in request.field_violations]
        elif detail.Unpack(retry):
            found.retry_after = seconds_of(retry.retry_delay)
