"""A server process: the only module that knows all layers.

``running`` builds everything from a Config, serves, and ends in order: not serving any more, workers drained,
lanes flushed, calls ended, loops stopped.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fencepost_server.api.server import GrpcServer
from fencepost_server.config import Config
from fencepost_server.engine.engine import Engine
from fencepost_server.store import migrate
from fencepost_server.web.app import HttpServer

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
        return f"{self.config.grpc_host}:{self.grpc.port}"


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Running]:
    """Serve within the block; ends gracefully after it.

    Raises SchemaVersionMismatch, DatabaseUnavailable (the first look at the schema has to succeed), PortInUse.
    """
    await migrate.check(config.dsn)
    engine = Engine(config)
    grpc = GrpcServer(config, engine)
    http = HttpServer(config, engine)
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
    await server.grpc.streams.drain(server.config.shutdown_grace)
    await server.engine.flush(max(2.0, server.config.shutdown_grace - (time.monotonic() - started)))


async def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            log.warning("a second signal: exiting at once")
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with running(config) as server:
        _spare_the_collector()
        announce(server)
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
    config = server.config
    if config.log_format == "json":
        line = {"event": "serving", "grpc_port": server.grpc.port, "http_port": server.http.port, "pid": os.getpid()}
        print(json.dumps(line), flush=True)  # noqa: T201  # stdout is what a supervisor reads
    else:
        print(  # noqa: T201  # the same for people
            f"fencepost serves gRPC on {server.grpc_address}, HTTP on {config.http_host}:{server.http.port}", flush=True
        )


def set_up_logging(config: Config) -> None:
    """Log lines to standard error, as text or JSON."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    # The driver and its pool have several lines for each connection that is lost or not had. Ours say it once a second.
    logging.getLogger("psycopg").setLevel(logging.ERROR)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
