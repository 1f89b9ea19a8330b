"""What is known of a function that runs as a local step: its name, what it returns, whether it wants a context.

Found out once for each function, because a workflow may call it ten thousand times in one replay. Functions that a
workflow defines anew each time it runs share what is known of their code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from fencepost.codec import PLAIN_TYPES, Codec, Value, codec_for, encode
from fencepost.errors import NotEncodable
from fencepost.lease import TaskKind
from fencepost.steps import MAX_NAME, Step, signature_of, wants_context
from fencepost.workflow import Workflow


class LocalFunction:
    """What is known of a function, or of a step's. Raises TypeError for what can't be a local step."""

    __slots__ = (
        "__weakref__",
        "_context_index",
        "_context_keyword",
        "_counts",
        "_signature",
        "codec",
        "is_async",
        "name",
        "step",
        "takes_context",
    )

    def __init__(self, callee: Callable[..., Any], names: Mapping[str, Any]) -> None:
        if isinstance(callee, str):
            raise TypeError(f"a local step is a function, not the name {callee!r}: ctx.call takes names")
        if not callable(callee):
            raise TypeError(f"a local step is a function, not {type(callee).__name__}: pass the function, not its call")
        if isinstance(callee, Workflow):
            raise TypeError(f"{callee.workflow_id} is a workflow: ctx.child runs it")
        if isinstance(callee, Step):
            if callee.kind is not TaskKind.STEP:
                raise TypeError(f"{callee.name} undoes steps: it can't be run as one")
            callee.prepare()
        function = function_of(callee)
        self.name = callee.name if isinstance(callee, Step) else _name_of(function)
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"local step {self.name}: a generator can't be a step")
        # A lease names a step; a plain function has none.
        self.step: Step[..., Any] = callee if isinstance(callee, Step) else Step(_stands_for, self.name)
        self.codec = callee.output_codec if isinstance(callee, Step) else _output_codec(function, self.name, names)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - objects with an async __call__ are functions too
        )
        self._context_keyword, self._context_index = _context_place(function)
        self.takes_context = self._context_keyword != ""
        self._signature = _known_signature(function)
        self._counts: set[int] = set()
        """How many arguments it is known to take."""

    def check(self, count: int) -> None:
        """Raises TypeError if it can't be called with so many arguments: each attempt would raise that."""
        if count in self._counts:
            return
        if self._signature is not None:
            args: tuple[Any, ...] = (None,) * count
            keywords: Mapping[str, Any] = {}
            if self.takes_context:
                args, keywords = self.with_context(args, None)
            try:
                self._signature.bind(*args, **keywords)
            except TypeError as error:
                raise TypeError(f"local step {self.name}: {error}") from None
        self._counts.add(count)

    def with_context(self, args: tuple[Any, ...], context: object) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments with a context among them, where the function takes it."""
        index = self._context_index
        if 0 <= index <= len(args):
            return (*args[:index], context, *args[index:]), {}
        return args, {self._context_keyword: context}

    def encode(self, output: object) -> Value:
        """What it returned as a payload. Raises NotEncodable."""
        if type(output) not in PLAIN_TYPES and inspect.isawaitable(output):
            close = getattr(output, "close", None)
            if close is not None:
                close()
            raise NotEncodable(
                "the function is not async, but returned an awaitable: pass the async function and its arguments"
            )
        return encode(output, declared=self.codec.declares)


_by_object: weakref.WeakKeyDictionary[Any, LocalFunction] = weakref.WeakKeyDictionary()
_by_code: dict[types.CodeType, dict[str, tuple[object, LocalFunction]]] = {}
"""By the function's name too, and with the annotation of what it returns, which are no part of its code."""
_by_method: weakref.WeakKeyDictionary[Any, LocalFunction] = weakref.WeakKeyDictionary()
"""By the function that a method calls: only methods of it are here, which have lost their first parameter."""


def function_of(callee: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in the end."""
    return callee.function if isinstance(callee, Step) else callee


def local_function(callee: Callable[..., Any], names: Mapping[str, Any]) -> LocalFunction:
    """What is known of ``callee``; ``names`` are looked at where its annotations name what its module lacks.

    Raises TypeError.
    """
    # A wrapper's code is that of all wrappers made by one decorator; what they wrap differs.
    if type(callee) is types.FunctionType and "__wrapped__" not in callee.__dict__:
        code, annotation = callee.__code__, callee.__annotations__.get("return")
        # A text that names what the function closes over means another type in each function of that code.
        if not (type(annotation) is str and code.co_freevars) or _words(annotation).isdisjoint(code.co_freevars):
            named = _by_code.get(code)
            if named is None:
                named = _by_code[code] = {}
            known = named.get(callee.__name__)
            if known is None or known[0] is not annotation:
                known = named[callee.__name__] = (annotation, LocalFunction(callee, names))
            return known[1]
    if type(callee) is types.MethodType and type(callee.__func__) is types.FunctionType:
        # Each look at a method makes a new object.
        made = _by_method.get(callee.__func__)
        if made is None:
            made = _by_method[callee.__func__] = LocalFunction(callee, names)
        return made
    try:
        made = _by_object.get(callee)
    except TypeError:
        made = None  # it has no hash, or can't be referred to weakly
    if made is None:
        made = LocalFunction(callee, names)
        with contextlib.suppress(TypeError):
            _by_object[callee] = made
    return made


@functools.lru_cache(maxsize=1000)
def _words(annotation: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", annotation))


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else str(name)[:MAX_NAME]


def _output_codec(function: Callable[..., Any], name: str, names: Mapping[str, Any]) -> Codec[Any]:
    while isinstance(function, functools.partial):
        function = function.func
    annotation = signature_of(function).return_annotation
    if annotation is inspect.Signature.empty:
        return codec_for(Any)
    inner = inspect.unwrap(function)

    def carrier() -> None: ...

    carrier.__annotations__ = {"return": annotation}
    closure = getattr(inner, "__closure__", None) or ()
    code = getattr(inner, "__code__", None)
    around = dict(names)
    for free, cell in zip(code.co_freevars if code is not None else (), closure, strict=False):
        try:
            around[free] = cell.cell_contents
        except ValueError:
            continue
    try:
        known = get_type_hints(carrier, globalns=getattr(inner, "__globals__", {}), localns=around, include_extras=True)
        return codec_for(known.get("return", Any))
    except NameError as error:
        raise TypeError(f"local step {name}: an annotation can't be resolved: {error}") from error
    except TypeError as error:
        raise TypeError(f"local step {name}: {error}") from error


def _known_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """How it is called; None if that can't be known, as of some that are written in C."""
    try:
        return signature_of(function)
    except ValueError:
        return None


def _context_place(function: Callable[..., Any]) -> tuple[str, int]:
    """The name of the parameter that takes a StepContext, and its place; -1 if it goes by its name only."""
    index = 0
    for parameter in signature_of(function).parameters.values():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            index = -1
            continue
        by_name = parameter.kind is parameter.KEYWORD_ONLY
        if parameter.name == "ctx" or wants_context(parameter.annotation):
            return parameter.name, -1 if by_name else index
        index += 1
    return "", -1


def _stands_for() -> None:
    """The handler of a lease that belongs to a plain function."""
