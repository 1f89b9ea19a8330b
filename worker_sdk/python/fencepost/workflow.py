"""Code workflows: the decorator `workflow`.

::

    @workflow("order", compatibility_id="1")
    async def order(ctx: WorkflowContext, request: Order) -> Receipt: ...

A `Workflow` can still be called like the function. Annotations decide how the run's input and output are converted
(see `codec`). Its manifest tells the server that it is code, and where its DECIDE tasks wait.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, get_origin, get_type_hints

from fencepost.codec import NULL, Codec, Value, codec_for, encode
from fencepost.errors import NotEncodable
from fencepost.names import check_name, takes_a_name
from fencepost.steps import names_around

P = ParamSpec("P")
R = TypeVar("R")


class Workflow(Generic[P, R]):
    """A workflow that is a function: its name, its compatibility id, and the queue of its DECIDE tasks.

    Calling it calls the function. Raises TypeError when the function is not async, or takes anything but the context
    and at most one input.
    """

    def __init__(
        self,
        function: Callable[P, Awaitable[R]],
        workflow_id: str,
        compatibility_id: str,
        queue: str = "default",
        *,
        input_schema: Mapping[str, Any] | None = None,
        output_schema: Mapping[str, Any] | None = None,
        local_names: Mapping[str, Any] | None = None,
    ) -> None:
        for what, text in (("id", workflow_id), ("compatibility_id", compatibility_id), ("queue", queue)):
            check_name(f"a workflow's {what}", text)
        self.function = function
        self.workflow_id = workflow_id
        self.compatibility_id = compatibility_id
        self.queue = queue
        self.input_schema = input_schema
        self.output_schema = output_schema
        self.local_names: Mapping[str, Any] = local_names or {}
        """What is known where it was declared, for annotations of its local steps."""
        self._input: inspect.Parameter | None = None
        self._input_codec: Codec[Any] | None = None
        self._output_codec: Codec[Any] | None = None
        self._return_annotation: Any = inspect.Parameter.empty
        self._read_signature()
        try:
            self._resolve(local_names)
        except NameError:
            # A type that is defined further down; `prepare` looks again when the worker starts.
            self._output_codec = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """Call the function itself."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Workflow {self.workflow_id} compatibility_id={self.compatibility_id} queue={self.queue}>"

    def _read_signature(self) -> None:
        if not inspect.iscoroutinefunction(self.function):
            hint = ", without yield" if inspect.isasyncgenfunction(self.function) else ""
            raise TypeError(f"workflow {self.workflow_id}: a workflow is an async function{hint}")
        if sys.version_info >= (3, 14):
            import annotationlib

            signature = inspect.signature(self.function, annotation_format=annotationlib.Format.FORWARDREF)
        else:
            signature = inspect.signature(self.function)
        self._return_annotation = signature.return_annotation
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        taken = [parameter for parameter in signature.parameters.values() if parameter.kind in positional]
        wanted = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
        ]
        if not taken or len(wanted) > 2 or any(parameter not in taken for parameter in wanted):
            raise TypeError(f"workflow {self.workflow_id}: the function takes the context and at most one input")
        self._check_context(taken[0])
        self._input = taken[1] if len(taken) > 1 else None

    def _check_context(self, first: inspect.Parameter) -> None:
        """Raises TypeError if the first parameter is declared as what no context can be: there is none for it."""
        declared = first.annotation
        if isinstance(declared, str):
            names = {**getattr(inspect.unwrap(self.function), "__globals__", {}), **self.local_names}
            # Names only: what has to be computed may be known to type checkers alone.
            name = declared.partition("[")[0]
            declared = names.get(name, getattr(builtins, name, None))
        declared = get_origin(declared) or declared
        if not isinstance(declared, type) or declared is Any or declared is inspect.Parameter.empty:
            return
        from fencepost.workflow_context import WorkflowContext  # which needs this module

        fits = issubclass(declared, WorkflowContext) or declared in WorkflowContext.__mro__
        if not fits and not getattr(declared, "_is_protocol", False):
            raise TypeError(
                f"workflow {self.workflow_id}: the function takes a WorkflowContext first, and at most one input after "
                f"it; its first parameter {first.name} is declared as {declared.__qualname__}"
            )

    def _resolve(self, local_names: Mapping[str, Any] | None = None) -> None:
        """Turn annotations into codecs. Raises NameError for an unknown name, TypeError for an impossible type."""
        hints: dict[str, Any] = {}
        if self._input is not None and self._input.annotation is not inspect.Parameter.empty:
            hints["input"] = self._input.annotation
        if self._return_annotation is not inspect.Parameter.empty:
            hints["return"] = self._return_annotation

        # Only these: the annotation of the context may name what is imported for type checkers alone.
        def carrier() -> None: ...

        carrier.__annotations__ = hints
        names = getattr(inspect.unwrap(self.function), "__globals__", {})
        known = get_type_hints(carrier, globalns=names, localns=dict(local_names or {}), include_extras=True)
        try:
            self._input_codec = codec_for(known.get("input", Any))
            self._output_codec = codec_for(known.get("return", Any))
        except TypeError as error:
            raise TypeError(f"workflow {self.workflow_id}: {error}") from error

    def prepare(self) -> None:
        """Make sure that the annotations are known. Raises TypeError if they name what does not exist."""
        if self._output_codec is None:
            try:
                self._resolve()
            except NameError as error:
                raise TypeError(f"workflow {self.workflow_id}: an annotation can't be resolved: {error}") from error

    @property
    def takes_input(self) -> bool:
        """Whether the function takes anything beside the context."""
        return self._input is not None

    @property
    def output_codec(self) -> Codec[Any]:
        """How its output is read."""
        self.prepare()
        assert self._output_codec is not None
        return self._output_codec

    @property
    def manifest(self) -> str:
        """What is registered with the server: a manifest, as JSON text."""
        manifest: dict[str, Any] = {
            "id": self.workflow_id,
            "compatibility_id": self.compatibility_id,
            "code": {"queue": self.queue},
        }
        if self.input_schema is not None:
            manifest["input_schema"] = dict(self.input_schema)
        if self.output_schema is not None:
            manifest["output_schema"] = dict(self.output_schema)
        return json.dumps(manifest)

    def arguments(self, input: Value) -> tuple[Any, ...]:
        """What the function takes beside the context, from a run's input: nothing if there is none and the parameter
        has a default. Raises NotDecodable.
        """
        self.prepare()
        if self._input is None:
            return ()
        assert self._input_codec is not None
        if self._input.default is not inspect.Parameter.empty and (input == NULL or input.json == "null"):
            # No input was given, which a run can't tell from null.
            return ()
        return (self._input_codec.decode(input),)

    def encode_input(self, value: object) -> Value:
        """A run's input as a payload. Raises NotEncodable."""
        self.prepare()
        assert self._input_codec is not None
        return encode(value, declared=self._input_codec.declares)

    def encode_output(self, value: object) -> Value:
        """What the function returned as a payload. Raises NotEncodable."""
        if inspect.isawaitable(value):
            raise NotEncodable("the function returned an awaitable: await it")
        return encode(value, declared=self.output_codec.declares)


@takes_a_name('@workflow("name", compatibility_id="1")')
def workflow(
    workflow_id: str,
    *,
    compatibility_id: str,
    queue: str = "default",
    input_schema: Mapping[str, Any] | None = None,
    output_schema: Mapping[str, Any] | None = None,
) -> Callable[[Callable[P, Awaitable[R]]], Workflow[P, R]]:
    """Make a workflow of an async function that takes a `WorkflowContext` and at most one input.

    ``compatibility_id`` names the behaviour: runs go on with code that was registered under the same one. ``queue`` is
    where its runs wait for a worker to decide. Schemas are JSON Schema 2020-12, checked by the server. Raises
    ValueError or TypeError for names or a function that can't be a workflow.
    """

    def decorate(function: Callable[P, Awaitable[R]]) -> Workflow[P, R]:
        return Workflow(
            function,
            workflow_id,
            compatibility_id,
            queue,
            input_schema=input_schema,
            output_schema=output_schema,
            local_names=names_around(inspect.currentframe()),
        )

    return decorate
