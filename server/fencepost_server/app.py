"""A server process: the only module that knows all layers.

``running`` builds everything from a Config, serves, and ends in order: not serving any more, workers drained,
lanes flushed, calls ended, loops stopped.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fencepost_server.api.server import GrpcServer
from fencepost_server.config import Config, address_of
from fencepost_server.engine.engine import Engine
from fencepost_server.logs import tell_ports
from fencepost_server.store import migrate
from fencepost_server.web.app import HttpServer, ToldByEngine

log = logging.getLogger("fencepost")

_HEALTH_INTERVAL = 0.5


@dataclass(slots=True)
class Running:
    """A server that serves."""

    config: Config
    engine: Engine
    grpc: GrpcServer
    http: HttpServer

    @property
    def grpc_address(self) -> str:
        """host:port."""
        return address_of(self.config.grpc_host, self.grpc.port)

    @property
    def http_address(self) -> str:
        """host:port."""
        return address_of(self.config.http_host, self.http.port)


@asynccontextmanager
async def running(config: Config, *, shared_port: bool = False) -> AsyncIterator[Running]:
    """Serve within the block; ends gracefully after it. ``shared_port``: other processes of the same command listen on
    the gRPC port as well.

    Raises SchemaVersionMismatch, DatabaseUnavailable (the first look at the schema has to succeed), PortInUse.
    """
    await migrate.check(config.dsn)
    engine = Engine(config)
    grpc = GrpcServer(config, engine, shared_port=shared_port)
    http = HttpServer(config, ToldByEngine(engine))
    await engine.start()
    try:
        await grpc.start()
        try:
            await http.start()
            server = Running(config, engine, grpc, http)
            health = asyncio.create_task(_report_health(server), name="health")
            try:
                yield server
            finally:
                health.cancel()
                await asyncio.gather(health, return_exceptions=True)
                await _drain(server)
        finally:
            await grpc.stop()
            await http.stop()
    finally:
        await engine.stop()


async def _report_health(server: Running) -> None:
    """NOT_SERVING without a database or while draining."""
    while True:
        await server.grpc.set_serving(serving=server.engine.healthy and not server.engine.draining)
        await asyncio.sleep(_HEALTH_INTERVAL)


async def _drain(server: Running) -> None:
    """Take no more, let workers finish, write what was reported."""
    started = time.monotonic()
    await server.grpc.set_serving(serving=False)
    server.engine.drain()
    if server.grpc.streams.count:
        log.info(
            "waiting up to %g s for %d worker streams to finish; a second signal does not wait",
            server.config.shutdown_grace,
            server.grpc.streams.count,
        )
    await server.grpc.streams.drain(server.config.shutdown_grace)
    await server.engine.flush(max(3.0, server.config.shutdown_grace - (time.monotonic() - started)))


async def serve(
    config: Config,
    *,
    shared_port: bool = False,
    at_once: signal.Signals | None = None,
    announced: Callable[[Running], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. ``at_once``: the signal that ends it without waiting for anything; None: a second
    one of those two does. ``announced`` is told when it serves; else standard output is.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set() and at_once is None:
            end_at_once()
        stop.set()

    def end_at_once() -> None:
        log.warning("told to end now: exiting at once")
        os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if at_once is not None:
        loop.add_signal_handler(at_once, end_at_once)
    async with running(config, shared_port=shared_port) as server:
        _spare_the_collector()
        (announced or announce)(server)
        await stop.wait()
        log.info("shutting down")
    log.info("stopped")


def _spare_the_collector() -> None:
    """Almost nothing here is cyclic, and a batch makes thousands of values: with the usual thresholds a tenth of the
    server's time goes into looking at them. What is loaded stays, so it is never looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def announce(server: Running) -> None:
    """Tell the ports: as a JSON line for programs, else as a sentence."""
    tell_ports(server.config, server.grpc.port, server.http.port)
