"""Parameters that several commands share, written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

Command = Callable[..., None]

# Heard in program.py, which looks for the word itself, because what fails may be the parsing.
Debug = Annotated[bool, typer.Option("--debug", help="Show the tracebacks of failures.")]


def replaced(
    function: Command, name: str, parameters: Sequence[inspect.Parameter], make: Callable[[Mapping[str, Any]], Any]
) -> Command:
    """A command that takes ``parameters`` where ``function`` takes ``name``, which ``make`` makes of them."""
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != name]
    names = {p.name for p in parameters}

    def command(**values: Any) -> None:
        shared = {key: value for key, value in values.items() if key in names}
        function(**{name: make(shared)}, **{key: value for key, value in values.items() if key not in names})

    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *parameters)]
    command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # typer reads it
    command.__doc__ = function.__doc__
    return command


def with_debug(function: Command) -> Command:
    """Let ``function`` be called with ``--debug`` as well."""
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    parameters = [*inspect.signature(function, eval_str=True).parameters.values(), debug]

    def command(*, debug: bool, **values: Any) -> None:
        function(**values)

    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # typer reads it
    command.__doc__ = function.__doc__
    return command
