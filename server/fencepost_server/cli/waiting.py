"""`fencepost runs wait`: until runs have ended.

All are waited for at the same time, on one event loop, because a run that takes long must not hide that the others have
ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.caller import Caller
from fencepost_server.cli.faults import WrongUsage
from fencepost_server.cli.output import local, shortened, show_table, visible, write_json
from fencepost_server.cli.progress import bar
from fencepost_server.cli.runs import failure_text, reasons

if TYPE_CHECKING:
    from fencepost import AsyncClient, FencepostError, Run

FAILED = 3
TIMED_OUT = 4

_AT_ONCE = 100
_LOOKED_AT = 10
"""Of so many runs people are told why they wait."""
_FIRST_LOOK, _LOOK_INTERVAL = 2.0, 30.0


@dataclass(frozen=True, slots=True)
class Waited:
    """What the wait for one run came to: the run as it was last seen, or the error; ``ended`` if it has ended."""

    run_id: str
    run: Run | None = None
    error: FencepostError | None = None
    ended: bool = False


def wait(
    caller: Caller,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN…", help="Ids of runs; - reads ids from standard input.", show_default=False),
    ],
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0, help="How long to wait. Default: until they have ended."),
    ] = None,
) -> None:
    """Wait until runs have ended.

    Exit codes: 0 all completed; 1 one could not be asked for; 3 one failed; 4 one had not ended in time. Where several
    apply, the first of them.
    """
    run_ids = list(dict.fromkeys(given(runs)))
    if not run_ids:
        raise WrongUsage("no run to wait for")
    waited = wait_for(caller, run_ids, timeout)
    show(caller, waited)
    raise typer.Exit(exit_code(waited))


def given(words: Sequence[str]) -> Iterator[str]:
    """The ids among words of the command line, and in place of - those on standard input. Raises WrongUsage if what
    comes there is no text.
    """
    for word in words:
        if word == "-":
            try:
                yield from sys.stdin.buffer.read().decode("utf-8").split()
            except UnicodeDecodeError as error:
                raise WrongUsage(f"standard input is not UTF-8 text (byte {error.start})") from None
        else:
            yield word


def exit_code(waited: Sequence[Waited]) -> int:
    """The exit code that tells how it went."""
    if any(outcome.error is not None for outcome in waited):
        return 1
    if any(outcome.ended and outcome.run is not None and outcome.run.state != "COMPLETED" for outcome in waited):
        return FAILED
    return 0 if all(outcome.ended for outcome in waited) else TIMED_OUT


def wait_for(caller: Caller, run_ids: Sequence[str], timeout: float | None) -> list[Waited]:
    """Wait for runs, with a progress bar if there are several and people look on; results in the order of the ids."""
    with bar("waiting", len(run_ids), shown=len(run_ids) > 1 and not caller.json) as show_done:
        return asyncio.run(_wait_for_all(caller, run_ids, timeout, show_done))


async def _wait_for_all(
    caller: Caller, run_ids: Sequence[str], timeout: float | None, show_done: Callable[[int], None]
) -> list[Waited]:
    end = None if timeout is None else time.monotonic() + timeout
    places = asyncio.Semaphore(_AT_ONCE)
    done = 0
    told: set[str] = set()
    looked_at = set() if caller.json else set(run_ids[:_LOOKED_AT])

    async with caller.connect_async() as client:

        async def one(run_id: str) -> Waited:
            nonlocal done
            async with places:
                looking = asyncio.create_task(_tell_why(client, run_id, told)) if run_id in looked_at else None
                outcome = await _wait_for_one(client, run_id, end)
                if looking is not None:
                    looking.cancel()
            done += 1
            show_done(done)
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(run_id)) for run_id in run_ids]
    return [task.result() for task in tasks]


async def _wait_for_one(client: AsyncClient, run_id: str, end: float | None) -> Waited:
    from fencepost import FencepostError

    try:
        try:
            left = None if end is None else max(end - time.monotonic(), 0.001)
            return Waited(run_id, await client.wait_run(run_id, left), ended=True)
        except TimeoutError:
            run = await client.get_run(run_id)
            return Waited(run_id, run, ended=run.ended)
    except FencepostError as error:
        return Waited(run_id, error=error)


async def _tell_why(client: AsyncClient, run_id: str, told: set[str]) -> None:
    """Tell people each reason for which nothing happens, once, until cancelled."""
    from fencepost import FencepostError

    await asyncio.sleep(_FIRST_LOOK)
    while True:
        with contextlib.suppress(FencepostError):  # the wait for the same run tells it
            for reason in reasons(await client.get_run(run_id)):
                if reason not in told:
                    told.add(reason)
                    typer.echo(f"fencepost: run {visible(run_id)} waits: {visible(reason)}", err=True)
        await asyncio.sleep(_LOOK_INTERVAL)


def show(caller: Caller, waited: Sequence[Waited]) -> None:
    """Write the outcomes."""
    if caller.json:
        for outcome in waited:
            write_json({"ended": outcome.ended, **document(outcome)})
        return
    rows = []
    for outcome in waited:
        run = outcome.run
        if run is None:
            typer.echo(f"fencepost: {visible(outcome.run_id)}: {visible(str(outcome.error))}", err=True)
            continue
        ended = local(run.end_time) or "not yet"
        rows.append((run.run_id, run.workflow_id, run.state.value, ended, shortened(failure_text(run.failure), 100)))
    if rows:
        show_table(("RUN", "WORKFLOW", "STATE", "ENDED", "FAILURE"), rows, whole=("RUN", "STATE", "ENDED"))


def document(outcome: Waited) -> dict[str, Any]:
    """The run as a document, or why there is none."""
    from fencepost_server.cli.documents import error_document, run_document

    if outcome.error is not None:
        return {"run_id": outcome.run_id, "error": error_document(outcome.error)}
    return run_document(outcome.run) if outcome.run is not None else {"run_id": outcome.run_id}
