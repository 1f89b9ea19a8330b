-- A clock that can be put forward, in databases of tests only. Unqualified, clock_timestamp() is the function of the schema
-- fencepost_test for connections that look there before pg_catalog, and PostgreSQL's own for all others.

-- name: install
-- Several statements, without parameters. Defaults of columns were resolved when the tables were made, hence the loop.
create schema fencepost_test;
create table fencepost_test.shift (
    only_row boolean primary key default true check (only_row),
    by_us bigint not null default 0
);
insert into fencepost_test.shift default values;
create function fencepost_test.clock_timestamp() returns timestamptz language plpgsql volatile as $body$
begin
    -- A multiple of a microsecond, never days: these would be shorter or longer where the session's zone changes its clocks.
    return pg_catalog.clock_timestamp() + (select s.by_us from fencepost_test.shift s) * interval '1 microsecond';
end
$body$;
do $body$
declare c record;
begin
    for c in
        select a.attrelid::regclass as rel, a.attname as col
        from pg_attrdef d join pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum
        where pg_get_expr(d.adbin, d.adrelid) = 'clock_timestamp()'
    loop
        execute format('alter table %s alter column %I set default fencepost_test.clock_timestamp()', c.rel, c.col);
    end loop;
end
$body$;

-- name: begin_life
-- Else the first server would see that none has run since the template was made, and take that for an outage.
update cluster set last_pass_at = clock_timestamp();

-- name: look
-- What is under way, and when what waits falls due. No locks. What a row is about stands in "what": 1 a lease, 2 tasks that may be
-- taken now, 3 messages, timers and schedules that loops are about to act on, 4 the time and the next due time.
with clock as materialized (select clock_timestamp() as now)
(select 1 as what, namespace, queue, handler, run_id::text, null::timestamptz as now, null::timestamptz as due
 from task where lease_session is not null order by lease_expires_at limit 20)
union all
(select 2, namespace, queue, handler, min(run_id::text), null, null
 from task, clock where lease_session is null and visible_at <= clock.now group by namespace, queue, handler limit 1000)
union all
(select 3, namespace, '', 'a message', target_run::text, null, null from message limit 1)
union all
(select 3, namespace, '', 'a timer', run_id::text, null, null
 from timer, clock where not parked and fire_at <= clock.now order by fire_at limit 1)
union all
(select 3, namespace, '', 'a schedule', schedule_id, null, null
 from schedule, clock where due_at <= clock.now or starting_at is not null limit 1)
union all
select 4, '', '', '', '', clock.now, least(
    (select fire_at from timer where not parked order by fire_at limit 1),
    (select min(visible_at) from task where lease_session is null and visible_at > clock.now and visible_at < '9000-01-01'),
    (select due_at from schedule where due_at is not null order by due_at limit 1))
from clock;

-- name: stand_still
-- Every transaction that leases, reports or fires has one of these in a weaker mode from its first look at the clock to its commit: when
-- this has been granted, nobody has read the clock for what is yet to be written. Reads go on.
lock table run, task, schedule in exclusive mode;

-- name: put_forward
-- Never back. The outage guard's times go along, for this is no outage.
with old as (
    select by_us from fencepost_test.shift
), new as (
    update fencepost_test.shift s
    set by_us = greatest(s.by_us, (extract(epoch from %(to)s::timestamptz - pg_catalog.clock_timestamp()) * 1000000)::bigint)
    returning s.by_us
)
update cluster
set last_pass_at = last_pass_at + (new.by_us - old.by_us) * interval '1 microsecond',
    hold_until = hold_until + case when hold_until > last_pass_at then new.by_us - old.by_us else 0 end * interval '1 microsecond'
from old, new;
