"""The queries that a workflow answers: plain functions of its own, which read its state between two turns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from fencepost.codec import NULL, Codec, Value, codec_for, encode
from fencepost.errors import NotEncodable
from fencepost.workflow_errors import UnknownQuery


class Answers:
    """The handlers of one run's queries, by name."""

    def __init__(self) -> None:
        self._handlers: dict[str, Callable[..., Any]] = {}

    def add(self, name: str, handler: Callable[..., Any]) -> None:
        """Answer queries of that name from now on. Raises TypeError for an async function."""
        if inspect.iscoroutinefunction(handler):
            raise TypeError(f"the query {name} is answered at once, by a plain function")
        self._handlers[name] = handler

    def answer(self, name: str, payload: Value) -> Value:
        """What the handler says. Raises UnknownQuery, NotDecodable, NotEncodable, and what the handler raises."""
        handler = self._handlers.get(name)
        if handler is None:
            known = ", ".join(sorted(self._handlers)) or "none"
            raise UnknownQuery(f"no query {name!r}; the workflow answers: {known}")
        parameters = [
            parameter
            for parameter in inspect.signature(handler).parameters.values()
            if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
        ]
        given = parameters[:1]
        if given and given[0].default is not inspect.Parameter.empty and (payload == NULL or payload.json == "null"):
            given = []
        output = handler(*(_codec_of(handler, parameter).decode(payload) for parameter in given))
        if inspect.isawaitable(output):
            raise NotEncodable(f"the query {name} answered with an awaitable")
        return encode(output)


def _codec_of(handler: Callable[..., Any], parameter: inspect.Parameter) -> Codec[Any]:
    if parameter.annotation is parameter.empty:
        return codec_for(Any)
    try:
        hints = get_type_hints(handler, include_extras=True)
    except NameError:
        # A class that only its function knows: the handler gets plain JSON.
        return codec_for(Any)
    return codec_for(hints.get(parameter.name, Any))
