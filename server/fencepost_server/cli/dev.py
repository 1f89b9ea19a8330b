"""`fencepost dev`: a PostgreSQL of one's own, its schema and a server, in one process that ends all of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.faults import CommandFailed
from fencepost_server.cli.loop import quiet_grpc, run_loop
from fencepost_server.cli.settings import config_of, with_settings
from fencepost_server.config import Config, address_of

if TYPE_CHECKING:
    from fencepost_server.app import Running
    from fencepost_server.embedded import EmbeddedPostgres

log = logging.getLogger("fencepost")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DATABASE_CHECK_INTERVAL = 1.0


def _dev(
    settings: dict[str, Any],
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            help="Where the database is kept. Default: $XDG_DATA_HOME/fencepost, that is ~/.local/share/fencepost; "
            "for root /var/lib/fencepost.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """A server with a PostgreSQL of its own, for development.

    Ctrl-C ends both; the data stays, and the next `fencepost dev` goes on with it. PostgreSQL does not run as root: for
    root it runs as the owner of the data folder, `nobody` if it is new. Each setting is also the environment variable
    FENCEPOST_<NAME>.
    """
    from fencepost_server.embedded import EmbeddedPostgres, default_folder

    # After the folder is had: of two on one folder with the same ports, the second is told of the first, not of ports.
    database = EmbeddedPostgres(data_dir or default_folder(), log.info, lambda: _refuse_taken_ports(config))
    config = config_of({**settings, "dsn": database.dsn, "listen_dsn": database.dsn})
    quiet_grpc()
    from fencepost_server.logs import set_up_logging

    set_up_logging(config)
    with _ended_by_signals(), database:
        if database.account is not None:
            log.info("PostgreSQL does not run as root: it runs as the user %s", database.account.name)
        run_loop(_serve(database, config))


dev = with_settings(_dev, dsn=None, listen_dsn=None, processes=None)


def _refuse_taken_ports(config: Config) -> None:
    """Raises CommandFailed for a port that is in use, before the time is taken to copy programs and make a database."""
    for host, port in ((config.grpc_host, config.grpc_port), (config.http_host, config.http_port)):
        if port == 0:
            continue
        with contextlib.suppress(socket.gaierror):  # whoever binds in earnest tells of it
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            with socket.socket(family, kind, protocol) as probe:
                # As servers do: connections that have ended may still have the port, which is no obstacle.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(address)
                except OSError as error:
                    raise CommandFailed(f"can't listen on {address_of(host, port)}: {_why_not(error)}") from error


def _why_not(error: OSError) -> str:
    return "is the port in use?" if error.errno == errno.EADDRINUSE else str(error.strerror)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let signals end the process in order while no event loop handles them."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    wanted = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _serve(database: EmbeddedPostgres, config: Config) -> None:
    from fencepost_server import app
    from fencepost_server.store.migrate import migrate

    stop = _stop_on_signals(database)
    for name in await migrate(config.dsn):
        log.info("applied %s", name)
    async with app.running(config) as server:
        database.note(address=server.grpc_address)
        if config.log_format == "json":
            line = {"event": "database", "dsn": database.dsn, "data_dir": str(database.folder)}
            typer.echo(json.dumps(line))
            app.announce(server)
        else:
            typer.echo(_how_to_go_on(database, server))
        await _until_stopped(stop, database)
        log.info("shutting down")
    log.info("stopped; the data is in %s", database.folder)


def _stop_on_signals(database: EmbeddedPostgres) -> asyncio.Event:
    """The event of the first signal. A second one ends the process at once; PostgreSQL ends by itself then."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            log.warning("a second signal: exiting at once")
            database.tell_to_stop()
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
            loop.add_signal_handler(number, on_signal)
    return stop


async def _until_stopped(stop: asyncio.Event, database: EmbeddedPostgres) -> None:
    """Wait for the signal. Raises EmbeddedFailed if PostgreSQL ends before that."""
    while database.running:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DATABASE_CHECK_INTERVAL):
                await stop.wait()
                return
    raise database.failure("PostgreSQL has ended")


def _how_to_go_on(database: EmbeddedPostgres, server: Running) -> str:
    """What is there now, and what to type next."""
    psql = shutil.which("psql") or str(database.psql)
    program = _program()
    lines = [
        "",
        "Fencepost is running. Ctrl-C ends it; the data stays.",
        "",
        f"  gRPC      {server.grpc_address}",
        f"  HTTP      http://{server.http_address} (/readyz, /metrics)",
        f"  Database  {database.dsn}",
        f"  Data      {database.folder}",
        "",
        "In another terminal:",
        "",
    ]
    if server.grpc.port != Config().grpc_port:
        lines.append(f"  export FENCEPOST_ADDRESS={server.grpc_address}")
    lines += [
        f"  {program} definitions register workflow.yaml",
        f"  {program} runs start my-workflow --input '{{\"n\": 1}}'",
        f"  {program} runs list",
        f"  {psql} {shlex.quote(database.dsn)}",
        "",
    ]
    return "\n".join(lines)


def _program() -> str:
    """How this program can be called from here."""
    if shutil.which("fencepost"):
        return "fencepost"
    return sys.argv[0] if Path(sys.argv[0]).name == "fencepost" else f"{sys.executable} -m fencepost_server.cli"
