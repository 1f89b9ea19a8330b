"""`fencepost signal|cancel|terminate|pause|resume|retry`: what may be asked of runs, of one or of all that match.

Runs are asked some at a time. One that refuses keeps no other from being asked, and is told at the end; a server that
can't be reached ends it, since the others would only wait for it one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.caller import Caller, refusal_text
from fencepost_server.cli.faults import FAILURE, CommandFailed, WrongUsage
from fencepost_server.cli.matching import MOST_RUNS, Chosen
from fencepost_server.cli.output import show_table, visible, write_json, write_line
from fencepost_server.cli.progress import bar
from fencepost_server.cli.starting import read_text

if TYPE_CHECKING:
    from fencepost import AsyncClient, FencepostError

_AT_ONCE = 20
_TABLE_ROWS = 20
_GOING_ON = ("PENDING", "RUNNING", "WAITING")
_NOT_ENDING = (*_GOING_ON, "PAUSED", "BLOCKED")
_NOT_ENDED = (*_NOT_ENDING, "ENDING", "UNDOING")

Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for people.", show_default=False)]
RequestId = Annotated[
    str,
    typer.Option(
        "--request-id",
        metavar="ID",
        help="The same id for the same run again gets the first answer. Default: a new one.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run answered: its state, and of a signal the number of its event; or the refusal."""

    run_id: str
    state: str = ""
    seq: int = 0
    error: FencepostError | None = None


Ask = Callable[["AsyncClient", str], Awaitable[tuple[str, int]]]
"""Asks one run; gives its state and the number of an event, or 0."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of asking runs: their answers in the order of the runs, and how many were not asked at all."""

    answers: list[Answer]
    left: int
    more: bool
    """Further runs may match."""

    @property
    def refused(self) -> list[Answer]:
        """Those that said no."""
        return [answer for answer in self.answers if answer.error is not None]


def signal(
    caller: Caller,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the runs wait for.", show_default=False)],
    chosen: Chosen,
    payload: Annotated[
        str | None,
        typer.Option("--payload", metavar="JSON", help="What it carries. Default: null.", show_default=False),
    ] = None,
    payload_file: Annotated[
        str | None,
        typer.Option("--payload-file", metavar="FILE", help="A file with what it carries; - is standard input."),
    ] = None,
    request_id: RequestId = "",
) -> None:
    """Give runs a signal, whether or not they wait for it yet."""
    if payload is not None and payload_file is not None:
        raise WrongUsage("--payload and --payload-file exclude each other")
    text = read_text(payload_file) if payload_file is not None else "null" if payload is None else payload
    from fencepost import Value

    async def ask(client: AsyncClient, run: str) -> tuple[str, int]:
        given = await client.signal_run(run, name, Value(json=text), request_id=request_id)
        return given.state.value, given.seq

    _do(caller, chosen, f"signal {name} to", _NOT_ENDED, ask)


def cancel(
    caller: Caller,
    chosen: Chosen,
    reason: Reason = "",
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0,
            max=86_400,
            help="How long steps under way may go on. Default: as the server is set.",
            show_default=False,
        ),
    ] = None,
    request_id: RequestId = "",
) -> None:
    """Ask runs to end: steps under way have a grace, then completed ones are undone."""

    async def ask(client: AsyncClient, run: str) -> tuple[str, int]:
        return (await client.cancel_run(run, reason, grace=grace, request_id=request_id)).value, 0

    _do(caller, chosen, "cancel", _NOT_ENDING, ask)


def terminate(caller: Caller, chosen: Chosen, reason: Reason = "", request_id: RequestId = "") -> None:
    """End runs at once. Nothing is undone."""

    async def ask(client: AsyncClient, run: str) -> tuple[str, int]:
        return (await client.terminate_run(run, reason, request_id=request_id)).value, 0

    _do(caller, chosen, "terminate", _NOT_ENDED, ask)


def pause(caller: Caller, chosen: Chosen, reason: Reason = "", request_id: RequestId = "") -> None:
    """Let workers take no more steps of runs until they are resumed."""

    async def ask(client: AsyncClient, run: str) -> tuple[str, int]:
        return (await client.pause_run(run, reason, request_id=request_id)).value, 0

    _do(caller, chosen, "pause", _GOING_ON, ask)


def resume(caller: Caller, chosen: Chosen, reason: Reason = "", request_id: RequestId = "") -> None:
    """Let paused runs go on."""

    async def ask(client: AsyncClient, run: str) -> tuple[str, int]:
        return (await client.resume_run(run, reason, request_id=request_id)).value, 0

    _do(caller, chosen, "resume", ("PAUSED",), ask)


def retry(
    caller: Caller,
    chosen: Chosen,
    reason: Reason = "",
    skip_undo: Annotated[
        bool,
        typer.Option("--skip-undo", help="Leave the step that can't be undone as it is. Needs --reason."),
    ] = False,
    request_id: RequestId = "",
) -> None:
    """Let failed or blocked runs go on from where they stopped, with fresh attempts."""
    if skip_undo and not reason:
        raise WrongUsage("--skip-undo needs --reason")

    async def ask(client: AsyncClient, run: str) -> tuple[str, int]:
        return (await client.retry_run(run, reason, skip_undo=skip_undo, request_id=request_id)).value, 0

    _do(caller, chosen, "retry", ("FAILED", "BLOCKED"), ask)


def _do(caller: Caller, chosen: Chosen, what: str, states: Sequence[str], ask: Ask) -> None:
    """Ask the chosen runs and tell what they answered."""
    run_ids = asyncio.run(_find(caller, chosen, states))
    chosen.agree(what.capitalize(), len(run_ids))  # outside of any loop, which would keep a Ctrl-C from the question
    more = not chosen.run_ids and len(run_ids) == MOST_RUNS
    answers = asyncio.run(_ask_all(caller, run_ids, what, ask))
    asked = Asked(answers, len(run_ids) - len(answers), more)
    _show(caller, asked, named=bool(chosen.run_ids))
    if asked.refused or asked.left or asked.more:
        raise typer.Exit(FAILURE)


async def _find(caller: Caller, chosen: Chosen, states: Sequence[str]) -> list[str]:
    async with caller.connect_async() as client:
        return await chosen.find(client, states)


async def _ask_all(caller: Caller, run_ids: Sequence[str], what: str, ask: Ask) -> list[Answer]:
    with bar(what, len(run_ids), shown=len(run_ids) > 1 and not caller.json) as show_done:
        async with caller.connect_async() as client:
            return await _ask_each(client, run_ids, ask, show_done)


async def _ask_each(
    client: AsyncClient, run_ids: Sequence[str], ask: Ask, show_done: Callable[[int], None]
) -> list[Answer]:
    """Ask _AT_ONCE runs at a time, until none is left or no server can be reached."""
    from fencepost import Unavailable

    waiting = iter(enumerate(run_ids))
    answers: dict[int, Answer] = {}
    reachable = True

    async def work(waiting: Iterator[tuple[int, str]]) -> None:
        nonlocal reachable
        for index, run_id in waiting:
            answers[index] = await _ask_one(client, run_id, ask)
            show_done(len(answers))
            if isinstance(answers[index].error, Unavailable):
                reachable = False
            if not reachable:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(min(_AT_ONCE, len(run_ids))):
            group.create_task(work(waiting))
    return [answers[index] for index in sorted(answers)]


async def _ask_one(client: AsyncClient, run_id: str, ask: Ask) -> Answer:
    from fencepost import FencepostError

    try:
        state, seq = await ask(client, run_id)
    except FencepostError as error:
        return Answer(run_id, error=error)
    return Answer(run_id, state, seq)


def _show(caller: Caller, asked: Asked, *, named: bool) -> None:
    """A document for each run; or a table of those named, or the number of those that matched. Refusals come last."""
    if caller.json:
        for answer in asked.answers:
            write_json(_document(answer))
    else:
        done = [answer for answer in asked.answers if answer.error is None]
        if not named or len(done) > _TABLE_ROWS:
            write_line(f"{len(done)} of {len(asked.answers) + asked.left} runs")
        elif done:
            titles = ("RUN", "STATE", "EVENT") if done[0].seq else ("RUN", "STATE")
            show_table(titles, [(a.run_id, a.state, str(a.seq))[: len(titles)] for a in done], whole=titles)
        for answer in asked.refused:
            reason = "" if answer.error is None else refusal_text(answer.error)
            typer.echo(f"fencepost: {visible(answer.run_id)}: {reason}", err=True)
    if asked.left:
        raise CommandFailed(f"no server answers at {caller.address}: {asked.left} runs were not asked")
    if asked.more:
        raise CommandFailed(f"more runs may match than the {MOST_RUNS} that are done in one go: do it again")


def _document(answer: Answer) -> dict[str, Any]:
    from fencepost_server.cli.documents import error_document

    if answer.error is not None:
        return {"run_id": answer.run_id, "error": error_document(answer.error)}
    seq = {"seq": answer.seq} if answer.seq else {}
    return {"run_id": answer.run_id, "state": answer.state, **seq}
