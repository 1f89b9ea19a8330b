"""Renewing the leases of all heartbeats together: who waits for whom."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fencepost_server.config import Config
from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.engine.leases import Renewal, Renewer
from fencepost_server.store.connection import Database
from fencepost_server.store.tasks import Lease, Ref

FRAMES, LEASES = 20, 1000


@pytest_asyncio.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    database = Database(Config(dsn=dsn, connect_timeout=30), "renewing", 2)
    await database.open()
    yield database
    await database.close()


class Heartbeats:
    """Heartbeats of leases that nobody has; ``answers`` has the sessions in the order in which they were told."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.lost = 0

    def frame(self, session_id: str, leases: int, namespace: str = "default") -> Renewal:
        refs = [(str(uuid.uuid4()), 2, 1) for _ in range(leases)]

        def answered(leases: dict[Ref, Lease | None]) -> None:
            assert list(leases) == refs
            assert not any(leases.values())
            self.answers.append(session_id)
            self.lost += len(leases)

        return Renewal(session_id, namespace, refs, answered, lambda: True)


async def test_a_heartbeat_waits_for_one_frame_of_each_other_session_at_most(database: Database) -> None:
    renewer, heartbeats = Renewer(database.config, database), Heartbeats()
    for _ in range(FRAMES):
        for flooding in ("a", "b", "c"):
            renewer.submit(heartbeats.frame(flooding, LEASES))
    renewer.submit(heartbeats.frame("quiet", 1))
    renewer.submit(heartbeats.frame("elsewhere", 1, namespace="other"))
    assert await renewer.run_once() == 0
    assert sorted(heartbeats.answers) == ["a", "b", "c", "elsewhere", "quiet"]
    while await renewer.run_once() is not None:
        pass
    assert heartbeats.lost == 3 * FRAMES * LEASES + 2


async def test_of_a_flood_the_newest_frames_are_kept_and_those_of_a_closed_stream_are_dropped(
    database: Database,
) -> None:
    """I12."""
    renewer, heartbeats = Renewer(database.config, database), Heartbeats()
    for _ in range(10 * FRAMES):
        renewer.submit(heartbeats.frame("a", 1))
    gone = heartbeats.frame("gone", 1)
    gone.wanted = lambda: False
    renewer.submit(gone)
    while await renewer.run_once() is not None:
        pass
    assert heartbeats.answers == ["a"] * FRAMES


async def test_heartbeats_outlive_an_outage(dsn: str, database: Database) -> None:
    away = Database(Config(dsn="host=127.0.0.1 port=1 dbname=none", connect_timeout=1), "away", 1)
    await away.open()
    renewer, heartbeats = Renewer(away.config, away), Heartbeats()
    for session_id in ("a", "b", "a"):
        renewer.submit(heartbeats.frame(session_id, 1))
    with pytest.raises(DatabaseUnavailable):
        await renewer.run_once()
    await away.close()
    renewer._database = database
    while await renewer.run_once() is not None:
        pass
    assert sorted(heartbeats.answers) == ["a", "a", "b"]


async def test_of_progress_that_can_not_be_told_the_newest_is_kept(database: Database) -> None:
    """I12: it waits with its heartbeats while the database is away, and nobody is promised it."""
    renewer, heartbeats = Renewer(database.config, database), Heartbeats()
    frames = [heartbeats.frame("a", 1) for _ in range(10)]
    for frame in frames:
        frame.progress = {frame.refs[0]: "x" * (1 << 20)}
        renewer.submit(frame)
    assert [bool(frame.progress) for frame in frames] == [False] * 6 + [True] * 4
    assert all(frame.refs for frame in frames)
