"""Many rows quickly, as the engine writes them: a run that it has made is copied, with all that belongs to it.

Copies differ in the run's id, and in their times: they lie a millisecond apart, the newest as old as the original.
They are inserted in the order of their ids, as runs are that start one after the other. Keys of requests are unique and
are not copied. Afterwards the tables are vacuumed and analyzed, and their pages are written: the state to which
autovacuum and checkpoints bring a database after a while, and not in the middle of a measurement.
"""

from __future__ import annotations

import asyncio

from psycopg import sql

from benchmarks.evidence import Connection
from benchmarks.stage import BenchmarkFailed, Stage

CHUNK = 5000
"""Copies that one statement makes."""
_WRITERS = 2
_TABLES = """
select c.relname, array_agg(a.attname::text order by a.attnum),
       array_agg(a.atttypid = 'timestamptz'::regtype order by a.attnum)
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
where c.relnamespace = 'public'::regnamespace and c.relkind = 'r' and c.relname <> 'run_key'
  and exists (select from pg_attribute k where k.attrelid = c.oid and k.attname = 'run_id')
group by c.relname
"""
_COPY = sql.SQL("""
insert into {table} ({columns})
select {values} from copy_of c cross join lateral (select * from {table} where run_id = %s offset 0) t
where c.number > %s and c.number <= %s order by c.number desc
""")
_IDS = """
create table copy_of as
select number::int, number * interval '1 ms' as age, uuidv7(- number * interval '1 ms') as run_id
from generate_series(1, {copies}) number;
create index on copy_of (number);
analyze copy_of
"""


async def multiply(stage: Stage, dsn: str, run_id: str, copies: int) -> None:
    """Make ``copies`` copies of a run that has no children. Raises BenchmarkFailed if a row of one is missing."""
    connection = await stage.connection(dsn)
    statements = await _statements(connection, run_id)
    await connection.execute(_IDS.format(copies=copies).encode())
    chunks = iter([(first, min(first + CHUNK, copies)) for first in range(0, copies, CHUNK)][::-1])

    async def write(own: Connection) -> None:
        for first, last in chunks:
            for statement in statements:
                await own.execute(statement, (run_id, first, last))

    async with asyncio.TaskGroup() as group:
        for _ in range(_WRITERS):
            group.create_task(write(await stage.connection(dsn)))
    await connection.execute("drop table copy_of")
    [[runs]] = await (await connection.execute("select count(*) from run")).fetchall()
    if runs < copies:
        raise BenchmarkFailed(f"{runs} of {copies} runs were copied")
    await connection.execute("vacuum (analyze)")
    await connection.execute("checkpoint")


async def _statements(connection: Connection, run_id: str) -> list[sql.Composed]:
    """A statement for each table in which the run has rows."""
    found = []
    for table, columns, times in await (await connection.execute(_TABLES)).fetchall():
        name = sql.Identifier(table)
        question = sql.SQL("select exists (select from {} where run_id = %s)").format(name)
        [[used]] = await (await connection.execute(question, (run_id,))).fetchall()
        if used:
            values = [_value(column, is_time) for column, is_time in zip(columns, times, strict=True)]
            identifiers = sql.SQL(", ").join(map(sql.Identifier, columns))
            found.append(_COPY.format(table=name, columns=identifiers, values=sql.SQL(", ").join(values)))
    return found


def _value(column: str, is_time: bool) -> sql.Composable:
    if column == "run_id":
        return sql.SQL("c.run_id")
    own = sql.Identifier("t", column)
    return sql.SQL("{} - c.age").format(own) if is_time else own
