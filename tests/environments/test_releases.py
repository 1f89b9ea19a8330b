"""Releases work side by side: servers and workers of an earlier one and of this one, on one database, which is migrated
under load; each kind of worker on each kind of server.

Row 36 of the field failures.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import LiteralString

import pytest

from fencepost.v1 import run_service_pb2
from fencepost_server.store.migrate import migrate
from tests.environments.code_worker import REMOTE, SUM, WORKFLOW
from tests.environments.released import CODE_WORKFLOWS, FIRST_ENGINE, Release
from tests.faults.scene import COMPLETED, ENDED, Scene, count, start_all, until_count
from tests.faults.sink import ONCE, Sink
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.processes import Process
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually

RUNS, STEPS, CODE_RUNS = 200, 3, 40
WAITING: LiteralString = "wait where name = 'go'"


async def send_go(api: Api, run_id: str) -> None:
    """The signal that the code runs wait for."""
    await api.runs.SignalRun(run_service_pb2.SignalRunRequest(run_id=run_id, signal_name="go"), timeout=DEADLINE)


EACH = pytest.mark.parametrize("commit", [FIRST_ENGINE, CODE_WORKFLOWS], ids=["first-engine", "code-workflows"])


@EACH
def test_the_release_before_runs_its_own_packages(released: Callable[[str], Release], commit: str) -> None:
    """Not this one's, which are installed in the same environment: all else would hold for this one beside itself."""
    before = released(commit)
    process = before.run(
        "-c", "import fencepost, fencepost_server as server; print(fencepost.__file__, server.__file__)"
    )
    assert process.wait() == 0
    assert process.logs.count(str(before.folder)) == 2, process.logs


@EACH
async def test_steps_go_on_while_the_release_before_is_replaced_by_this_one(
    scene: Scene,
    released: Callable[[str], Release],
    server_process: StartServerProcess,
    python_process: Callable[..., Process],
    sink: Sink,
    new_database: Callable[..., str],
    commit: str,
) -> None:
    """The older servers stop when the newer ones are there, and their workers move on.

    A server of these releases that stops may answer a worker's Goodbye before tasks that are on their way to it. The
    worker closes its side then, and an attempt is lost.
    """
    dsn, before = new_database(), released(commit)
    before.migrate(dsn)
    old, old_address = before.serve(dsn)
    api = scene.api(old_address)
    await api.register(manifest(STEPS, retry={"max_attempts": 3, "initial_delay": "0s"}))
    worker = ("-m", "tests.faults.worker_program")
    work = (sink.dsn, str(STEPS), "10")
    before.run(*worker, old_address, *work)
    starting = asyncio.create_task(start_all(api, RUNS))
    await until_count(dsn, COMPLETED, RUNS // 4, more=True)

    assert await migrate(dsn) or commit != FIRST_ENGINE, "its schema is an older one"
    new = server_process(dsn)
    moving = f"{old_address},{new.grpc_address}"
    workers = [
        before.run(*worker, moving, *work),
        before.run(*worker, new.grpc_address, *work),
        python_process(*worker, moving, *work),
        python_process(*worker, new.grpc_address, *work),
    ]
    for each in workers:
        await asyncio.to_thread(each.wait_event, "connected")
    assert await starting == RUNS
    later = scene.api(new.grpc_address)
    assert await start_all(later, 2 * RUNS) == RUNS, "keys of the release before are known"
    await asyncio.to_thread(old.terminate)
    await until_count(dsn, ENDED, 2 * RUNS)
    assert await count(dsn, COMPLETED) == 2 * RUNS * STEPS
    assert len(sink.effects()) == 2 * RUNS * STEPS


async def test_code_runs_go_on_while_the_release_before_is_replaced_by_this_one(
    scene: Scene,
    released: Callable[[str], Release],
    server_process: StartServerProcess,
    python_process: Callable[..., Process],
    sink: Sink,
    new_database: Callable[..., str],
) -> None:
    """Histories that the older SDK has begun are gone on with by the newer one, and the other way round.

    There has been no migration since code workflows came.
    """
    dsn, before = new_database(), released(CODE_WORKFLOWS)
    before.migrate(dsn)
    old, old_address = before.serve(dsn)
    worker = ("-m", "tests.environments.code_worker")
    first = before.run(*worker, old_address, sink.dsn)
    api = scene.api(old_address)

    async def registered() -> bool:
        return await count(dsn, "deployment") > 0

    await eventually(registered)
    runs = [(await api.start(workflow_id=WORKFLOW)).run_id for _ in range(CODE_RUNS)]
    await until_count(dsn, WAITING, CODE_RUNS)

    await migrate(dsn)
    new = server_process(dsn)
    later = scene.api(new.grpc_address)
    old_sdk = before.run(*worker, new.grpc_address, sink.dsn)
    new_sdk = python_process(*worker, f"{old_address},{new.grpc_address}", sink.dsn)
    await until_count(dsn, "session where ended_at is null", 3)
    first.kill()
    runs += [(await later.start(workflow_id=WORKFLOW)).run_id for _ in range(CODE_RUNS)]
    await until_count(dsn, WAITING, 2 * CODE_RUNS)
    for run_id in runs[::2]:
        await send_go(api, run_id)
    await asyncio.to_thread(old.terminate)
    for run_id in runs[1::2]:
        await send_go(later, run_id)
    for run_id in runs:
        run = await later.wait(run_id)
        assert json.loads(run.output.json) == SUM
    assert Counter(sink.effects().values()) == {ONCE: len(runs) * REMOTE}
    assert old_sdk.running
    assert new_sdk.running
