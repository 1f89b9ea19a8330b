"""What must hold in the tables when everything is quiet, as questions whose answers have to be empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString

from fencepost_server.domain.model import FINAL_STATES, EventType, RunState
from tests.faults.scene import fetch
from tests.faults.soak.findings import Finding, Rule

_ENDS = {
    EventType.RUN_COMPLETED: RunState.COMPLETED,
    EventType.RUN_FAILED: RunState.FAILED,
    EventType.RUN_CANCELLED: RunState.CANCELLED,
    EventType.RUN_TERMINATED: RunState.TERMINATED,
    EventType.RUN_CONTINUED: RunState.CONTINUED,
}
PARAMS: Mapping[str, Any] = {
    "final": [int(state) for state in FINAL_STATES],
    "ends": [int(event) for event in _ENDS],
    "end_states": [int(state) for state in _ENDS.values()],
    "failed": int(RunState.FAILED),
    "run_failed": int(EventType.RUN_FAILED),
    "run_retried": int(EventType.RUN_RETRIED),
    "run_started": int(EventType.RUN_STARTED),
}
QUESTIONS: Mapping[LiteralString, tuple[Rule, str]] = {
    """
    select r.run_id::text as what from run r
    left join (
        select run_id, count(*) as n, min(seq) as low, max(seq) as high from event group by run_id
    ) e using (run_id)
    where e.n is distinct from r.next_seq - 1 or e.low is distinct from 1 or e.high is distinct from e.n
    """: (Rule.ROWS, "its events are not 1, 2, 3 … up to what the run says"),
    """
    select e.run_id::text as what from event e left join run r using (run_id)
    where r.run_id is null group by e.run_id
    """: (Rule.ROWS, "there are events and no run"),
    """
    select run_id::text || ' ' || seq as what from (
        select run_id, seq, at, lag(at) over (partition by run_id order by seq) as before from event) e
    where at < before
    """: (Rule.ILLEGAL, "time ran backwards"),
    """
    select r.run_id::text as what from run r join event e on e.run_id = r.run_id and e.seq = r.next_seq - 1
    where r.last_event_at <> e.at or (r.ended_at is not null) <> (r.state = any(%(final)s))
       or (r.ended_at is not null and r.ended_at <> e.at)
       or (r.ended_at is not null)
          <> ((e.type, r.state::int) in (select * from unnest(%(ends)s::int[], %(end_states)s::int[])))
    """: (Rule.ROWS, "its state or its times are not those of its last event"),
    """
    select e.run_id::text || ' ' || e.seq as what from event e
    join event n on n.run_id = e.run_id and n.seq = e.seq + 1
    where e.type = any(%(ends)s) and not (e.type = %(run_failed)s and n.type = %(run_retried)s)
    """: (Rule.ILLEGAL, "something was written after the end"),
    """
    select e.run_id::text || ' ' || e.seq as what from event e where (e.seq = 1) <> (e.type = %(run_started)s)
    """: (Rule.ILLEGAL, "the first event, and no other, is the start"),
    """
    select 'task ' || run_id || '/' || task_id as what from task join run r using (run_id)
              where r.state = any(%(final)s)
    union all select 'timer ' || run_id || '/' || seq from timer join run r using (run_id)
              where r.state = any(%(final)s) and not (parked and r.state = %(failed)s)
    union all select 'wait ' || run_id || '/' || seq from wait join run r using (run_id)
              where r.state = any(%(final)s) and r.state <> %(failed)s
    union all select 'signal ' || run_id || '/' || seq from signal join run r using (run_id)
              where r.state = any(%(final)s) and r.state <> %(failed)s
    union all select 'undo ' || run_id || '/' || of_seq from undo join run r using (run_id)
              where r.state = any(%(final)s)
    union all select 'child ' || run_id || '/' || seq from child join run r using (run_id)
              where r.state = any(%(final)s) and r.state <> %(failed)s
    union all select 'scope ' || run_id || '/' || scope_id from scope join run r using (run_id)
              where r.state = any(%(final)s) and r.state <> %(failed)s
    union all select 'output ' || run_id || '/' || seq from output join run r using (run_id)
              where r.state = any(%(final)s) and r.state <> %(failed)s
    union all select 'checkpoint ' || run_id || '/' || task_id from checkpoint join run r using (run_id)
              where r.state = any(%(final)s) and r.state <> %(failed)s
    union all select 'stopped task ' || run_id || '/' || task_id from stopped_task join run r using (run_id)
              where r.state = any(%(final)s) and r.state <> %(failed)s
    union all select 'message to ' || target_run from message
    """: (Rule.ROWS, "a row is left of what has ended"),
    """
    select run_id::text || '/' || task_id as what from (
        select run_id, task_id, seq, token, lag(token) over (partition by run_id, task_id order by seq) as before
        from event where task_id is not null and token is not null and token > 0) e
    where token < before
    """: (Rule.ILLEGAL, "a token has not grown"),
}
AT_WORK: LiteralString = """
select 1 from run where ended_at is null
union all select 1 from message union all select 1 from schedule where starting_at is not null
"""
"""Has rows until everything is quiet."""
_WEIGHTS: LiteralString = "select count(*) as runs, (select count(*) from event) as events from run"


async def sizes(dsn: str) -> tuple[int, int]:
    """How many runs and events there are."""
    [row] = await fetch(dsn, _WEIGHTS)
    return row["runs"], row["events"]


async def broken_rows(dsn: str) -> list[Finding]:
    """Every answer to a question that should have none."""
    found = []
    for question, (rule, text) in QUESTIONS.items():
        rows = await fetch(dsn, question, **PARAMS)
        found += [Finding(rule, f"{row['what']}: {text}") for row in rows]
    return found
