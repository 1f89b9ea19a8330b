"""What lies in the database costs those who work nothing: tasks that wait, versions of rows that a long transaction
keeps, and runs that have ended. Counted in the blocks that PostgreSQL touches, and the rows that it reads from end to
end: no machine changes these.

Rows 21, 22 and 35 of the field failures, smaller. A million: BACKLOG=1000000, ENDED_RUNS=1000000
(--log-cli-level=info tells the figures and the times).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, LiteralString, TypeVar

import psycopg

from fencepost.v1 import run_pb2
from fencepost.v1 import run_service_pb2 as pb
from tests.faults.scene import STAYING, Scene, count, fetch, samples
from tests.faults.test_retention import LOAD, ROWS, STEPS, Load, runs
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually

T = TypeVar("T")
log = logging.getLogger(__name__)
BACKLOG = int(os.environ.get("BACKLOG", "20000"))
ENDED_RUNS = int(os.environ.get("ENDED_RUNS", "50000"))
FEW, PARTS = 10, 6
# Its probes are no part of what is counted, and there are the more of them the slower the machine is.
KEEPING: dict[str, Any] = {**STAYING, "retention": 0.0, "poll_interval": 30.0, "outage_gap": 60.0}
COPY: LiteralString = """
    with copy as materialized (select gen_random_uuid() as run_id from generate_series(1, %(copies)s)),
    runs as (
        insert into run select n.* from copy c, run r,
            lateral jsonb_populate_record(r, jsonb_build_object('run_id', c.run_id)) n where r.run_id = %(run_id)s),
    events as (
        insert into event select n.* from copy c, event e,
            lateral jsonb_populate_record(e, jsonb_build_object('run_id', c.run_id)) n where e.run_id = %(run_id)s)
    insert into task select n.* from copy c, task t,
        lateral jsonb_populate_record(t, jsonb_build_object('run_id', c.run_id)) n where t.run_id = %(run_id)s
"""
TOUCHED: LiteralString = """
    select coalesce(
        sum(heap_blks_read + heap_blks_hit + coalesce(idx_blks_read + idx_blks_hit, 0) + seq_tup_read), 0)::int as n
    from pg_statio_user_tables join pg_stat_user_tables using (relid, relname) where relname = any(%(tables)s)
"""
BACKENDS: LiteralString = (
    "pg_stat_activity where datname = current_database() and starts_with(application_name, 'fencepost')"
)
PAGE = 100
LOOKED_AT = 10_000
"""So many runs one page is found among, at most."""
LISTS: dict[str, dict[str, Any]] = {
    "all": {},
    "of a workflow": {"workflow_id": "wf"},
    "of a user": {"user_id": "old"},
    "in a state": {"states": [run_pb2.RUN_STATE_COMPLETED]},
    "in a state that none is in": {"states": [run_pb2.RUN_STATE_BLOCKED]},
}


class Touched:
    """Blocks of tables and their indexes that a server has touched, and rows that it has read from end to end."""

    n = 0


@contextlib.asynccontextmanager
async def server_of(scene: Scene, *tables: str) -> AsyncIterator[tuple[InProcessServer, Touched]]:
    """A server, and afterwards what it has touched: backends tell their numbers when they end at the latest."""
    touched = Touched()
    await eventually(lambda: _none_is_left(scene.dsn))
    [before] = await fetch(scene.dsn, TOUCHED, tables=list(tables))
    server = await scene.serve(**KEEPING)
    yield server, touched
    await server.stop()
    await eventually(lambda: _none_is_left(scene.dsn))
    [after] = await fetch(scene.dsn, TOUCHED, tables=list(tables))
    touched.n = after["n"] - before["n"]


async def _none_is_left(dsn: str) -> bool:
    """No backend of a server's, which would have something to tell yet."""
    return await count(dsn, BACKENDS) == 0


async def test_ten_tasks_of_a_queue_start_at_once_beside_all_that_wait_in_another(scene: Scene) -> None:
    """Row 21. No table is analyzed: to the planner the queue is as it was when it was empty."""
    setting_up = await scene.serve(**KEEPING)
    api = scene.api(setting_up.grpc_address)
    await api.register(manifest(workflow_id="many", queue="full"))
    await api.register(manifest(workflow_id="few", queue="few"))
    [copied] = await api.start_many([api.start_request(workflow_id="many")])
    for first in range(0, BACKLOG, ROWS):
        await fetch(scene.dsn, COPY, copies=min(ROWS, BACKLOG - first), run_id=copied.started.run_id)
    await setting_up.stop()
    assert await count(scene.dsn, "task where queue = 'full' and lease_session is null") == BACKLOG + 1
    async with server_of(scene, "task") as (server, touched):
        api = scene.api(server.grpc_address)
        worker = await scene.raw(server.grpc_address, handlers=[("s1", "few")], capacity=FEW)
        began = time.monotonic()
        await api.start_many([api.start_request(workflow_id="few") for _ in range(FEW)])
        tasks = await worker.tasks(FEW)
        log.info("%d tasks beside %d that wait: begun within %.0f ms", FEW, BACKLOG, 1000 * (time.monotonic() - began))
        await worker.complete_all([(task, "null") for task in tasks])
        await worker.close()
    log.info("%d touched", touched.n)
    assert touched.n < 100 * FEW


async def test_a_snapshot_that_is_held_makes_no_step_dearer_than_the_first_ones(scene: Scene) -> None:
    """Row 22: no version of a row that was changed or deleted meanwhile can go."""
    setting_up = await scene.serve(**KEEPING)
    await scene.api(setting_up.grpc_address).register(manifest(STEPS))
    await setting_up.stop()
    async with await psycopg.AsyncConnection.connect(scene.dsn) as holding:
        await holding.execute("begin isolation level repeatable read")
        await holding.execute("select from run")
        a_step = [await _touched_a_step(scene) for _ in range(PARTS)]
        [dead] = await fetch(scene.dsn, "select n_dead_tup::int as n from pg_stat_user_tables where relname = 'task'")
    log.info("touched a step: %s; %d dead versions of tasks", [round(each, 1) for each in a_step], dead["n"])
    assert dead["n"] >= (PARTS - 1) * LOAD * STEPS, "nothing was kept"
    assert a_step[-1] < 1.5 * a_step[0]


async def timed(what: str, doing: Awaitable[T]) -> T:
    """Log how long it takes."""
    began = time.monotonic()
    done = await doing
    log.info("%s: %.0f ms", what, 1000 * (time.monotonic() - began))
    return done


async def test_lists_and_metrics_over_many_ended_runs_touch_few_rows_and_harm_no_step(scene: Scene) -> None:
    """Row 35."""
    setting_up = await scene.serve(**KEEPING)
    await scene.api(setting_up.grpc_address).register(manifest(STEPS))
    await setting_up.stop()
    empty = await _touched_a_step(scene)
    for first in range(0, ENDED_RUNS, ROWS):
        await fetch(scene.dsn, runs("old", 3, "now() - interval '1 d'", 1), n=min(ROWS, ENDED_RUNS - first))
    async with server_of(scene, "run", "event", "attribute") as (server, touched):
        api = scene.api(server.grpc_address)
        for what, fields in LISTS.items():
            page = await timed(what, _page(api, **fields))
            assert len(page.runs) == (0 if what == "in a state that none is in" else PAGE), what
            await timed(f"{what}, the next page", _page(api, page_token=page.next_page_token, **fields))
        await timed("metrics", samples(f"127.0.0.1:{server.app.http.port}"))
    log.info("%d touched by lists and metrics", touched.n)
    assert touched.n < 4 * (2 * LOOKED_AT + 2 * PAGE * len(LISTS))
    among_many = await _touched_a_step(scene)
    log.info("touched a step: %.1f, then %.1f", empty, among_many)
    assert among_many < 1.5 * empty


async def _page(api: Api, **fields: Any) -> pb.ListRunsResponse:
    return await api.runs.ListRuns(pb.ListRunsRequest(page_size=PAGE, **fields), timeout=DEADLINE)


async def _touched_a_step(scene: Scene) -> float:
    async with server_of(scene, "task", "run", "event") as (server, touched):
        worker = await scene.raw(server.grpc_address, handlers=handler_names(STEPS), capacity=200)
        load = Load(scene.api(server.grpc_address), worker)
        await load.flow(lambda: True)
        await worker.close()
    return touched.n / load.steps
