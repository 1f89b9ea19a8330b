"""What a step raises becomes a failure that can be recorded, of the kind that was meant."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from fencepost import CorrectiveError, FailureKind, OperationalError, PermanentError, StepError
from fencepost.failure import MAX_CODE, MAX_MESSAGE, Failed, failed

LIMIT = 1 << 20
OPERATIONAL, CORRECTIVE, PERMANENT = FailureKind.OPERATIONAL, FailureKind.CORRECTIVE, FailureKind.PERMANENT


class CardDeclined(PermanentError):
    pass


class Forgetful(PermanentError):
    def __init__(self) -> None:
        self.nothing = True


def raised(build: Callable[[], None]) -> Failed:
    try:
        build()
    except BaseException as error:  # noqa: BLE001 - any
        return failed(error, LIMIT)
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (PermanentError("no"), PERMANENT, "PermanentError"),
        (CardDeclined("no"), PERMANENT, "CardDeclined"),
        (Forgetful(), PERMANENT, "Forgetful"),
        (PermanentError("no", code="NO_FUNDS"), PERMANENT, "NO_FUNDS"),
        (CorrectiveError("no"), CORRECTIVE, "CorrectiveError"),
        (OperationalError("no"), OPERATIONAL, "OperationalError"),
        (StepError("no"), OPERATIONAL, "StepError"),
        (KeyError("no"), OPERATIONAL, "KeyError"),
        (SystemExit(1), OPERATIONAL, "SystemExit"),
        (KeyboardInterrupt(), OPERATIONAL, "KeyboardInterrupt"),
        (asyncio.CancelledError(), OPERATIONAL, "CancelledError"),
        (TimeoutError(), OPERATIONAL, "TimeoutError"),
        (GeneratorExit(), OPERATIONAL, "GeneratorExit"),
    ],
)
def test_each_error_has_its_kind_and_code(error: BaseException, kind: FailureKind, code: str) -> None:
    failure = failed(error, LIMIT)
    assert (failure.kind, failure.code) == (kind, code)


def test_a_kind_survives_raise_from_at_any_depth() -> None:
    def build() -> None:
        try:
            try:
                raise CardDeclined("no funds")
            except CardDeclined as error:
                raise ValueError("charging") from error
        except ValueError as error:
            raise RuntimeError("order 7") from error

    failure = raised(build)
    assert (failure.kind, failure.code) == (PERMANENT, "CardDeclined")
    assert failure.message == "order 7 (because of CardDeclined: no funds)"


def test_what_was_only_handled_meanwhile_does_not_count() -> None:
    def build() -> None:
        try:
            raise PermanentError("first")
        except PermanentError:
            raise KeyError("second")  # noqa: B904 - the point

    assert raised(build).kind is OPERATIONAL


def test_the_outermost_kind_decides() -> None:
    def build() -> None:
        raise OperationalError("again", retry_after=7) from PermanentError("never")

    failure = raised(build)
    assert (failure.kind, failure.retry_after) == (OPERATIONAL, 7)


@pytest.mark.parametrize(
    ("group", "kind"),
    [
        (ExceptionGroup("g", [KeyError("a"), PermanentError("b"), CorrectiveError("c")]), PERMANENT),
        (ExceptionGroup("g", [OperationalError("a"), CorrectiveError("c"), KeyError("k")]), CORRECTIVE),
        (ExceptionGroup("g", [KeyError("a"), ExceptionGroup("h", [PermanentError("b")])]), PERMANENT),
        (ExceptionGroup("g", [KeyError("a"), OSError("b")]), OPERATIONAL),
        (BaseExceptionGroup("g", [SystemExit(1), PermanentError("b")]), PERMANENT),
    ],
)
def test_the_most_final_kind_of_a_group_wins(group: BaseException, kind: FailureKind) -> None:
    assert failed(group, LIMIT).kind is kind
    wrapped = RuntimeError("around")
    wrapped.__cause__ = group
    assert failed(wrapped, LIMIT).kind is kind


@pytest.mark.parametrize(
    "error",
    [
        ExceptionGroup("g", [KeyError("a"), OperationalError("b", retry_after=7)]),
        ExceptionGroup("g", [OperationalError("a"), ExceptionGroup("h", [OperationalError("b", retry_after=7)])]),
        ExceptionGroup("g", [OperationalError("a", retry_after=3), OperationalError("b", retry_after=7)]),
    ],
)
def test_the_longest_delay_of_a_group_is_kept_also_when_it_is_wrapped(error: BaseException) -> None:
    wrapped = RuntimeError("around")
    wrapped.__cause__ = error
    for raised_error in (error, wrapped):
        failure = failed(raised_error, LIMIT)
        assert (failure.kind, failure.retry_after) == (OPERATIONAL, 7)


def test_a_delay_beside_a_more_final_kind_does_not_count() -> None:
    group = ExceptionGroup("g", [OperationalError("a", retry_after=7), CorrectiveError("b")])
    assert (failed(group, LIMIT).kind, failed(group, LIMIT).retry_after) == (CORRECTIVE, None)


async def test_a_kind_survives_a_task_group() -> None:
    async def decline() -> None:
        raise CardDeclined("no funds")

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(decline())
    failure = failed(caught.value, LIMIT)
    assert (failure.kind, failure.code) == (PERMANENT, "CardDeclined")


def test_a_ring_of_causes_ends() -> None:
    one, two = KeyError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one
    assert failed(one, LIMIT).code == "KeyError"


def test_texts_are_cut_by_code_points_and_cleaned() -> None:
    failure = failed(ValueError("é" * 5_000_000), LIMIT)
    assert len(failure.message) == MAX_MESSAGE
    failure = failed(ValueError("a\x00b\ud800c"), LIMIT)
    assert failure.message == "a\x00b\ufffdc"
    failure.message.encode()
    assert len(failed(PermanentError("x", code="c" * 999), LIMIT).code) == MAX_CODE


@pytest.mark.parametrize("fault", [RuntimeError("no"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_an_error_whose_text_can_not_be_had_is_recorded_all_the_same(fault: BaseException) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise fault

    failure = failed(Mute(), LIMIT)
    assert (failure.code, failure.message) == ("Mute", f"(its text can't be had: {type(fault).__name__})")


def test_an_error_without_a_text_is_named_by_its_class() -> None:
    assert failed(KeyError(), LIMIT).message == "KeyError"


def test_feedback_is_kept() -> None:
    failure = failed(CorrectiveError("shorter", feedback={"max": 10}), LIMIT)
    assert failure.feedback is not None
    assert failure.feedback.decode() == {"max": 10}


@pytest.mark.parametrize("feedback", [math.nan, {1}, "x" * 101])
def test_feedback_that_can_not_be_recorded_is_left_out_and_said(feedback: object) -> None:
    failure = failed(CorrectiveError("shorter", feedback=feedback), 100)
    assert failure.kind is CORRECTIVE
    assert failure.feedback is None
    assert failure.message.startswith("shorter (the feedback can't be recorded: ")


@pytest.mark.parametrize(
    ("asked", "given"), [(None, None), (5, 5.0), (-1, 0.0), (1e12, 30 * 24 * 3600.0), (math.nan, None)]
)
def test_a_retry_delay_is_brought_into_bounds(asked: float | None, given: float | None) -> None:
    assert failed(OperationalError("x", retry_after=asked), LIMIT).retry_after == given
