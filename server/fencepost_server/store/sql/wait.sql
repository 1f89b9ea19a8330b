-- What runs wait for, for people. No locks. What decides on it is extra.sql's.

-- name: open_waits
-- Timers are those that nodes and starts wait for, not the timeouts of something else (kinds 1 and 6); a start is no node's, though
-- its place is the first one. Each part is bounded before they are put in order. index: timer_pkey, wait_pkey, child_pkey
select * from (
    (select seq, case kind when 1 then place else '{}' end as place, fire_at, null::text as name, null::uuid as child_run_id from timer
     where run_id = %(run_id)s and kind in (1, 6) order by seq limit 1000)
    union all
    (select seq, place, null, name, null from wait where run_id = %(run_id)s order by seq limit 1000)
    union all
    (select seq, place, null, null, child_run_id from child where run_id = %(run_id)s order by seq limit 1000)
) w order by seq limit 1000;

-- name: pending_signals
-- Signals that no wait has taken, by name. They are counted up to 10,000 in all, and 100 names are told. index: signal_pkey
select name, count(*)::int
from (select name from signal where run_id = %(run_id)s order by run_id, name, seq limit 10000) s
group by name order by name limit 100;
