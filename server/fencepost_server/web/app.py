"""The HTTP side of a server: /healthz (the process lives), /readyz (it has a database and is not draining),
/metrics. What is told there comes from an engine, or from several processes (gathered.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Protocol

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from fencepost_server.config import Config, address_of
from fencepost_server.engine.engine import Engine
from fencepost_server.telemetry import EngineCollector

_FIRST_REQUEST_TIMEOUT = 5.0
"""Seconds from the making of a connection to the end of its first request's head."""


class HttpPortInUse(OSError):
    """The HTTP port is taken, or can't be had."""


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class _Connection(H11Protocol):
    """Ends when no request has come over it in time. uvicorn waits for the first one for ever: a hundred connections
    that bring none would have /healthz answer 503, and the process restarted, for as long as they stay.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as of uvicorn
        """Called by the loop."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(_FIRST_REQUEST_TIMEOUT, self._end_unless_asked)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _end_unless_asked(self) -> None:
        if self.cycle is None:
            self.transport.abort()  # type: ignore[unreachable]  # uvicorn has None there until the first request


class Told(Protocol):
    """What is told over HTTP."""

    async def ready(self) -> bool:
        """Whether there is a database, and new work is taken."""

    async def metrics(self) -> bytes:
        """All metrics in Prometheus's text format."""


class ToldByEngine:
    """What one engine tells."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(engine))

    async def ready(self) -> bool:
        """See Told."""
        return self._engine.healthy and not self._engine.draining

    async def metrics(self) -> bytes:
        """See Told."""
        await self._engine.backlog.count()
        return generate_latest(self._registry)


class HttpServer:
    """Serves on a port of its own."""

    def __init__(self, config: Config, told: Told) -> None:
        self._config = config

        async def healthz(_request: Request) -> Response:
            return PlainTextResponse("ok\n")

        async def readyz(_request: Request) -> Response:
            ready = await told.ready()
            return PlainTextResponse("ready\n" if ready else "not ready\n", 200 if ready else 503)

        async def metrics(_request: Request) -> Response:
            return Response(await told.metrics(), media_type=CONTENT_TYPE_LATEST)

        app = Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)])
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                loop="none",
                http=_Connection,
                ws="none",
                limit_concurrency=100,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
            )
        )
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Bind and serve. Raises HttpPortInUse."""
        host, port = self._config.http_host.strip("[]"), self._config.http_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
        except OSError as error:
            bound.close()
            why = "is the port in use?" if error.errno == errno.EADDRINUSE else error.strerror
            raise HttpPortInUse(f"can't listen on {address_of(host, port)}: {why}") from error
        self._socket, self.port = bound, bound.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[bound]), name="http")

    async def stop(self) -> None:
        """End."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        if self._socket is not None:
            self._socket.close()
