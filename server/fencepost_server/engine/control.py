"""What may be asked of a run: signal, cancel, terminate, pause, resume, retry.

Each becomes a Command in the lane of its run and is answered after its commit (I1). Whether the state of the run
allows it is decided there, under its lock; here is only said what is asked, and by which fingerprint a repeat under
the same request id is told from another request (I7). Called by the api and by schedules.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

from fencepost_server.domain.errors import FencepostError, Overloaded
from fencepost_server.domain.model import Payload
from fencepost_server.engine import reading
from fencepost_server.engine.engine import Engine
from fencepost_server.engine.operations import Command, Commanded, CommandKind
from fencepost_server.engine.starting import comparable

_MAX_HOPS = 20
"""Runs of a chain that end while they are asked."""


async def signal(
    engine: Engine, namespace: str, run_id: str, name: str, payload: Payload, request_id: str = ""
) -> Commanded:
    """Give a run a signal; the answer has the number of its event. Raises RunNotFound, IllegalTransition,
    RequestIdConflict, TooManySignals, and what ``ask`` raises.
    """
    return await ask(engine, Command(CommandKind.SIGNAL, run_id, namespace, request_id, name=name, payload=payload))


async def cancel(
    engine: Engine, namespace: str, run_id: str, reason: str = "", grace: float | None = None, request_id: str = ""
) -> Commanded:
    """Ask a run to end. ``grace``: seconds that steps under way may go on; None: as configured. Raises RunNotFound,
    IllegalTransition, RequestIdConflict, and what ``ask`` raises.
    """
    return await ask(engine, Command(CommandKind.CANCEL, run_id, namespace, request_id, reason=reason, grace=grace))


async def terminate(engine: Engine, namespace: str, run_id: str, reason: str = "", request_id: str = "") -> Commanded:
    """End a run at once. Raises as ``cancel``."""
    return await ask(engine, Command(CommandKind.TERMINATE, run_id, namespace, request_id, reason=reason))


async def pause(engine: Engine, namespace: str, run_id: str, reason: str = "", request_id: str = "") -> Commanded:
    """Lease no further step of a run. Raises as ``cancel``."""
    return await ask(engine, Command(CommandKind.PAUSE, run_id, namespace, request_id, reason=reason))


async def resume(engine: Engine, namespace: str, run_id: str, reason: str = "", request_id: str = "") -> Commanded:
    """Let a paused run go on. Raises as ``cancel``."""
    return await ask(engine, Command(CommandKind.RESUME, run_id, namespace, request_id, reason=reason))


async def retry(
    engine: Engine, namespace: str, run_id: str, reason: str = "", request_id: str = "", *, skip_undo: bool = False
) -> Commanded:
    """Let a FAILED or BLOCKED run go on. ``skip_undo``: past the step that can't be undone. Raises as ``cancel``, and
    AlreadyUndone, KeyTaken, ParentDecided.
    """
    return await ask(
        engine, Command(CommandKind.RETRY, run_id, namespace, request_id, reason=reason, skip_undo=skip_undo)
    )


async def ask(engine: Engine, command: Command) -> Commanded:
    """Queue a command and wait for its answer; a run that has continued as new is asked as that.

    Raises Overloaded, ServerDraining, DatabaseUnavailable, and what the
    command is refused with.
    """
    if command.request_id:
        command.fingerprint = fingerprint(command)
    for _ in range(_MAX_HOPS):
        engine.submit(command)
        outcome = await command.result
        if isinstance(outcome, FencepostError):
            raise outcome
        if not outcome.next_run:
            return outcome
        run_id = await reading.latest(engine, command.namespace, outcome.next_run)
        result = asyncio.get_running_loop().create_future()
        command = replace(command, run_id=run_id, result=result, again=False, deadline=0.0)
    raise Overloaded(f"run {command.run_id} continues as new too fast to be reached")


def fingerprint(command: Command) -> bytes:
    """The 32 bytes that tell whether two requests under one request id ask for the same: SHA-256 over all that is
    asked, each part with its length before it, the payload in its canonical form.
    """
    grace = "" if command.grace is None else repr(command.grace)
    parts = (
        command.kind.name,
        command.name,
        comparable(command.payload),
        command.reason,
        grace,
        "skip_undo" if command.skip_undo else "",
    )
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
