"""A definition that is gone, or that this release can't read, harms its own runs only (row 12 of the field)."""

from __future__ import annotations

from fencepost.v1 import run_pb2, run_service_pb2
from tests.engine.rows import execute, fetch
from tests.faults.scene import Scene
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.waiting import eventually

GOOD = 200


async def test_a_run_whose_definition_is_gone_is_blocked_with_its_reason_and_others_pass_it_by(scene: Scene) -> None:
    server = await scene.serve()
    api = scene.api(server.grpc_address)
    await api.register(manifest(1, workflow_id="poison"))
    poisoned = (await api.start("poison")).run_id
    await api.register(manifest(1))
    good = [(await api.start()).run_id for _ in range(GOOD)]
    await server.stop()
    kept = await _take_out(scene.dsn)
    server = await scene.serve()
    api = scene.api(server.grpc_address)
    worker = await scene.raw(server.grpc_address, handlers=["s1"], capacity=50)
    for _ in range(GOOD // 50):
        await worker.complete_all([(task, "1") for task in await worker.tasks(50)])
    for run_id in good:
        assert (await api.wait(run_id)).state == run_pb2.RUN_STATE_COMPLETED

    async def blocked() -> bool:
        run = await api.get(poisoned)
        return run.state == run_pb2.RUN_STATE_BLOCKED and run.failure.code == "UNKNOWN_DEFINITION"

    await eventually(blocked)
    await execute(scene.dsn, "insert into definition select * from json_populate_record(null::definition, %s)", (kept,))
    await _retry(api, poisoned)
    await worker.complete(await worker.task())
    assert (await api.wait(poisoned)).state == run_pb2.RUN_STATE_COMPLETED


async def _take_out(dsn: str) -> str:
    """Delete the poisoned run's definition; returns the row."""
    [(row,)] = await fetch(dsn, "select row_to_json(d)::text from definition d where workflow_id = 'poison'")
    await execute(dsn, "delete from definition where workflow_id = 'poison'")
    return str(row)


async def _retry(api: Api, run_id: str) -> None:
    await api.runs.RetryRun(run_service_pb2.RetryRunRequest(run_id=run_id), timeout=DEADLINE)
