"""Registering, activating, removing and reading definitions.

Whatever changes what the starts of a workflow take holds its deployment for update, which waits for the starts
under way and lets later ones wait. What can make a cycle of children goes one by one in a namespace, under a lock
that comes before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from fencepost_server.domain.child_cycles import ChildPlace, child_nodes, cycles
from fencepost_server.domain.errors import (
    DefinitionDrift,
    DefinitionRemoved,
    InvalidManifest,
    UnknownDefinition,
    UnknownWorkflow,
)
from fencepost_server.domain.manifest import Manifest, ManifestInvalid, difference, parse_manifest
from fencepost_server.domain.violation import Violation
from fencepost_server.store import definitions
from fencepost_server.store.connection import Database
from fencepost_server.store.definitions import DefinitionRow, Removal
from fencepost_server.store.pipeline import Session

FIRST_PAGE = ("", datetime(9999, 1, 1, tzinfo=UTC), b"")

# How far cycles are looked for. Manifests have a megabyte at most, and are read so many at a time.
_MAX_REACHED = 1000
_MAX_BYTES = 64 << 20
_AT_ONCE = 20


@dataclass(frozen=True, slots=True)
class Registered:
    """The definition that is registered now, and whether this call made it."""

    definition: DefinitionRow
    created: bool


@dataclass(frozen=True, slots=True)
class Activated:
    """The definition that new runs take now, and the hash of the one that they took before."""

    definition: DefinitionRow
    previous_hash: bytes


def parsed(text: str, *, yaml: bool) -> Manifest:
    """A valid manifest. Raises InvalidManifest with every fault."""
    try:
        return parse_manifest(text, yaml=yaml)
    except ManifestInvalid as error:
        raise _invalid(error.violations) from None


def _invalid(faults: Sequence[Violation]) -> InvalidManifest:
    return InvalidManifest(f"the manifest has {len(faults)} fault{'s' if len(faults) != 1 else ''}", violations=faults)


async def register(database: Database, namespace: str, manifest: Manifest) -> Registered:
    """Make a manifest the active definition of its workflow.

    The same manifest again changes nothing, not even which one is active. Raises DefinitionDrift when the
    compatibility id is taken by another manifest, DefinitionRemoved when this very manifest was removed (a worker
    that registers its manifests at its start must not bring back what an operator took away), InvalidManifest for a
    cycle of children.
    """
    children = child_nodes(manifest.canonical)
    async with database.transaction() as session:
        if children:
            definitions.lock_children(session, namespace)
        await definitions.lock_workflow(session, namespace, manifest.workflow_id, manifest.hash)
        same = await definitions.same_compatibility(session, namespace, manifest.workflow_id, manifest.compatibility_id)
        if same is None:
            await _refuse_cycles(session, namespace, manifest.workflow_id, children)
            definitions.insert_active(
                session,
                namespace,
                manifest.workflow_id,
                manifest.hash,
                manifest.compatibility_id,
                manifest.canonical,
            )
        else:
            _refuse_another(manifest, *same)
        row = await definitions.get(session, namespace, manifest.workflow_id, manifest.hash)
    assert row is not None  # inserted or found above, in this transaction
    return Registered(row, same is None)


def _refuse_another(manifest: Manifest, hash_: bytes, canonical: str, removed: bool) -> None:
    """Refuse a manifest unless it is the one that has its compatibility id, and that was not removed."""
    if hash_ != manifest.hash:
        raise DefinitionDrift(
            f"compatibility id {manifest.compatibility_id!r} of workflow {manifest.workflow_id!r} is registered"
            " with another manifest; choose a new one",
            violations=[Violation("", text) for text in difference(canonical, manifest.canonical)],
            metadata={"registered_hash": hash_.hex(), "manifest_hash": manifest.hash.hex()},
        )
    if removed:
        raise _removed(manifest.workflow_id, hash_, "; it comes back under a new compatibility id only")


def _removed(workflow_id: str, hash_: bytes, advice: str = "") -> DefinitionRemoved:
    return DefinitionRemoved(f"definition {hash_.hex()} of workflow {workflow_id!r} was removed{advice}")


async def find_cycles(database: Database, namespace: str, manifest: Manifest) -> Sequence[Violation]:
    """The cycles of children that a manifest would make if it were registered now."""
    children = child_nodes(manifest.canonical)
    if not children:
        return ()
    async with database.transaction() as session:
        return await _cycles(session, namespace, manifest.workflow_id, children)


async def _refuse_cycles(session: Session, namespace: str, workflow_id: str, children: Sequence[ChildPlace]) -> None:
    if faults := await _cycles(session, namespace, workflow_id, children):
        raise _invalid(faults)


async def _cycles(
    session: Session, namespace: str, workflow_id: str, children: Sequence[ChildPlace]
) -> Sequence[Violation]:
    """Follow the active definitions from the children of a workflow on. A child that nobody has registered, or
    whose active definition was removed, has no children of its own.
    """
    edges: dict[str, frozenset[str]] = {}
    front = {place.workflow_id for place in children} - {workflow_id}
    reached, size = len(front), 0
    while front:
        part = sorted(front)[:_AT_ONCE]
        front.difference_update(part)
        edges.update(dict.fromkeys(part, frozenset()))
        for parent, manifest in (await definitions.active_parents(session, namespace, part)).items():
            size += len(manifest)
            edges[parent] = frozenset(place.workflow_id for place in child_nodes(manifest))
            new = edges[parent] - edges.keys() - front - {workflow_id}
            reached += len(new)
            front |= new
        if reached > _MAX_REACHED or size > _MAX_BYTES:
            return [Violation("", "its children lead to so many workflows that a cycle can't be ruled out")]
    return cycles(workflow_id, children, edges)


async def activate(database: Database, namespace: str, workflow_id: str, hash_: bytes) -> Activated:
    """Let new runs take a registered definition: roll back to it. Raises UnknownWorkflow, UnknownDefinition,
    DefinitionRemoved, and InvalidManifest for a cycle of children, which other workflows may have closed meanwhile.
    """
    known = await get(database, namespace, workflow_id, hash_)
    children = child_nodes(known.manifest)
    async with database.transaction() as session:
        if children:
            definitions.lock_children(session, namespace)
        previous = await definitions.lock_deployed(session, namespace, workflow_id)
        row = await definitions.get(session, namespace, workflow_id, hash_)
        assert row is not None  # definitions and deployments are never deleted
        assert previous is not None
        if row.removed_at is not None:
            raise _removed(workflow_id, hash_)
        if not row.active:
            await _refuse_cycles(session, namespace, workflow_id, children)
            definitions.activate(session, namespace, workflow_id, hash_)
            row = await definitions.get(session, namespace, workflow_id, hash_)
            assert row is not None
    return Activated(row, previous)


async def remove(database: Database, namespace: str, workflow_id: str, hash_: bytes) -> tuple[DefinitionRow, Removal]:
    """Let no run take a definition any more; its live runs are all committed when this returns, and go on until
    they are ended by ``engine.removal``. A second time changes nothing. Raises UnknownWorkflow, UnknownDefinition.

    The active one stays the active one: what would take its place is for the operator to say, and until then starts
    are refused.
    """
    await get(database, namespace, workflow_id, hash_)
    async with database.transaction() as session:
        await definitions.lock_deployed(session, namespace, workflow_id)
        definitions.remove(session, namespace, workflow_id, hash_)
        row = await definitions.get(session, namespace, workflow_id, hash_)
    assert row is not None  # definitions are never deleted
    assert row.removed_at is not None
    return row, Removal(namespace, workflow_id, hash_, row.created_at, row.removed_at)


async def get(database: Database, namespace: str, workflow_id: str, hash_: bytes | None) -> DefinitionRow:
    """One definition. Raises UnknownWorkflow, UnknownDefinition."""
    async with database.transaction() as session:
        row = await definitions.get(session, namespace, workflow_id, hash_)
        if row is not None:
            return row
        known = await definitions.deployed(session, namespace, workflow_id)
    if known:
        raise UnknownDefinition(f"workflow {workflow_id!r} has no definition {'' if hash_ is None else hash_.hex()}")
    raise UnknownWorkflow(f"no definition is registered for workflow {workflow_id!r}")


async def list_page(
    database: Database, namespace: str, workflow_id: str, after: tuple[str, datetime, bytes], limit: int
) -> list[DefinitionRow]:
    """A page of definitions."""
    return await definitions.list_definitions(database, namespace, workflow_id, after, limit)
