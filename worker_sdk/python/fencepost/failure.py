"""What an attempt ended with: an output, or a failure made from whatever the step raised.

How an exception becomes a failure:

- `PermanentError`, `CorrectiveError` and `OperationalError` say their kind themselves, also when they are the
  ``__cause__`` of something else (``raise … from``) at any depth: the outermost one that says its kind
  decides. ``__context__`` does not count: what merely happened while another error was handled chose nothing.
- Of the errors in an exception group the most final kind wins: permanent, corrective, operational. The delay is then
  the longest that any of its operational errors asks for.
- Everything else is operational with the class's name as its code, SystemExit and CancelledError of the
  user's own included: a step can't end its worker.
- Texts are cut by code points to the contract's limits and lone surrogates in them replaced, so that a
  failure can always be recorded.

Pure; called by the executor and the session.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fencepost.codec import NULL, Value, encode
from fencepost.errors import NotEncodable
from fencepost.models import FailureKind, payload_size
from fencepost.recordable import recordable
from fencepost.step_errors import CorrectiveError, OperationalError, PermanentError, StepError
from fencepost.workflow_errors import OpFailed

MAX_MESSAGE = 10_000
MAX_CODE = 200
_MAX_ERRORS = 1_000
_CHECKPOINT_OVERHEAD = 32

_SURROGATES = re.compile("[\ud800-\udfff]")
_FINALITY = {FailureKind.OPERATIONAL: 0, FailureKind.CORRECTIVE: 1, FailureKind.PERMANENT: 2}

INPUT_NOT_DECODABLE = "INPUT_NOT_DECODABLE"
OUTPUT_NOT_RECORDABLE = "OUTPUT_NOT_RECORDABLE"
ATTEMPT_TIMEOUT = "ATTEMPT_TIMEOUT"
WORKER_SHUTDOWN = "WORKER_SHUTDOWN"


@dataclass(slots=True)  # not frozen: one is made for each step, and of a frozen one each field is set by a call
class Completed:
    """The attempt ended with ``output``, ``size`` bytes of it with its metadata."""

    output: Value
    size: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed. ``retry_after`` is in seconds, None for the node's own backoff.

    ``unexpected`` tells that the step did not choose the kind: a traceback may be wanted. ``checkpoint`` is the newest
    state of the step, with its number, if the server has not acknowledged it.
    """

    kind: FailureKind
    code: str
    message: str
    feedback: Value | None = None
    retry_after: float | None = None
    unexpected: bool = False
    checkpoint: tuple[int, Value] | None = None

    @property
    def size(self) -> int:
        """At most how many bytes it takes in a frame, its lease left out."""
        size = 4 * (len(self.code) + len(self.message)) + (payload_size(self.feedback) if self.feedback else 0)
        return size if self.checkpoint is None else size + payload_size(self.checkpoint[1]) + _CHECKPOINT_OVERHEAD


@dataclass(frozen=True, slots=True)
class Released:
    """It was never begun and goes back."""

    size: int = 0


Outcome = Completed | Failed | Released
NOTHING = Completed(NULL, 0)


def clean(text: str, limit: int = MAX_MESSAGE) -> str:
    """Cut ``text`` to ``limit`` code points and replace what is not Unicode."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def kind_of(error: StepError) -> FailureKind:
    """The kind that a StepError stands for; operational for one that is none of the three, nor has its own."""
    if isinstance(error, OpFailed):
        return error.kind
    if isinstance(error, PermanentError):
        return FailureKind.PERMANENT
    if isinstance(error, CorrectiveError):
        return FailureKind.CORRECTIVE
    return FailureKind.OPERATIONAL


def failed(error: BaseException, max_payload_bytes: int) -> Failed:
    """Make a failure of what a step raised. Never raises."""
    spoken = list(_spoken(error))
    # The first of the most final kind.
    decisive = max(spoken, key=lambda candidate: _FINALITY[kind_of(candidate)], default=None)
    if decisive is None:
        name = type(error).__name__
        return Failed(FailureKind.OPERATIONAL, clean(name, MAX_CODE), clean(_told(error) or name), unexpected=True)
    message = text_of(error)
    if isinstance(error, OpFailed):
        message = f"{error.what}: {error.detail}"  # its code stands beside it
    elif decisive is not error:
        message = f"{message} (because of {type(decisive).__name__}: {text_of(decisive)})"
    feedback = None
    if isinstance(decisive, CorrectiveError | OpFailed) and decisive.feedback is not None:
        try:
            feedback = recordable(encode(decisive.feedback), given=decisive.feedback)
            if feedback.size > max_payload_bytes:
                raise NotEncodable(f"it is over the limit of {max_payload_bytes} bytes")
        except NotEncodable as fault:
            feedback = None
            message = f"{message[: MAX_MESSAGE // 2]} (the feedback can't be recorded: {fault.message})"
    return Failed(
        kind=kind_of(decisive),
        code=clean(str(decisive.code or type(decisive).__name__), MAX_CODE),
        message=clean(message),
        feedback=feedback,
        retry_after=_longest_delay(spoken) if kind_of(decisive) is FailureKind.OPERATIONAL else None,
    )


def stopped(reason: str) -> Failed:
    """The failure of an attempt that ended because it was asked to."""
    return Failed(FailureKind.OPERATIONAL, "StepCancelled", f"the step stopped because it was asked to: {reason}")


def not_recordable(message: str) -> Failed:
    """The failure of an attempt whose output can't be recorded: another attempt would end the same way."""
    return Failed(FailureKind.PERMANENT, OUTPUT_NOT_RECORDABLE, clean(message))


def text_of(error: BaseException) -> str:
    """The error's own text, whatever its class does when asked for it."""
    try:
        return str(error)
    except BaseException as fault:  # noqa: BLE001 - __str__ is the user's code; it must not hide the error
        return f"(its text can't be had: {type(fault).__name__})"


def _told(error: BaseException) -> str:
    """The text of an error; of a group, which says only how many it has, the first of them too."""
    text, first = text_of(error), error
    for _ in range(_MAX_ERRORS):
        if not isinstance(first, BaseExceptionGroup):
            break
        first = first.exceptions[0]
    return text if first is error else f"{text}, first {type(first).__name__}: {text_of(first)}"


def _longest_delay(errors: list[StepError]) -> float | None:
    delays = (error.retry_after for error in errors if isinstance(error, OperationalError))
    return max((delay for delay in delays if delay is not None), default=None)


def _spoken(error: BaseException) -> Iterator[StepError]:
    """The outermost StepError of each branch of causes and groups, in a bounded walk:

    causes may form a ring.
    """
    waiting: list[BaseException] = [error]
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_ERRORS:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, StepError):
            yield current
            continue
        if isinstance(current, BaseExceptionGroup):
            waiting.extend(reversed(current.exceptions))
        if current.__cause__ is not None:
            waiting.append(current.__cause__)
