"""`fencepost runs history RUN --replay MODULE:WORKFLOW`: what the code of today makes of a run's history.

The function runs in the main thread of this process and nowhere else, so that a debugger can stop in it. Nothing is
sent to the server, and no step is run: their results are in the history.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from fencepost_server.cli.caller import Caller
from fencepost_server.cli.faults import CommandFailed, WrongUsage
from fencepost_server.cli.output import as_json, visible, write_json, write_line

if TYPE_CHECKING:
    from fencepost import Workflow
    from fencepost.testing import Replay

_FLAG = "--replay"


def replay(caller: Caller, run_id: str, place: str) -> None:
    """Replay a run's history. Raises CommandFailed with the first difference, WrongUsage if there is no such code."""
    from fencepost import NondeterminismError
    from fencepost.testing import Replayer

    workflow = workflow_at(place)
    with caller.connect() as client:
        run = client.get_run(run_id)
        events = list(client.history(run_id))
    if not events or events[0].workflow_id != workflow.workflow_id:
        raise WrongUsage(f"{_FLAG}: {place} is {workflow.workflow_id}, and the run is one of {run.workflow_id}")
    try:
        found = Replayer(workflow).replay(
            events, run_id=run_id, user_id=run.user_id, tell=None if caller.json else _tell
        )
    except NondeterminismError as error:
        if caller.json:
            raise CommandFailed(as_json(_document(run_id, None, error.message)), bare=True) from error
        raise CommandFailed(f"the code does not do what the history says: {visible(error.message)}") from error
    if caller.json:
        write_json(_document(run_id, found, None))
    else:
        write_line(f"replayed {found.events} events and {found.ops} ops without a difference: the code {found.end}")


def workflow_at(place: str) -> Workflow[..., Any]:
    """What ``module:workflow`` names; modules are looked for in the working directory first. Raises WrongUsage."""
    from fencepost import Workflow

    module_name, colon, name = place.partition(":")
    if not colon or not module_name or not name or module_name.startswith("."):  # of no package, so not relative
        raise WrongUsage(f"{_FLAG}: it is MODULE:WORKFLOW, such as app.workflows:order, not {place!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise WrongUsage(f"{_FLAG}: {error}") from error
    except Exception as error:
        # Their code, which may raise anything: where in it is what they want to see.
        lines = traceback.format_exception(error)
        raise CommandFailed(f"{_FLAG}: {module_name} can't be imported\n{''.join(lines).rstrip()}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Workflow):
        raise WrongUsage(f"{_FLAG}: {place} is no function with @workflow")
    return found


def _tell(line: str) -> None:
    write_line(visible(line))


def _document(run_id: str, found: Replay | None, difference: str | None) -> dict[str, Any]:
    document: dict[str, Any] = {"run_id": run_id, "difference": difference}
    if found is not None:
        document |= {"events": found.events, "ops": found.ops, "end": found.end}
    return document
