"""Which runs a command is about: those named, or all that match, after a question.

What matches is found first, page by page and up to a bound, then shown as a number, and only then is anything done: to
the runs that were found, and to no run that began to match meanwhile.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.faults import WrongUsage
from fencepost_server.cli.filters import attributes_of, state_of
from fencepost_server.cli.parameters import Command, replaced
from fencepost_server.cli.waiting import given

if TYPE_CHECKING:
    from fencepost import AsyncClient

MOST_RUNS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Runs by their ids, or by what they have; ``yes``: without a question."""

    run_ids: tuple[str, ...]
    workflow: str
    states: tuple[str, ...]
    user: str
    attributes: Mapping[str, str]
    yes: bool

    async def find(self, client: AsyncClient, states: Sequence[str]) -> list[str]:
        """The ids, the newest first, at most MOST_RUNS. ``states``: those that are meant if none is said."""
        if self.run_ids:
            return list(self.run_ids)
        found = client.list_runs(
            self.workflow or None,
            self.states or states,
            MOST_RUNS,
            user_id=self.user,
            attributes=dict(self.attributes),
        )
        return [run.run_id async for run in found]

    def agree(self, what: str, runs: int) -> None:
        """Ask whether to do ``what`` to so many runs, if they were not named. Raises typer.Abort."""
        if self.run_ids or self.yes or not runs:
            return
        number = f"the newest {runs}" if runs == MOST_RUNS else str(runs)
        typer.confirm(f"{what} {number} run{'s' if runs > 1 else ''}?", abort=True, err=True)


_PARAMETERS: Mapping[str, tuple[Any, Any]] = {
    "runs": (
        Annotated[
            list[str] | None,
            typer.Argument(metavar="RUN…", help="Ids of runs; - reads ids from standard input.", show_default=False),
        ],
        None,
    ),
    "all_matching": (
        Annotated[bool, typer.Option("--all-matching", help="All runs that match, instead of those named.")],
        False,
    ),
    "workflow": (
        Annotated[str, typer.Option("--workflow", help="Only those of this workflow.", show_default=False)],
        "",
    ),
    "state": (
        Annotated[
            list[str] | None,
            typer.Option(
                "--state", help="Only those in this state. May be repeated. Default: all that it makes sense for."
            ),
        ],
        None,
    ),
    "user": (
        Annotated[str, typer.Option("--user", help="Only those on behalf of this user.", show_default=False)],
        "",
    ),
    "attribute": (
        Annotated[
            list[str] | None,
            typer.Option("--attribute", metavar="KEY=VALUE", help="Only those with this attribute. May be repeated."),
        ],
        None,
    ),
    "yes": (Annotated[bool, typer.Option("--yes", help="Do it without asking.")], False),
}


def with_chosen(function: Command) -> Command:
    """Let a command that takes ``chosen: Chosen`` take ids, or the flags of a filter."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _PARAMETERS.items()
    ]
    return replaced(function, "chosen", parameters, _chosen)


def _chosen(values: Mapping[str, Any]) -> Chosen:
    """Raises WrongUsage unless it is clear which runs are meant."""
    states = tuple(state_of(name) for name in values["state"] or ())
    attributes = attributes_of(values["attribute"] or ())
    filtered = bool(values["workflow"] or states or values["user"] or attributes)
    run_ids = tuple(dict.fromkeys(given(values["runs"] or ())))
    if values["all_matching"]:
        if run_ids:
            raise WrongUsage("name runs, or say --all-matching")
        if not filtered:
            raise WrongUsage("--all-matching needs --workflow, --state, --user or --attribute")
        if not values["yes"] and not sys.stdin.isatty():
            raise WrongUsage("say --yes: there is nobody to ask")
    elif filtered:
        raise WrongUsage("filters are for --all-matching")
    elif not run_ids:
        raise WrongUsage("which runs? Name them, or say --all-matching")
    return Chosen(
        run_ids=run_ids,
        workflow=values["workflow"],
        states=states,
        user=values["user"],
        attributes=attributes,
        yes=values["yes"],
    )
