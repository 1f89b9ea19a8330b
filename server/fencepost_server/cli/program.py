"""Puts the commands together, runs one, and turns what goes wrong into a line and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
import typer.core

from fencepost_server.cli import control, definitions, deploying, dev, runs, schedules, server, starting, waiting
from fencepost_server.cli.caller import with_caller
from fencepost_server.cli.faults import WrongUsage, explain
from fencepost_server.cli.matching import with_chosen
from fencepost_server.cli.parameters import Command, Debug, with_debug
from fencepost_server.cli.schedule_specs import with_said

PROGRAM = "fencepost"

_CONTROL: Mapping[str, Command] = {
    "signal": control.signal,
    "cancel": control.cancel,
    "terminate": control.terminate,
    "pause": control.pause,
    "resume": control.resume,
    "retry": control.retry,
}
_CLIENTS = ("definitions", "runs", "schedules", *_CONTROL)


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
    debug: Debug = False,
    address: Annotated[str | None, typer.Option("--address", hidden=True)] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", hidden=True)] = None,
    json: Annotated[bool, typer.Option("--json", hidden=True)] = False,
) -> None:
    """Fencepost: durable workflows on Postgres."""
    # For those who write them before the command, as with other programs; each client command shows them in its help.
    given = {"address": address, "namespace": namespace, "json": json or None}
    context.obj = {name: value for name, value in given.items() if value is not None}
    if context.obj and context.invoked_subcommand not in _CLIENTS:
        commands = f"{', '.join(_CLIENTS[:-1])} and {_CLIENTS[-1]}"
        raise WrongUsage(f"--{next(iter(context.obj))} is for the commands {commands}")


class _Group(typer.core.TyperGroup):
    """Tells of a command that it has not where else there is one of that name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if word not in self.commands and not ctx.resilient_parsing:
            found = [" ".join((PROGRAM, *place, word)) for place in _places_of(word, ctx.find_root().command)]
            if found:
                ctx.fail(f"No such command {word!r} here. There is: {', '.join(found)}")
        return super().resolve_command(ctx, args)


def _places_of(word: str, group: Any) -> Iterator[tuple[str, ...]]:
    """The words that lead to each command of that name."""
    if word in group.commands:
        yield ()
    for name, inner in group.commands.items():
        if isinstance(inner, _Group):
            yield from ((name, *place) for place in _places_of(word, inner))


def make_app() -> typer.Typer:
    """The program with all of its commands."""
    # Plain help: rich's takes two thirds of the time that `--help` takes in all.
    app = typer.Typer(
        name=PROGRAM, cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    app.callback()(_root)
    for name, command in (
        ("dev", dev.dev),
        ("serve", server.serve),
        ("migrate", server.migrate),
        ("restore-epoch", server.restore_epoch),
    ):
        app.command(name)(with_debug(command))
    _add_group(
        app,
        "definitions",
        "Register workflow definitions, look at them, choose which one new runs take.",
        {
            "register": with_caller(definitions.register),
            "validate": with_caller(definitions.validate),
            "list": with_caller(definitions.list_),
            "get": with_caller(definitions.get),
            "diff": with_caller(deploying.diff),
            "activate": with_caller(deploying.activate),
            "remove": with_caller(deploying.remove),
        },
    )
    _add_group(
        app,
        "runs",
        "Start runs and follow them. What is asked of them, such as cancel, are commands of their own.",
        {
            "start": with_caller(starting.start),
            "get": with_caller(runs.get),
            "list": with_caller(runs.list_),
            "watch": with_caller(runs.watch),
            "wait": with_caller(waiting.wait, without=("timeout",)),
            "history": with_caller(runs.history),
            "query": with_caller(runs.query),
        },
    )
    _add_group(
        app,
        "schedules",
        "Start runs at given times.",
        {
            "create": with_caller(with_said(schedules.create)),
            "update": with_caller(with_said(schedules.update)),
            "list": with_caller(schedules.list_),
            "show": with_caller(schedules.show),
            "fire-times": with_caller(schedules.fire_times),
            "trigger": with_caller(schedules.trigger),
            "backfill": with_caller(schedules.backfill),
            "pause": with_caller(schedules.pause),
            "resume": with_caller(schedules.resume),
            "delete": with_caller(schedules.delete),
        },
    )
    for name, command in _CONTROL.items():
        app.command(name)(with_debug(with_caller(with_chosen(command))))
    return app


def _add_group(app: typer.Typer, name: str, text: str, commands: Mapping[str, Command]) -> None:
    group = typer.Typer(name=name, cls=_Group, help=text, no_args_is_help=True, rich_markup_mode=None)
    for word, command in commands.items():
        group.command(word)(with_debug(command))
    app.add_typer(group)


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
        if str(fault):
            print(str(fault) if fault.bare else f"{PROGRAM}: {fault}", file=sys.stderr)  # noqa: T201  # for people
        sys.exit(fault.code)
