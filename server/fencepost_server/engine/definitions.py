"""Registering and reading definitions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from fencepost_server.domain.errors import DefinitionDrift, InvalidManifest, UnknownDefinition, UnknownWorkflow
from fencepost_server.domain.manifest import Manifest, ManifestInvalid, difference, parse_manifest
from fencepost_server.domain.violation import Violation
from fencepost_server.store import definitions
from fencepost_server.store.connection import Database
from fencepost_server.store.definitions import DefinitionRow

FIRST_PAGE = ("", datetime(9999, 1, 1, tzinfo=UTC), b"")


@dataclass(frozen=True, slots=True)
class Registered:
    """The definition that is registered now, and whether this call made it."""

    definition: DefinitionRow
    created: bool


def parsed(text: str, *, yaml: bool) -> Manifest:
    """A valid manifest. Raises InvalidManifest with every fault."""
    try:
        return parse_manifest(text, yaml=yaml)
    except ManifestInvalid as error:
        faults = error.violations
        raise InvalidManifest(
            f"the manifest has {len(faults)} fault{'s' if len(faults) != 1 else ''}", violations=faults
        ) from None


async def register(database: Database, namespace: str, manifest: Manifest) -> Registered:
    """Make a manifest the active definition of its workflow.

    The same manifest again changes nothing, not even which one is active. Raises DefinitionDrift when the
    compatibility id is taken by another manifest.
    """
    async with database.transaction() as session:
        await definitions.lock_workflow(session, namespace, manifest.workflow_id, manifest.hash)
        same = await definitions.same_compatibility(session, namespace, manifest.workflow_id, manifest.compatibility_id)
        if same is not None and same[0] != manifest.hash:
            differences = difference(same[1], manifest.canonical)
            raise DefinitionDrift(
                f"compatibility id {manifest.compatibility_id!r} of workflow {manifest.workflow_id!r} is registered"
                " with another manifest; choose a new one",
                violations=[Violation("", text) for text in differences],
                metadata={"registered_hash": same[0].hex(), "manifest_hash": manifest.hash.hex()},
            )
        if same is None:
            await definitions.insert_active(
                session,
                namespace,
                manifest.workflow_id,
                manifest.hash,
                manifest.compatibility_id,
                manifest.canonical,
            )
        row = await definitions.get(session, namespace, manifest.workflow_id, manifest.hash)
    assert row is not None  # inserted or found above, in this transaction
    return Registered(row, same is None)


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
