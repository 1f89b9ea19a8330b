"""Registers the definitions of a worker's code workflows, so that runs of them can be started and offered to it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import grpc

from fencepost.errors import FencepostError
from fencepost.status import error_of_call
from fencepost.v1 import definition_service_pb2 as definitions
from fencepost.v1 import definition_service_pb2_grpc as rpc
from fencepost.workflow import Workflow

_CALL_TIMEOUT = 10.0


class Registering:
    """Registers each of ``workflows`` once in the life of a worker: what becomes of a definition then is not its
    business.
    """

    def __init__(self, namespace: str, workflows: Iterable[Workflow[..., Any]]) -> None:
        self._namespace = namespace
        self._left = list(workflows)

    async def __call__(self, channel: grpc.aio.Channel) -> None:
        """Register what is left. Raises FencepostError; those that were registered before it need no repetition."""
        stub = rpc.DefinitionServiceStub(channel)
        while self._left:
            request = definitions.RegisterDefinitionRequest(
                namespace=self._namespace, json=self._left[0].manifest, request_id=str(uuid.uuid4())
            )
            try:
                await stub.RegisterDefinition(request, timeout=_CALL_TIMEOUT)
            except grpc.RpcError as error:
                raise _of(self._left[0], error_of_call(error)) from error
            self._left.pop(0)


def _of(workflow: Workflow[..., Any], error: FencepostError) -> FencepostError:
    """The error with the name of the workflow that it is about."""
    error.message = f"workflow {workflow.workflow_id}: {error.message}"
    error.args = (error.message, *error.args[1:])
    return error
