"""A worker that chooses its session's id can name the session also if its Welcome was lost (row 1)."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

import pytest

from tests.engine.rows import fetch
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import OK, RawWorker, StreamEnded
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually

NONCE = "the nonce of a process"


async def test_what_came_behind_a_lost_welcome_is_offered_again_at_once_and_costs_no_attempt(
    server: InProcessServer, api: Api, connect_worker: Callable[..., Awaitable[RawWorker]], dsn: str
) -> None:
    await api.register(manifest(1, retry={"max_attempts": 1}))
    run_id = (await api.start()).run_id
    chosen = str(uuid.uuid4())
    first = await connect_worker(server.grpc_address, process_nonce=NONCE, session_id=chosen)

    async def leased() -> bool:
        rows = await fetch(dsn, "select lease_session::text from task where run_id = %s", [run_id])
        return rows == [(chosen,)]

    await eventually(leased)
    await first.drop()
    second = await connect_worker(
        server.grpc_address, process_nonce=NONCE, session_id=str(uuid.uuid4()), previous_session_ids=[chosen]
    )
    task = await second.task()
    assert (task.task.run_id, task.attempt) == (run_id, 1)
    await second.complete(task)
    await api.wait(run_id)


async def test_an_id_that_was_used_before_or_is_none_is_refused(
    server: InProcessServer, connect_worker: Callable[..., Awaitable[RawWorker]]
) -> None:
    """Nobody can take the place of a session that is there."""
    chosen = str(uuid.uuid4())
    worker = await connect_worker(server.grpc_address, session_id=chosen)
    assert worker.welcome is not None
    assert worker.welcome.session_id == chosen
    for wrong in (chosen, "mine", chosen.upper()):
        with pytest.raises(StreamEnded) as caught:
            await connect_worker(server.grpc_address, session_id=wrong)
        assert caught.value.error is not None
        assert caught.value.error.reason == "INVALID_HELLO"
        assert [path for path, _ in caught.value.error.violations] == ["session_id"]


async def test_whoever_names_the_session_of_another_takes_nothing_from_it(
    server: InProcessServer, api: Api, connect_worker: Callable[..., Awaitable[RawWorker]], dsn: str
) -> None:
    """Its leases last as long as before, and it gets further tasks."""
    await api.register(manifest())
    chosen = str(uuid.uuid4())
    worker = await connect_worker(server.grpc_address, session_id=chosen)
    await api.start()
    task = await worker.task()
    lease = "select lease_expires_at from task"
    before = await fetch(dsn, lease)
    with pytest.raises(StreamEnded):
        await connect_worker(server.grpc_address, session_id=chosen)
    server.app.engine.closer.submit(str(uuid.uuid4()))  # which is done with all that was asked for before
    await eventually(lambda: not server.app.engine.closer._waiting)
    assert await fetch(dsn, lease) == before
    assert await fetch(dsn, "select ended_at from session where session_id = %s", [chosen]) == [(None,)]
    await api.start()
    await worker.complete(await worker.task())
    await worker.complete(task)


async def test_an_id_that_is_among_those_of_former_sessions_is_refused(
    server: InProcessServer, api: Api, connect_worker: Callable[..., Awaitable[RawWorker]], dsn: str
) -> None:
    """What it holds would have moved to the session that it has left."""
    await api.register(manifest())
    await api.start()
    worker = await connect_worker(server.grpc_address, process_nonce=NONCE)
    task = await worker.task()
    chosen = str(uuid.uuid4())
    with pytest.raises(StreamEnded) as caught:
        await worker.reconnect(session_id=chosen, previous_session_ids=[*worker.sessions, chosen])
    assert caught.value.error is not None
    assert caught.value.error.reason == "INVALID_HELLO"
    assert [path for path, _ in caught.value.error.violations] == ["previous_session_ids[1]"]
    await worker.reconnect()
    assert (await worker.complete(task)).outcome == OK


async def test_a_former_session_in_another_namespace_is_none(
    server: InProcessServer, connect_worker: Callable[..., Awaitable[RawWorker]]
) -> None:
    """Whoever knows its id and the nonce of its process does not end it (I14)."""
    worker = await connect_worker(server.grpc_address, process_nonce=NONCE)
    await connect_worker(
        server.grpc_address, namespace="other", process_nonce=NONCE, previous_session_ids=worker.sessions
    )
    await worker.sync()
    assert len(server.app.engine.dispatcher.sessions) == 2
