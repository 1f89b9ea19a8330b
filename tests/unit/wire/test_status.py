"""Errors on the wire: one code for each reason, details that fit into a header, nothing of ours that leaks."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from fencepost_server.domain import errors
from fencepost_server.domain.violation import Violation
from fencepost_server.wire.status import aborting, code_of, item_error, reason_number, sanitised

HEADER_LIMIT = 8192
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=3000)


def leaves(kind: type[errors.FencepostError] = errors.FencepostError) -> list[type[errors.FencepostError]]:
    """The classes of errors that are raised."""
    below = kind.__subclasses__()
    return [leaf for child in below for leaf in leaves(child)] if below else [kind]


@pytest.mark.parametrize("kind", leaves())
def test_every_error_has_its_code_and_its_reason(kind: type[errors.FencepostError]) -> None:
    error = kind("what happened", metadata={"a": "b"})
    code, message, _ = aborting(error)
    assert code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
    assert message == "what happened"
    assert reason_number(error.reason) > 0
    assert item_error(error).reason == reason_number(error.reason)
    retryable = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (error.retry_after is not None) == retryable, "what may be retried says when, and nothing else does"


def details(error: errors.FencepostError) -> tuple[int, list[tuple[str, str]], str]:
    """The size of an error on the wire as headers grow there, its violations, and its reason."""
    code, message, [(name, raw)] = aborting(error)
    status = status_pb2.Status.FromString(raw)
    assert status.code == code.value[0]
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        assert detail.Unpack(info) or detail.Unpack(bad) or detail.Unpack(retry)
    size = len(name) + len(raw) * 4 // 3 + sum(1 if c.isascii() else 3 * len(c.encode()) for c in message)
    return size, [(v.field, v.description) for v in bad.field_violations], info.reason


@given(message=TEXT, faults=st.lists(st.tuples(TEXT, TEXT), max_size=150))
def test_no_error_is_larger_than_the_headers_that_carry_it(message: str, faults: list[tuple[str, str]]) -> None:
    error = errors.InvalidManifest(message, violations=[Violation(path, text) for path, text in faults])
    size, told, reason = details(error)
    assert size < HEADER_LIMIT - 500
    assert reason == "INVALID_MANIFEST"
    assert bool(told) == bool(faults)
    assert len(told) <= len(faults)


def test_what_fits_is_told_in_full_and_of_the_rest_how_much_it_is() -> None:
    few = [Violation(f"/{n}", "wrong") for n in range(20)]
    assert details(errors.InvalidManifest("", violations=few))[1] == [(v.path, v.message) for v in few]
    many = [Violation(f"/{n}", "wrong") for n in range(1000)]
    told = details(errors.InvalidManifest("", violations=many))[1]
    assert told[0] == ("/0", "wrong")
    assert told[-1] == ("", f"and {1000 - len(told) + 1} more")


def test_what_is_not_ours_is_an_incident_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    error = sanitised(RuntimeError('relation "secret" does not exist'))
    assert isinstance(error, errors.Internal)
    assert "secret" not in error.message
    incident = error.message.rsplit(" ", 1)[1]
    assert incident in caplog.text
    assert "secret" in caplog.text, "the log has it"
    ours = errors.RunNotFound("x")
    assert sanitised(ours) is ours
    assert code_of(ours) is grpc.StatusCode.NOT_FOUND
