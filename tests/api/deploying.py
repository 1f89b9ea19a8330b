"""Short calls of those RPCs that say which definition new runs take."""

from __future__ import annotations

from typing import Any

from fencepost.v1 import definition_service_pb2 as pb
from tests.fixtures.api import DEADLINE, Api


async def registered(api: Api, text: str, **fields: Any) -> str:
    """The hash of a manifest after its registration."""
    return (await api.register(text, **fields)).definition.definition_hash


async def activate(api: Api, hash_: str, workflow_id: str = "wf", **fields: Any) -> pb.ActivateDefinitionResponse:
    """Let new runs take a definition."""
    request = pb.ActivateDefinitionRequest(workflow_id=workflow_id, definition_hash=hash_, **fields)
    return await api.definitions.ActivateDefinition(request, timeout=DEADLINE)


async def remove(api: Api, hash_: str, workflow_id: str = "wf", **fields: Any) -> pb.RemoveDefinitionResponse:
    """Remove a definition."""
    request = pb.RemoveDefinitionRequest(workflow_id=workflow_id, definition_hash=hash_, **fields)
    return await api.definitions.RemoveDefinition(request, timeout=DEADLINE)
