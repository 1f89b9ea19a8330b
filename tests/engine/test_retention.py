"""Ended runs go when they are old enough, with all that is theirs; nothing else goes, and nobody sees half of a run."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Collection
from typing import Any, LiteralString

import grpc
import pytest
import pytest_asyncio

from fencepost.v1 import run_service_pb2 as pb
from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.domain.model import RunState
from fencepost_server.engine import retention as engine_retention
from fencepost_server.store import retention as stored
from tests.engine.ageing import Scene, turn
from tests.engine.code import AS_NEW, Code, payload
from tests.engine.rows import count, execute, fetch, holding
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.refusals import refused
from tests.fixtures.servers import InProcessServer

KEPT_BY_OTHERS = {"run_key", "query"}
"""Tables with a run's id whose rows may outlive it."""

VALUES = {
    "uuid": "gen_random_uuid()",
    "text": "'t'",
    "bytea": "'\\x00'",
    "json": "'{}'",
    "boolean": "false",
    "timestamp with time zone": "now() + interval '1 day'",  # a timer that is due would fire
}


@pytest_asyncio.fixture
async def scene(server: InProcessServer, dsn: str) -> Scene:
    return Scene(dsn, server.app.engine)


async def tables_of_runs(dsn: str) -> list[LiteralString]:
    """All tables whose rows belong to a run."""
    rows = await fetch(
        dsn, "select table_name::text from information_schema.columns where column_name = 'run_id' order by 1"
    )
    return [name for (name,) in rows]


async def fill(dsn: str, table: LiteralString, run_ids: Collection[str]) -> None:
    """A row of a table for each run, whatever its columns are."""
    columns = await fetch(
        dsn,
        """select column_name::text, data_type::text from information_schema.columns
           where table_name = %s and is_nullable = 'NO' and column_name <> 'run_id' and is_identity = 'NO'""",
        [table],
    )
    names = ", ".join(["run_id", *(name for name, _ in columns)])
    values = ", ".join(["x", *(VALUES.get(type_, "7") for _, type_ in columns)])
    await execute(dsn, f"insert into {table} ({names}) select {values} from unnest(%s::uuid[]) x", [list(run_ids)])


async def test_an_old_ended_run_goes_with_all_of_its_rows_and_nothing_else_does(scene: Scene, api: Api) -> None:
    """Also of tables that later migrations bring."""
    await api.register(manifest())
    old = [run_id for state in RunState if state.final for run_id in await scene.runs(1, 11, state=state)]
    young = await scene.runs(2, 9)
    live = [run_id for state in RunState if not state.final for run_id in await scene.runs(1, 1000, state=state)]
    tables = [table for table in await tables_of_runs(scene.dsn) if table not in KEPT_BY_OTHERS | {"run", "event"}]
    assert len(tables) >= 10
    for table in tables:
        await fill(scene.dsn, table, old + young + live)
    loop = scene.retention()
    await turn(loop)
    assert await scene.left() == {*young, *live}
    assert loop.deleted == len(old)
    for table in [*tables, "event"]:
        assert await count(scene.dsn, table, "run_id = any(%s::uuid[])", [old]) == 0, table
        found = await fetch(scene.dsn, f"select distinct run_id::text from {table}")
        assert {row[0] for row in found} == {*young, *live}, table


async def test_each_definition_says_how_long_its_runs_are_kept_and_the_server_for_the_others(
    scene: Scene, api: Api
) -> None:
    """The versions of one workflow too, and 0 is for ever."""

    async def registered(workflow_id: str, version: str, retention: str | None) -> None:
        extra = {"retention": retention} if retention else {}
        await api.register(manifest(workflow_id=workflow_id, compatibility_id=version, workflow=extra))

    await registered("plain", "1", None)
    await registered("short", "1", "1h")
    await registered("both", "1", "100d")
    plain = [(await scene.runs(1, days, workflow_id="plain"))[0] for days in (9, 11)]
    short = [(await scene.runs(1, days, workflow_id="short"))[0] for days in (0.03, 0.05)]
    long = [(await scene.runs(1, days, workflow_id="both"))[0] for days in (50, 101)]
    await registered("both", "2", "2d")
    both = [(await scene.runs(1, days, workflow_id="both"))[0] for days in (1, 3)]
    await turn(scene.retention(retention=0.0))
    assert await scene.left() == {*plain, short[0], long[0], both[0]}
    await turn(scene.retention())
    assert await scene.left() == {plain[0], short[0], long[0], both[0]}


@pytest.mark.parametrize("text", ['{"retention": "2 centuries"}', '{"retention": 5}', "[]", "no JSON"])
async def test_a_definition_that_can_not_be_read_keeps_its_own_runs_and_no_others(
    scene: Scene, api: Api, text: str
) -> None:
    """As when a newer release has registered it."""
    await api.register(manifest(workflow_id="odd"))
    await api.register(manifest())
    await execute(scene.dsn, "update definition set manifest = %s where workflow_id = 'odd'", [text])
    stays = await scene.runs(1, 11, workflow_id="odd")
    await scene.runs(1, 11)
    await turn(scene.retention())
    assert await scene.left() == set(stays)


async def test_a_run_that_is_retried_between_the_look_and_the_lock_stays(
    scene: Scene, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 9: what was read without a lock decides nothing."""
    await api.register(manifest())
    retried, gone = await scene.runs(2, 11, state=RunState.FAILED)
    lock = stored.lock

    async def late(*arguments: Any) -> Any:
        await execute(scene.dsn, "update run set state = 2, ended_at = null where run_id = %s", [retried])
        return await lock(*arguments)

    monkeypatch.setattr(stored, "lock", late)
    await turn(scene.retention())
    assert await scene.left() == {retried}
    assert await count(scene.dsn, "event", "run_id = %s", [gone]) == 0
    assert await count(scene.dsn, "event", "run_id = %s", [retried]) == 3


async def test_a_child_stays_while_its_parent_may_need_it(scene: Scene, api: Api) -> None:
    await api.register(manifest())
    [live] = await scene.runs(1, 20, state=RunState.WAITING)
    [ended] = await scene.runs(1, 1)
    failed = [
        (await scene.runs(1, 20, state=RunState.FAILED, parent_run_id=parent))[0]
        for parent in (live, ended, str(uuid.uuid4()))
    ]
    told, untold = await scene.runs(2, 20, parent_run_id=live)
    await execute(
        scene.dsn,
        """insert into message (target_run, kind, source_run, source_seq, namespace, body)
           values (%s, 4, %s, 1, '', '{}')""",
        [live, untold],
    )
    loop = scene.retention()
    await turn(loop)
    assert await scene.left() == {live, ended, failed[0], untold}
    await execute(scene.dsn, "delete from message")
    await execute(scene.dsn, "update run set state = 3, ended_at = now() where run_id = %s", [live])
    await turn(loop)
    assert await scene.left() == {live, ended}
    assert told not in await scene.left()


async def test_the_first_run_of_a_chain_stays_as_long_as_any_other_of_it(code: Code) -> None:
    """Calls on the chain are remembered with it, and its input is what the dedupe key stands for."""
    dsn, api, engine = code.scene.dsn, code.scene.api, code.scene.server.app.engine
    scene = Scene(dsn, engine)
    first = await code.start("in", dedupe_key="k")
    await (await code.take()).advance(outcome=AS_NEW, output=payload("next"))
    run = await code.take()
    last = run.task.task.run_id
    await run.fail()
    await _age(dsn, first)
    await turn(scene.retention())
    assert await scene.left() == {first, last}
    for _ in range(2):
        await code.scene.call("Retry", last, request_id="again")
    assert (await api.start("code", '"in"', dedupe_key="k")).run_id == last
    await (await code.take()).complete()
    await _age(dsn, last)
    await turn(scene.retention())
    await turn(scene.retention())
    assert await scene.left() == set()
    assert await count(dsn, "request") == 0


async def _age(dsn: str, run_id: str) -> None:
    """It ended long ago."""
    longer = "update run set created_at = created_at - %(ago)s::interval, ended_at = ended_at - %(ago)s::interval"
    await execute(dsn, longer + " where run_id = %(run_id)s", {"ago": "20 days", "run_id": run_id})


async def test_a_long_history_goes_in_slices_that_nobody_sees(scene: Scene, api: Api) -> None:
    """Also when the server that hid it is gone: another one goes on."""
    await api.register(manifest())
    [long] = await scene.runs(1, 11, events=95)
    [short] = await scene.runs(1, 12)
    await fill(scene.dsn, "run_attribute", [long])
    await execute(scene.dsn, "update run_attribute set namespace = 'default', key = 'k', value = 'v'")

    async def seen() -> bool:
        """All of it, or nothing."""
        listed = [
            long in [run.run_id for run in await api.list_all(**fields)]
            for fields in ({}, {"workflow_id": "wf"}, {"attributes": {"k": "v"}})
        ]
        if not any(listed):
            with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
                await api.get(long)
            with refused("RUN_NOT_FOUND"):
                await api.history(long)
            return False
        assert all(listed)
        assert (await api.get(long)).input.json == "1"
        assert await count(scene.dsn, "event", "run_id = %s", [long]) == 95
        return True

    loop = scene.retention(retention_batch_events=10)
    for _ in range(10):
        await loop.run_once()
        if not await seen():
            break
    sizes = [await count(scene.dsn, "event", "run_id = %s", [long])]
    while sizes[-1]:
        if len(sizes) % 4 == 1:
            loop = scene.retention(retention_batch_events=10)  # what the one before knew is lost
        await loop.run_once()
        assert not await seen()
        sizes.append(await count(scene.dsn, "event", "run_id = %s", [long]))
        assert len(sizes) < 50
    assert sizes[0] == 95
    assert max(a - b for a, b in itertools.pairwise(sizes)) == 10
    assert await count(scene.dsn, "event", "run_id = %s", [short]) == 0
    await turn(loop)
    assert await scene.left() == set()


async def test_a_request_key_outlives_its_run(scene: Scene, api: Api) -> None:
    """The same key again is answered with the run that is gone, until the key's own time has passed."""
    await api.register(manifest())
    first = (await api.start(request_key="k", input="1")).run_id
    bound = (await api.start(request_key="other", dedupe_key="d", request_id="r")).run_id
    also = await api.start(request_key="bound", dedupe_key="d")
    assert (also.run_id, also.created) == (bound, False)
    await execute(
        scene.dsn,
        """insert into run_key
               (namespace, kind, workflow_id, user_id, key, run_id, definition_hash, fingerprint, created)
           values ('default', 4, '', '', 'schedule', %s, '', '', true)""",
        [first],
    )
    await execute(scene.dsn, "update run set state = 3, created_at = now() - interval '11 d', ended_at = created_at")
    await execute(scene.dsn, "update run set ended_at = created_at")
    loop = scene.retention(key_memory=3600.0)
    await turn(loop)
    assert await scene.left() == set()
    for key, run_id in (("k", first), ("other", bound), ("bound", bound)):
        again = await api.start(request_key=key, input="1" if key == "k" else "null")
        assert (again.run_id, again.created) == (run_id, False)
    with refused("REQUEST_KEY_CONFLICT"):
        await api.start(request_key="k", input="2")
    with refused("RUN_NOT_FOUND"):
        await api.get(first)
    ends = await fetch(
        scene.dsn,
        """select kind, key, expires_at between now() + interval '59 min' and now() + interval '61 min' from run_key
           where kind in (1, 4) order by kind, key""",
    )
    assert ends == [(1, "bound", True), (1, "k", True), (1, "other", True), (4, "schedule", True)]
    assert (await api.start(request_key="other", dedupe_key="d", request_id="r")).run_id == bound
    await execute(scene.dsn, "update run_key set expires_at = now() - interval '1 s' where kind in (1, 4)")
    await turn(loop)
    fresh = await api.start(request_key="k", input="2")
    assert fresh.created
    assert fresh.run_id != first


async def test_a_key_lives_as_long_as_its_run(scene: Scene, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, turn after turn looks at some of them."""
    await api.register(manifest())
    monkeypatch.setattr(engine_retention, "_KEYS", 4)
    runs = [(await api.start(request_key=f"k{n:02}")).run_id for n in range(11)]
    await execute(scene.dsn, "delete from run where run_id = any(%s::uuid[])", [runs[::3]])
    loop = scene.retention()
    for _ in range(8):
        await turn(loop)
    rows = await fetch(scene.dsn, "select key from run_key where kind = 1 and expires_at is not null order by key")
    assert [row[0] for row in rows] == ["k00", "k03", "k06", "k09"]


async def test_runs_that_stay_hide_none_that_goes(scene: Scene, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 19: a thousand that live on are first in order. No step looks at more than a page, and a turn ends."""
    await api.register(manifest())
    await api.register(manifest(workflow_id="other"))
    monkeypatch.setattr(engine_retention, "_PAGE", 100)
    live = await scene.runs(1000, 100, state=RunState.WAITING)
    await scene.runs(10, 50)
    await scene.runs(10, 50, workflow_id="other")
    loop = scene.retention()
    for _ in range(3):
        await loop.run_once()
    assert await count(scene.dsn, "run", "workflow_id = 'other'") == 0
    assert await turn(loop) <= 12
    assert await scene.left() == set(live)
    assert await turn(loop) <= 13


async def test_what_somebody_holds_is_left_for_the_next_turn_and_nobody_waits(scene: Scene, api: Api) -> None:
    await api.register(manifest())
    held, *free = await scene.runs(5, 11)
    loop = scene.retention()
    async with holding(scene.dsn, "select from run where run_id = %s for no key update", [held]):
        async with asyncio.timeout(30):
            await turn(loop)
        assert await scene.left() == {held}
    await turn(loop)
    assert await scene.left() == set()
    assert free


async def test_servers_that_delete_at_once_delete_everything_once(scene: Scene, api: Api) -> None:
    await api.register(manifest())
    await scene.runs(300, 11)
    long = await scene.runs(3, 12, events=30)
    loops = [scene.retention(retention_batch=20, retention_batch_events=20) for _ in range(3)]
    await asyncio.gather(*(turn(loop) for loop in loops))
    await turn(loops[0])
    assert await scene.left() == set()
    assert await count(scene.dsn, "event") == 0
    assert sum(loop.deleted for loop in loops) == 300 + len(long)


async def test_steps_become_smaller_where_they_are_too_much_and_larger_again(
    scene: Scene, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose payloads are large is as much work as thousands of others."""
    await api.register(manifest())
    await scene.runs(100, 11)
    sizes: list[int] = []
    delete: Callable[..., Any] = stored.delete

    async def limited(session: Any, run_ids: Collection[str], key_memory: float) -> None:
        sizes.append(len(run_ids))
        if len(run_ids) > 10:
            raise DatabaseUnavailable("too slow")
        await delete(session, run_ids, key_memory)

    monkeypatch.setattr(stored, "delete", limited)
    loop = scene.retention(retention_batch=64)
    failed = 0
    for _ in range(200):
        try:
            await loop.run_once()
        except DatabaseUnavailable:
            failed += 1
        if not await scene.left():
            break
    assert sizes[:4] == [64, 32, 16, 8]
    assert 4 <= failed <= 20
    assert await scene.left() == set()


async def test_a_reader_who_comes_while_a_run_goes_is_told_that_it_is_gone(scene: Scene, api: Api) -> None:
    """And not that it had no input, or no events."""
    await api.register(manifest())
    [run_id] = await scene.runs(1, 1)
    await execute(scene.dsn, "delete from event")
    with refused("RUN_NOT_FOUND"):
        await api.get(run_id)
    with refused("RUN_NOT_FOUND"):
        await api.history(run_id)
    with refused("RUN_NOT_FOUND"):
        await anext(api.watch(run_id, timeout=DEADLINE))


async def test_an_ended_run_is_listed_until_it_goes(scene: Scene, api: Api) -> None:
    await api.register(manifest())
    runs = await scene.runs(3, 11)
    assert {run.run_id for run in await api.list_all()} == set(runs)
    await turn(scene.retention())
    page = await api.runs.ListRuns(pb.ListRunsRequest(), timeout=DEADLINE)
    assert (list(page.runs), page.next_page_token) == ([], "")
