"""What a schedule does, as it is said on the command line: by options, by a file, or by both, where an option goes
before the key of the file that means the same.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.faults import CommandFailed, WrongUsage
from fencepost_server.cli.filters import attributes_of, time_of
from fencepost_server.cli.output import visible
from fencepost_server.cli.parameters import Command, replaced
from fencepost_server.cli.starting import read_text
from fencepost_server.domain.durations import parse_duration

if TYPE_CHECKING:
    from fencepost import ScheduleSpec

OVERLAPS = ("skip", "queue-one", "allow", "cancel-running")


def _text(flag: str, help_: str, metavar: str | None = None) -> Any:
    return Annotated[str, typer.Option(flag, metavar=metavar, help=help_, show_default=False)]


_PARAMETERS: Mapping[str, tuple[Any, Any]] = {
    "file": (_text("--file", "A YAML or JSON file with keys as in the contract; - is standard input.", "FILE"), ""),
    "workflow": (_text("--workflow", "What to run: the definition that is active at the fire time."), ""),
    "cron": (_text("--cron", "Minute, hour, day of month, month, day of week.", "FIELDS"), ""),
    "every": (_text("--every", "Every so often, such as 90s or 1h30m, counted from 1970.", "DURATION"), ""),
    "offset": (_text("--offset", "Shifts --every.", "DURATION"), ""),
    "time_zone": (_text("--time-zone", "The IANA zone of --cron. Default: UTC.", "ZONE"), ""),
    "input": (_text("--input", "The input of each run. Default: null.", "JSON"), ""),
    "input_file": (_text("--input-file", "A file with the input; - is standard input.", "FILE"), ""),
    "user": (_text("--user", "On whose behalf."), ""),
    "priority": (
        Annotated[int | None, typer.Option("--priority", min=1, max=5, help="1 (first) to 5 (last). Default: 3.")],
        None,
    ),
    "attribute": (
        Annotated[
            list[str] | None,
            typer.Option("--attribute", metavar="KEY=VALUE", help="A label of each run. May be repeated."),
        ],
        None,
    ),
    "run_timeout": (_text("--run-timeout", "How long a run may take.", "DURATION"), ""),
    "overlap": (
        _text("--overlap", f"While a run is under way: {', '.join(OVERLAPS)}. Default: skip.", "POLICY"),
        "",
    ),
    "catch_up": (_text("--catch-up", "How late a missed fire time is made up for. Default: 1m.", "DURATION"), ""),
    "jitter": (_text("--jitter", "Start each run up to so much later.", "DURATION"), ""),
    "start": (_text("--start", "Fire from then on only.", "TIME"), ""),
    "end": (_text("--end", "Fire before then only.", "TIME"), ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The options as they were given; '' and None: not given."""

    file: str
    workflow: str
    cron: str
    every: str
    offset: str
    time_zone: str
    input: str
    input_file: str
    user: str
    priority: int | None
    attribute: Sequence[str] | None
    run_timeout: str
    overlap: str
    catch_up: str
    jitter: str
    start: str
    end: str

    def spec(self) -> ScheduleSpec:
        """What to ask the server for. Raises WrongUsage, CommandFailed, BadParameter."""
        from fencepost import ScheduleSpec, Value

        if self.input and self.input_file:
            raise WrongUsage("--input and --input-file exclude each other")
        if self.file == "-" == self.input_file:
            raise WrongUsage("--file and --input-file can't both be standard input")
        found = _of_file(self.file) if self.file else {}
        for key in ("interval", "offset") if self.cron else ("cron", "time_zone") if self.every else ():
            found.pop(key, None)  # the option goes before the file
        found |= self._given()
        text = read_text(self.input_file) if self.input_file else self.input
        if text:
            found["input"] = Value(json=text)
        if not found.get("workflow_id"):
            raise WrongUsage("--workflow is missing, or workflow_id in the file")
        if ("cron" in found) is ("interval" in found):
            raise WrongUsage("either --cron or --every is needed, or cron or interval in the file")
        return ScheduleSpec(**found)

    def _given(self) -> dict[str, Any]:
        given: dict[str, Any] = {
            "workflow_id": self.workflow,
            "cron": self.cron,
            "time_zone": self.time_zone,
            "user_id": self.user,
            "priority": self.priority,
            "attributes": attributes_of(self.attribute or []),
            "overlap": _overlap(self.overlap) if self.overlap else "",
            "start_time": time_of(self.start, "--start"),
            "end_time": time_of(self.end, "--end"),
        }
        for name, flag, text in (
            ("interval", "--every", self.every),
            ("offset", "--offset", self.offset),
            ("run_timeout", "--run-timeout", self.run_timeout),
            ("catch_up_window", "--catch-up", self.catch_up),
            ("jitter", "--jitter", self.jitter),
        ):
            if text:
                try:
                    given[name] = _seconds(text)
                except ValueError as error:
                    raise typer.BadParameter(str(error), param_hint=flag) from None
        return {name: value for name, value in given.items() if value not in ("", None, {})}


def with_said(function: Command) -> Command:
    """A command that takes the options of a spec where ``function`` takes ``said``."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _PARAMETERS.items()
    ]
    return replaced(function, "said", parameters, lambda values: Said(**values))


def _seconds(value: object) -> float:
    if not isinstance(value, str):
        raise ValueError("must be a duration such as 30s or 1h30m")  # noqa: TRY004  # a fault of a file, not of ours
    return parse_duration(value) / 1000


def _overlap(value: object) -> str:
    name = str(value).lower().replace("_", "-")
    if name not in OVERLAPS:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(OVERLAPS)}", param_hint="--overlap")
    return name.replace("-", "_").upper()


def _plain(kind: type, what: str) -> Callable[[object], object]:
    def read(value: object) -> object:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"must be {what}")  # noqa: TRY004  # a fault of a file, not of ours
        return value

    return read


def _attributes(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("must be an object of texts")
    return value


def _policy(value: object) -> str:
    try:
        return _overlap(value)
    except typer.BadParameter as error:
        raise ValueError(error.message) from None


def _time(value: object) -> dt.datetime:
    if isinstance(value, str):
        try:
            return dt.datetime.fromisoformat(value).astimezone()
        except (ValueError, OverflowError):
            pass
    raise ValueError("must be a time such as 2026-03-01T12:30:00+01:00")


def _input(value: object) -> object:
    from fencepost import Value
    from fencepost_server.domain.jsontext import canonical_value

    return Value(json=canonical_value(value))


_KEYS: Mapping[str, Callable[[object], object]] = {
    "workflow_id": _plain(str, "a text"),
    "cron": _plain(str, "a text"),
    "time_zone": _plain(str, "a text"),
    "interval": _seconds,
    "offset": _seconds,
    "input": _input,
    "user_id": _plain(str, "a text"),
    "priority": _plain(int, "a number"),
    "attributes": _attributes,
    "run_timeout": _seconds,
    "overlap": _policy,
    "catch_up_window": _seconds,
    "jitter": _seconds,
    "start_time": _time,
    "end_time": _time,
}


def _of_file(file: str) -> dict[str, Any]:
    """The keys of a file, read. Raises CommandFailed with every fault."""
    from fencepost_server.domain.yamltext import YamlError, parse_yaml

    try:
        document = parse_yaml(read_text(file))  # JSON is YAML, too
    except YamlError as error:
        raise CommandFailed(f"{file}: {visible(str(error))}") from None
    if not isinstance(document, dict):
        raise CommandFailed(f"{file}: must be an object with the keys {', '.join(_KEYS)}")
    found, faults = {}, []
    for key, value in document.items():
        read = _KEYS.get(key)
        if read is None:
            faults.append(f"/{key}: there is no such key")
            continue
        try:
            found[key] = read(value)
        except ValueError as error:
            faults.append(f"/{key}: {error}")
    if faults:
        raise CommandFailed(f"{file}: " + "; ".join(visible(fault) for fault in faults))
    return found


def spec_document(spec: ScheduleSpec) -> dict[str, Any]:
    """A spec that was read, for programs, with the keys of a file; durations are in seconds."""
    from fencepost import Value
    from fencepost_server.cli.documents import raw, stamp

    document = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name != "input"}
    document["overlap"] = spec.overlap.value
    document["attributes"] = dict(spec.attributes)
    document["start_time"], document["end_time"] = stamp(spec.start_time), stamp(spec.end_time)
    value = spec.input
    if isinstance(value, Value) and value.binary is not None:
        document["input_base64"] = base64.b64encode(value.binary).decode()
    else:
        document["input"] = raw(value.json if isinstance(value, Value) else None)
    return document
