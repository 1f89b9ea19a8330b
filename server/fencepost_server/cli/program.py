"""Puts the commands together, runs one, and turns what goes wrong into a line and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from fencepost_server.cli import dev, server
from fencepost_server.cli.faults import explain

PROGRAM = "fencepost"
_DEBUG = "debug"


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"{PROGRAM} {version('fencepost-server')}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the tracebacks of failures.")] = False,
) -> None:
    """Fencepost: durable workflows on Postgres."""
    context.find_root().meta[_DEBUG] = debug


def make_app() -> typer.Typer:
    """The program with all of its commands."""
    app = typer.Typer(name=PROGRAM, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    app.command("dev")(dev.dev)
    app.command("serve")(server.serve)
    app.command("migrate")(server.migrate)
    app.command("restore-epoch")(server.restore_epoch)
    return app


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command and end the process with its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(make_app())
    try:
        command.main(words, prog_name=PROGRAM)
    except Exception as error:
        fault = explain(error)
        if fault is None:
            raise
        if "--debug" in words:
            traceback.print_exc()
        print(f"{PROGRAM}: {fault}", file=sys.stderr)  # noqa: T201  # the one line for people
        sys.exit(fault.code)
