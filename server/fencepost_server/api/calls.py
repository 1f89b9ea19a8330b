"""What every call has around it: a limit of calls at a time; in the unary services, bytes that are no message become
INVALID_REQUEST, our errors google.rpc.Status, others an incident.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from fencepost_server.domain.errors import InvalidRequest, Overloaded
from fencepost_server.wire.status import aborting, sanitised

Self = TypeVar("Self")
Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]


class CallLimit(grpc.aio.ServerInterceptor):
    """Refuses calls of all services beyond ``limit`` at a time as OVERLOADED, before their requests are read.

    gRPC's own limit says neither why it refuses nor when to come again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls = 0

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Called by gRPC in the task of a call, which ends with the call, however that ends."""
        task = asyncio.current_task()
        if task is None or self._calls >= self._limit:
            return _TOO_MANY
        self._calls += 1
        task.add_done_callback(self._ended)
        return await continuation(details)

    def _ended(self, _task: asyncio.Task[Any]) -> None:
        self._calls -= 1


async def _refuse(_requests: object, context: Context) -> None:
    await context.abort(*aborting(Overloaded("too many calls at a time")))


_TOO_MANY: Any = grpc.stream_stream_rpc_method_handler(_refuse)  # of a stream, gRPC reads nothing that nobody asks for


def handlers(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """A service as the generated code would register it, but for requests that can't be decoded: gRPC would answer
    UNKNOWN, and quote the parser.
    """
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        streams = method.server_streaming
        make: Any = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        methods[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=functools.partial(_decode, GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _decode(kind: type[Message], data: bytes) -> Message | InvalidRequest:
    try:
        return kind.FromString(data)
    except DecodeError:
        return InvalidRequest(f"the bytes are not a {kind.DESCRIPTOR.name} in UTF-8")


def call(
    method: Callable[[Self, Request], Awaitable[Response]],
) -> Callable[[Self, Request, Context], Awaitable[Response]]:
    """A unary RPC from a method of a request."""

    @functools.wraps(method)
    async def handler(self: Self, request: Request, context: Context) -> Response:
        try:
            if isinstance(request, InvalidRequest):
                raise request
            return await method(self, request)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # sanitised logs what is not ours and tells an incident id
            await context.abort(*aborting(sanitised(error)))
            raise AssertionError("abort raises") from error

    return handler


def stream(
    method: Callable[[Self, Request], AsyncIterator[Response]],
) -> Callable[[Self, Request, Context], AsyncIterator[Response]]:
    """A server-streaming RPC from an async generator over a request."""

    @functools.wraps(method)
    async def handler(self: Self, request: Request, context: Context) -> AsyncIterator[Response]:
        try:
            if isinstance(request, InvalidRequest):
                raise request
            async for response in method(self, request):
                yield response
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001  # as in ``call``
            await context.abort(*aborting(sanitised(error)))

    return handler
