"""Definitions, deployments, and the runs of removed definitions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime

from fencepost_server.domain.child_cycles import CHILD_MARK
from fencepost_server.store.arrays import Texts
from fencepost_server.store.connection import Database
from fencepost_server.store.pipeline import Session
from fencepost_server.store.queries import query
from fencepost_server.store.runs import in_order

Position = tuple[datetime, str]
"""A place in a list of runs, the oldest first: created_at and run_id."""

_LEAST_RUN, _GREATEST_RUN = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"
FIRST: Position = (datetime(1, 1, 2, tzinfo=UTC), _LEAST_RUN)
LAST: Position = (datetime(9999, 1, 1, tzinfo=UTC), _GREATEST_RUN)


@dataclass(frozen=True, slots=True)
class DefinitionRow:
    """A registered definition. ``manifest`` is canonical JSON, or '' where it was not read; ``active`` says that its
    workflow names it, which it also does of a removed one until another takes its place.
    """

    workflow_id: str
    hash: bytes
    compatibility_id: str
    active: bool
    manifest: str
    created_at: datetime
    removed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Removal:
    """A definition that was removed, and when it came and went."""

    namespace: str
    workflow_id: str
    hash: bytes
    created_at: datetime
    removed_at: datetime

    @property
    def key(self) -> tuple[str, str, bytes]:
        """What it is known by."""
        return self.namespace, self.workflow_id, self.hash


@dataclass(frozen=True, slots=True)
class LivePage:
    """Runs of a definition that have not ended, oldest first, and up to where the page goes (None: to the end)."""

    runs: list[Position]
    reached: Position | None


@dataclass(frozen=True, slots=True)
class LiveCount:
    """How many live runs there are on a page, and up to where it goes (None: to the end)."""

    runs: int
    reached: Position | None


def lock_children(session: Session, namespace: str) -> None:
    """Let nobody else register or activate a definition with child nodes in the namespace. Before all other locks."""
    session.send(query("definition", "wait_longer"))
    session.send(query("definition", "lock_children"), {"namespace": namespace})


async def lock_workflow(session: Session, namespace: str, workflow_id: str, hash_: bytes) -> bytes:
    """Lock the workflow's deployment against starts, making it with ``hash_`` if there is none. Returns the
    active hash.
    """
    params = {"namespace": namespace, "workflow_id": workflow_id, "hash": hash_}
    session.send(query("definition", "wait_longer"))
    session.send(query("definition", "insert_deployment"), params)
    rows = await session.rows(query("definition", "lock_deployment"), params)
    return bytes(rows[0][0])


async def lock_deployed(session: Session, namespace: str, workflow_id: str) -> bytes | None:
    """Lock the workflow's deployment against starts. Returns the active hash, None without a deployment."""
    session.send(query("definition", "wait_longer"))
    rows = await session.rows(
        query("definition", "lock_deployment"), {"namespace": namespace, "workflow_id": workflow_id}
    )
    return bytes(rows[0][0]) if rows else None


async def same_compatibility(
    session: Session, namespace: str, workflow_id: str, compatibility_id: str
) -> tuple[bytes, str, bool] | None:
    """Hash and manifest of the definition with that compatibility id, and whether it was removed."""
    rows = await session.rows(
        query("definition", "same_compatibility"),
        {"namespace": namespace, "workflow_id": workflow_id, "compatibility_id": compatibility_id},
    )
    return (bytes(rows[0][0]), rows[0][1], rows[0][2]) if rows else None


def insert_active(
    session: Session, namespace: str, workflow_id: str, hash_: bytes, compatibility_id: str, manifest: str
) -> None:
    """A new definition, which new runs take from now on. The workflow is locked."""
    params = {
        "namespace": namespace,
        "workflow_id": workflow_id,
        "hash": hash_,
        "compatibility_id": compatibility_id,
        "manifest": manifest,
    }
    session.send(query("definition", "insert"), params)
    session.send(query("definition", "activate"), params)


def activate(session: Session, namespace: str, workflow_id: str, hash_: bytes) -> None:
    """Let new runs take a definition. The workflow is locked."""
    params = {"namespace": namespace, "workflow_id": workflow_id, "hash": hash_}
    session.send(query("definition", "activate"), params)


def remove(session: Session, namespace: str, workflow_id: str, hash_: bytes) -> None:
    """Let no run take a definition any more. The workflow is locked. A second time changes nothing."""
    params = {"namespace": namespace, "workflow_id": workflow_id, "hash": hash_}
    session.send(query("definition", "remove"), params)
    session.send(query("definition", "refuse_starts"), params)


async def get(session: Session, namespace: str, workflow_id: str, hash_: bytes | None) -> DefinitionRow | None:
    """One definition; the active one without a hash."""
    rows = await session.rows(
        query("definition", "get"), {"namespace": namespace, "workflow_id": workflow_id, "hash": hash_}
    )
    return _row(*rows[0]) if rows else None


def _row(
    workflow_id: str,
    hash_: bytes,
    compatibility_id: str,
    active: bool,
    manifest: str,
    created_at: datetime,
    removed_at: datetime | None,
) -> DefinitionRow:
    """In the order of the statements get and list."""
    return DefinitionRow(workflow_id, bytes(hash_), compatibility_id, active, manifest, created_at, removed_at)


async def deployed(session: Session, namespace: str, workflow_id: str) -> bool:
    """Whether the workflow has any definition."""
    return bool(
        await session.rows(query("definition", "deployed"), {"namespace": namespace, "workflow_id": workflow_id})
    )


async def list_definitions(
    database: Database, namespace: str, workflow_id: str, after: tuple[str, datetime, bytes], limit: int
) -> list[DefinitionRow]:
    """A page by workflow id, the newest definition of each first."""
    rows = await in_order(
        database,
        query("definition", "list"),
        {
            "namespace": namespace,
            "workflow_id": workflow_id,
            "after_workflow": after[0],
            "before_at": after[1],
            "before_hash": after[2],
            "limit": limit,
        },
    )
    return [_row(*row) for row in rows]


async def active_parents(session: Session, namespace: str, workflow_ids: Collection[str]) -> dict[str, str]:
    """The active manifests, by workflow, of those that may have child nodes and were not removed."""
    rows = await session.rows(
        query("definition", "active_parents"),
        {"namespace": namespace, "workflow_ids": Texts(sorted(workflow_ids)), "mark": CHILD_MARK},
    )
    return dict(rows)


async def removals(database: Database, after: tuple[str, str, bytes], limit: int) -> list[Removal]:
    """A page of removed definitions of all namespaces, in the order of their keys."""
    rows = await database.rows(
        query("definition", "removals"),
        {"after_namespace": after[0], "after_workflow": after[1], "after_hash": after[2], "limit": limit},
    )
    return [Removal(ns, workflow_id, bytes(hash_), came, went) for ns, workflow_id, hash_, came, went in rows]


async def live_runs(
    database: Database, removal: Removal, after: Position, until: Position, scan: int, limit: int
) -> LivePage:
    """At most ``limit`` live runs of a definition after one place up to another; reads at most ``scan`` runs."""
    rows = await in_order(
        database, query("definition", "live_runs"), {**_range(removal, after, until), "scan": scan, "limit": limit}
    )
    runs = [(at, run_id) for run_id, at, live, _total in rows if live]
    more = bool(rows) and (len(rows) == limit or rows[-1][3] == scan)
    return LivePage(runs, (rows[-1][1], rows[-1][0]) if more else None)


async def count_live_runs(
    database: Database, removal: Removal, after: Position, until: Position, scan: int
) -> LiveCount:
    """How many of the next ``scan`` runs are live ones of a definition."""
    rows = await in_order(
        database, query("definition", "count_live_runs"), {**_range(removal, after, until), "scan": scan}
    )
    if not rows:
        return LiveCount(0, None)
    live, total, at, run_id = rows[0]
    return LiveCount(live, (at, run_id) if total == scan else None)


def _range(removal: Removal, after: Position, until: Position) -> dict[str, object]:
    return {
        "namespace": removal.namespace,
        "workflow_id": removal.workflow_id,
        "hash": removal.hash,
        "after_at": after[0],
        "after_run": after[1],
        "until_at": until[0],
        "until_run": until[1],
    }
