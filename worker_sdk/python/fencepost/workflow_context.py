"""What a workflow's function asks for: `WorkflowContext`.

Each durable call returns a handle at once and is begun, so that gather works and the order of calls decides. What a
handle gives is what the history has, decoded: at the first execution as at every replay.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime as dt
import logging
import random
import types
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from hashlib import blake2b
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, overload

from fencepost.answers import Answers
from fencepost.codec import Codec, Value, codec_for, encode
from fencepost.errors import NotEncodable
from fencepost.local_functions import function_of, local_function
from fencepost.op_book import OpBook, shield
from fencepost.op_options import child_options, label_of, labels_of, local_options, name_of, step_options
from fencepost.ops import (
    ATTRIBUTES,
    CHILD,
    LOCAL,
    SIGNAL,
    SLEEP,
    STEP,
    Call,
    Handle,
    Op,
    digest_of,
    digest_of_arguments,
    own,
)
from fencepost.policies import Retry, Seconds, UndoBy, seconds_in
from fencepost.recordable import recordable
from fencepost.steps import Step
from fencepost.workflow import Workflow
from fencepost.workflow_errors import ContinueAsNew
from fencepost.workflow_log import WorkflowLogger

P = ParamSpec("P")
T = TypeVar("T")

MAX_EVENTS = 10_000
MAX_HISTORY_SIZE = 10 << 20
_EVENT_SIZE = 64

_ANY = codec_for(Any)
_NOTHING = codec_for(None)


class WorkflowContext:
    """What a workflow's function knows of its run, and what it asks for.

    For the function and its tasks only: local steps get no part of it. Calls raise NotEncodable for inputs that have no
    JSON, TypeError and ValueError for what can never be asked for. Once the run is about to end (cancelled, or failed
    by a timeout), every handle that is asked for outside of `shielded` raises CancelledError when it is awaited.
    """

    def __init__(self, book: OpBook, workflow: Workflow[..., Any], user_id: str, max_payload_bytes: int) -> None:
        self._book = book
        self._workflow = workflow
        self._user_id = user_id
        self._max_payload_bytes = max_payload_bytes
        self._payload_size = 0
        self._random: random.Random | None = None
        self._ids: random.Random | None = None
        self._answers = Answers()

    # Steps

    @overload
    def run(
        self,
        fn: Callable[..., Awaitable[T]],
        *args: Any,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: Seconds | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[T]: ...

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: Seconds | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[T]: ...

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: Seconds | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[Any]:
        """Run a function as a local step: in this worker, recorded when it has ended.

        ``fn`` is a plain or an async function, or a step; a parameter of it that is annotated `StepContext` or named
        ``ctx`` is given one. Its result is decoded to the annotation of what it returns. Of ``args`` only a digest is
        recorded; with ``undo`` they are, as its input: the one argument, or a list of several. ``timeout`` bounds each
        attempt. Arguments by keyword come in a `functools.partial`. Awaiting raises `StepFailed`.
        """
        local = local_function(fn, self._workflow.local_names)
        local.check(len(args))
        name = local.name if name is None else label_of("name", name)
        seconds, options = local_options(name, timeout, retry, undo)
        digest = digest_of_arguments(args)
        op = self._book.new_op(LOCAL, name)
        if op is not None:
            op.digest = digest
            if op.number not in self._book.done:
                args = own(args)
            op.call = Call(function_of(fn), local, args, retry, seconds, self._user_id, self._workflow.workflow_id)
            if undo is not None:
                op.options = options
                op.input = self._encoded(_input_of(fn, args), args[0] if len(args) == 1 else None)
            self._book.to_begin[op.number] = op
        return self._book.handle(op, local.codec)

    @overload
    def call(
        self,
        handler: Step[..., Awaitable[T]],
        input: Any = None,
        *,
        queue: str | None = None,
        timeout: Seconds | None = None,
        lease: Seconds | None = None,
        queue_timeout: Seconds | None = None,
        total_timeout: Seconds | None = None,
        retry: Retry | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[T]: ...

    @overload
    def call(
        self,
        handler: Step[..., T],
        input: Any = None,
        *,
        queue: str | None = None,
        timeout: Seconds | None = None,
        lease: Seconds | None = None,
        queue_timeout: Seconds | None = None,
        total_timeout: Seconds | None = None,
        retry: Retry | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[T]: ...

    @overload
    def call(
        self,
        handler: str | Step[..., Any],
        input: Any = None,
        *,
        type: type[T],
        queue: str | None = None,
        timeout: Seconds | None = None,
        lease: Seconds | None = None,
        queue_timeout: Seconds | None = None,
        total_timeout: Seconds | None = None,
        retry: Retry | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[T]: ...

    @overload
    def call(
        self,
        handler: str,
        input: Any = None,
        *,
        queue: str | None = None,
        timeout: Seconds | None = None,
        lease: Seconds | None = None,
        queue_timeout: Seconds | None = None,
        total_timeout: Seconds | None = None,
        retry: Retry | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[Any]: ...

    def call(
        self,
        handler: str | Step[..., Any],
        input: Any = None,
        *,
        type: Any = None,
        queue: str | None = None,
        timeout: Seconds | None = None,
        lease: Seconds | None = None,
        queue_timeout: Seconds | None = None,
        total_timeout: Seconds | None = None,
        retry: Retry | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[Any]:
        """Run a step on any worker that has its handler, in any language.

        ``handler`` is its name or the step itself, which brings its queue and the type of its result; ``type`` says it
        otherwise. The options are those of a step in a manifest. Awaiting raises `StepFailed`.
        """
        codec = _ANY if type is None else codec_for(type)
        if isinstance(handler, Step):
            handler.prepare()
            codec = handler.output_codec if type is None else codec
            queue = handler.queue if queue is None and handler.queue != "default" else queue
            value = handler.encode_input(input)
            handler = handler.name
        else:
            value = encode(input)
        name = name_of("handler", handler)
        options = step_options(name, queue, timeout, lease, queue_timeout, total_timeout, retry, undo)
        op = self._book.new_op(STEP, name)
        return self._asked(op, self._encoded(value, input), options, codec)

    @overload
    def child(
        self,
        workflow: Workflow[..., T],
        input: Any = None,
        *,
        on_parent_end: Literal["cancel", "terminate", "abandon"] | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[T]: ...

    @overload
    def child(
        self,
        workflow: str | Workflow[..., Any],
        input: Any = None,
        *,
        type: type[T],
        on_parent_end: Literal["cancel", "terminate", "abandon"] | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[T]: ...

    @overload
    def child(
        self,
        workflow: str,
        input: Any = None,
        *,
        on_parent_end: Literal["cancel", "terminate", "abandon"] | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[Any]: ...

    def child(
        self,
        workflow: str | Workflow[..., Any],
        input: Any = None,
        *,
        type: Any = None,
        on_parent_end: Literal["cancel", "terminate", "abandon"] | None = None,
        undo: UndoBy | None = None,
    ) -> Handle[Any]:
        """Start a child run and wait for its output.

        ``workflow`` is an id, of a graph too, or a code workflow itself, which brings the type of its output.
        ``on_parent_end`` says what becomes of it if this run ends first: "cancel" if nothing is said. Awaiting raises
        `ChildFailed`.
        """
        codec = _ANY if type is None else codec_for(type)
        if isinstance(workflow, Workflow):
            codec = workflow.output_codec if type is None else codec
            value = workflow.encode_input(input)
            workflow = workflow.workflow_id
        else:
            value = encode(input)
        name = name_of("workflow", workflow)
        options = child_options(name, on_parent_end, undo)
        op = self._book.new_op(CHILD, name)
        return self._asked(op, self._encoded(value, input), options, codec)

    def _asked(self, op: Op | None, value: Value, options: str, codec: Codec[Any]) -> Handle[Any]:
        if op is not None:
            op.input = value
            op.digest = digest_of(value)
            op.options = options
            self._book.ask(op)
        return self._book.handle(op, codec)

    def _encoded(self, value: Value, given: object) -> Value:
        """The payload that was made of ``given``, if it can be recorded. Raises NotEncodable."""
        size = recordable(value, given=given).size
        if size > self._max_payload_bytes:
            raise NotEncodable(f"{size} bytes, over the limit of {self._max_payload_bytes}: give a reference instead")
        return value

    # Time and signals

    def sleep(self, length: Seconds) -> Handle[None]:
        """Wait, for milliseconds or years: seconds, or a timedelta. Nothing of the run needs to be in memory."""
        seconds = seconds_in(length, "sleep")
        op = self._book.new_op(SLEEP, "")
        if op is not None:
            op.seconds = seconds
            self._book.ask(op)
        return self._book.handle(op, _NOTHING)

    @overload
    def signal(self, name: str, *, type: type[T], timeout: Seconds | None = None) -> Handle[T]: ...

    @overload
    def signal(self, name: str, *, timeout: Seconds | None = None) -> Handle[Any]: ...

    def signal(self, name: str, *, type: Any = Any, timeout: Seconds | None = None) -> Handle[Any]:
        """Wait for a signal and take it: each is taken once, in the order in which they came, also those that came
        before. Awaiting gives its payload, or raises `SignalTimeout`.
        """
        codec = codec_for(type)
        name = name_of("signal", name)
        seconds = None if timeout is None else seconds_in(timeout, f"signal {name}: timeout")
        op = self._book.new_op(SIGNAL, name)
        handle = self._book.handle(op, codec)
        if op is not None:
            op.seconds = seconds
            self._book.wait_for_signal(op)
        return handle

    @overload
    def signals(self, name: str, *, type: type[T]) -> AsyncIterator[T]: ...

    @overload
    def signals(self, name: str) -> AsyncIterator[Any]: ...

    def signals(self, name: str, *, type: Any = Any) -> AsyncIterator[Any]:
        """The signals of that name, one after the other, without end."""
        return _Signals(self, name, type)

    # What replay repeats

    def now(self) -> dt.datetime:
        """The time of the last event that the function was fed, in UTC, by the database's clock."""
        seconds, nanos = self._book.now
        return dt.datetime.fromtimestamp(seconds, dt.UTC) + dt.timedelta(microseconds=nanos // 1000)

    @property
    def random(self) -> random.Random:
        """Chance that is the same at each replay."""
        if self._random is None:
            self._random = random.Random(_seed(self._book.run_id, "random"))
        return self._random

    def uuid4(self) -> uuid.UUID:
        """A random UUID that is the same at each replay."""
        if self._ids is None:
            self._ids = random.Random(_seed(self._book.run_id, "uuid4"))
        return uuid.UUID(int=self._ids.getrandbits(128), version=4)

    def patched(self, patch_id: str) -> bool:
        """Whether this run goes the way of a change of the code: True for runs that reach the first such call anew,
        False for those that have passed here before it was there. What a run was told once it is told always.
        """
        return self._book.patched(label_of("patch", patch_id))

    # The run

    @property
    def run_id(self) -> str:
        """The run."""
        return self._book.run_id

    @property
    def workflow_id(self) -> str:
        """Its workflow."""
        return self._workflow.workflow_id

    @property
    def user_id(self) -> str:
        """On whose behalf it runs; may be empty."""
        return self._user_id

    @property
    def cancelled(self) -> bool:
        """Whether the run is about to end."""
        return self._book.ending is not None

    def shielded(self) -> Shielded:
        """A context (``with``) in which durable calls work although the run is about to end, and go on when it is.

        asyncio.shield keeps an op from the cancellation of who awaits it, but not from the end of its run: this does.
        """
        return Shielded()

    @property
    def should_continue_as_new(self) -> bool:
        """Whether the history has got long: 10,000 events, or 10 MiB."""
        return self._book.seq >= MAX_EVENTS or self._payload_size + _EVENT_SIZE * self._book.seq >= MAX_HISTORY_SIZE

    def continue_as_new(self, input: Any = None) -> NoReturn:
        """End this run and go on in a new one, with a history of its own. Signals that nobody has taken, keys and what
        can be undone move along; ops that are open are cancelled.
        """
        raise ContinueAsNew(self._encoded(self._workflow.encode_input(input), input))

    def set_attributes(self, attributes: Mapping[str, str | None]) -> None:
        """Label the run, beside and in place of the labels that it has; None or an empty text takes one away."""
        told = labels_of(attributes)
        op = self._book.new_op(ATTRIBUTES, "")
        if op is not None:
            op.attributes = told
            self._book.ask(op)

    def on_query(self, name: str, fn: Callable[..., Any]) -> None:
        """Let ``fn`` answer queries of that name. It is a plain function of the query's input, or of nothing; it only
        reads.
        """
        self._answers.add(label_of("query", name), fn)

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that is silent while a replay repeats what was logged before."""
        return WorkflowLogger(self)

    # For the run in memory

    def count(self, payload: Value) -> None:
        """The history has this payload: its characters, which a replay counts alike."""
        if payload.json is not None:
            self._payload_size += len(payload.json)
        elif payload.binary is not None:
            self._payload_size += len(payload.binary)

    def answer(self, name: str, payload: Value) -> Value:
        """Answer a query."""
        value = self._answers.answer(name, payload)
        return self._encoded(value, value)

    @property
    def replaying(self) -> bool:
        """Whether the function repeats what is recorded."""
        return self._book.seq <= self._book.seen_seq


class Shielded:
    """A context in which durable calls go on when the run is about to end."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token: contextvars.Token[bool] = shield.set(True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        # A function that is collected while it stands in here leaves in the context of whoever collects it.
        with contextlib.suppress(ValueError):
            shield.reset(self._token)


class _Signals(AsyncIterator[Any]):
    def __init__(self, context: WorkflowContext, name: str, type: Any) -> None:
        self._context, self._name, self._type = context, name, type

    async def __anext__(self) -> Any:
        return await self._context.signal(self._name, type=self._type)


def _input_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> Value:
    """What the undo of a local step receives as its input: the argument, or a list of several."""
    given = args[0] if len(args) == 1 else list(args) or None
    return fn.encode_input(given) if isinstance(fn, Step) else encode(given)


def _seed(run_id: str, use: str) -> int:
    return int.from_bytes(blake2b(f"{run_id}/{use}".encode(), digest_size=16).digest())
