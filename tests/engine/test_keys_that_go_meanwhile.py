"""A key that is held at the insert and gone at the read is free, and claimed again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencepost_server.store import batch
from tests.engine.rows import count
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import StartInProcessServer


async def test_a_run_that_ends_between_the_insert_and_the_read_of_its_key_leaves_the_key_to_one_other(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Callable[[str], Api],
    connect_worker: Callable[..., Awaitable[RawWorker]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is never more than one active run for a dedupe key. The start is held at a server of its own: at the
    worker's, its lane might be the one that the completion needs.
    """
    patient = {"idle_in_transaction_timeout": 60.0, "batch_timeout": 60.0}  # it is idle for as long as the other works
    server, other = await in_process_server(dsn), await in_process_server(dsn, **patient)
    api = connect_api(other.grpc_address)
    await api.register(manifest(1))
    first = await api.start(input="1", dedupe_key="k")
    worker = await connect_worker(server.grpc_address)
    task = (await worker.tasks(1))[0]
    reached, go = asyncio.Event(), asyncio.Event()
    read_keys = batch.read_keys

    async def held(session: Any, keys: Any) -> Any:
        if not reached.is_set():
            await session.sync()  # the insert is executed, not only queued
            reached.set()
            await go.wait()
        return await read_keys(session, keys)

    monkeypatch.setattr(batch, "read_keys", held)
    starting = asyncio.create_task(api.start(input="1", dedupe_key="k"))
    await asyncio.wait_for(reached.wait(), 30)
    await worker.complete(task)
    await connect_api(other.grpc_address).wait(first.run_id)
    go.set()
    second = await starting
    third = await api.start(input="1", dedupe_key="k")
    assert (second.created, third.created, third.run_id) == (True, False, second.run_id)
    assert await count(dsn, "run", "ended_at is null and dedupe_key = 'k'") == 1
