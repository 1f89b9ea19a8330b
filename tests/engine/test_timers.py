"""Timers fire once, at or after their time, whichever server does it (semantics: timers)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.engine.flows import OpenScene, Scene, step, workflow
from tests.engine.rows import count, execute, fetch, holding
from tests.fixtures.api import Api
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import StartInProcessServer
from tests.fixtures.waiting import eventually

NAP = {"id": "nap", "sleep": "1h"}


async def sleepers(scene: Scene, n: int, *nodes: dict[str, object]) -> list[str]:
    """Runs that sleep."""
    await scene.api.register(workflow(NAP, *nodes))
    requests = [scene.api.start_request() for _ in range(n)]
    return [result.started.run_id for result in await scene.api.start_many(requests)]


async def wake_all(dsn: str) -> None:
    """All timers are due now."""
    await execute(dsn, "update timer set fire_at = clock_timestamp() - interval '3 d'")


async def test_many_timers_that_are_due_at_once_all_fire_once_on_two_servers(open_scene: OpenScene) -> None:
    scene = await open_scene(timer_batch=50)
    await open_scene(timer_batch=50)
    runs = await sleepers(scene, 400)
    await wake_all(scene.dsn)
    for run_id in runs:
        await scene.output(run_id)
    fired = await fetch(scene.dsn, "select run_id::text, count(*)::int from event where type = 10 group by run_id")
    assert Counter(dict(fired)) == Counter(runs)
    assert await count(scene.dsn, "timer") == 0


async def test_timers_that_fell_due_while_no_server_was_there_fire_when_one_is(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Callable[[str], Api]
) -> None:
    """Days of downtime."""
    first = await in_process_server(dsn)
    api = connect_api(first.grpc_address)
    await api.register(workflow(NAP))
    run_id = (await api.start(input="[7]")).run_id
    await first.stop()
    await wake_all(dsn)
    second = await in_process_server(dsn)
    run = await connect_api(second.grpc_address).wait(run_id)
    assert run.output.json == "[7]"


async def test_a_timer_whose_run_another_transaction_holds_delays_no_other(open_scene: OpenScene) -> None:
    """Row 19 of the field's failures."""
    scene = await open_scene(timer_batch=1, lock_timeout=0.1)
    runs = await sleepers(scene, 6)
    async with holding(scene.dsn, "select from run where run_id = any(%s) for update", [runs[:3]]):
        await wake_all(scene.dsn)
        for run_id in runs[3:]:
            await scene.output(run_id)
        assert await count(scene.dsn, "timer") == 3
    for run_id in runs[:3]:
        await scene.output(run_id)


async def test_a_timer_of_a_kind_that_a_newer_release_has_keeps_no_other_from_firing(open_scene: OpenScene) -> None:
    """Row 12."""
    scene = await open_scene()
    strange, run_id = await sleepers(scene, 2)
    await execute(
        scene.dsn, "update timer set kind = 99, fire_at = fire_at - interval '1 d' where run_id = %s", [strange]
    )
    await wake_all(scene.dsn)
    await scene.output(run_id)
    assert await count(scene.dsn, "timer") == 1


async def test_an_idle_server_knows_when_the_next_timer_is_due(open_scene: OpenScene) -> None:
    """It does not wait for its next look: a timer's time is told when it is made."""
    scene = await open_scene(poll_interval=30, outage_gap=60)
    await scene.api.register(workflow({"id": "nap", "sleep": "100ms"}))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await scene.output(await scene.start())
    assert loop.time() - began < 20


async def test_a_timer_that_another_server_made_is_found_by_the_probe(open_scene: OpenScene) -> None:
    scene = await open_scene()
    await eventually(lambda: scene.server.app.engine.last_probe)
    [run_id] = await sleepers(scene, 1)
    await wake_all(scene.dsn)
    await scene.output(run_id)


async def test_a_timer_and_a_cancel_that_race_leave_one_end(
    open_scene: OpenScene, connect_worker: Callable[..., Awaitable[RawWorker]]
) -> None:
    """Row 16 of the field's failures, of timers. A step that has begun may come to the worker behind the answer to the
    cancel, when this no longer looks: it has a short grace.
    """
    scene = await open_scene(cancel_grace=1.0)
    runs = await sleepers(scene, 30, step("a"))
    await wake_all(scene.dsn)
    await asyncio.gather(*(scene.call("Cancel", run_id) for run_id in runs))
    done: list[str] = []
    for run_id in runs:
        for task in [t for t in scene.worker.held.values() if t.run_id == run_id]:
            await scene.worker.complete(task)
        await scene.failure(run_id, "CANCELLED")
        events = await scene.kinds(run_id)
        assert events.count("run_cancelled") == 1
        assert events[-1] == "run_cancelled"
        done += events
    assert await count(scene.dsn, "timer") == 0


async def test_what_a_sleep_passes_on_may_be_large_and_is_not_copied(scene: Scene) -> None:
    data = "x" * 900_000
    await scene.api.register(workflow({"id": "nap", "sleep": "1ms"}, {"id": "again", "sleep": "1ms"}))
    run_id = await scene.start(data)
    assert await scene.output(run_id) == data
    [(largest,)] = await fetch(
        scene.dsn, "select max(octet_length(payload::text)) from event where run_id = %s and seq > 1", [run_id]
    )
    assert largest is None or largest < 1000
    assert len(json.dumps(data)) > 900_000
