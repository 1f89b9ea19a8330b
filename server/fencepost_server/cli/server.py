"""The commands that work on a server or its database: serve, migrate, restore-epoch."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import typer

from fencepost_server.cli.faults import WrongUsage
from fencepost_server.cli.settings import config_of, with_settings
from fencepost_server.config import Config

T = TypeVar("T")

NO_DSN = "no database: say --dsn postgresql://user:password@host/database, or set FENCEPOST_DSN"


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in a new event loop: uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _serve(
    settings: dict[str, Any],
    migrate: Annotated[bool, typer.Option("--migrate", help="Bring the database's schema up to date first.")] = False,
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends at once."""
    config = config_of(settings)
    if not config.dsn:
        raise WrongUsage(NO_DSN)
    from fencepost_server import app

    app.set_up_logging(config)
    run_loop(_migrate_and_serve(config, migrate=migrate))


async def _migrate_and_serve(config: Config, *, migrate: bool) -> None:
    import logging

    from fencepost_server import app
    from fencepost_server.store import explain as _explain  # noqa: F401  # known to `faults.explain` from now on
    from fencepost_server.store.migrate import migrate as bring_up_to_date

    if migrate:
        for name in await bring_up_to_date(config.dsn):
            logging.getLogger("fencepost").info("applied %s", name)
    await app.serve(config)


serve = with_settings(_serve)

Dsn = Annotated[
    str, typer.Option("--dsn", envvar="FENCEPOST_DSN", help="Postgres connection string.", show_default=False)
]


def migrate(dsn: Dsn = "") -> None:
    """Bring the database's schema up to date. Safe to run from several places at once."""
    if not dsn:
        raise WrongUsage(NO_DSN)
    from fencepost_server.store import explain as _explain  # noqa: F401  # known to `faults.explain` from now on
    from fencepost_server.store.migrate import migrate as bring_up_to_date

    applied = run_loop(bring_up_to_date(dsn))
    for name in applied:
        typer.echo(f"applied {name}")
    if not applied:
        typer.echo("up to date")
