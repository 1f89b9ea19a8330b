"""Makes a flag of every setting of `fencepost_server.config.Config`, and a Config of the flags that were given.

The flags are derived from the fields and their metadata, so a new setting has its flag, its help and its default at
once. Values are converted here rather than by the parser, which would stop at the first wrong one.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import typer

from fencepost_server.config import ENV_PREFIX, Config, ConfigError, load

_KINDS = {bool: "", int: "INTEGER", float: "NUMBER", str: "TEXT"}


def flag(name: str) -> str:
    """The flag of a setting: ``--grpc-port`` for grpc_port."""
    return "--" + name.replace("_", "-")


def with_settings(function: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Let a command that takes ``settings: dict`` take a flag for each setting instead.

    ``defaults`` replaces the default that is shown for single settings; one that is None leaves its flag out.
    """

    def command(**values: Any) -> None:
        names = {f.name for f in dataclasses.fields(Config)}
        settings = {name: value for name, value in values.items() if name in names}
        function(settings=settings, **{name: value for name, value in values.items() if name not in names})

    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "settings"]
    flags = [
        _parameter(f, defaults.get(f.name, f.default))
        for f in dataclasses.fields(Config)
        if defaults.get(f.name, f.default) is not None
    ]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *flags)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    command.__doc__ = function.__doc__
    return command


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
        rich_help_panel="Settings",
    )
    hint: Any = bool | None if kind is bool else str | None
    return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=hint)


def _shown(default: Any) -> str:
    text = ("yes" if default else "no") if isinstance(default, bool) else str(default)
    return f" Default: {text}." if text else ""


def config_of(settings: Mapping[str, str | bool | None], **defaults: Any) -> Config:
    """The Config of flags over FENCEPOST_* variables over ``defaults`` over its own defaults.

    Raises ConfigError with every fault; those of flags name the flag.
    """
    fields = {f.name: f for f in dataclasses.fields(Config)}
    values: dict[str, Any] = {}
    faults: list[str] = []
    for name, text in settings.items():
        if text is None:
            continue
        try:
            values[name] = text if isinstance(text, bool) else _converted(text, type(fields[name].default))
        except ValueError:
            expected = "a whole number" if type(fields[name].default) is int else "a number"
            faults.append(f"{flag(name)}: {text!r} is not {expected}")
    try:
        config = load(values) if not defaults else load({**_not_set(defaults), **values})
    except ConfigError as error:
        raise ConfigError(faults + [_named(fault, values) for fault in error.faults]) from None
    if faults:
        raise ConfigError(faults)
    return config


def _converted(text: str, kind: type) -> Any:
    return kind(text)


def _not_set(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``defaults`` that no environment variable replaces."""
    import os

    return {name: value for name, value in defaults.items() if f"{ENV_PREFIX}{name.upper()}" not in os.environ}


def _named(fault: str, given: Mapping[str, Any]) -> str:
    """A fault of a setting that came as a flag, by the flag's name."""
    name, colon, rest = fault.partition(":")
    return f"{flag(name)}{colon}{rest}" if name in given else fault
