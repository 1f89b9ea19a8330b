"""A new release meets what the one before has left, and works beside: schemas, runs under way, servers, workers.

An older schema is made by the older migrations, with the rows in it that a server has written, as far as it has columns
for them: migrations only add, which is what lets the servers of a release go on beside the migrations of the next.

Row 36 of the field failures.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.errors import SchemaVersionMismatch
from fencepost_server.store import migrate as module
from fencepost_server.store.migrate import Migration, check, migrate, migrations
from tests.engine.rows import holding
from tests.faults.conftest import StartWorker
from tests.faults.scene import COMPLETED, ENDED, ONE_ATTEMPT, Scene, attempts, count, fetch, start_all, until_count
from tests.faults.sink import ONCE, Sink
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import until_blocked
from tests.unit.sdk.building import DONE, frames, given, only, opened, task

OURS = migrations()
RUNS, STEPS = 150, 3
NEXT = Migration(
    len(OURS) + 1,
    f"{len(OURS) + 1:04}_next.sql",
    """
    alter table run add column novelty json;
    alter table task add column novelty boolean not null default false;
    alter table event add column novelty text collate "C";
    create index task_novelty on task (run_id) where novelty;
    create table novelty (run_id uuid primary key);
    """,
)
TABLES = """
select c.relname, array_agg(a.attname::text order by a.attnum) from pg_class c join pg_attribute a on a.attrelid = c.oid
where c.relnamespace = 'public'::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped
  and c.relname <> 'schema_migration'
group by 1 order by 1
"""


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Chooses the migrations that this process's release has; servers in other processes have all that there are."""

    def choose(*chosen: Migration) -> None:
        monkeypatch.setattr(module, "migrations", lambda: list(chosen))

    return choose


def copy_rows(source: str, target: str) -> None:
    """All rows, as far as the target has tables and columns for them."""
    with psycopg.connect(source) as reading, psycopg.connect(target) as writing:
        writing.execute("truncate cluster")
        for table, columns in writing.execute(TABLES).fetchall():
            what = sql.SQL("{} ({})").format(sql.Identifier(table), sql.SQL(", ").join(map(sql.Identifier, columns)))
            with (
                reading.cursor().copy(sql.SQL("copy {} to stdout").format(what)) as read,
                writing.cursor().copy(sql.SQL("copy {} from stdin").format(what)) as write,
            ):
                for part in read:
                    write.write(part)


@pytest.mark.parametrize("version", range(1, len(OURS)))
async def test_runs_under_way_on_an_older_schema_end_on_the_newest(
    scene: Scene, new_database: Callable[..., str], release: Callable[..., None], version: int
) -> None:
    """One has a step behind it, one has a step that a worker has in hand, one has not begun."""
    server = await scene.serve(shutdown_grace=0.0)
    api = scene.api(server.grpc_address)
    await api.register(manifest(STEPS, retry=ONE_ATTEMPT))
    worker = await scene.raw(server.grpc_address, handlers=handler_names(STEPS), capacity=2)
    run_ids = [(await api.start(request_key=str(number))).run_id for number in range(3)]
    await worker.complete(await worker.task())
    await server.stop()
    older = new_database()
    release(*OURS[:version])
    await migrate(older)
    copy_rows(scene.dsn, older)
    release(*OURS)
    with pytest.raises(SchemaVersionMismatch, match="run `fencepost migrate`"):
        await check(older)
    assert await migrate(older) == [migration.name for migration in OURS[version:]]
    newer = await scene.serve(dsn=older, shutdown_grace=0.0)
    api = scene.api(newer.grpc_address)
    assert [(await api.start(request_key=str(number))).run_id for number in range(3)] == run_ids
    again = await scene.raw(
        newer.grpc_address,
        handlers=handler_names(STEPS),
        capacity=10,
        process_nonce=worker.hello().process_nonce,
        previous_session_ids=worker.sessions,
    )
    for _ in range(3 * STEPS - 1):
        await again.complete(await again.task())
    for run_id in run_ids:
        await api.wait(run_id)
        assert attempts(await api.history(run_id)) == [1] * STEPS


async def test_servers_work_on_while_the_next_release_migrates_and_do_not_start_again(
    scene: Scene,
    server_process: StartServerProcess,
    worker_process: StartWorker,
    sink: Sink,
    new_database: Callable[..., str],
    release: Callable[..., None],
) -> None:
    """What they have prepared stays valid, and what they wait for is a moment."""
    dsn = new_database(migrated=True)
    server = server_process(dsn)
    api = scene.api(server.grpc_address)
    await api.register(manifest(STEPS, retry=ONE_ATTEMPT))
    worker_process(server.grpc_address, steps=STEPS, slots=20)
    starting = asyncio.create_task(start_all(api, RUNS))
    await until_count(dsn, COMPLETED, RUNS // 3, 30, more=True)
    release(*OURS, NEXT)
    assert await migrate(dsn) == [NEXT.name]
    await starting
    await until_count(dsn, ENDED, RUNS, 30)
    assert await count(dsn, COMPLETED + " and attempt = 1") == RUNS * STEPS
    assert Counter(sink.effects().values()) == {ONCE: RUNS * STEPS}
    assert [line for line in server.events() if line.get("level") == "error"] == []
    server.kill()
    server.start()
    assert await asyncio.to_thread(server.wait) == 1
    assert "SCHEMA_VERSION_MISMATCH" in server.logs
    assert "newer than this release" in server.logs


async def test_a_migration_that_has_to_wait_for_a_table_holds_up_nobody(
    new_database: Callable[..., str], release: Callable[..., None]
) -> None:
    """Behind a transaction that reads for hours, as a dump does: who comes after it gets through, and so does it in the
    end.
    """
    dsn = new_database(migrated=True)
    release(*OURS, NEXT)
    async with holding(dsn, "select from task"):
        migrating = asyncio.create_task(migrate(dsn))
        for _ in range(3):
            await until_blocked(dsn)
            await asyncio.wait_for(fetch(dsn, "select from task"), 10)  # it waits for half a second at a time
        assert not migrating.done()
    assert await migrating == [NEXT.name]
    await check(dsn)


async def test_a_migration_gives_up_on_a_table_that_it_does_not_get(
    new_database: Callable[..., str], release: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = new_database(migrated=True)
    release(*OURS, NEXT)
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    async with holding(dsn, "select from task"):
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await migrate(dsn)
    release(*OURS)
    await check(dsn)


def test_migrations_only_add() -> None:
    """Servers of the release before work on what the next one has migrated."""
    takes_away = re.compile(r"\b(drop|rename|truncate|alter\s+column|set\s+not\s+null)\b", re.IGNORECASE)
    texts = {migration.name: re.sub(r"--[^\n]*", "", migration.text) for migration in OURS}
    assert {name: found for name, text in texts.items() if (found := takes_away.findall(text))} == {}


def with_unknown(message: Any) -> bytes:
    """Its bytes, and a field behind them that no release has yet: number 1000, a text."""
    text = b"from the future"
    return bytes(message.SerializeToString()) + b"\xc2\x3e" + bytes([len(text)]) + text


async def test_what_a_newer_worker_says_beyond_the_contract_is_passed_over(
    scene: Scene, connect_worker: Callable[..., Awaitable[Any]]
) -> None:
    server = await scene.serve()
    api = scene.api(server.grpc_address)
    await api.register(manifest(1))
    worker = await connect_worker(server.grpc_address, hello=False)
    hello = pb.Hello.FromString(with_unknown(worker.hello()))
    await worker.send(hello)
    run_id = (await api.start()).run_id
    got = await worker.task()
    item = pb.CompleteItem.FromString(with_unknown(pb.CompleteItem(task=got.task)))
    assert b"from the future" in item.SerializeToString()
    await worker.send(pb.Complete(items=[item]))
    await api.wait(run_id)


def test_what_a_newer_server_says_beyond_the_contract_is_passed_over_by_the_sdk() -> None:
    """A frame of an unknown kind, and unknown fields in one that it knows."""
    session = opened()
    session.receive(pb.SessionResponse.FromString(with_unknown(pb.SessionResponse())), 0)
    assert frames(session) == []
    assigned = pb.Task.FromString(with_unknown(task(1)))
    [lease] = given(session, assigned)
    session.finish(lease, DONE)
    assert only(session).complete.items[0].task == assigned.task
