"""DefinitionService."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

from fencepost.v1 import definition_service_pb2 as pb
from fencepost.v1 import definition_service_pb2_grpc, run_service_pb2
from fencepost_server.api import views
from fencepost_server.api.calls import call
from fencepost_server.api.checks import Checks, page_token, read_page_token
from fencepost_server.config import Config
from fencepost_server.domain.errors import InvalidManifest, InvalidPageToken, InvalidRequest
from fencepost_server.domain.manifest import Manifest
from fencepost_server.domain.violation import Violation
from fencepost_server.engine import definitions
from fencepost_server.engine.engine import Engine

_DEFAULT_PAGE = 100
_DEFINITIONS = "definitions"


class DefinitionService(definition_service_pb2_grpc.DefinitionServiceServicer):
    """See proto/fencepost/v1/definition_service.proto."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self._config = config
        self._engine = engine

    @call
    async def RegisterDefinition(self, request: pb.RegisterDefinitionRequest) -> pb.RegisterDefinitionResponse:
        """Register a manifest."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        checks.text(request.request_id, "request_id")
        checks.done()
        registered = await definitions.register(self._engine.reads, namespace, await self._manifest(request))
        return pb.RegisterDefinitionResponse(
            definition=views.definition(registered.definition), created=registered.created
        )

    @call
    async def ValidateDefinition(self, request: pb.ValidateDefinitionRequest) -> pb.ValidateDefinitionResponse:
        """Tell the faults of a manifest."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        checks.done()
        try:
            manifest = await self._manifest(request)
        except InvalidManifest as error:
            return _invalid(error.violations)
        if cycles := await definitions.find_cycles(self._engine.reads, namespace, manifest):
            return _invalid(cycles)
        return pb.ValidateDefinitionResponse(definition_hash=manifest.hash.hex(), manifest_json=manifest.canonical)

    async def _manifest(self, request: pb.RegisterDefinitionRequest | pb.ValidateDefinitionRequest) -> Manifest:
        which = request.WhichOneof("manifest")
        if which is None:
            fault = Violation("manifest", "json or yaml is required")
            raise InvalidRequest("invalid request: manifest: json or yaml is required", violations=[fault])
        text = request.yaml if which == "yaml" else request.json
        if len(text) > self._config.max_manifest_bytes or len(text.encode()) > self._config.max_manifest_bytes:
            fault = Violation("", f"more than {self._config.max_manifest_bytes} bytes")
            raise InvalidManifest("the manifest is too large", violations=[fault])
        # A large one takes seconds to read: in a thread, so that heartbeats are answered meanwhile.
        return await asyncio.to_thread(definitions.parsed, text, yaml=which == "yaml")

    @call
    async def ActivateDefinition(self, request: pb.ActivateDefinitionRequest) -> pb.ActivateDefinitionResponse:
        """Let new runs take a definition."""
        activated = await definitions.activate(self._engine.reads, *_named(request))
        return pb.ActivateDefinitionResponse(
            definition=views.definition(activated.definition), previous_hash=activated.previous_hash.hex()
        )

    @call
    async def RemoveDefinition(self, request: pb.RemoveDefinitionRequest) -> pb.RemoveDefinitionResponse:
        """Remove a definition and end its runs."""
        row, removal = await definitions.remove(self._engine.reads, *_named(request))
        remaining = await self._engine.remover.end_runs(removal)
        return pb.RemoveDefinitionResponse(definition=views.definition(row), remaining_runs=remaining)

    @call
    async def GetDefinition(self, request: pb.GetDefinitionRequest) -> pb.GetDefinitionResponse:
        """Read a definition."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        workflow_id = checks.name(request.workflow_id, "workflow_id")
        hash_ = checks.hash(request.definition_hash)
        checks.done()
        row = await definitions.get(self._engine.reads, namespace, workflow_id, hash_)
        return pb.GetDefinitionResponse(definition=views.definition(row))

    @call
    async def ListDefinitions(self, request: pb.ListDefinitionsRequest) -> pb.ListDefinitionsResponse:
        """List definitions."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        workflow_id = checks.name(request.workflow_id, "workflow_id", required=False)
        limit = checks.number(request.page_size, "page_size", 1, self._config.max_page_size, _DEFAULT_PAGE)
        checks.done()
        after = definitions.FIRST_PAGE
        if request.page_token:
            name, at, hex_ = read_page_token(_DEFINITIONS, request.page_token, (str, datetime, str))
            try:
                after = (name, at, bytes.fromhex(hex_))
            except ValueError:
                raise InvalidPageToken("page_token is not one of this list") from None
        rows = await definitions.list_page(self._engine.reads, namespace, workflow_id, after, limit + 1)
        token = ""
        if len(rows) > limit:
            last = rows[limit - 1]
            token = page_token(_DEFINITIONS, [last.workflow_id, last.created_at, last.hash.hex()])
        return pb.ListDefinitionsResponse(
            definitions=[views.definition(row) for row in rows[:limit]], next_page_token=token
        )


def _invalid(faults: Sequence[Violation]) -> pb.ValidateDefinitionResponse:
    return pb.ValidateDefinitionResponse(
        violations=[run_service_pb2.Violation(path=fault.path, message=fault.message) for fault in faults]
    )


def _named(request: pb.ActivateDefinitionRequest | pb.RemoveDefinitionRequest) -> tuple[str, str, bytes]:
    """Namespace, workflow and hash of the definition that is to be changed."""
    checks = Checks()
    namespace = checks.namespace(request.namespace)
    workflow_id = checks.name(request.workflow_id, "workflow_id")
    hash_ = checks.hash(request.definition_hash)
    if not request.definition_hash:
        checks.note("definition_hash", "is required")
    checks.text(request.request_id, "request_id")
    checks.done()
    return namespace, workflow_id, hash_ or b""
