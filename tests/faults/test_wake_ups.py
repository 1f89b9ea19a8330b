"""Hints between servers are lost, refused or never sent: polling alone finishes every run, and what can be repaired is.

Row 7 of the field failures. I10.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.engine.rows import until_listening
from tests.faults.scene import QUICK, STAYING, Scene, count, fetch, until_count
from tests.fixtures.databases import database_address, redirected
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import OK, RawWorker, StreamEnded
from tests.fixtures.waiting import eventually

LISTENERS = "pg_stat_activity where datname = current_database() and application_name = 'fencepost listener'"
BY_HINTS_ONLY: dict[str, Any] = {**STAYING, "poll_interval": 30.0, "outage_gap": 60.0}


@pytest.mark.parametrize("listening", [False, True], ids=["listen-disabled", "listener-never-connects"])
async def test_without_notifications_polling_finishes_every_run(scene: Scene, listening: bool) -> None:
    """Row 7, I10: started at one server, run by a worker of the other one, waited for at the first."""
    listen: dict[str, Any] = {}
    if listening:
        nobody = scene.proxy(database_address(scene.dsn))
        nobody.refuse()
        listen["listen_dsn"] = redirected(scene.dsn, nobody.address)
    first, second = await scene.serve(**QUICK | listen), await scene.serve(**QUICK | listen)
    api = scene.api(first.grpc_address)
    await api.register(manifest(2))
    worker = await scene.raw(second.grpc_address, handlers=handler_names(2))
    for _ in range(5):
        run_id = (await api.start()).run_id
        for _ in range(2):
            assert (await worker.complete(await worker.task(10))).outcome == OK
        await api.wait(run_id, 10)
    assert await count(scene.dsn, LISTENERS) == 0


async def test_a_listener_whose_backend_is_terminated_comes_back(scene: Scene) -> None:
    """Row 7: again and again. Nobody polls within the time of this test, so hints do the work before and after."""
    listen = {"listen_dsn": scene.dsn}
    second = await scene.serve(**BY_HINTS_ONLY | listen)
    await until_count(scene.dsn, "server", 1)  # else the first one's only look might come before
    first = await scene.serve(**BY_HINTS_ONLY | listen)
    await eventually(lambda: first.app.engine.notifier.others == 1)
    api = scene.api(first.grpc_address)
    await api.register(manifest(1))
    worker = await scene.raw(second.grpc_address)
    for _ in range(3):
        await until_listening(scene.dsn, 2)
        run_id = (await api.start()).run_id
        assert (await worker.complete(await worker.task())).outcome == OK
        await api.wait(run_id)
        await until_listening(scene.dsn, 2)
        await fetch(scene.dsn, f"select pg_terminate_backend(pid, 5000) from {LISTENERS}")
    await until_listening(scene.dsn, 2)


async def test_a_listener_whose_connecting_takes_too_long_leaves_no_connection_behind(scene: Scene) -> None:
    """The database has let it in, but it does not hear of that: what it gave up must not stay connected."""
    hole = scene.proxy(database_address(scene.dsn))
    hole.blackhole("down")
    await scene.serve(**QUICK, listen_dsn=redirected(scene.dsn, hole.address) + " sslmode=disable", connect_timeout=2.0)
    await eventually(lambda: hole.accepted > 1, what="it tries again")
    hole.heal()
    await until_listening(scene.dsn, 1)
    await until_count(scene.dsn, LISTENERS, 1)


async def test_hints_that_are_lost_cost_a_poll_at_most_and_a_deaf_listener_notices_it(scene: Scene) -> None:
    """I10: the listener's connection is a black hole, so for a while it does not even know that it hears nothing."""
    hole = scene.proxy(database_address(scene.dsn))
    listen = {"listen_dsn": redirected(scene.dsn, hole.address), "batch_timeout": 1.0}
    second = await scene.serve(**QUICK | listen)
    await until_count(scene.dsn, LISTENERS, 1)
    hole.blackhole("down")
    first = await scene.serve(**QUICK)
    api = scene.api(first.grpc_address)
    await api.register(manifest(1))

    async def connected() -> RawWorker | None:
        with contextlib.suppress(StreamEnded):  # its transaction was too slow for the short limit
            return await scene.raw(second.grpc_address)
        return None

    worker = await eventually(connected)
    assert worker is not None
    run_id = (await api.start()).run_id
    assert (await worker.complete(await worker.task(10))).outcome == OK
    await api.wait(run_id, 10)
    await eventually(lambda: hole.accepted > 1, 30, what="it gives its connection up and makes another one")
    hole.heal()
    await until_count(scene.dsn, LISTENERS, 1)
