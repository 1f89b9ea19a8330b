"""Puts the commands together, runs one, and turns what goes wrong into a line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fencepost_server.cli import control, definitions, deploying, dev, runs, schedules, server, starting, waiting
from fencepost_server.cli.caller import with_caller
from fencepost_server.cli.faults import WrongUsage, explain
from fencepost_server.cli.matching import with_chosen
from fencepost_server.cli.parameters import Command, Debug, with_debug
from fencepost_server.cli.schedule_specs import with_said

PROGRAM = "fencepost"


def _on_chosen(command: Command) -> Command:
    return with_caller(with_chosen(command))


_SERVERS: Mapping[str, Callable[[], Command]] = {
    "dev": lambda: dev.dev,
    "serve": lambda: server.serve,
    "migrate": lambda: server.migrate,
    "restore-epoch": lambda: server.restore_epoch,
}
_CONTROL: Mapping[str, Callable[[], Command]] = {
    "signal": partial(_on_chosen, control.signal),
    "cancel": partial(_on_chosen, control.cancel),
    "terminate": partial(_on_chosen, control.terminate),
    "pause": partial(_on_chosen, control.pause),
    "resume": partial(_on_chosen, control.resume),
    "retry": partial(_on_chosen, control.retry),
}
_GROUPS: Mapping[str, tuple[str, Mapping[str, Callable[[], Command]]]] = {
    "definitions": (
        "Register workflow definitions, look at them, choose which one new runs take.",
        {
            "register": partial(with_caller, definitions.register),
            "validate": partial(with_caller, definitions.validate),
            "list": partial(with_caller, definitions.list_),
            "get": partial(with_caller, definitions.get),
            "diff": partial(with_caller, deploying.diff),
            "activate": partial(with_caller, deploying.activate),
            "remove": partial(with_caller, deploying.remove),
        },
    ),
    "runs": (
        "Start runs and follow them. What is asked of them, such as cancel, are commands of their own.",
        {
            "start": partial(with_caller, starting.start),
            "get": partial(with_caller, runs.get),
            "list": partial(with_caller, runs.list_),
            "watch": partial(with_caller, runs.watch),
            "wait": partial(with_caller, waiting.wait, without=("timeout",)),
            "history": partial(with_caller, runs.history),
            "query": partial(with_caller, runs.query),
        },
    ),
    "schedules": (
        "Start runs at given times.",
        {
            "create": lambda: with_caller(with_said(schedules.create)),
            "update": lambda: with_caller(with_said(schedules.update)),
            "list": partial(with_caller, schedules.list_),
            "show": partial(with_caller, schedules.show),
            "fire-times": partial(with_caller, schedules.fire_times),
            "trigger": partial(with_caller, schedules.trigger),
            "backfill": partial(with_caller, schedules.backfill),
            "pause": partial(with_caller, schedules.pause),
            "resume": partial(with_caller, schedules.resume),
            "delete": partial(with_caller, schedules.delete),
        },
    ),
}
_CLIENTS = (*_GROUPS, *_CONTROL)


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


class _Group(TyperGroup):
    """Tells of a command that it has not where else there is one of that name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if word not in self.commands and not ctx.resilient_parsing:
            found = [" ".join((PROGRAM, *place)) for place in _places_of(word)]
            if found:
                ctx.fail(f"No such command {word!r} here. There is: {', '.join(found)}")
        return super().resolve_command(ctx, args)


def _places_of(word: str) -> Iterator[tuple[str, ...]]:
    """The words of each command of that name."""
    if word in {**_SERVERS, **_GROUPS, **_CONTROL}:
        yield (word,)
    yield from ((name, word) for name, (_, makers) in _GROUPS.items() if word in makers)


class _Commands(Mapping[str, Any]):
    """The commands of a group. Each is made when it is asked for: making all is a fifth of what one takes in all."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = makers
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


# Plain help: rich's takes two thirds of the time that `--help` takes in all.
_new = partial(typer.Typer, cls=_Group, pretty_exceptions_enable=False, rich_markup_mode=None)


def make_program() -> TyperGroup:
    """The program with all of its commands."""
    app = _new(name=PROGRAM, no_args_is_help=True)
    app.callback()(_root)
    program = typer.main.get_command(app)
    assert isinstance(program, TyperGroup)
    commands = {name: partial(_command, name, make) for name, make in {**_SERVERS, **_CONTROL}.items()}
    groups = {name: partial(_group, name, text, makers) for name, (text, makers) in _GROUPS.items()}
    program.commands = _Commands({**commands, **groups})  # type: ignore[assignment]  # nobody adds any
    return program


def _group(name: str, text: str, makers: Mapping[str, Callable[[], Command]]) -> TyperGroup:
    group = typer.main.get_group(_new(name=name, help=text, no_args_is_help=True))
    commands = {word: partial(_command, word, make) for word, make in makers.items()}
    group.commands = _Commands(commands)  # type: ignore[assignment]  # as above
    return group


def _command(name: str, make: Callable[[], Command]) -> Any:
    app = _new(add_completion=False)
    app.command(name)(with_debug(make()))
    return typer.main.get_command(app)


def _open_standard_streams() -> None:
    """Have those that were closed before the start lead nowhere: Python has None for them, and the next file or socket
    would get their number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # until the process ends


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command and end the process with its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_streams()
    program = make_program()
    try:
        program.main(words, prog_name=PROGRAM)
    except Exception as error:
        fault = explain(error)
        if fault is None:
            raise
        if "--debug" in words:
            traceback.print_exc()
        if str(fault):
            print(str(fault) if fault.bare else f"{PROGRAM}: {fault}", file=sys.stderr)  # noqa: T201  # for people
        sys.exit(fault.code)
