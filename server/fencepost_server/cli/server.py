"""The commands that work on a server or its database: serve, migrate, restore-epoch."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from fencepost_server.cli.faults import WrongUsage
from fencepost_server.cli.loop import quiet_grpc, run_loop
from fencepost_server.cli.settings import config_of, with_settings
from fencepost_server.config import Config

NO_DSN = "no database: say --dsn postgresql://user:password@host/database, or set FENCEPOST_DSN"


def _serve(
    settings: dict[str, Any],
    migrate: Annotated[bool, typer.Option("--migrate", help="Bring the database's schema up to date first.")] = False,
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends at once.

    With --processes N, N processes serve on the one gRPC port, and one more starts, watches and ends them.

    Each setting is also the environment variable FENCEPOST_<NAME>; a flag goes before it.
    """
    config = config_of(settings)
    if not config.dsn:
        raise WrongUsage(NO_DSN)
    quiet_grpc()
    from fencepost_server.logs import set_up_logging

    set_up_logging(config)
    code = run_loop(_migrate_and_serve(config, migrate=migrate))
    if code:
        raise typer.Exit(code)


async def _migrate_and_serve(config: Config, *, migrate: bool) -> int:
    import logging

    from fencepost_server.store.migrate import migrate as bring_up_to_date

    if migrate:
        for name in await bring_up_to_date(config.dsn):
            logging.getLogger("fencepost").info("applied %s", name)
    if config.processes == 1:
        from fencepost_server import app

        await app.serve(config)
        return 0
    from fencepost_server.supervisor import supervise

    return await supervise(config, [sys.executable, "-m", "fencepost_server.cli.child"])


serve = with_settings(_serve)

Dsn = Annotated[
    str, typer.Option("--dsn", envvar="FENCEPOST_DSN", help="Postgres connection string.", show_default=False)
]


def migrate(dsn: Dsn = "") -> None:
    """Bring the database's schema up to date. Safe to run from several places at once."""
    if not dsn:
        raise WrongUsage(NO_DSN)
    from fencepost_server.store.migrate import migrate as bring_up_to_date

    applied = run_loop(bring_up_to_date(dsn))
    for name in applied:
        typer.echo(f"applied {name}")
    if not applied:
        typer.echo("up to date")


def restore_epoch(
    dsn: Dsn = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
) -> None:
    """Make every fencing token from now on larger than all before.

    Needed once after a database was restored from a backup, or after a failover that lost transactions: the database
    has forgotten tokens that it gave out, and would give them out again. Stop all servers before it, and start them
    after it.
    """
    if not dsn:
        raise WrongUsage(NO_DSN)
    if not yes:
        if not sys.stdin.isatty():
            raise WrongUsage("say --yes: this is for a database that was restored, or has lost transactions")
        typer.confirm("Was the database restored from a backup, or has it lost transactions?", abort=True)
    epoch = run_loop(_raise_epoch(dsn))
    typer.echo(f"the epoch is {epoch} now: every fencing token from now on is larger than all before")


async def _raise_epoch(dsn: str) -> int:
    from fencepost_server.config import load
    from fencepost_server.store.cluster import raise_epoch
    from fencepost_server.store.connection import Database
    from fencepost_server.store.migrate import check

    await check(dsn)
    database = Database(load({"dsn": dsn}), "epoch", 1)
    await database.open()
    try:
        return await raise_epoch(database)
    finally:
        await database.close()
