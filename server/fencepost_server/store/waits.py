"""What a run waits for beside its steps, for those who read it: times, signals, children."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fencepost_server.store.pipeline import Result, Session
from fencepost_server.store.queries import query


@dataclass(frozen=True, slots=True)
class OpenWaitRow:
    """One of a time, the name of a signal and the id of a child run. ``node_index``: None for the run as a whole."""

    seq: int
    node_index: int | None
    fire_at: datetime | None
    signal_name: str | None
    child_run_id: str | None
    name: str = ""
    """Of an op of a code run, which has no node."""


def send_open(session: Session, params: Mapping[str, Any]) -> Result:
    """Ask for the first 1,000 of a run's waits, ``params`` having its run_id; ``read_open`` reads the answer."""
    return session.send(query("wait", "open_waits"), params)


def read_open(answer: Result) -> list[OpenWaitRow]:
    """The waits in the order in which they began."""
    return [_row(seq, json.loads(place), fire_at, name, child) for seq, place, fire_at, name, child in answer.rows()]


def send_pending(session: Session, params: Mapping[str, Any]) -> Result:
    """Ask for the signals of a run that no wait has taken, ``params`` having its run_id: rows of a name and how often
    it is there, 100 at most.
    """
    return session.send(query("wait", "pending_signals"), params)


def _row(
    seq: int, place: Mapping[str, Any], fire_at: datetime | None, signal_name: str | None, child: str | None
) -> OpenWaitRow:
    _kind, name, _options = place.get("plan", ("", "", ""))
    return OpenWaitRow(seq, place.get("node"), fire_at, signal_name, child, name)
