"""`fencepost runs start`: one run, or those of a file."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from fencepost_server.cli import waiting
from fencepost_server.cli.caller import Caller, refusal
from fencepost_server.cli.faults import CommandFailed, WrongUsage
from fencepost_server.cli.filters import attributes_of
from fencepost_server.cli.output import lasted, show_pairs, visible, write_json, write_line
from fencepost_server.cli.progress import bar
from fencepost_server.cli.runs import show_run

if TYPE_CHECKING:
    from fencepost import FencepostError, RunHandle
    from fencepost_server.cli.lines import Line

_FAULTS_SHOWN = 20

RequestKey = Annotated[
    str,
    typer.Option(
        "--request-key", metavar="KEY", help="The same key again finds the run that it started.", show_default=False
    ),
]
DedupeKey = Annotated[
    str,
    typer.Option(
        "--dedupe-key",
        metavar="KEY",
        help="The same key again finds the run that it started, until that has ended.",
        show_default=False,
    ),
]
BindDuplicate = Annotated[
    bool,
    typer.Option("--bind-duplicate", help="Find the run that holds the dedupe key even if its input is another one."),
]
StartDelay = Annotated[
    str,
    typer.Option("--start-delay", metavar="DURATION", help="Begin so much later, such as 1h30m.", show_default=False),
]
RunTimeout = Annotated[
    str, typer.Option("--run-timeout", metavar="DURATION", help="How long it may take.", show_default=False)
]
Many = Annotated[
    str | None,
    typer.Option(
        "--many",
        metavar="FILE.jsonl",
        help='Start a run for each line, such as {"input": 1, "request_key": "a"}; dedupe_key, on_active_duplicate, '
        "user_id, priority, attributes, definition_hash, start_delay and run_timeout may be there too. "
        "- is standard input.",
        show_default=False,
    ),
]


def start(
    caller: Caller,
    workflow: Annotated[str, typer.Argument(metavar="WORKFLOW", show_default=False)],
    input_: Annotated[
        str | None, typer.Option("--input", metavar="JSON", help="The input. Default: null.", show_default=False)
    ] = None,
    input_file: Annotated[
        str | None, typer.Option("--input-file", metavar="FILE", help="A file with the input; - is standard input.")
    ] = None,
    request_key: RequestKey = "",
    dedupe_key: DedupeKey = "",
    bind_duplicate: BindDuplicate = False,
    user: Annotated[str, typer.Option("--user", help="On whose behalf.", show_default=False)] = "",
    priority: Annotated[
        int | None, typer.Option("--priority", min=1, max=5, help="1 (first) to 5 (last). Default: 3.")
    ] = None,
    attribute: Annotated[
        list[str] | None,
        typer.Option("--attribute", metavar="KEY=VALUE", help="A label for `runs list`. May be repeated."),
    ] = None,
    definition: Annotated[
        str, typer.Option("--definition", metavar="HASH", help="Default: the active one.", show_default=False)
    ] = "",
    start_delay: StartDelay = "",
    run_timeout: RunTimeout = "",
    many: Many = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it has ended; exit codes as of `runs wait`.")
    ] = False,
    wait_timeout: Annotated[
        float | None,
        typer.Option("--wait-timeout", metavar="SECONDS", min=0, help="How long to wait. Default: without end."),
    ] = None,
) -> None:
    """Start a run, or one for each line of a file.

    A run has been committed when its id is printed. With --many, ids are printed with --json; without it, how many were
    started, and what was refused.
    """
    if input_ is not None and input_file is not None:
        raise WrongUsage("--input and --input-file exclude each other")
    if many is not None and (input_ is not None or input_file is not None or request_key or dedupe_key):
        raise WrongUsage("with --many, input, request key and dedupe key are in the file")
    if bind_duplicate and many is None and not dedupe_key:
        raise WrongUsage("--bind-duplicate needs --dedupe-key")
    from fencepost_server.cli.lines import Line

    try:
        line = Line(
            request_key=request_key,
            user_id=user,
            priority=priority or 0,
            definition_hash=definition,
            dedupe_key=dedupe_key,
            on_active_duplicate="bind" if bind_duplicate else "",
            attributes=attributes_of(attribute or []),
            start_delay=start_delay,
            run_timeout=run_timeout,
        )
    except ValueError as error:
        raise WrongUsage(f"--{str(error).replace('_', '-', 1)}") from None
    limit = Limit(wait or wait_timeout is not None, wait_timeout)
    if many is not None:
        _start_many(caller, workflow, many, line, limit)
        return
    text = input_ if input_file is None else read_text(input_file)
    _start_one(caller, workflow, "null" if text is None else text, line, limit, input_file or "--input")


@dataclass(frozen=True, slots=True)
class Limit:
    """Whether to wait for what was started, and for how many seconds at most."""

    wait: bool
    seconds: float | None


def _start_one(caller: Caller, workflow: str, text: str, line: Line, limit: Limit, source: str) -> None:
    """Start a run whose input is ``text``, which came from ``source``."""
    with caller.connect() as client:
        run = client.start_runs([line.start(workflow, text)])[0]
    from fencepost import FencepostError, InvalidJson

    if isinstance(run, InvalidJson) and not caller.json:
        faults = "; ".join(violation.message for violation in run.violations) or run.message
        raise CommandFailed(f"{run.reason}: {source} is not valid: {visible(faults)}")
    if isinstance(run, FencepostError):
        raise run
    if not limit.wait:
        _show_started(caller, run, line)
        return
    outcome = waiting.wait_for(caller, [run.run_id], limit.seconds)[0]
    if outcome.error is not None:
        _show_started(caller, run, line)
        raise refusal(outcome.error, caller)
    if caller.json:
        write_json({**_started(run), "ended": outcome.ended, "run": waiting.document(outcome)})
    elif outcome.run is not None:
        show_run(outcome.run)
    raise typer.Exit(waiting.exit_code([outcome]))


def _started(run: RunHandle) -> dict[str, object]:
    return {
        "run_id": run.run_id,
        "created": run.created,
        "definition_hash": run.definition_hash,
        "input_differs": run.input_differs,
    }


def _show_started(caller: Caller, run: RunHandle, line: Line) -> None:
    if caller.json:
        write_json(_started(run))
        return
    new = "started" if run.created else _how_found(run, line)
    show_pairs([("run", run.run_id), ("definition", run.definition_hash), ("new", new)])


def _how_found(run: RunHandle, line: Line) -> str:
    """By which key a run was found, as far as that is known."""
    if run.input_differs:
        return "found: a run with another input holds the dedupe key"
    if not line.dedupe_key:
        return "found: the request key was used before"
    if not line.request_key:
        return "found: this run holds the dedupe key"
    return "found: the request key was used before, or this run holds the dedupe key"


def read_text(file: str) -> str:
    """The text of a file. Raises CommandFailed."""
    with _opened(file) as stream:
        content = stream.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{file}: not UTF-8 text (byte {error.start})") from None


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = open(file, "rb")  # noqa: SIM115  # closed below; a fault within the block is not one of opening
    except OSError as error:
        raise CommandFailed(f"{file}: {error.strerror}") from error
    with stream:
        yield stream


@dataclass(slots=True)
class Tally:
    """What became of the lines of a file. Refusals are told at once, the first of them in full."""

    caller: Caller
    created: int = 0
    found: int = 0
    refused: int = 0
    run_ids: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"started {self.created}, found {self.found}, refused {self.refused}"

    def add(self, number: int, outcome: RunHandle | FencepostError) -> None:
        """Count what became of a line, and tell it."""
        from fencepost import FencepostError

        if isinstance(outcome, FencepostError):
            self._refuse(number, outcome)
            return
        self.created += bool(outcome.created)
        self.found += not outcome.created
        self.run_ids.append(outcome.run_id)
        if self.caller.json:
            write_json({"line": number, **_started(outcome)})

    def _refuse(self, number: int, error: FencepostError) -> None:
        self.refused += 1
        if self.caller.json:
            from fencepost_server.cli.documents import error_document

            write_json({"line": number, "error": error_document(error)})
        elif self.refused <= _FAULTS_SHOWN:
            first, *faults = str(error).splitlines()
            typer.echo(f"line {number}: {visible(first)}", err=True)
            for fault in faults:
                typer.echo(f"    {visible(fault.strip())}", err=True)
        elif self.refused == _FAULTS_SHOWN + 1:
            typer.echo("more refusals are only counted; --json tells them all", err=True)


def _start_many(caller: Caller, workflow: str, file: str, defaults: Line, limit: Limit) -> None:
    from fencepost import Unavailable
    from fencepost_server.cli.lines import start_lines

    began = time.monotonic()
    tally = Tally(caller)
    done = 0
    with (
        _opened(file) as stream,
        caller.connect() as client,
        bar("starting", _size(stream), shown=not caller.json, counted=False) as show_done,
    ):

        def lines() -> Iterator[bytes]:
            nonlocal done
            for line in stream:
                done += len(line)
                yield line

        try:
            for outcomes in start_lines(client, workflow, lines(), defaults):
                for number, outcome in outcomes:
                    tally.add(number, outcome)
                show_done(done)
        except Unavailable as error:
            typer.echo(f"{tally} before no server answered; with request keys it can be done again", err=True)
            raise refusal(error, caller) from error
    if not caller.json:
        write_line(f"{tally} in {lasted(time.monotonic() - began)}")
    code = 1 if tally.refused else 0
    if limit.wait and tally.run_ids:
        waited = waiting.wait_for(caller, tally.run_ids, limit.seconds)
        waiting.show(caller, waited)
        code = code or waiting.exit_code(waited)
    raise typer.Exit(code)


def _size(stream: BinaryIO) -> int | None:
    """How many bytes it has, as far as that is known."""
    found = os.fstat(stream.fileno())
    return found.st_size if stat.S_ISREG(found.st_mode) else None
