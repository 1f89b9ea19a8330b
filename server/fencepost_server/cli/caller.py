"""How the client commands reach a server, and how they tell what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fencepost_server.cli.faults import CommandFailed, WrongUsage, is_a
from fencepost_server.cli.parameters import Command, replaced

if TYPE_CHECKING:
    from fencepost import AsyncClient, Client, FencepostError

DEFAULT_ADDRESS = "127.0.0.1:7654"
DEFAULT_PATIENCE = 10.0


def _or_before(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """The flag's value, or that of the same flag before the command; a variable comes after both."""
    given = (context.obj or {}).get(parameter.name)
    source = context.get_parameter_source(parameter.name or "")
    return value if given is None or (source is not None and source.name == "COMMANDLINE") else given


_PARAMETERS: Mapping[str, tuple[Any, Any]] = {
    "address": (
        Annotated[
            str,
            typer.Option(
                "--address",
                envvar="FENCEPOST_ADDRESS",
                metavar="HOST:PORT",
                help="Where a server is; several that are equal are separated by commas.",
                callback=_or_before,
            ),
        ],
        DEFAULT_ADDRESS,
    ),
    "namespace": (
        Annotated[
            str,
            typer.Option(
                "--namespace", envvar="FENCEPOST_NAMESPACE", help="The namespace to work in.", callback=_or_before
            ),
        ],
        "default",
    ),
    "json": (
        Annotated[bool, typer.Option("--json", help="Answer in JSON, a line for each item.", callback=_or_before)],
        False,
    ),
    "timeout": (
        Annotated[
            float,
            typer.Option(
                "--timeout",
                metavar="SECONDS",
                min=0,
                help="How long to try while no server answers.",
            ),
        ],
        DEFAULT_PATIENCE,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls: the server's address, the namespace, whether the answer is JSON, and the patience in seconds."""

    address: str
    namespace: str
    json: bool
    timeout: float = DEFAULT_PATIENCE

    def connect(self) -> Client:
        """A client. Raises WrongUsage for an address that is none."""
        from fencepost import Client

        try:
            return Client(self.address, namespace=self.namespace, timeout=self.timeout)
        except ValueError as error:
            raise WrongUsage(f"--address: {error}") from None

    def connect_async(self) -> AsyncClient:
        """The same for an event loop."""
        from fencepost import AsyncClient

        try:
            return AsyncClient(self.address, namespace=self.namespace, timeout=self.timeout)
        except ValueError as error:
            raise WrongUsage(f"--address: {error}") from None


def with_caller(function: Command, *, without: tuple[str, ...] = ()) -> Command:
    """Let a command that takes ``caller: Caller`` take the flags for it, but for those that it has itself."""

    def command(*, caller: Caller, **values: Any) -> None:
        try:
            function(caller=caller, **values)
        except Exception as error:
            # The SDK is not loaded for a command that asks no server, such as one whose flags are wrong.
            if is_a(error, "fencepost", "FencepostError"):
                raise refusal(cast("FencepostError", error), caller) from error
            raise

    own = inspect.signature(function, eval_str=True)
    command.__signature__ = own  # type: ignore[attr-defined]  # `replaced` and typer read it
    command.__doc__ = function.__doc__
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _PARAMETERS.items()
        if name not in without
    ]
    return replaced(command, "caller", parameters, lambda values: Caller(**values))


def refusal(error: FencepostError, caller: Caller) -> CommandFailed:
    """What a server, or the lack of one, said, for people or as JSON."""
    from fencepost_server.cli.documents import error_document
    from fencepost_server.cli.output import as_json, visible

    if caller.json:
        return CommandFailed(as_json({"error": error_document(error)}), bare=True)
    if error.reason == "UNREACHABLE":
        return CommandFailed(f"no server answers at {caller.address}: {visible(error.message)}")
    return CommandFailed(refusal_text(error))


def refusal_text(error: FencepostError) -> str:
    """The reason of a refusal and what it says, with a table of what is wrong where, if it says so."""
    from fencepost_server.cli.output import aligned, visible

    text = f"{error.reason}: {visible(error.message)}"
    if not error.violations:
        return text
    rows = [(violation.path or "(whole)", violation.message) for violation in error.violations]
    return text + "\n" + aligned(("PATH", "FAULT"), rows, indent=2)
