"""Rows are changed where they are, and what is past its time is forgotten (row 34 of the field failures)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.engine.rows import execute, fetch
from tests.fixtures.api import Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import StartInProcessServer
from tests.fixtures.waiting import eventually

ConnectWorker = Callable[..., Awaitable[RawWorker]]
Connect = Callable[[str], Api]


async def test_the_updates_of_runs_touch_no_index(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """HOT: nothing that changes with a step is in an index of the run, its state included."""
    [(before, hot_before)] = await fetch(dsn, STATS)
    server = await in_process_server(dsn)
    api = connect_api(server.grpc_address)
    await api.register(manifest(10))
    runs = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(50)])]
    worker = await connect_worker(server.grpc_address, handlers=handler_names(10), capacity=50)
    for _ in range(10):
        await worker.complete_all([(task, "1") for task in await worker.tasks(50)])
    for run_id in runs:
        await api.wait(run_id)
    await worker.close()
    await server.stop()  # a backend that ends tells its numbers at once

    async def all_told() -> bool:
        [(updates, _)] = await fetch(dsn, STATS)
        return bool(updates - before >= 500)

    await eventually(all_told)
    [(updates, hot)] = await fetch(dsn, STATS)
    assert updates - before == 500
    # Not all of them: a page that is looked at by others just then is not cleaned. An index would make it none.
    assert hot - hot_before >= 0.3 * 500
    assert await fetch(dsn, INDEXED) == [], "an index or a predicate names a column that changes with a step"


STATS = """
select coalesce(sum(n_tup_upd), 0)::int, coalesce(sum(n_tup_hot_upd), 0)::int
from pg_stat_user_tables where relname = 'run'
"""
INDEXED = """
select i.indexrelid::regclass::text, a.attname
from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any(i.indkey)
where i.indrelid = 'run'::regclass
  and (a.attname in ('state', 'node_index', 'next_seq', 'last_event_at', 'output_seq', 'failure', 'ended_at', 'control')
       or pg_get_expr(i.indpred, i.indrelid) not in (
           '(parent_run_id IS NOT NULL)', '(user_id <> ''''::text)', '(chain_id IS NOT NULL)'))
"""


async def test_housekeeping_forgets_what_is_past_its_time_and_nothing_else(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    server = await in_process_server(dsn, request_memory=60)
    await server.app.engine.probe_once()  # which writes the server's row
    api = connect_api(server.grpc_address)
    await api.register(manifest())
    first = await api.start(request_key="k", request_id="r")
    await api.start(request_id="r2")
    old, new = [await connect_worker(server.grpc_address) for _ in range(2)]
    await old.drop()
    await eventually(lambda: fetch(dsn, "select from session where ended_at is not null"))
    await new.drop()
    await eventually(lambda: fetch(dsn, "select from session having count(ended_at) = 2"))
    await execute(dsn, "update run_key set expires_at = expires_at - interval '1 h' where key = 'r'")
    await execute(
        dsn, "update session set ended_at = ended_at - interval '2 h' where session_id = %s", [old.sessions[0]]
    )
    await execute(dsn, "insert into server values (gen_random_uuid(), now() - interval '1 d', now() - interval '1 d')")
    await server.app.engine.housekeep_once()
    assert await fetch(dsn, "select key from run_key order by key") == [("k",), ("r2",)]
    assert await fetch(dsn, "select session_id::text from session") == [(new.sessions[0],)]
    assert await fetch(dsn, "select server_id::text from server") == [(server.app.engine.server_id,)]
    assert (await api.start(request_key="k", request_id="r")).run_id == first.run_id, "keys outlive their requests"


async def test_housekeeping_ends_the_sessions_of_servers_that_were_killed_long_ago(
    in_process_server: StartInProcessServer, dsn: str, connect_worker: ConnectWorker
) -> None:
    """Nobody else does: a server that is killed can't say that its streams have ended (I12)."""
    server = await in_process_server(dsn)
    engine = server.app.engine
    await engine.probe_once()
    worker = await connect_worker(server.grpc_address)
    await execute(
        dsn,
        "insert into session (session_id, namespace, server_id, process_nonce, worker_name, sdk, started_at)"
        " select gen_random_uuid(), 'default', gen_random_uuid(), 'nonce', 'w' || h, '', now() - h * interval '1 h'"
        " from generate_series(0, 2) h",
    )
    await execute(dsn, "update session set started_at = now() - interval '1 d' where worker_name = 'raw'")
    await engine.housekeep_once()
    left = await fetch(dsn, "select worker_name, ended_at is null from session order by worker_name")
    assert left == [("raw", True), ("w0", True), ("w1", False), ("w2", False)]
    await execute(dsn, "update session set ended_at = ended_at - interval '2 h'")
    await engine.housekeep_once()
    assert await fetch(dsn, "select worker_name from session order by worker_name") == [("raw",), ("w0",)]
    assert worker.sessions
