"""What the clients ask of definitions; `plans` says how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

from fencepost.codec import encode
from fencepost.errors import Violation
from fencepost.models import Activation, Definition, Removal, definition_of, violations_of
from fencepost.plans import Asker, Page, Plan, new_id
from fencepost.v1 import definition_service_pb2 as definitions

Manifest: TypeAlias = str | Path | dict[str, Any]
"""A manifest: its text (JSON or YAML), the path of a .json, .yaml or .yml file, or a dict."""

_SUFFIXES = (".json", ".yaml", ".yml")


class DefinitionRequests(Asker):
    """Plans of everything about definitions."""

    def register_definition(self, manifest: Manifest) -> Plan[Definition]:
        """Register a manifest."""
        request = definitions.RegisterDefinitionRequest(
            namespace=self._namespace, request_id=new_id(), **_manifest(manifest)
        )
        response = yield from self._ask("definitions", "RegisterDefinition", request)
        return definition_of(response.definition, created=response.created)

    def validate_definition(self, manifest: Manifest) -> Plan[list[Violation]]:
        """Find what registering would refuse."""
        request = definitions.ValidateDefinitionRequest(namespace=self._namespace, **_manifest(manifest))
        response = yield from self._ask("definitions", "ValidateDefinition", request)
        return list(violations_of(response.violations))

    def get_definition(self, workflow_id: str, definition_hash: str) -> Plan[Definition]:
        """Read a definition."""
        request = definitions.GetDefinitionRequest(
            namespace=self._namespace, workflow_id=workflow_id, definition_hash=definition_hash
        )
        response = yield from self._ask("definitions", "GetDefinition", request)
        return definition_of(response.definition)

    def list_definitions(self, workflow_id: str, size: int, token: str) -> Plan[Page[Definition]]:
        """Read one page of definitions."""
        request = definitions.ListDefinitionsRequest(
            namespace=self._namespace, workflow_id=workflow_id, page_size=size, page_token=token
        )
        response = yield from self._ask("definitions", "ListDefinitions", request)
        return [definition_of(found) for found in response.definitions], response.next_page_token

    def activate_definition(self, workflow_id: str, definition_hash: str) -> Plan[Activation]:
        """Let new runs take a definition."""
        request = definitions.ActivateDefinitionRequest(
            namespace=self._namespace, workflow_id=workflow_id, definition_hash=definition_hash, request_id=new_id()
        )
        response = yield from self._ask("definitions", "ActivateDefinition", request)
        return Activation(definition_of(response.definition), response.previous_hash)

    def remove_definition(self, workflow_id: str, definition_hash: str) -> Plan[Removal]:
        """Let no run take a definition, and end those that have."""
        request = definitions.RemoveDefinitionRequest(
            namespace=self._namespace, workflow_id=workflow_id, definition_hash=definition_hash, request_id=new_id()
        )
        response = yield from self._ask("definitions", "RemoveDefinition", request)
        return Removal(definition_of(response.definition), response.remaining_runs)


def _manifest(manifest: object) -> dict[str, str]:
    """The field of a manifest's request.

    Raises OSError or UnicodeDecodeError for a file that can't be read, TypeError for what is no manifest.
    """
    if not isinstance(manifest, str | Path | dict):
        hint = ": its manifest is its .manifest" if hasattr(manifest, "manifest") else ""
        raise TypeError(f"a manifest is a text, the path of a file, or a dict, not {manifest!r}{hint}")
    if isinstance(manifest, dict):
        return {"json": encode(manifest).json or "null"}
    if isinstance(manifest, Path) or ("\n" not in manifest and manifest.endswith(_SUFFIXES)):
        path = Path(manifest)
        return {"json" if path.suffix == ".json" else "yaml": path.read_text("utf-8")}
    try:
        json.loads(manifest)
    except ValueError:
        return {"yaml": manifest}
    return {"json": manifest}
