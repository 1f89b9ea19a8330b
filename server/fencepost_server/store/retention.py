"""Ended runs that are old enough to go, and keys that outlived theirs. See sql/retention.sql."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from fencepost_server.store.arrays import Texts, Times, Uuids
from fencepost_server.store.connection import Database
from fencepost_server.store.pipeline import Session
from fencepost_server.store.queries import query
from fencepost_server.store.runs import in_order
from fencepost_server.store.tasks import NO_RUN

DefinitionKey = tuple[str, str, bytes]
"""namespace, workflow_id, hash."""
Key = tuple[str, int, str, str, str]
"""namespace, kind, workflow_id, user_id, key."""

FIRST_DEFINITION: DefinitionKey = ("", "", b"")
FIRST_KEY: Key = ("", 0, "", "", "")


@dataclass(frozen=True, slots=True)
class Range:
    """A workflow's runs that are older than ``keep`` seconds, oldest first, after a place among them."""

    namespace: str
    workflow_id: str
    keep: float
    after_at: datetime = datetime(1, 1, 1, tzinfo=UTC)
    after_run: str = NO_RUN

    def after(self, run: OldRun) -> Range:
        """What is behind a run."""
        return replace(self, after_at=run.created_at, after_run=run.run_id)


@dataclass(frozen=True, slots=True)
class OldRun:
    """A run of a range. ``ended_since``: seconds, None if it has not ended. The order of fields is that of the
    statement page.
    """

    run_id: str
    created_at: datetime
    definition_hash: bytes
    events: int
    ended_since: float | None


@dataclass(frozen=True, slots=True)
class LockedRun:
    """An ended run, locked. The order of fields is that of the statement lock."""

    run_id: str
    definition_hash: bytes
    ended_since: float


async def definitions(database: Database, after: DefinitionKey, limit: int) -> list[DefinitionKey]:
    """A page of all definitions, in order."""
    params = {"namespace": after[0], "workflow_id": after[1], "hash": after[2], "limit": limit}
    rows = await in_order(database, query("retention", "definitions"), params)
    return [(namespace, workflow_id, bytes(hash_)) for namespace, workflow_id, hash_ in rows]


async def old(database: Database, ranges: Sequence[Range]) -> list[Range]:
    """Those of the ranges in which there is any run."""
    params = {
        "namespaces": Texts(r.namespace for r in ranges),
        "workflow_ids": Texts(r.workflow_id for r in ranges),
        "keeps": [r.keep for r in ranges],
        "after_ats": Times(r.after_at for r in ranges),
        "after_runs": Uuids(r.after_run for r in ranges),
    }
    return [ranges[ord_ - 1] for (ord_,) in await in_order(database, query("retention", "old"), params)]


async def page(database: Database, wanted: Range, limit: int) -> list[OldRun]:
    """The first runs of a range."""
    params = {
        "namespace": wanted.namespace,
        "workflow_id": wanted.workflow_id,
        "keep": wanted.keep,
        "after_at": wanted.after_at,
        "after_run": wanted.after_run,
        "limit": limit,
    }
    rows = await in_order(database, query("retention", "page"), params)
    return [OldRun(run_id, at, bytes(hash_), events, ended) for run_id, at, hash_, events, ended in rows]


async def lock(session: Session, run_ids: Collection[str]) -> list[LockedRun]:
    """Lock those of the runs that have ended and that nobody holds."""
    rows = await session.rows(query("retention", "lock"), {"run_ids": Uuids(sorted(run_ids))})
    return [LockedRun(run_id, bytes(hash_), ended) for run_id, hash_, ended in rows]


async def needed(session: Session, run_ids: Collection[str]) -> set[str]:
    """Those of the locked runs that another run may still need."""
    return {row[0] for row in await session.rows(query("retention", "needed"), {"run_ids": Uuids(run_ids)})}


async def delete(session: Session, run_ids: Collection[str], key_memory: float) -> None:
    """Delete locked runs with all of their rows; their request keys stand for them so many seconds longer."""
    _remember(session, run_ids, key_memory)
    session.send(query("retention", "delete"), {"run_ids": Uuids(run_ids)})


async def hide(session: Session, run_id: str, key_memory: float) -> None:
    """Let nobody see a locked run any more, which is too large to be deleted at once."""
    _remember(session, [run_id], key_memory)
    session.send(query("retention", "hide"), {"run_ids": Uuids([run_id])})


def _remember(session: Session, run_ids: Collection[str], key_memory: float) -> None:
    params = {"run_ids": Uuids(run_ids), "memory": timedelta(seconds=key_memory)}
    session.send(query("retention", "remember"), params)


async def lock_hidden(session: Session, left: Collection[str]) -> str | None:
    """Lock a hidden run that nobody holds and that is none of ``left``."""
    rows = await session.rows(query("retention", "lock_hidden"), {"left": Uuids(left)})
    return rows[0][0] if rows else None


async def delete_slice(session: Session, run_id: str, limit: int) -> bool:
    """Delete so many rows in each table of a locked, hidden run; with the last ones the run. Returns whether it is
    gone.
    """
    rows = await session.rows(query("retention", "delete_slice"), {"run_id": run_id, "limit": limit})
    if rows[0][0] == limit:
        return False
    session.send(query("retention", "delete"), {"run_ids": Uuids([run_id])})
    return True


async def outlived(database: Database, after: Key, limit: int, key_memory: float) -> Key:
    """Look at the next keys in order, and let those go in so many seconds that have outlived their run. Returns where
    to go on, the first place after the last key.
    """
    namespace, kind, workflow_id, user_id, key = after
    params = {
        "namespace": namespace,
        "kind": kind,
        "workflow_id": workflow_id,
        "user_id": user_id,
        "key": key,
        "limit": limit,
        "memory": timedelta(seconds=key_memory),
    }
    rows = await in_order(database, query("retention", "outlived"), params)
    if not rows or rows[0][5] < limit:
        return FIRST_KEY
    namespace, kind, workflow_id, user_id, key, _ = rows[0]
    return namespace, kind, workflow_id, user_id, key


async def forget_keys(database: Database, limit: int) -> int:
    """Delete keys past their time. Returns how many."""
    return len(await database.rows(query("retention", "forget_keys"), {"limit": limit}))
