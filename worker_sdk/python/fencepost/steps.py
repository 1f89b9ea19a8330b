"""Handlers of steps: the `step` decorator and the context that a handler may ask for.

::

    @step("orders.validate")
    async def validate(order: Order, ctx: StepContext) -> Validated: ...

The decorator returns a `Step`, which can still be called like the function, so that a test needs no worker.
It finds out once, from the signature, what the handler takes: at most one input, and the context where a
parameter is annotated `StepContext` or named ``ctx``. The input's and the output's annotations decide how
they are converted (see `codec`); without any they are plain JSON.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, get_type_hints

from fencepost.codec import NULL, Codec, codec_for, declares_sets_or_bytes, encode
from fencepost.errors import NotEncodable
from fencepost.failure import NOTHING, Completed
from fencepost.lease import CancelReason, Lease, cancellations, clock

if TYPE_CHECKING:
    from fencepost.models import Failure

P = ParamSpec("P")
R = TypeVar("R")

MAX_NAME = 200
_step_logger = logging.getLogger("fencepost.step")
_NO_KEYWORDS: Mapping[str, Any] = types.MappingProxyType({})


class StepContext:
    """What a handler can know of the attempt that it runs.

    Made for one attempt; safe to use from any thread.
    """

    __slots__ = ("_lease",)

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    @classmethod
    def for_test(
        cls,
        *,
        run_id: str = "00000000-0000-0000-0000-000000000000",
        task_id: int = 2,
        node_id: str = "node",
        workflow_id: str = "workflow",
        attempt: int = 1,
        fencing_token: int = 1,
        idempotency_key: str = "test",
        user_id: str = "",
        failure_before: Failure | None = None,
    ) -> StepContext:
        """A context of no worker, to call a handler with in a test."""
        lease = Lease(
            owner=None,
            step=Step(_nothing, "test"),
            run_id=run_id,
            task_id=task_id,
            token=fencing_token,
            workflow_id=workflow_id,
            definition_hash="",
            node_id=node_id,
            attempt=attempt,
            expires_at=clock() + 60.0,
            lease_seconds=60.0,
            deadline=0.0,
            input=NULL,
            failure_before=failure_before,
            idempotency_key=idempotency_key,
            user_id=user_id,
            max_payload_bytes=1 << 20,
        )
        return cls(lease)

    @property
    def run_id(self) -> str:
        """The run."""
        return self._lease.run_id

    @property
    def task_id(self) -> int:
        """The task: the number of the event of the run that scheduled this step."""
        return self._lease.task_id

    @property
    def node_id(self) -> str:
        """The node in the definition."""
        return self._lease.node_id

    @property
    def workflow_id(self) -> str:
        """The run's workflow."""
        return self._lease.workflow_id

    @property
    def definition_hash(self) -> str:
        """The definition that the run is pinned to: SHA-256 in hex."""
        return self._lease.definition_hash

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self._lease.attempt

    @property
    def fencing_token(self) -> int:
        """Grows with every lease of this step, over attempts and workers.

        Another system that keeps the highest token it has seen for ``idempotency_key`` and refuses lower ones
        can't be written to by an attempt that has lost its lease. Tokens of different steps can't be
        compared.
        """
        return self._lease.token

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this step and for no other step:

        for deduplicating effects elsewhere.
        """
        return self._lease.idempotency_key

    @property
    def user_id(self) -> str:
        """On whose behalf the run runs; may be empty."""
        return self._lease.user_id

    @property
    def failure_before(self) -> Failure | None:
        """The attempt before, if it failed as corrective."""
        return self._lease.failure_before

    @property
    def feedback(self) -> Any:
        """What the attempt before was told to do better, as plain JSON: `CorrectiveError.feedback`, or the
        output schema's violations from the server. None if it was not corrective, or said nothing.
        """
        before = self._lease.failure_before
        return None if before is None or before.feedback is None else before.feedback.decode()

    @property
    def deadline(self) -> float | None:
        """Seconds until the attempt times out, 0.0 at the least; None if it has no timeout."""
        deadline = self._lease.deadline
        return max(0.0, deadline - clock()) if deadline else None

    @property
    def lease_remaining(self) -> float:
        """How many seconds the lease lasts for certain, negative when it may have run out.

        The session renews it on its own. Below zero (a server or a network that is away) another worker may
        have the step; its result may still count, which the fencing token decides. A step can look here
        before an effect that no fencing token protects.
        """
        return self._lease.expires_at - clock()

    @property
    def cancelled(self) -> bool:
        """Whether the step should stop: no outcome of it will count. Async handlers are cancelled as well."""
        return self._lease.cancel_reason is not None

    @property
    def cancel_reason(self) -> CancelReason | None:
        """Why it is cancelled, if it is."""
        return self._lease.cancel_reason

    def wait_cancelled(self, timeout: float) -> bool:
        """Wait in a thread until the step is cancelled, or ``timeout`` seconds have passed; tell if it is
        cancelled.

        For sync handlers in place of `time.sleep`. In an async handler it would block the loop.
        """
        end = clock() + timeout
        while not self.cancelled:
            left = end - clock()
            if left <= 0:
                return False
            with cancellations:
                if not self.cancelled:
                    cancellations.wait(left)
        return True

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that puts run, node and attempt in each record (``extra``) and before each message."""
        return _StepLogger(
            _step_logger,
            {
                "run_id": self.run_id,
                "workflow_id": self.workflow_id,
                "node_id": self.node_id,
                "attempt": self.attempt,
            },
        )


class _StepLogger(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add what the adapter knows to the record, under what the call itself gave."""
        known = dict(self.extra or {})
        kwargs["extra"] = {**known, **(kwargs.get("extra") or {})}
        return f"[{known['run_id']} {known['node_id']} #{known['attempt']}] {msg}", kwargs


class Step(Generic[P, R]):
    """A handler: a function with the name under which manifests call it, and the queue that it serves.

    Calling it calls the function. Raises TypeError when the function takes anything but an input and a
    context.
    """

    def __init__(
        self,
        function: Callable[P, R],
        name: str,
        queue: str = "default",
        *,
        local_names: Mapping[str, Any] | None = None,
    ) -> None:
        for what, text in (("name", name), ("queue", queue)):
            if not text or len(text) > MAX_NAME:
                raise ValueError(f"a step's {what} has 1 to {MAX_NAME} characters, not {len(text)}")
        self.function = function
        self.name = name
        self.queue = queue
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - objects with an async __call__ are handlers too
        )
        self._input_annotation: Any = inspect.Parameter.empty
        self._output_annotation: Any = inspect.Parameter.empty
        self._takes_input = False
        self._context_first = False
        self._takes_context = False
        self._context_keyword = ""
        self._codec: Codec[Any] | None = None
        self._declares = False
        self._read_signature()
        try:
            self._resolve(local_names)
        except NameError:
            # A type that is defined further down; `prepare` looks again when the worker starts.
            self._codec = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself: for tests, and for steps that share work."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Step {self.name} queue={self.queue}>"

    def _read_signature(self) -> None:
        """Find out which parameter is the input and which the context. Raises TypeError."""
        signature = _signature(self.function)
        if inspect.isasyncgenfunction(self.function) or inspect.isgeneratorfunction(self.function):
            raise TypeError(f"step {self.name}: a generator can't be a handler")
        self._output_annotation = signature.return_annotation
        inputs: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
                continue
            if parameter.name == "ctx" or _is_context(parameter.annotation):
                self._takes_context = True
                self._context_first = not inputs
                self._context_keyword = parameter.name if parameter.kind is parameter.KEYWORD_ONLY else ""
            elif parameter.default is parameter.empty or not inputs:
                inputs.append(parameter)
        wanted = [parameter for parameter in inputs if parameter.default is parameter.empty]
        if len(wanted) > 1 or any(parameter.kind is parameter.KEYWORD_ONLY for parameter in wanted):
            raise TypeError(
                f"step {self.name}: a handler takes one input and, if it wants, a context named ctx; "
                f"this one asks for {', '.join(parameter.name for parameter in wanted)}"
            )
        chosen = wanted or inputs
        if chosen and chosen[0].kind is not inspect.Parameter.KEYWORD_ONLY:
            self._takes_input = True
            self._input_annotation = chosen[0].annotation

    def _resolve(self, local_names: Mapping[str, Any] | None = None) -> None:
        """Turn annotations into a codec.

        Raises NameError for an unknown name, TypeError for an impossible type.
        """
        names = getattr(inspect.unwrap(self.function), "__globals__", {})
        hints = {
            place: annotation
            for place, annotation in (("input", self._input_annotation), ("return", self._output_annotation))
            if annotation is not inspect.Parameter.empty
        }

        # Only these two: an annotation of the context may name what is imported for type checkers alone.
        def carrier() -> None: ...

        carrier.__annotations__ = hints
        known = get_type_hints(carrier, globalns=names, localns=dict(local_names or {}), include_extras=True)
        try:
            self._codec = codec_for(known.get("input", Any))
        except TypeError as error:
            raise TypeError(f"step {self.name}: {error}") from error
        self._declares = declares_sets_or_bytes(known.get("return", Any))

    def prepare(self) -> None:
        """Make sure that the annotations are known. Raises TypeError if they name what does not exist."""
        if self._codec is None:
            try:
                self._resolve()
            except NameError as error:
                raise TypeError(f"step {self.name}: an annotation can't be resolved: {error}") from error

    def bind(self, lease: Lease) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments for one attempt. Raises NotDecodable."""
        if not self._takes_input:
            values: tuple[Any, ...] = ()
        else:
            assert self._codec is not None, "prepare() comes first"
            values = (self._codec.decode(lease.input),)
        if not self._takes_context:
            return values, _NO_KEYWORDS
        context = StepContext(lease)
        if self._context_keyword:
            return values, {self._context_keyword: context}
        return ((context, *values) if self._context_first else (*values, context)), _NO_KEYWORDS

    def completed(self, output: object, max_payload_bytes: int) -> Completed:
        """Make an outcome of what the handler returned. Raises NotEncodable."""
        if output is None:
            return NOTHING
        if inspect.isawaitable(output):
            close = getattr(output, "close", None)
            if close is not None:
                close()
            raise NotEncodable("the handler is not async, but returned an awaitable")
        value = encode(output, declared=self._declares)
        size = value.size
        if size > max_payload_bytes:
            raise NotEncodable(f"{size} bytes, over the limit of {max_payload_bytes}: return a reference instead")
        return Completed(value, size)


def step(name: str, *, queue: str = "default") -> Callable[[Callable[P, R]], Step[P, R]]:
    """Make a handler of a function, async or sync; sync ones run in threads.

    ``name`` is what manifests say in ``step``; ``queue`` is the queue that it serves. Raises ValueError or
    TypeError for a name or a function that can't be a handler.
    """

    def decorate(function: Callable[P, R]) -> Step[P, R]:
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        # Classes of the function around it: their names are in no module, only here.
        local_names = None if caller is None or caller.f_code.co_name == "<module>" else dict(caller.f_locals)
        return Step(function, name, queue, local_names=local_names)

    return decorate


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def _is_context(annotation: Any) -> bool:
    """Whether an annotation says StepContext:

    as the class, as text, or as a reference to what can't be looked up.
    """
    if annotation is StepContext:
        return True
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", "")
    return text.rpartition(".")[2] == "StepContext"


def _nothing() -> None:
    return None
