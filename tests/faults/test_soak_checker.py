"""The checker of the soak goes red for each rule that is broken, and for none that is not.

Some programs run without any fault; then each row of the table breaks one thing in a copy of what they have left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import psycopg
import pytest
from psycopg import sql

from fencepost_server.domain.model import EventType
from tests.faults.soak.checker import check
from tests.faults.soak.conditional_sink import ConditionalSink
from tests.faults.soak.findings import Finding, Rule
from tests.faults.soak.levels import Level
from tests.faults.soak.load import Acked, Load
from tests.faults.soak.recovery import BOUNDS, SERVER_KILLED, Recoveries
from tests.faults.soak.schedules import wrong_schedules
from tests.faults.soak.tables import AT_WORK, broken_rows
from tests.faults.soak.watcher import Watcher
from tests.fixtures.api import Api
from tests.fixtures.databases import Cluster
from tests.fixtures.processes import Process
from tests.fixtures.servers import StartInProcessServer, StartServerProcess
from tests.fixtures.waiting import eventually

SEED, PROGRAMS = 3, 20
E = EventType


@dataclass(frozen=True, slots=True)
class Broken:
    """What is done to the tables, and what the checker has to say of it, the rule and words of the finding. In a
    statement, {run} is a completed graph run that no other statement is about.
    """

    statement: str
    rule: Rule
    says: str


STEP = f"type = {E.STEP_COMPLETED:d}"
LOCAL = f"type = {E.LOCAL_STEP_ENDED:d}"
HISTORIES = [
    Broken("delete from event where seq = 2 and run_id = {run}", Rule.ROWS, "its events are not 1, 2, 3"),
    Broken("delete from event where seq = (select next_seq - 1 from run where run_id = {run}) and run_id = {run}",
           Rule.ROWS, "not 1, 2, 3"),
    Broken("update run set state = 2, ended_at = null where run_id = {run}", Rule.STUCK, "is RUNNING"),
    Broken("update run set state = 4 where run_id = {run}", Rule.ROWS, "its state or its times are not those"),
    Broken(f"""with one as (update run set next_seq = next_seq + 1 where run_id = {{run}} returning *)
           insert into event (run_id, seq, type, at)
           select run_id, next_seq - 1, {E.RUN_RESUMED:d}, clock_timestamp() from one""",
           Rule.ILLEGAL, "something was written after the end"),
    Broken("update event set at = at - interval '1 hour' where seq = 3 and run_id = {run}",
           Rule.ILLEGAL, "time ran backwards"),
    Broken("update run set request_key = 'another' where request_key = (select max(request_key) from run)",
           Rule.LOST, "was answered with run"),
    Broken(f"""update event set detail = (detail::jsonb || '{{{{"request_id": "another"}}}}')::json
           where type = {E.SIGNAL_RECEIVED:d}""", Rule.LOST, "was answered, and is no event"),
    Broken("delete from request", Rule.LOST, "was answered, and is not known"),
    Broken("delete from run_key where kind = 4", Rule.SCHEDULE, "it has started nothing"),
]  # fmt: skip
OLD = "'2000-01-01', 0, 0, 0, 0, 1, 1000"
TABLES = [
    Broken("delete from run where run_id = {run}", Rule.ROWS, "there are events and no run"),
    Broken(f"update event set type = {E.RUN_RESUMED:d} where seq = 1 and run_id = {{run}}",
           Rule.ILLEGAL, "the first event, and no other, is the start"),
    Broken(f"""insert into event (run_id, seq, type, at, task_id, token)
           select run_id, next_seq + n, {E.STEP_RETRYING:d}, clock_timestamp(), 2, 9 - n
           from run, generate_series(0, 1) n where run_id = {{run}}""", Rule.ILLEGAL, "a token has not grown"),
    Broken(f"insert into task select run_id, 1, namespace, '', '', 3, 0, 1, 4, {OLD} from run where run_id = {{run}}",
           Rule.ROWS, "task "),
    Broken("insert into timer select run_id, 1, 1, namespace, '2000-01-01', true, '{{}}' from run where run_id = {run}",
           Rule.ROWS, "timer "),
    Broken("insert into wait select run_id, 1, 'go', '{{}}' from run where run_id = {run}", Rule.ROWS, "wait "),
    Broken("insert into signal select run_id, 1, 'go', 4 from run where run_id = {run}", Rule.ROWS, "signal "),
    Broken("insert into undo select run_id, 1, false, 0, 1, 1, 4, 1, 1, 0, 0 from run where run_id = {run}",
           Rule.ROWS, "undo "),
    Broken("insert into child select run_id, 1, run_id, '{{}}' from run where run_id = {run}", Rule.ROWS, "child "),
    Broken("insert into scope select run_id, 1, 0, 1, 0, 0, 0, 0, 0, 0 from run where run_id = {run}",
           Rule.ROWS, "scope "),
    Broken("insert into output select run_id, 0, 0, 0, 1 from run where run_id = {run}", Rule.ROWS, "output "),
    Broken("insert into checkpoint select run_id, 1, 1 from run where run_id = {run}", Rule.ROWS, "checkpoint "),
    Broken("insert into stopped_task select run_id, 1, '{{}}' from run where run_id = {run}",
           Rule.ROWS, "stopped task "),
    Broken("""insert into message (target_run, kind, source_run, source_seq, namespace, body)
           select run_id, 4, run_id, 1, namespace, '{{}}' from run where run_id = {run}""", Rule.ROWS, "message to "),
]  # fmt: skip
"""What a server would mend, or could not read."""
OUTPUTS = [
    Broken(f"""update event set payload = json_build_object('way', 77, 'items', array[]::integer[])
           where payload::text like '%items%' and {STEP}""", Rule.EFFECTS, "came to Fate"),
    Broken(f"""update event set payload = json_build_object('site', payload->'site', 'v', 1, 'last', 1)
           where {LOCAL} and payload is not null""", Rule.EFFECTS, "ended with End"),
    Broken(f"update event set token = 0 - token, type = {E.STEP_FAILED:d} where run_id = {{run}} and {STEP}",
           Rule.ILLEGAL, "Illegal: the token of task"),
    Broken("update run set state = 4 where run_id = {run}", Rule.ILLEGAL, "state is 'FAILED', expected 'COMPLETED'"),
]  # fmt: skip
LAST = "select max(key) from run_key k join schedule s on starts_with(k.key, s.uuid::text) where k.kind = 4"
SCHEDULES = [
    Broken(f"""update run_key
           set key = split_part(key, ' ', 1) || ' ' || split_part(key, ' ', 2)::timestamptz + interval '1 hour'
           where key = ({LAST} and schedule_id = 'beside')""", Rule.SCHEDULE, "beside: 1800 times have no run"),
    Broken(f"""update run_key
           set key = split_part(key, ' ', 1) || ' ' || split_part(key, ' ', 2)::timestamptz + interval '1 hour'
           where key = ({LAST} and schedule_id = 'skipping')""", Rule.SCHEDULE, "times are left out"),
    Broken("update schedule set started_runs = 1000 where schedule_id = 'skipping'",
           Rule.SCHEDULE, "skipping: 1000 are counted"),
    Broken(f"update run_key set run_id = gen_random_uuid() where key = ({LAST} and schedule_id = 'queueing')",
           Rule.SCHEDULE, "queueing: a run that it started is not there"),
    Broken("update schedule set starting_at = '2100-01-01' where schedule_id = 'queueing'",
           Rule.SCHEDULE, "queueing: a start is under way for ever"),
    Broken("update schedule set failed_starts = 1 where schedule_id = 'cancelling'",
           Rule.SCHEDULE, "cancelling: starts have failed"),
    Broken("update schedule set skipped_missed = 1 where schedule_id = 'beside'",
           Rule.SCHEDULE, "beside: starts have failed or were missed"),
]  # fmt: skip
STEPS = "select * from trial where not undo and verdict = 'accepted' and step not like '%/-%' order by number"
LOGGED = "insert into trial (step, run_id, undo, token, attempt, largest, verdict, worker)"
SINK = [
    Broken(f"{LOGGED} select step, run_id, undo, token + 9, attempt + 1, token, 'known', '' from ({STEPS} limit 1) t",
           Rule.REPEATED, "acted again after it had completed"),
    Broken(f"{LOGGED} select step, run_id, undo, token, attempt, token, 'known', '' from ({STEPS} offset 1 limit 1) t",
           Rule.REPEATED, "the same lease acted twice"),
    Broken(f"{LOGGED} select step, run_id, undo, token - 1, 9, token, 'known', '' from ({STEPS} offset 2 limit 1) t",
           Rule.REPEATED, "was known"),
    Broken(f"{LOGGED} select step, run_id, undo, token + 1, 9, token, 'refused', '' from ({STEPS} offset 3 limit 1) t",
           Rule.REPEATED, "was refused"),
    # Several, because an attempt that acted may have failed after it, and not be the one that has completed the step.
    Broken(f"delete from trial where number in (select number from ({STEPS} offset 4 limit 8) t)",
           Rule.EFFECTS, "has not acted with it"),
    Broken("update effect set undone = not undone", Rule.EFFECTS, "which its history does not say"),
    Broken(f"{LOGGED} values ('x/1', 'x', false, 1, 1, 0, 'accepted', '')", Rule.LOST, "runs acted that are not there"),
    Broken("update told set token = token - 1", Rule.LOST, "was acknowledged, recorded is"),
    Broken("insert into forgotten values ('x/1', 7, 1, 2)", Rule.LOST, "x/1"),
]  # fmt: skip


@dataclass
class Left:
    """What the programs have left: the database and the sink's, both at rest, and what was acknowledged."""

    dsn: str
    sink_dsn: str
    acked: Acked


@pytest.fixture
async def left(
    new_database: Callable[..., str],
    server_process: StartServerProcess,
    python_process: Callable[..., Process],
) -> Left:
    dsn, sink_dsn = new_database(migrated=True), new_database()
    server = server_process(dsn, listen_dsn=dsn)
    sink = ConditionalSink(sink_dsn)
    sink.create()
    workers = [
        python_process("-m", "tests.faults.soak.worker", server.grpc_address, sink_dsn, kind, kind, "1000")
        for kind in ("graph", "code")
    ]
    watcher = Watcher(dsn)
    load = Load(server.grpc_address, watcher, sink, SEED, PROGRAMS)
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watcher.watch())
            await load.prepare()
            await load.run(PROGRAMS)
            await load.stop()
            watching.cancel()
        await eventually(lambda: _is_quiet(watcher), 30)
    finally:
        await watcher.close()
        await load.close()
        sink.close()
    for process in (*workers, server):
        process.kill()  # nobody may be connected to what is copied
    return Left(dsn, sink_dsn, load.acked)


async def _is_quiet(watcher: Watcher) -> bool:
    return not await watcher.fetch(AT_WORK)


@pytest.fixture
def copy_of(cluster: Cluster) -> Iterator[Callable[[str], str]]:
    """Copies a database that nobody is connected to."""
    made: list[str] = []

    def make(dsn: str) -> str:
        name = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
        made.append(f"{name}_copy_{len(made)}")
        return cluster.create(made[-1], name)

    yield make
    for name in made:
        cluster.drop(name)


def break_all(dsn: str, table: Sequence[Broken]) -> None:
    """No foreign key and no trigger is in the way."""
    with psycopg.connect(dsn, options="-c session_replication_role=replica", connect_timeout=30) as connection:
        if table is not SINK:
            connection.execute(
                "create temp table completed as select run_id from run r where state = 3 and workflow_id like 'soak-%'"
                f" and exists (select from event where run_id = r.run_id and {STEP})"
            )
        for number, row in enumerate(table):
            run = f"(select run_id from completed order by run_id offset {number} limit 1)"
            done = connection.execute(sql.SQL(row.statement).format(run=sql.SQL(run)))
            assert done.rowcount > 0, f"nothing was broken by {row.statement}"


async def test_the_checker_finds_each_rule_that_is_broken_and_nothing_where_none_is(
    left: Left, copy_of: Callable[[str], str], in_process_server: StartInProcessServer
) -> None:
    async def found(dsn: str, sink_dsn: str, acked: Acked) -> list[Finding]:
        server = await in_process_server(dsn)
        api, sink = Api(server.grpc_address), ConditionalSink(sink_dsn)
        try:
            return await check(dsn, api, sink, acked)
        finally:
            sink.close()
            await api.close()
            await server.stop()

    assert list(map(str, await found(copy_of(left.dsn), left.sink_dsn, left.acked))) == []
    left.acked.conflicts.append("one key: two runs")
    dsn, sink_dsn = copy_of(left.dsn), copy_of(left.sink_dsn)
    break_all(dsn, HISTORIES)
    findings = await found(dsn, left.sink_dsn, left.acked)
    told = [
        Broken("", Rule.REPEATED, "one key: two runs"),
        Broken("", Rule.ILLEGAL, "its history is told otherwise than it is numbered"),
        Broken("", Rule.ILLEGAL, "run_resumed in COMPLETED"),
        Broken("", Rule.REPEATED, "signal another is"),
        Broken("", Rule.EFFECTS, "nothing in its history says what became of it"),
    ]
    assert missed(findings, [*HISTORIES, *told]) == [], findings
    dsn = copy_of(left.dsn)
    break_all(dsn, TABLES)
    findings = await broken_rows(dsn)
    assert missed(findings, TABLES) == [], findings
    dsn = copy_of(left.dsn)
    break_all(dsn, SCHEDULES)
    findings = await wrong_schedules(dsn, left.acked.paused)
    assert missed(findings, SCHEDULES) == [], findings
    dsn = copy_of(left.dsn)
    break_all(dsn, OUTPUTS)
    break_all(sink_dsn, SINK)
    left.acked.paused["beside"] += timedelta(hours=1)
    findings = await found(dsn, sink_dsn, left.acked)
    stopped = Broken("", Rule.SCHEDULE, "it had stopped to fire")
    assert missed(findings, [*OUTPUTS, *SINK, stopped]) == [], findings


def missed(findings: Sequence[Finding], table: Sequence[Broken]) -> list[Broken]:
    """What was broken and not found."""
    return [row for row in table if not any(each.rule is row.rule and row.says in each.text for each in findings)]


def test_a_recovery_past_its_bound_and_a_server_that_grows_are_found() -> None:
    recoveries = Recoveries()
    recoveries.bounded[SERVER_KILLED] += [1.0, BOUNDS[SERVER_KILLED] + 0.1]
    assert len(recoveries.late()) == 1
    mib = 1 << 20
    assert not Level(0, 200.0, (100 * mib, 140 * mib), (30, 60)).grown
    assert Level(0, 200.0, (100 * mib, 190 * mib), (30, 30)).grown
    assert Level(0, 200.0, (100 * mib, 100 * mib), (30, 90)).grown
