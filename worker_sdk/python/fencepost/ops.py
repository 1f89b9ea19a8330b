"""What a code workflow asks for: its ops, the handles that it awaits, and the local steps that its worker runs.

An `Op` is numbered by the order of calls. It is *asked* when the function called, *recorded* when its command is an
event of the history (``seq``), *ended* when its handle has a result. Matching at replay compares kind and name, then a
short digest of the input.

Callers: `op_book` makes, matches and settles ops, the worker runs `LocalCall`s.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import msgspec

from fencepost.codec import NULL, Codec, Value, plain
from fencepost.context import StepContext
from fencepost.errors import NotEncodable
from fencepost.failure import NOTHING, Completed, Failed
from fencepost.lease import Lease, clock
from fencepost.policies import DEFAULT_RETRY, Retry, duration_text
from fencepost.recordable import recordable

if TYPE_CHECKING:
    from fencepost.local_functions import LocalFunction

T = TypeVar("T")

LOCAL = "local step"
STEP = "step"
SLEEP = "sleep"
SIGNAL = "signal"
CHILD = "child"
ATTRIBUTES = "attributes"

_ANY_LEASE_SECONDS = 60.0
_ANY_STEP_LIMIT = 1 << 20
_UNCHANGING = frozenset((str, int, float, bool, type(None), bytes))

_fingerprint_of: Callable[[Any], bytes] = msgspec.json.Encoder(enc_hook=plain, order="deterministic").encode


def digest_of_arguments(arguments: tuple[Any, ...]) -> bytes:
    """Eight bytes that tell if a local step is called with what it was called with before. Raises NotEncodable."""
    try:
        return blake2b(_fingerprint_of(arguments), digest_size=8).digest()
    except NotEncodable:
        raise
    except Exception as error:
        # Methods of the user's classes run in here, so anything can come out.
        raise NotEncodable(f"an argument of the step has no JSON: {error}") from error


def digest_of(value: Value) -> bytes:
    """The same of a payload."""
    data = value.json.encode() if value.json is not None else value.binary or b"null"
    return blake2b(data, digest_size=8).digest()


def own(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A copy of a local step's arguments, as they are now: what the step does to them must not reach the workflow, nor
    what the workflow does to them later the step.
    """
    for argument in arguments:
        if type(argument) not in _UNCHANGING:
            return copy.deepcopy(arguments)
    return arguments


class Canceller(Protocol):
    """What is told when an awaiter is gone: the run in memory."""

    def cancel_op(self, op: Op) -> None:
        """The handle of ``op`` was cancelled before it had a result."""


class Op:
    """One durable call. ``input``, ``options``, ``seconds`` and ``attributes`` are what its command says."""

    __slots__ = (
        "attributes",
        "call",
        "cancelled",
        "cancelled_at",
        "codec",
        "digest",
        "fire",
        "handle",
        "input",
        "kind",
        "local",
        "made_at",
        "name",
        "number",
        "options",
        "result",
        "seconds",
        "seq",
        "shielded",
        "silent",
    )

    def __init__(self, number: int, kind: str, name: str, made_at: int, shielded: bool) -> None:
        self.number = number
        self.kind = kind
        self.name = name
        self.made_at = made_at
        """The event that the function had been fed last when it asked."""
        self.shielded = shielded
        """Whether it goes on when the run is about to end."""
        self.seq = 0
        """The event that recorded it."""
        self.digest = b""
        self.codec: Codec[Any] | None = None
        self.handle: Handle[Any] | None = None
        self.fire: Callable[[], None] | None = None
        """Of a timer of the loop, which has no handle."""
        self.input = NULL
        self.options = ""
        self.seconds: float | None = None
        self.attributes: Mapping[str, str] | None = None
        self.cancelled = False
        self.cancelled_at = 0
        self.silent = False
        """Cancelled because the run ends, which the server knows."""
        self.call: Call | None = None
        """Of a local step: what is to be run."""
        self.local: LocalCall | None = None
        """Of a local step that was begun."""
        self.result: tuple[Completed | Failed, int] | None = None
        """Of a local step that has ended, until that is recorded: how, and after how many attempts."""

    @property
    def text(self) -> str:
        """For people: ``step charge``, ``sleep 30s``."""
        return op_text(self.kind, self.name, self.seconds)

    @property
    def awaited(self) -> bool:
        """Whether somebody may still wait for it."""
        return self.fire is not None if self.handle is None else not self.handle.done()


def op_text(kind: str, name: str, seconds: float | None = None) -> str:
    """For people: what an op is."""
    if kind == SLEEP:
        return f"sleep {duration_text(seconds or 0.0)}"
    return kind if kind == ATTRIBUTES else f"{kind} {name}"


class Handle(asyncio.Future[T]):
    """What a durable call returns: begun already, to be awaited when the result is wanted.

    Cancelling it, or the task that awaits it, stops the op.
    """

    __slots__ = ("_canceller", "_op", "awaited")

    def __init__(self, loop: asyncio.AbstractEventLoop, canceller: Canceller | None, op: Op | None) -> None:
        super().__init__(loop=loop)
        self._canceller = canceller
        self._op = op
        self.awaited = False
        """Whether somebody waits, or has waited, while it had no result."""

    def add_done_callback(self, fn: Callable[[Self], object], /, *, context: contextvars.Context | None = None) -> None:
        """Call ``fn`` when it has a result; what awaits it does that too."""
        self.awaited = True
        super().add_done_callback(fn, context=context)

    def cancel(self, msg: Any | None = None) -> bool:
        """Stop the op, unless it has ended. Whoever awaits it gets CancelledError."""
        if not super().cancel(msg):
            return False
        if self._canceller is not None and self._op is not None:
            self._canceller.cancel_op(self._op)
        return True


@dataclass(slots=True)
class Call:
    """What a local step runs."""

    function: Callable[..., Any]
    local: LocalFunction
    args: tuple[Any, ...]
    retry: Retry | None
    timeout: float | None
    user_id: str
    workflow_id: str


class LocalCall:
    """A local step to be run by the worker, once, with as many attempts as ``retry`` allows.

    ``function`` is called with what `bind` returns, within ``timeout`` seconds. ``cancelled`` tells that nobody awaits
    it any more; what it ends with is recorded all the same, so that it can be undone.
    """

    __slots__ = (
        "_args",
        "_call",
        "cancelled",
        "fencing_token",
        "function",
        "is_async",
        "lease",
        "max_output_bytes",
        "name",
        "op",
        "retry",
        "run_id",
        "timeout",
    )

    def __init__(self, op: int, name: str, call: Call, run_id: str, fencing_token: int) -> None:
        self.op = op
        self.name = name
        self.function = call.function
        self._call = call
        self._args = call.args
        self.retry = call.retry or DEFAULT_RETRY
        self.timeout = call.timeout
        self.is_async = call.local.is_async
        self.cancelled = False
        self.max_output_bytes: int | None = None
        """What a frame has room for beside the input that is recorded for an undo; None without one."""
        self.run_id = run_id
        self.fencing_token = fencing_token
        self.lease: Lease | None = None
        """What the context of the last attempt looks at, if the function takes one."""

    def __repr__(self) -> str:
        return f"<LocalCall {self.run_id} op {self.op} {self.name}>"

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this step and for no other step: a task's has the number of an event, so this
        has that of the op, negative. An undo of it is told this key.
        """
        return f"{self.run_id}/-{self.op}"

    def bind(self, attempt: int = 1) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of one attempt, which are counted from 1."""
        local = self._call.local
        if not local.takes_context:
            return self._args, {}
        return local.with_context(self._args, StepContext(self._lease(attempt)))

    def completed(self, output: object, max_payload_bytes: int) -> Completed:
        """Make an outcome of what the function returned. Raises NotEncodable."""
        if output is None:
            return NOTHING
        value = recordable(self._call.local.encode(output), given=output)
        size, room = value.size, self.max_output_bytes
        if size > max_payload_bytes:
            raise NotEncodable(f"{size} bytes, over the limit of {max_payload_bytes}: return a reference instead")
        if room is not None and size > room:
            raise NotEncodable(f"{size} bytes, which with the input that its undo needs fit no frame: use references")
        return Completed(value, size)

    def _lease(self, attempt: int) -> Lease:
        """What the context of an attempt shows. The token is the DECIDE task's; checkpoints live in this worker."""
        before, now = self.lease, clock()
        self.lease = lease = Lease(
            owner=None,
            step=self._call.local.step,
            run_id=self.run_id,
            task_id=1,
            token=self.fencing_token,
            workflow_id=self._call.workflow_id,
            definition_hash="",
            node_id=self.name,
            attempt=attempt,
            expires_at=now + _ANY_LEASE_SECONDS,
            lease_seconds=_ANY_LEASE_SECONDS,
            deadline=0.0 if self.timeout is None else now + self.timeout,
            input=NULL,
            failure_before=None,
            idempotency_key=self.idempotency_key,
            user_id=self._call.user_id,
            max_payload_bytes=_ANY_STEP_LIMIT,
            checkpoint=(0, None) if before is None else before.checkpoint,
        )
        return lease
