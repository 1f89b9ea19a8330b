"""The walks over the runs of removed definitions: who is told, in which order, and what that costs.

What a run does when it is told is the lanes' business: here the commands end up in a list.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from fencepost_server.config import Config
from fencepost_server.domain.errors import (
    DatabaseUnavailable,
    FencepostError,
    IllegalTransition,
    Overloaded,
    RunNotFound,
    ServerDraining,
)
from fencepost_server.domain.manifest import parse_manifest
from fencepost_server.domain.model import RunState
from fencepost_server.engine import definitions
from fencepost_server.engine import removal as engine_removal
from fencepost_server.engine.operations import Command, Commanded, CommandKind
from fencepost_server.engine.removal import MAX_COUNTED, Remover
from fencepost_server.store.connection import Database
from fencepost_server.store.definitions import Removal
from tests.engine.rows import execute, fetch, holding
from tests.fixtures.manifests import manifest
from tests.fixtures.waiting import eventually, until_blocked


@dataclass(slots=True)
class Told:
    """Stands for the lanes: what was submitted, and what is answered to whom."""

    dsn: str
    database: Database
    commands: list[Command] = field(default_factory=list)
    faults: dict[str, FencepostError] = field(default_factory=dict)
    """By run id: raised by ``submit`` if it is one of overload, else the answer; once."""

    @property
    def run_ids(self) -> list[str]:
        return [command.run_id for command in self.commands]

    def submit(self, command: Command) -> None:
        fault = self.faults.get(command.run_id)
        if isinstance(fault, Overloaded | ServerDraining):
            del self.faults[command.run_id]
            raise fault
        self.commands.append(command)
        command.settle(Commanded(RunState.UNDOING) if fault is None else self.faults.pop(command.run_id))

    def remover(self, scan: int = 10_000, batch: int = 200) -> Remover:
        """That of one more server, as if just started."""
        remover = Remover(self.database, self.database, self.submit)
        remover.scan, remover.batch = scan, batch
        return remover

    async def removed(self, n: int = 1, *, namespace: str = "default", before: int = 0) -> Removal:
        """Register a definition, start ``before`` runs of it, and remove it."""
        text = parse_manifest(manifest(compatibility_id=str(n)))
        await definitions.register(self.database, namespace, text)
        if before:
            await self.runs(text.hash, before, namespace=namespace)
        return (await definitions.remove(self.database, namespace, "wf", text.hash))[1]

    async def runs(self, hash_: bytes, n: int, *, namespace: str = "default", ended: bool = False) -> list[str]:
        """Runs in the order of their times, of which several have the same."""
        rows = await fetch(
            self.dsn,
            "insert into run (run_id, namespace, workflow_id, definition_hash, user_id, request_key, priority, state,"
            " node_index, next_seq, last_event_at, created_at, ended_at)"
            " select gen_random_uuid(), %s, 'wf', %s, '', '', 3, 2, 0, 3, clock_timestamp(),"
            " now() + n / 3 * interval '1 ms', case when %s then now() end from generate_series(1, %s) n"
            " returning run_id::text, created_at",
            [namespace, hash_, ended, n],
        )
        return [run_id for run_id, _at in sorted(rows, key=lambda row: (row[1], row[0]))]


@pytest_asyncio.fixture
async def told(dsn: str) -> AsyncIterator[Told]:
    """The lanes of nobody, on a clean database."""
    database = Database(Config(dsn=dsn, statement_timeout=60, batch_timeout=60), "removal", 4)
    await database.open()
    yield Told(dsn, database)
    await database.close()


async def to_the_end(remover: Remover, passes: int = 1000) -> None:
    """Let it go on until it would rest till the next look."""
    for _ in range(passes):
        if await remover.run_once() > 1.0:
            return
    raise AssertionError("it never rests")


@pytest.mark.parametrize(("scan", "batch"), [(10_000, 200), (7, 3), (3, 7), (1, 1), (50, 50)])
async def test_every_live_run_of_a_removed_definition_is_told_once_the_oldest_first(
    told: Told, scan: int, batch: int
) -> None:
    """And no other one, however the pages fall."""
    other = (await definitions.register(told.database, "default", parse_manifest(manifest()))).definition.hash
    removal = await told.removed(2)
    expected: list[str] = []
    for _ in range(3):
        await told.runs(other, 4)
        expected += await told.runs(removal.hash, 10)
        await told.runs(removal.hash, 5, ended=True)
        await told.runs(removal.hash, 2, namespace="other")
    await to_the_end(told.remover(scan, batch))
    assert told.run_ids == expected
    assert {(command.kind, command.namespace) for command in told.commands} == {(CommandKind.REMOVE, "default")}


async def test_who_removes_is_told_how_many_runs_have_not_ended(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_removal, "_PATIENCE", 60.0)
    monkeypatch.setattr(engine_removal, "_COUNTING", 60.0)  # what is found by then is told, although it is not all
    removal = await told.removed(before=20)
    remover = told.remover(scan=6, batch=4)
    remover.loop.start()
    try:
        assert await remover.end_runs(removal) == 20
        assert len(set(told.run_ids)) == len(told.run_ids) == 20
        for left in (13, 1, 0, 0):
            await execute(
                told.dsn,
                "update run set ended_at = now() where run_id = any(select run_id from run where ended_at is null"
                " order by random() limit (select count(*) - %s from run where ended_at is null))",
                [left],
            )
            assert await remover.end_runs(removal) == left
        assert len(told.run_ids) == 20, "a walk that came to its end is not repeated"
    finally:
        await remover.loop.stop()


async def test_no_more_runs_are_counted_than_anybody_would_read(told: Told) -> None:
    """I12."""
    removal = await told.removed(before=MAX_COUNTED + 50)
    remover = told.remover()
    remover.loop.start()
    try:
        assert await remover.end_runs(removal) == MAX_COUNTED
        await eventually(lambda: len(set(told.run_ids)) == MAX_COUNTED + 50, 120)
    finally:
        await remover.loop.stop()


@pytest.mark.parametrize("fault", [Overloaded("full"), DatabaseUnavailable("away")])
async def test_a_run_that_could_not_be_told_is_told_later_and_keeps_no_other_waiting(
    told: Told, fault: FencepostError
) -> None:
    removal = await told.removed(before=12)
    ids = [row[0] for row in await fetch(told.dsn, "select run_id::text from run order by created_at, run_id")]
    told.faults = {ids[5]: fault}
    remover = told.remover(batch=4)
    await to_the_end(remover)
    assert set(told.run_ids) == set(ids)
    told.commands.clear()
    await to_the_end(remover)
    assert told.run_ids == []
    assert removal.key in remover._walks


async def test_a_run_that_can_not_be_told_for_long_keeps_no_other_removal_waiting(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose row somebody holds: it is asked again and again, and those of other definitions are told once."""
    await told.removed(1, before=1)
    [(stuck,)] = await fetch(told.dsn, "select run_id::text from run")
    await told.removed(2, before=5)
    submit = told.submit

    def failing(command: Command) -> None:
        if command.run_id == stuck:
            told.faults[stuck] = DatabaseUnavailable("its row is locked")
        submit(command)

    remover = told.remover()
    monkeypatch.setattr(remover, "_submit", failing)
    for _ in range(3):
        assert await remover.run_once() == 1.0
    others = [run_id for run_id in told.run_ids if run_id != stuck]
    assert (len(others), len(set(others)), told.run_ids.count(stuck)) == (5, 5, 3)


@pytest.mark.parametrize("answer", [RunNotFound("gone"), IllegalTransition("it has ended")])
async def test_runs_that_have_ended_or_gone_meanwhile_are_told_no_more(told: Told, answer: FencepostError) -> None:
    await told.removed(before=5)
    ids = [row[0] for row in await fetch(told.dsn, "select run_id::text from run")]
    told.faults = dict.fromkeys(ids, answer)
    await to_the_end(told.remover())
    assert sorted(told.run_ids) == sorted(ids)


async def test_a_server_that_shuts_down_leaves_the_rest_to_others(told: Told) -> None:
    """I13."""
    await told.removed(before=9)
    ids = [row[0] for row in await fetch(told.dsn, "select run_id::text from run order by created_at, run_id")]
    told.faults = {ids[4]: ServerDraining("shutting down")}
    assert await told.remover(batch=3).run_once() == 0.0
    first = told.remover(batch=3)
    told.commands.clear()
    await to_the_end(first)
    assert told.run_ids == ids[:4]
    told.commands.clear()
    await to_the_end(told.remover(batch=3))
    assert told.run_ids == ids


async def test_every_server_finds_removals_by_itself_a_page_at_a_time(told: Told) -> None:
    for n in range(5):
        await told.removed(n, before=2)
    await told.removed(0, namespace="another", before=2)
    expected = {row[0] for row in await fetch(told.dsn, "select run_id::text from run")}
    remover = told.remover()
    remover.look_page, remover.look_interval = 2, 0.0
    for _ in range(50):
        await remover.run_once()
    assert set(told.run_ids) == expected
    assert len(told.run_ids) == len(expected)


async def test_nothing_to_end_costs_one_statement_a_minute(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        await told.removed(n, before=2)
    remover = told.remover()
    await to_the_end(remover)
    sent: list[Any] = []
    rows = Database.rows

    async def counting(*arguments: Any) -> Any:
        sent.append(arguments)
        return await rows(*arguments)

    monkeypatch.setattr(Database, "rows", counting)
    assert await remover.run_once() > 45  # of a minute since the look, after which runs were told
    assert sent == []
    remover.look_interval = 0.0
    remover._next_look = 0.0
    await remover.run_once()
    assert len(sent) == 1


async def test_a_removal_waits_for_the_starts_under_way_and_ends_their_runs(told: Told) -> None:
    """The share lock of the starts: what they insert is there when the walk begins."""
    text = parse_manifest(manifest())
    await definitions.register(told.database, "default", text)
    async with holding(told.dsn, "select from deployment for share") as start:
        removing = asyncio.create_task(definitions.remove(told.database, "default", "wf", text.hash))
        await until_blocked(told.dsn)
        await start.execute(
            "insert into run (run_id, namespace, workflow_id, definition_hash, user_id, request_key, priority, state,"
            " node_index, next_seq, last_event_at, created_at)"
            " values (gen_random_uuid(), 'default', 'wf', %s, '', '', 3, 2, 0, 3, now(), now())",
            [text.hash],
        )
        await start.commit()
    await removing
    await to_the_end(told.remover())
    assert len(told.run_ids) == 1


async def test_a_caller_that_is_gone_does_not_stop_the_walk(told: Told) -> None:
    removal = await told.removed(before=30)
    remover = told.remover(batch=1)
    calling = asyncio.create_task(remover.end_runs(removal))
    await eventually(lambda: remover._walks)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    remover.loop.start()
    try:
        await eventually(lambda: len(told.run_ids) == 30)
    finally:
        await remover.loop.stop()
