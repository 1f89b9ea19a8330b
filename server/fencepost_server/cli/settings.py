"""Makes a flag of every setting of `fencepost_server.config.Config`, and a Config of the flags that were given.

The flags are derived from the fields and their metadata, so a new setting has its flag, its help and its default at
once. Values are converted here rather than by the parser, which would stop at the first wrong one.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import typer

from fencepost_server.cli.parameters import Command, replaced
from fencepost_server.config import Config, ConfigError, load

_KINDS = {bool: "", int: "INTEGER", float: "NUMBER", str: "TEXT"}


def flag(name: str) -> str:
    """The flag of a setting: ``--grpc-port`` for grpc_port."""
    return "--" + name.replace("_", "-")


def with_settings(function: Command, **defaults: Any) -> Command:
    """Let a command that takes ``settings: dict`` take a flag for each setting instead.

    ``defaults`` replaces the default that is shown for single settings; one that is None leaves its flag out.
    """

    flags = [
        _parameter(f, defaults.get(f.name, f.default))
        for f in dataclasses.fields(Config)
        if defaults.get(f.name, f.default) is not None
    ]
    return replaced(function, "settings", flags, dict)


def _parameter(f: dataclasses.Field[Any], default: Any) -> inspect.Parameter:
    kind = type(f.default)
    name = f.name.replace("_", "-")
    names = [f"--{name}/--no-{name}"] if kind is bool else [f"--{name}"]
    option = typer.Option(
        None,
        *names,
        help=f"{f.metadata['doc']}{_shown(default)}",
        metavar=_KINDS[kind] or None,
        show_default=False,
    )
    hint: Any = bool | None if kind is bool else str | None
    return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=hint)


def _shown(default: Any) -> str:
    text = ("yes" if default else "no") if isinstance(default, bool) else str(default)
    return f" Default: {text}." if text else ""


def config_of(settings: Mapping[str, str | bool | None]) -> Config:
    """The Config of flags over FENCEPOST_* variables over defaults.

    Raises ConfigError with every fault; those of flags name the flag.
    """
    fields = {f.name: f for f in dataclasses.fields(Config)}
    values: dict[str, Any] = {}
    faults: list[str] = []
    for name, text in settings.items():
        if text is None:
            continue
        kind: Any = type(fields[name].default)
        try:
            values[name] = text if isinstance(text, bool) else kind(text)
        except ValueError:
            faults.append(f"{flag(name)}: {text!r} is not {'a whole number' if kind is int else 'a number'}")
    try:
        config = load(values)
    except ConfigError as error:
        raise ConfigError(faults + [_named(fault, values) for fault in error.faults]) from None
    if faults:
        raise ConfigError(faults)
    return config


def _named(fault: str, given: Mapping[str, Any]) -> str:
    """A fault of a setting that came as a flag, by the flag's name."""
    name, colon, rest = fault.partition(":")
    return f"{flag(name)}{colon}{rest}" if name in given else fault
