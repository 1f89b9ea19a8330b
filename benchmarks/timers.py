"""Very many timers due within a second: the benchmark `timers`.

Runs that sleep, and end when they wake. Each is as the engine made it (seeding.py) but for the time at which it is due:
they are brought to be due evenly over one second. Late is how long after its time a timer has fired, by the database's
clock.
"""

from __future__ import annotations

from benchmarks import evidence, meter, seeding
from benchmarks.load import Load
from benchmarks.plan import Plan
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.stage import BenchmarkFailed, Stage
from fencepost_server.domain.model import EventType, RunState

TIMER = {"id": "bench-timer", "compatibility_id": "1", "sequence": [{"id": "sleep", "sleep": "1d"}]}
_LIMIT = 300.0
_SETTLE, _MOVED_PER_SECOND = 2.0, 10_000
_NONE_WAITS = "select not exists (select from timer where not parked)"
_MOVE = """
with places as (select run_id, row_number() over () as place, count(*) over () as total from timer),
     moved as (
    update timer t
    set fire_at = statement_timestamp() + (%(seconds)s + p.place::float8 / p.total) * interval '1 s'
    from places p where p.run_id = t.run_id returning t.run_id, t.fire_at
)
insert into bench_due select run_id, fire_at from moved
"""
_FIRED = """
select count(*), extract(epoch from max(r.ended_at) - min(d.fire_at))::float8,
       percentile_disc(array[0.5, 0.99, 1]) within group (order by extract(epoch from e.at - d.fire_at)::float8 * 1000)
from bench_due d join event e on e.run_id = d.run_id and e.type = %(fired)s
     join run r on r.run_id = d.run_id and r.state = %(completed)s
"""


async def measure(stage: Stage, plan: Plan) -> Report:
    """The benchmark `timers`."""
    results = Results(stage, "timers", plan, unit="timer")

    async def one(_number: int) -> None:
        dsn = await stage.database()
        load = await Load.on(stage, plan.slots, dsn=dsn, workers=0)
        await load.client.register_definition(TIMER)
        [run_id] = await load.start("bench-timer", [None])
        await seeding.multiply(stage, dsn, run_id, plan.timers - 1)
        results.add(await _fire(load, results, plan.timers))

    await results.rounds(one)
    return results.report(f"{plan.rounds} rounds of {plan.timers:,} timers due within a second", timers=plan.timers)


async def _fire(load: Load, results: Results, timers: int) -> dict[str, float]:
    connection = load.connection
    await connection.execute("create table bench_due (run_id uuid, fire_at timestamptz)")
    cursor = await connection.execute(_MOVE, {"seconds": _SETTLE + timers / _MOVED_PER_SECOND})
    if cursor.rowcount != timers:
        raise BenchmarkFailed(f"{cursor.rowcount} of {timers} timers wait")
    [[early]] = await (await connection.execute("select min(fire_at) > clock_timestamp() from bench_due")).fetchall()
    if not early:
        raise BenchmarkFailed("some timers were due before all were moved")
    before = await load.meter.read()
    await evidence.until(connection, _NONE_WAITS, {}, _LIMIT)
    results.add_cost("fired", meter.cost(before, await load.meter.read()), timers)
    parameters = {"fired": int(EventType.TIMER_FIRED), "completed": int(RunState.COMPLETED)}
    [[fired, seconds, late]] = await (await connection.execute(_FIRED, parameters)).fetchall()
    if fired != timers:
        raise BenchmarkFailed(f"{fired} of {timers} timers have fired and ended their run")
    found = dict(zip(("late_p50_ms", "late_p99_ms", "late_max_ms"), late, strict=True))
    return {"timers_seconds": seconds, "timers_per_second": timers / seconds} | found
