"""The database falls silent: its connections stay up, and nothing comes back. No loop of a server dies of it, or waits
for ever; each says that it is in trouble, and goes on when there is an answer.

Row 18 of the field failures.
"""

from __future__ import annotations

import asyncio
from typing import Any, LiteralString

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.faults.scene import ONE_ATTEMPT, STAYING, Scene, attempts, count, samples, until_count
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import OK
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually

SHORT: dict[str, Any] = {
    **STAYING,
    "connect_timeout": 4.0,
    "statement_timeout": 4.0,
    "batch_timeout": 4.0,
    "retention": 86_400.0,
}
SILENCE = 4.0
AGES = "fencepost_loop_last_good_seconds"
LOOK_BY_THEMSELVES = {"probe", "housekeeping", "retention"}
"""Loops that ask the database in each pass. The others ask when there is something to do: the probe tells them."""
TOLD_BY_THE_PROBE = {"dispatch", "sweep"}


async def told(server: InProcessServer, name: str) -> dict[str, float]:
    """What a metric says of each loop."""
    found = await samples(f"127.0.0.1:{server.app.http.port}")
    return {sample.labels["loop"]: sample.value for sample in found if sample.name == name}


def wake_all(server: InProcessServer) -> None:
    """Whatever a loop waits for, it makes a pass now."""
    for loop in server.app.engine.loops:
        loop.wake()


async def test_every_loop_outlives_a_database_that_falls_silent_and_its_metric_tells_of_it(scene: Scene) -> None:
    """Beside it a server that the database answers works on."""
    link = scene.proxy(f"127.0.0.1:{conninfo_to_dict(scene.dsn)['port']}")
    through = make_conninfo(scene.dsn, port=link.port)
    cut = await scene.serve(dsn=through, listen_dsn=through, **SHORT)
    whole = await scene.serve(**STAYING)
    api = scene.api(whole.grpc_address)
    await api.register(manifest(2, retry=ONE_ATTEMPT))
    worker = await scene.raw(cut.grpc_address, handlers=handler_names(2), capacity=3)
    run_id = (await api.start()).run_id
    task = await worker.task()
    names = set(await told(cut, AGES))
    assert names > LOOK_BY_THEMSELVES | TOLD_BY_THE_PROBE

    link.blackhole()

    async def all_tell() -> bool:
        wake_all(cut)
        ages, errors = (
            await told(cut, AGES),
            await told(cut, "fencepost_loop_errors_total"),
        )
        for name in LOOK_BY_THEMSELVES:
            assert ages[name] > SILENCE, ages
            assert errors[name] > 0, errors
        return not cut.app.engine.healthy

    await eventually(all_tell, 30, interval=0.2)
    other = await scene.raw(whole.grpc_address, handlers=handler_names(2), capacity=3, worker_name="other")
    beside = (await api.start()).run_id
    for _ in range(2):
        await other.complete(await other.task())
    await api.wait(beside)
    await other.close()
    reported = asyncio.create_task(worker.complete(task))

    link.heal()

    async def all_are_well() -> bool:
        wake_all(cut)
        ages = await told(cut, AGES)
        assert all(0 <= ages[name] < SILENCE / 2 for name in names - {"listen"}), ages
        return bool(cut.app.engine.healthy)

    await eventually(all_are_well, 30, interval=0.2)
    listeners: LiteralString = (
        "pg_stat_activity where datname = current_database() and application_name = 'fencepost listener'"
    )
    await until_count(scene.dsn, listeners, 1, 30)
    assert (await reported).outcome == OK
    await worker.complete(await worker.task())
    await api.wait(run_id)
    assert attempts(await api.history(run_id)) == [1, 1]
    assert await count(scene.dsn, "task") == 0
