"""Loops that look into the database: what is told to them while they look, or happens right after, is not missed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import LiteralString

import pytest

from fencepost_server.config import Config
from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.engine import reconcile
from fencepost_server.engine.leases import Sweeper
from fencepost_server.store.connection import Database
from tests.engine.rows import count, execute, fetch, holding
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import StartInProcessServer
from tests.fixtures.waiting import eventually

LOOKING: LiteralString = (
    "datname = current_database() and wait_event_type = 'Lock' and query like '%lease_session is not null%'"
)


async def test_an_expiry_that_a_sweep_is_told_of_while_it_looks_is_swept_in_time(dsn: str) -> None:
    patient = Config(dsn=dsn, lock_timeout=30, statement_timeout=60, batch_timeout=60)
    database = Database(patient, "loops", 2)
    await database.open()
    try:
        sweeper = Sweeper(database.config, database, lambda reports: None)
        async with holding(dsn, "lock table task"):
            sweep = asyncio.create_task(sweeper.run_once())
            await eventually(lambda: count(dsn, "pg_stat_activity", LOOKING))
            sweeper.due_by(2.0)
        delay = await asyncio.wait_for(sweep, 30)
        assert delay is not None
        assert delay <= 2.0
    finally:
        await database.close()


async def test_a_sweep_that_failed_is_due_again(dsn: str) -> None:
    database = Database(Config(dsn=dsn, lock_timeout=0.1), "loops", 2)
    await database.open()
    try:
        reported: list[object] = []
        sweeper = Sweeper(database.config, database, lambda reports: reported.append(list(reports)))
        async with holding(dsn, "lock table task"):
            with pytest.raises(DatabaseUnavailable):
                await sweeper.run_once()
        await sweeper.run_once()
        assert reported == [[]]
    finally:
        await database.close()


async def test_a_lease_whose_commit_lands_after_the_first_look_for_it_is_taken_back_for_free(
    in_process_server: StartInProcessServer,
    connect_api: Callable[[str], Api],
    connect_worker: Callable[..., Awaitable[RawWorker]],
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row 48: Postgres may commit what it was sent long after its connection was cut."""
    monkeypatch.setattr(reconcile, "_SETTLE", 0.05)
    monkeypatch.setattr(reconcile, "_BETWEEN_LOOKS", 0.2)
    monkeypatch.setattr(reconcile, "_LOOKS", 100)  # so many that some come behind the lease, however late that is
    server = await in_process_server(dsn)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1, retry={"max_attempts": 1}))
    worker = await connect_worker(server.grpc_address, capacity=0)
    await api.start()
    reconciler = server.app.engine.reconciler
    before = reconciler.loop.last_good
    reconciler.request()
    await eventually(lambda: reconciler.loop.last_good > before)
    statement = "update task set lease_session = %s, attempt = 1, token = 1, lease_expires_at = now() + interval '1 h'"
    assert await execute(dsn, statement, [worker.sessions[0]]) == 1

    async def free() -> bool:
        return await fetch(dsn, "select attempt, lease_session from task") == [(0, None)]

    await eventually(free)
