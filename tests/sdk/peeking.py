"""What a server in this process knows of its worker sessions and tells nobody."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.fixtures.servers import InProcessServer


def sessions(server: InProcessServer) -> list[Any]:
    """Its open worker sessions."""
    return [stream.session for stream in server.app.grpc.streams._streams.values()]


def leased(server: InProcessServer, run_id: str) -> bool:
    """Whether a task of the run is out on a session."""
    return any(key[0] == run_id for session in sessions(server) for key, _out in session._leases.items())


def paused(server: InProcessServer) -> bool:
    """Whether no session wants tasks."""
    return all(session._leases.steps.capacity == 0 for session in sessions(server))


def pongs(server: InProcessServer) -> int:
    """How many pings its sessions have answered."""
    return sum(session._pulse._pong for session in sessions(server))


def count_renewals(server: InProcessServer) -> Counter[str]:
    """How often heartbeats have named tasks of each run, from now on."""
    counted: Counter[str] = Counter()
    renewer = server.app.engine.renewer
    submit = renewer.submit

    def note(renewal: Any) -> None:
        counted.update(run_id for run_id, _task_id, _token in renewal.refs)
        submit(renewal)

    renewer.submit = note
    return counted
