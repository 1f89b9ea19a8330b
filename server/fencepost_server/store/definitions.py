"""Definitions and deployments."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from fencepost_server.store.connection import Database, Session
from fencepost_server.store.queries import query


@dataclass(frozen=True, slots=True)
class DefinitionRow:
    """A registered definition. ``manifest`` is canonical JSON, or '' where it was not read."""

    workflow_id: str
    hash: bytes
    compatibility_id: str
    active: bool
    manifest: str
    created_at: datetime


async def lock_workflow(session: Session, namespace: str, workflow_id: str, hash_: bytes) -> bytes:
    """Lock the workflow's deployment against starts, making it with ``hash_`` if there is none. Returns the
    active hash.
    """
    params = {"namespace": namespace, "workflow_id": workflow_id, "hash": hash_}
    await session.send(query("definition", "insert_deployment"), params)
    rows = await session.rows(query("definition", "lock_deployment"), params)
    return bytes(rows[0][0])


async def same_compatibility(
    session: Session, namespace: str, workflow_id: str, compatibility_id: str
) -> tuple[bytes, str] | None:
    """Hash and manifest of the definition with that compatibility id."""
    rows = await session.rows(
        query("definition", "same_compatibility"),
        {"namespace": namespace, "workflow_id": workflow_id, "compatibility_id": compatibility_id},
    )
    return (bytes(rows[0][0]), rows[0][1]) if rows else None


async def insert_active(
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
    await session.send(query("definition", "insert"), params)
    await session.send(query("definition", "activate"), params)


async def get(session: Session, namespace: str, workflow_id: str, hash_: bytes | None) -> DefinitionRow | None:
    """One definition; the active one without a hash."""
    rows = await session.rows(
        query("definition", "get"), {"namespace": namespace, "workflow_id": workflow_id, "hash": hash_}
    )
    if not rows:
        return None
    workflow, found, compatibility_id, active, manifest, created_at = rows[0]
    return DefinitionRow(workflow, bytes(found), compatibility_id, active, manifest, created_at)


async def deployed(session: Session, namespace: str, workflow_id: str) -> bool:
    """Whether the workflow has any definition."""
    return bool(
        await session.rows(query("definition", "deployed"), {"namespace": namespace, "workflow_id": workflow_id})
    )


async def list_definitions(
    database: Database, namespace: str, workflow_id: str, after: tuple[str, datetime, bytes], limit: int
) -> list[DefinitionRow]:
    """A page by workflow id, the newest definition of each first."""
    rows = await database.rows(
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
    return [
        DefinitionRow(workflow, bytes(h), compatibility, active, "", at)
        for workflow, h, compatibility, active, at in rows
    ]
