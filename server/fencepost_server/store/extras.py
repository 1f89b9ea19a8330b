"""What runs have beyond their open steps, for a batch: one read for all that its decisions ask for, one write for all
that they have changed. Statements take columns; here is which types these have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fencepost_server.domain.model import PARKED_UNTIL
from fencepost_server.store.arrays import Blobs, Bools, Column, Ints, Texts, Times, Uuids, columns
from fencepost_server.store.connection import Database
from fencepost_server.store.pipeline import Result, Session
from fencepost_server.store.queries import query

_LETTERS = "abcdefghijkl"

_READS: dict[str, tuple[type[Column], ...]] = {
    "payload": (Uuids, Ints),
    "scope": (Uuids, Ints),
    "outputs": (Uuids, Ints),
    "recorded": (Uuids, Ints, Ints, Ints),
    "wait": (Uuids, Texts),
    "signal": (Uuids, Texts),
    "matches": (Uuids,),
    "timer": (Uuids, Ints, Ints),
    "fired_timers": (Uuids,),
    "open_tasks": (Uuids,),
    "open_task": (Uuids, Ints),
    "park": (Uuids,),
    "unpark": (Uuids,),
    "unblock": (Uuids,),
    "next_undo": (Uuids,),
    "take_stopped": (Uuids,),
    "child": (Uuids, Ints),
    "children": (Uuids,),
    "request": (Uuids, Texts),
    "run_state": (Uuids,),
    "pending_start": (Uuids,),
    "child_on_its_way": (Uuids, Uuids),
    "key_holder": (Texts, Texts, Texts),
    "removed": (Texts, Texts, Blobs),
    "history": (Uuids, Ints),
    "chain_end": (Uuids,),
    "op_event": (Uuids, Ints),
    "op_scheduled": (Uuids, Ints),
    "attributes": (Uuids,),
    "take_signals": (Uuids, Texts),
    "unread_signals": (Uuids,),
    "signals_size": (Uuids,),
    "take_key": (Texts, Texts, Texts, Uuids, Blobs, Blobs),
}

_WRITES: dict[str, tuple[type[Column], ...]] = {
    "insert_attribute": (Uuids, Texts, Texts, Texts, Times),
    "insert_timer": (Uuids, Ints, Ints, Texts, Times, Texts),
    "insert_wait": (Uuids, Ints, Texts, Texts),
    "insert_signal": (Uuids, Ints, Texts, Ints),
    "insert_scope": (Uuids, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints),
    "insert_output": (Uuids, Ints, Ints, Ints, Ints),
    "insert_child": (Uuids, Ints, Uuids, Texts),
    "insert_undo": (Uuids, Ints, Bools, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Texts),
    "move_undo": (Uuids, Uuids, Ints),
    "move_key": (Texts, Texts, Texts, Uuids, Uuids, Blobs),
    "set_attributes": (Uuids, Texts),
    "reset_decider": (Uuids,),
    "wake_decider": (Uuids, Times),
    "lease_decider": (Uuids, Uuids, Ints, Times),
    "insert_message": (Uuids, Ints, Uuids, Ints, Texts, Texts),
    "insert_request": (Uuids, Texts, Blobs, Texts),
    "insert_stopped": (Uuids, Ints, Texts),
    "restore_task": (Uuids, Ints, Ints, Texts, Texts, Texts, Ints),
    "save_checkpoint": (Uuids, Ints, Ints, Texts, Blobs, Texts),
    "update_scope": (Uuids, Ints, Ints, Ints, Ints),
    "update_undo": (Uuids, Ints, Ints),
    "update_child": (Uuids, Ints, Texts),
    "cancel_task": (Uuids, Ints, Times, Texts),
    "park_timer": (Uuids, Ints, Ints, Texts),
    "stop_timers": (Uuids,),
    "delete_timer": (Uuids, Ints, Ints),
    "delete_grace": (Uuids,),
    "delete_wait": (Uuids, Ints, Texts),
    "end_wait": (Uuids, Ints),
    "delete_signal": (Uuids, Ints, Texts),
    "delete_scope": (Uuids, Ints),
    "delete_child": (Uuids, Ints),
    "delete_undo": (Uuids, Ints),
    "delete_message": (Ints,),
    "delete_stopped": (Uuids,),
    "delete_checkpoint": (Uuids, Ints),
    "clear_ended": (Uuids,),
}
"""In the order in which they are sent: what is inserted can be deleted again in one write. What is deleted can't be
inserted again in the same one: it has to be taken out by a read.
"""


@dataclass(frozen=True, slots=True)
class Need:
    """Rows that a decision has to see: a statement of extra.sql, and the key to ask it for."""

    statement: str
    key: tuple[Any, ...]


Rows = list[tuple[Any, ...]]


async def read(session: Session, needs: Sequence[Need], now: datetime) -> list[Rows]:
    """The rows of each need, in one round trip. Of a statement that changes rows, those changed."""
    asked: dict[str, list[int]] = {}
    for index, need in enumerate(needs):
        asked.setdefault(need.statement, []).append(index)
    sent: list[tuple[list[int], Result]] = []
    for name, indexes in asked.items():
        params = _params(_READS[name], [needs[index].key for index in indexes])
        sent.append((indexes, session.send(query("extra", name), params | {"until": PARKED_UNTIL, "now": now})))
    await session.sync()
    found: list[Rows] = [[] for _ in needs]
    for indexes, result in sent:
        for ord_, *row in result.rows():
            found[indexes[ord_ - 1]].append(tuple(row))
    return found


def write(session: Session, rows: Mapping[str, Sequence[tuple[Any, ...]]]) -> None:
    """Write rows by the name of their statement."""
    for name, types in _WRITES.items():
        if some := rows.get(name):
            session.send(query("extra", name), _params(types, some))


def _params(types: tuple[type[Column], ...], rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    return dict(zip(_LETTERS, columns(rows, *types), strict=False))


async def lock_messages(session: Session, ids: Iterable[int]) -> set[int]:
    """Lock messages for their delivery. Returns those that are there and nobody else's."""
    return {row[0] for row in await session.rows(query("extra", "lock_messages"), {"ids": Ints(sorted(ids))})}


@dataclass(frozen=True, slots=True)
class DueTimer:
    """A timer whose time has come."""

    run_id: str
    seq: int
    kind: int
    namespace: str
    fire_at: datetime


async def due_timers(database: Database, after: DueTimer | None, limit: int) -> list[DueTimer]:
    """Timers whose time has come, a page."""
    rows = await database.rows(
        query("extra", "due_timers"),
        {
            "after_at": datetime.min.replace(year=1970, tzinfo=PARKED_UNTIL.tzinfo) if after is None else after.fire_at,
            "after_run": "00000000-0000-0000-0000-000000000000" if after is None else after.run_id,
            "after_seq": 0 if after is None else after.seq,
            "after_kind": 0 if after is None else after.kind,
            "limit": limit,
        },
    )
    return [DueTimer(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of the outbox."""

    message_id: int
    target_run: str
    kind: int
    source_run: str
    source_seq: int
    namespace: str
    body: str


async def messages(database: Database, after: int, limit: int) -> list[StoredMessage]:
    """What is to be delivered, a page in order."""
    rows = await database.rows(query("extra", "messages"), {"after": after, "limit": limit})
    return [StoredMessage(*row) for row in rows]
