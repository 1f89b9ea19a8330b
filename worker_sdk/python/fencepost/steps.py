"""Handlers: the decorators `step` and `undo`.

::

    @step("orders.reserve")
    async def reserve(order: Order, ctx: StepContext) -> Reservation: ...

    @undo("orders.unreserve")
    async def unreserve(order: Order, reservation: Reservation | None, ctx: StepContext) -> None: ...

A decorator returns a `Step`, or its subclass `Undo`, which can still be called like the function, so that a test needs
no worker. It finds out once, from the signature, what the handler takes: at most one input, for an undo handler also
the output of the step that it undoes, and the context where a parameter is annotated `StepContext` or named ``ctx``.
Annotations decide how values are converted (see `codec`); without any they are plain JSON.

A handler serves one kind of task: a `Step` is never run to undo anything, an `Undo` never as a step. Names are of one
space, because a worker offers names.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, get_type_hints

from fencepost.codec import PLAIN_TYPES, Codec, Value, codec_for, declares_sets_or_bytes, encode
from fencepost.context import StepContext
from fencepost.errors import NotEncodable
from fencepost.failure import NOTHING, Completed
from fencepost.lease import Lease, TaskKind
from fencepost.models import payload_size
from fencepost.names import check_name, takes_a_name

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

MAX_NAME = 200
_NO_KEYWORDS: Mapping[str, Any] = types.MappingProxyType({})


class Step(Generic[P, R_co]):
    """A handler: a function with the name under which manifests call it, and the queue that it serves.

    Calling it calls the function. Raises TypeError when the function takes anything but an input and a
    context.
    """

    kind: ClassVar[TaskKind] = TaskKind.STEP
    _noun: ClassVar[str] = "step"
    _takes: ClassVar[str] = "one input"
    _max_values: ClassVar[int] = 1

    def __init__(
        self,
        function: Callable[P, R_co],
        name: str,
        queue: str = "default",
        *,
        local_names: Mapping[str, Any] | None = None,
    ) -> None:
        for what, text in (("name", name), ("queue", queue)):
            if not text or len(text) > MAX_NAME:
                raise ValueError(f"a {self._noun}'s {what} has 1 to {MAX_NAME} characters, not {len(text)}")
        self.function = function
        self.name = name
        self.queue = queue
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - objects with an async __call__ are handlers too
        )
        # Of the input and, for an undo handler, the output, as far as the function takes them.
        self._annotations: tuple[Any, ...] = ()
        self._codecs: tuple[Codec[Any], ...] | None = None
        self._return_annotation: Any = inspect.Parameter.empty
        self._return_type: Any = Any
        self._takes_context = False
        self._context_index = 0
        self._context_keyword = ""
        self._declares = False
        self._read_signature()
        try:
            self._resolve(local_names)
        except NameError:
            # A type that is defined further down; `prepare` looks again when the worker starts.
            self._codecs = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function itself: for tests, and for steps that share work."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} queue={self.queue}>"

    def _read_signature(self) -> None:
        """Find out which parameters are the values and which the context. Raises TypeError."""
        signature = signature_of(self.function)
        if inspect.isasyncgenfunction(self.function) or inspect.isgeneratorfunction(self.function):
            raise TypeError(f"{self._noun} {self.name}: a generator can't be a handler")
        self._return_annotation = signature.return_annotation
        values: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
                continue
            if parameter.name == "ctx" or wants_context(parameter.annotation):
                self._takes_context = True
                self._context_index = len(values)
                self._context_keyword = parameter.name if parameter.kind is parameter.KEYWORD_ONLY else ""
            elif parameter.default is parameter.empty or len(values) < self._max_values:
                values.append(parameter)
        wanted = [parameter for parameter in values if parameter.default is parameter.empty]
        if len(wanted) > self._max_values or any(parameter.kind is parameter.KEYWORD_ONLY for parameter in wanted):
            raise TypeError(
                f"{self._noun} {self.name}: a handler takes {self._takes} and, if it wants, a context named ctx; "
                f"this one asks for {', '.join(parameter.name for parameter in wanted)}"
            )
        self._annotations = tuple(
            parameter.annotation for parameter in values if parameter.kind is not parameter.KEYWORD_ONLY
        )[: self._max_values]

    def _resolve(self, local_names: Mapping[str, Any] | None = None) -> None:
        """Turn annotations into codecs.

        Raises NameError for an unknown name, TypeError for an impossible type.
        """
        names = getattr(inspect.unwrap(self.function), "__globals__", {})
        places = [f"value{index}" for index in range(len(self._annotations))]
        hints = {
            place: annotation
            for place, annotation in (*zip(places, self._annotations, strict=True), ("return", self._return_annotation))
            if annotation is not inspect.Parameter.empty
        }

        # Only these: an annotation of the context may name what is imported for type checkers alone.
        def carrier() -> None: ...

        carrier.__annotations__ = hints
        known = get_type_hints(carrier, globalns=names, localns=dict(local_names or {}), include_extras=True)
        try:
            self._codecs = tuple(codec_for(known.get(place, Any)) for place in places)
        except TypeError as error:
            raise TypeError(f"{self._noun} {self.name}: {error}") from error
        self._return_type = known.get("return", Any)
        self._declares = declares_sets_or_bytes(self._return_type)

    def prepare(self) -> None:
        """Make sure that the annotations are known. Raises TypeError if they name what does not exist."""
        if self._codecs is None:
            try:
                self._resolve()
            except NameError as error:
                raise TypeError(f"{self._noun} {self.name}: an annotation can't be resolved: {error}") from error

    @property
    def output_codec(self) -> Codec[Any]:
        """How a workflow reads what the handler returned. Raises TypeError if its annotation is no type of JSON."""
        try:
            return codec_for(self._return_type)
        except TypeError as error:
            raise TypeError(f"{self._noun} {self.name}: {error}") from error

    def encode_input(self, value: object) -> Value:
        """What a workflow gives the handler, as a payload. Raises NotEncodable."""
        return encode(value, declared=self._codecs[0].declares if self._codecs else False)

    def bind(self, lease: Lease) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments for one attempt. Raises NotDecodable."""
        assert self._codecs is not None, "prepare() comes first"
        values = self._values(lease, self._codecs) if self._codecs else ()
        if not self._takes_context:
            return values, _NO_KEYWORDS
        context = StepContext(lease)
        if self._context_keyword:
            return values, {self._context_keyword: context}
        index = self._context_index
        return (*values[:index], context, *values[index:]), _NO_KEYWORDS

    def _values(self, lease: Lease, codecs: tuple[Codec[Any], ...]) -> tuple[Any, ...]:
        """What the handler takes beside its context, decoded. Raises NotDecodable."""
        return (codecs[0].decode(lease.input),)

    def completed(self, output: object, max_payload_bytes: int) -> Completed:
        """Make an outcome of what the handler returned. Raises NotEncodable."""
        if output is None:
            return NOTHING
        if type(output) not in PLAIN_TYPES and inspect.isawaitable(output):
            close = getattr(output, "close", None)
            if close is not None:
                close()
            raise NotEncodable("the handler is not async, but returned an awaitable")
        value = encode(output, declared=self._declares)
        size = value.size
        if size > max_payload_bytes:
            raise NotEncodable(f"{size} bytes, over the limit of {max_payload_bytes}: return a reference instead")
        return Completed(value, payload_size(value) if value.metadata else size)


class Undo(Step[P, R_co]):
    """A handler that undoes a completed step: it takes that step's input and output, in this order, and a context.

    The output is None if the step did not complete (`StepContext.unfinished`), whatever its annotation says. Raises
    TypeError when the function takes anything else.
    """

    kind: ClassVar[TaskKind] = TaskKind.UNDO
    _noun: ClassVar[str] = "undo handler"
    _takes: ClassVar[str] = "an input, an output"
    _max_values: ClassVar[int] = 2

    def _values(self, lease: Lease, codecs: tuple[Codec[Any], ...]) -> tuple[Any, ...]:
        payload = lease.undo_output
        given = codecs[0].decode(lease.input)
        if len(codecs) == 1:
            return (given,)
        return given, None if payload is None or lease.unfinished else codecs[1].decode(payload)


@takes_a_name('@step("name")')
def step(name: str, *, queue: str = "default") -> Callable[[Callable[P, R]], Step[P, R]]:
    """Make a handler of a function, async or sync; sync ones run in threads.

    ``name`` is what manifests say in ``step``; ``queue`` is the queue that it serves. Raises ValueError or
    TypeError for a name or a function that can't be a handler.
    """
    check_name("a step's name", name)
    check_name("a step's queue", queue)

    def decorate(function: Callable[P, R]) -> Step[P, R]:
        return Step(function, name, queue, local_names=names_around(inspect.currentframe()))

    return decorate


@takes_a_name('@undo("name")')
def undo(name: str, *, queue: str = "default") -> Callable[[Callable[P, R]], Undo[P, R]]:
    """Make an undo handler of a function, async or sync; sync ones run in threads.

    ``name`` is what manifests say in ``undo: {step: …}``; ``queue`` is the queue that it serves. Raises ValueError or
    TypeError for a name or a function that can't be an undo handler.
    """
    check_name("an undo handler's name", name)
    check_name("an undo handler's queue", queue)

    def decorate(function: Callable[P, R]) -> Undo[P, R]:
        return Undo(function, name, queue, local_names=names_around(inspect.currentframe()))

    return decorate


def names_around(frame: types.FrameType | None) -> Mapping[str, Any] | None:
    """What is known where the decorator of ``frame`` is used: classes of a function are in no module, only there."""
    caller = frame.f_back if frame is not None else None
    return None if caller is None or caller.f_code.co_name == "<module>" else dict(caller.f_locals)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of ``function``, whatever its annotations name."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def wants_context(annotation: Any) -> bool:
    """Whether an annotation says StepContext:

    as the class, as text, or as a reference to what can't be looked up.
    """
    if annotation is StepContext:
        return True
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", "")
    return text.rpartition(".")[2] == "StepContext"
