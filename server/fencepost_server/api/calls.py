"""What every unary call has around it: our errors become google.rpc.Status, others an incident."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

from fencepost_server.wire.status import aborting, sanitised

Self = TypeVar("Self")
Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]


def call(
    method: Callable[[Self, Request], Awaitable[Response]],
) -> Callable[[Self, Request, Context], Awaitable[Response]]:
    """A unary RPC from a method of a request."""

    @functools.wraps(method)
    async def handler(self: Self, request: Request, context: Context) -> Response:
        try:
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
            async for response in method(self, request):
                yield response
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001  # as in ``call``
            await context.abort(*aborting(sanitised(error)))

    return handler
