"""What retention can't delete keeps nothing else from going."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, LiteralString

import psycopg
import pytest
import pytest_asyncio

from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.engine.retention import TURN, Retention
from fencepost_server.store import retention as stored
from tests.engine.ageing import Scene, turn
from tests.engine.rows import execute
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.servers import InProcessServer


@pytest_asyncio.fixture
async def scene(server: InProcessServer, dsn: str) -> Scene:
    return Scene(dsn, server.app.engine)


@asynccontextmanager
async def refusing(dsn: str, code: LiteralString) -> AsyncIterator[None]:
    """Events of type 99 can't be deleted, for an error that Postgres itself raises."""
    await execute(
        dsn,
        f"""create function refuse() returns trigger language plpgsql as
            $$ begin raise exception 'no' using errcode = '{code}'; end $$""",
    )
    try:
        await execute(
            dsn,
            """create trigger refuse before delete on event for each row when (old.type = 99)
               execute function refuse()""",
        )
        yield
    finally:
        await execute(dsn, "drop function refuse cascade")


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("code", ["XX001", "57014"])  # damaged; too slow, which a database that is away looks like
async def test_a_run_that_can_not_be_deleted_keeps_no_other_and_no_turn_from_its_end(
    scene: Scene, api: Api, code: LiteralString, hidden: bool
) -> None:
    """Row 12: it is first in order. Those behind it go, and those that fall due later."""
    await api.register(manifest())
    [poison] = await scene.runs(1, 12)
    await scene.runs(20, 11)
    await scene.runs(1, 11, events=30)
    await execute(scene.dsn, "update event set type = 99 where run_id = %s", [poison])
    if hidden:
        await execute(scene.dsn, "update run set namespace = '' where run_id = %s", [poison])
    loop = scene.retention(retention_batch=8, retention_batch_events=16)
    async with refusing(scene.dsn, code):
        for _ in range(2):
            await failing_turn(loop)
            assert await scene.left() == {poison}
            await scene.runs(5, 11)
    await turn(loop)
    assert await scene.left() == set()


async def test_keys_that_can_not_be_looked_at_keep_no_run(
    scene: Scene, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn begins all the same, and no sooner than after one that went well."""
    await api.register(manifest())

    async def damaged(*arguments: Any) -> Any:
        raise psycopg.errors.DataCorrupted("no")

    monkeypatch.setattr(stored, "forget_keys", damaged)
    loop = scene.retention()
    for _ in range(2):
        await scene.runs(5, 11)
        await failing_turn(loop)
        assert await scene.left() == set()


async def failing_turn(loop: Retention) -> None:
    """One turn to its end, in which steps fail."""
    failed = 0
    for _ in range(100):
        try:
            if await loop.run_once() == TURN:
                assert failed
                return
        except (psycopg.Error, DatabaseUnavailable):
            failed += 1
    raise AssertionError(f"the turn is not over, {failed} steps failed")
