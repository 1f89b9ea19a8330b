-- What runs have beyond their open steps: read when a decision needs it, under the lock of its run, and written with the batch.
-- Each statement serves all runs of a batch: a, b, c … are the columns of what is asked for or written.

-- name: payload
-- index: event_pkey
select k.ord, e.payload, e.payload_binary, e.payload_metadata
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
cross join lateral (select * from event e where e.run_id = k.a and e.seq = k.b offset 0) e;

-- name: scope
-- index: scope_pkey
select k.ord, s.*
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
cross join lateral (
    select run_id, scope_id, node_index, total, done, next_item, item_bytes, output_bytes, parent_scope, parent_item
    from scope s where s.run_id = k.a and s.scope_id = k.b offset 0
) s;

-- name: outputs
-- The outputs of all branches or items of a scope, in order. Read once, by the join. index: output_pkey, event_pkey
select k.ord, o.item, e.payload, e.payload_binary
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
cross join lateral (
    select item, seq from output o where o.run_id = k.a and o.scope_id = k.b and o.node_index = -1 offset 0
) o
cross join lateral (select * from event e where e.run_id = k.a and e.seq = o.seq offset 0) e
order by k.ord, o.item;

-- name: recorded
-- Where the output of a node is. index: output_pkey
select k.ord, o.seq
from unnest(%(a)s, %(b)s, %(c)s, %(d)s) with ordinality k(a, b, c, d, ord)
cross join lateral (
    select seq from output o where o.run_id = k.a and o.scope_id = k.b and o.node_index = k.c and o.item = k.d offset 0
) o;

-- name: wait
-- The first wait for a signal of that name. index: wait_pkey
select k.ord, w.*
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
cross join lateral (
    select run_id, seq, name, place from wait w where w.run_id = k.a and w.name = k.b order by w.seq limit 1
) w;

-- name: signal
-- The first signal of that name that no wait has taken. index: signal_pkey, event_pkey
select k.ord, s.seq, s.size
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
cross join lateral (
    select s.seq, s.size from signal s where s.run_id = k.a and s.name = k.b order by s.seq limit 1
) s;

-- name: matches
-- Waits and signals of the same name, each in order: what a pause has kept apart. Each side is numbered once and both are grouped, for
-- a join of them may be planned as a loop in a loop. So many pairs are told that one decision can bear. index: wait_pkey, signal_pkey
select k.ord, w.run_id, w.seq, w.name, w.place, m.signal_seq, m.size
from unnest(%(a)s) with ordinality k(a, ord)
cross join lateral (
    select name, max(wait_seq) as wait_seq, max(signal_seq) as signal_seq, max(size) as size from (
        select name, row_number() over (partition by name order by seq) as n, seq as wait_seq, null as signal_seq, null as size
        from wait where run_id = k.a
        union all
        select name, row_number() over (partition by name order by seq), null, seq, size from signal where run_id = k.a
    ) numbered
    group by name, n having count(*) = 2 order by wait_seq limit 1000
) m
cross join lateral (
    select * from wait w where w.run_id = k.a and w.name = m.name and w.seq = m.wait_seq offset 0
) w
order by k.ord, w.seq;

-- name: timer
-- index: timer_pkey
select k.ord, t.*
from unnest(%(a)s, %(b)s, %(c)s) with ordinality k(a, b, c, ord)
cross join lateral (
    select run_id, seq, kind, namespace, fire_at, place from timer t
    where t.run_id = k.a and t.seq = k.b and t.kind = k.c and not t.parked offset 0
) t;

-- name: fired_timers
-- What fell due during a pause. index: timer_pkey
select k.ord, t.*
from unnest(%(a)s) with ordinality k(a, ord)
cross join lateral (
    select run_id, seq, kind, namespace, fire_at, place from timer t where t.run_id = k.a and t.parked offset 0
) t
order by k.ord, t.fire_at, t.seq;

-- name: open_tasks
-- locks: the tasks of runs that are locked. Claims and heartbeats that hold one commit at once, and never wait for a run.
-- index: task_pkey
select k.ord, t.run_id, t.task_id, t.queue, t.handler, t.priority, t.node_index, t.input_seq, t.input_bytes, t.visible_at,
       t.attempt, t.operational_failures, t.corrective_failures, t.redeliveries, t.token, t.lease_ms,
       coalesce(t.timeout_ms, t.long_timeout_ms), t.lease_session, t.lease_expires_at, t.attempt_deadline_at, t.last_failure,
       t.feedback, t.outcomes, t.extra, t.checkpoint_number, t.resume_at
from unnest(%(a)s) with ordinality k(a, ord)
cross join lateral (select * from task t where t.run_id = k.a order by t.task_id for update) t;

-- name: open_task
-- locks: one task of a run that is locked. index: task_pkey
select k.ord, t.run_id, t.task_id, t.queue, t.handler, t.priority, t.node_index, t.input_seq, t.input_bytes, t.visible_at,
       t.attempt, t.operational_failures, t.corrective_failures, t.redeliveries, t.token, t.lease_ms,
       coalesce(t.timeout_ms, t.long_timeout_ms), t.lease_session, t.lease_expires_at, t.attempt_deadline_at, t.last_failure,
       t.feedback, t.outcomes, t.extra, t.checkpoint_number, t.resume_at
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
cross join lateral (select * from task t where t.run_id = k.a and t.task_id = k.b for update) t;

-- name: park
-- A pause: nobody may take a task until unpark. A task that is leased stays so; what a claim has just taken is left to it.
-- locks: the tasks of runs that are locked, so that only claims and heartbeats compete. index: task_pkey
with parked as (
    update task t set resume_at = t.visible_at, visible_at = %(until)s
    where t.ctid = any(array(
        select x.at from unnest(%(a)s) k(a)
        cross join lateral (
            select t.ctid as at, t.lease_session, t.visible_at from task t where t.run_id = k.a offset 0 for update
        ) x
        where x.lease_session is null and x.visible_at < %(until)s))
    returning t.run_id
)
select k.ord from unnest(%(a)s) with ordinality k(a, ord) join parked p on p.run_id = k.a;

-- name: unpark
-- The end of a pause. locks: the parked tasks of runs that are locked. index: task_pkey
with unparked as (
    update task t set visible_at = t.resume_at, resume_at = null
    from unnest(%(a)s) with ordinality k(a, ord)
    where t.run_id = any(%(a)s) and t.run_id = k.a and t.resume_at is not null
    returning k.ord, t.namespace, t.queue, t.handler, t.priority, t.visible_at
)
select * from unparked order by ord;

-- name: unblock
-- Steps that nobody could begin get fresh attempts. locks: the tasks of runs that are locked. index: task_pkey
with unparked as (
    update task t
    set visible_at = %(now)s, attempt = 0, operational_failures = 0, corrective_failures = 0, redeliveries = 0,
        extra = case when t.attempt > 0 then (coalesce(t.extra::jsonb, '{}') || '{"acted": true}')::json else t.extra end
    where t.ctid = any(array(
        select x.at from unnest(%(a)s) k(a)
        cross join lateral (
            select t.ctid as at, t.lease_session, t.visible_at, t.resume_at from task t where t.run_id = k.a offset 0 for update
        ) x
        where x.lease_session is null and x.resume_at is null and x.visible_at = %(until)s))
    returning t.run_id, t.namespace, t.queue, t.handler, t.priority, t.visible_at
)
select k.ord, u.namespace, u.queue, u.handler, u.priority, u.visible_at
from unnest(%(a)s) with ordinality k(a, ord) join unparked u on u.run_id = k.a;

-- name: next_undo
-- What is undone next, and what after that: what may have acted without completing first, then in reverse order of completion. With
-- inputs and outputs, for eager leases; only the first may be large. index: undo_unfinished, undo_pkey, event_pkey
select k.ord, u.run_id, u.of_seq, u.unfinished, u.node_index, u.task_id, u.input_seq, u.input_bytes, u.output_seq, u.token,
       u.scope_id, u.item, u.plan, u.origin, u.origin_seq, e.payload, e.payload_binary, e.payload_metadata, o.payload, o.payload_binary, o.payload_metadata,
       u.n
from unnest(%(a)s) with ordinality k(a, ord)
cross join lateral (
    select *, row_number() over (order by unfinished desc, of_seq desc) as n from (
        (select * from undo u where u.run_id = k.a and u.unfinished order by u.of_seq desc limit 20)
        union all
        (select * from undo u where u.run_id = k.a and not u.unfinished order by u.of_seq desc limit 20)
    ) u order by n limit 20
) u
cross join lateral (select * from event e where e.run_id = coalesce(u.origin, k.a) and e.seq = u.input_seq offset 0) e
left join lateral (select * from event o where o.run_id = coalesce(u.origin, k.a) and o.seq = u.output_seq offset 0) o on true
where u.n = 1 or coalesce(pg_column_size(e.payload), pg_column_size(e.payload_binary), 0)
               + coalesce(pg_column_size(o.payload), pg_column_size(o.payload_binary), 0) < 8192
order by k.ord, u.n;

-- name: history
-- Events of a code run after one, as many as fit in a page. index: event_pkey
select k.ord, e.seq, e.type, e.at, e.task_id, e.token, e.attempt, e.payload, e.payload_binary, e.payload_metadata, e.detail
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
cross join lateral (
    select x.*, sum(x.bytes) over (order by x.seq) - x.bytes as before from (
        select e.*, coalesce(pg_column_size(e.payload), pg_column_size(e.payload_binary), 0) as bytes
        from event e where e.run_id = k.a and e.seq > k.b order by e.seq limit 500
    ) x
) e
where e.before < 1048576 order by k.ord, e.seq;

-- name: chain_end
-- Who goes on with the work of the first run of a chain. index: run_chain
select k.ord, l.run_id
from unnest(%(a)s) with ordinality k(a, ord)
cross join lateral (
    select run_id from run l where l.chain_id = k.a order by l.created_at desc, l.run_id desc limit 1
) l;

-- name: op_event
-- The end of an op, and whether its run asked for anything after that, or the op has ended once more. Local steps do not tell: they
-- may have been under way, and what was decided before they began counts as decided (seen_seq). index: event_pkey
select k.ord, e.type, e.task_id, e.token, exists (
    select from event c
    where c.run_id = k.a and c.seq > k.b
      and (c.type in (2, 9, 11, 18, 35, 36, 37) or c.type in (4, 5, 23) and c.task_id = e.task_id)
)
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
cross join lateral (select * from event e where e.run_id = k.a and e.seq = k.b offset 0) e;

-- name: op_scheduled
-- What a step of a code run was asked for with, and about the size of its input. index: event_pkey
select k.ord, e.detail::text, coalesce(pg_column_size(e.payload), pg_column_size(e.payload_binary), 0)
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
cross join lateral (select * from event e where e.run_id = k.a and e.seq = k.b offset 0) e;

-- name: attributes
-- index: run_pkey
select k.ord, r.attributes from unnest(%(a)s) with ordinality k(a, ord)
cross join lateral (select attributes from run r where r.run_id = k.a offset 0) r;

-- name: unread_signals
-- Signals that nobody has taken, with their payloads: as many as a run may hold. index: signal_pkey, event_pkey
select k.ord, s.name, s.size, e.payload, e.payload_binary, e.payload_metadata, e.detail
from unnest(%(a)s) with ordinality k(a, ord)
cross join lateral (select * from signal s where s.run_id = k.a offset 0) s
cross join lateral (select * from event e where e.run_id = k.a and e.seq = s.seq offset 0) e
order by k.ord, s.seq;

-- name: signals_size
-- About the bytes of the signals that nobody has taken. index: signal_pkey
select k.ord, s.size from unnest(%(a)s) with ordinality k(a, ord)
cross join lateral (select coalesce(sum(size), 0)::bigint as size from signal s where s.run_id = k.a) s;

-- name: wake_decider
-- The run of an idle DECIDE task has an event for it. Its run is locked, and no claim takes an idle one. By tuple id, once it is locked:
-- a join by the run may be planned as a loop in a loop. index: task_pkey
update task t set visible_at = k.b
from (
    select k.*, p.place from unnest(%(a)s, %(b)s) k(a, b)
    cross join lateral (select ctid as place from task p where p.run_id = k.a and p.task_id = 1 for update) p
) k
where t.ctid = k.place;

-- name: lease_decider
-- As wake_decider, leased at once to the session that decided last. index: task_pkey
update task t set visible_at = k.d - interval '60 s', lease_session = k.b, token = k.c, lease_expires_at = k.d, attempt = 1
from (
    select k.*, p.place from unnest(%(a)s, %(b)s, %(c)s, %(d)s) k(a, b, c, d)
    cross join lateral (select ctid as place from task p where p.run_id = k.a and p.task_id = 1 for update) p
) k
where t.ctid = k.place;

-- name: reset_decider
-- An Advance was accepted: attempts count anew. index: task_pkey
update task set attempt = 1, operational_failures = 0, redeliveries = 0 where run_id = any(%(a)s) and task_id = 1;

-- name: set_attributes
-- A run labels itself: what it had is replaced. index: run_pkey, run_attribute_pkey
with k as (
    select a, b::json as b from unnest(%(a)s, %(b)s) u(a, b)
), labelled as (
    update run r set attributes = nullif(k.b::text, '{}')::json from k where r.run_id = any(%(a)s) and r.run_id = k.a
    returning r.run_id, r.namespace, r.created_at
), gone as (
    delete from run_attribute x using k
    where x.run_id = any(%(a)s) and x.run_id = k.a and not exists (select from json_object_keys(k.b) n where n = x.key)
)
insert into run_attribute (namespace, key, value, created_at, run_id)
select l.namespace, n.key, n.value, l.created_at, l.run_id
from labelled l join k on k.a = l.run_id cross join lateral json_each_text(k.b) n
on conflict on constraint run_attribute_pkey do update set value = excluded.value;

-- name: take_signals
-- The function of a code run has taken these. index: signal_pkey
with taken as (
    delete from signal s
    using unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
    where s.run_id = any(%(a)s) and s.run_id = k.a
      and s.seq in (select n::bigint from json_array_elements_text(k.b::json) n)
    returning k.ord, s.seq
)
select ord, seq from taken;

-- name: end_wait
-- index: wait_pkey
delete from wait w using unnest(%(a)s, %(b)s) k(a, b) where w.run_id = any(%(a)s) and w.run_id = k.a and w.seq = k.b;

-- name: delete_grace
-- The function has ended in its grace. index: timer_pkey
delete from timer where run_id = any(%(a)s) and kind = 8;

-- name: move_undo
-- A run continues as new, and its undo log with it: numbers that are below all of the new run keep the order. index: undo_pkey
update undo u set run_id = k.b, of_seq = u.of_seq - k.c, origin = coalesce(u.origin, u.run_id),
                  origin_seq = coalesce(u.origin_seq, u.of_seq)
from unnest(%(a)s, %(b)s, %(c)s) k(a, b, c) where u.run_id = any(%(a)s) and u.run_id = k.a;

-- name: move_key
-- A run continues as new, and holds its dedupe key as that. By tuple id, once it is locked, as in wake_decider. index: run_key_pkey
update run_key r set run_id = k.e, definition_hash = k.f
from (
    select k.*, p.place from unnest(%(a)s, %(b)s, %(c)s, %(d)s, %(e)s, %(f)s) k(a, b, c, d, e, f)
    cross join lateral (
        select ctid as place from run_key p
        where p.namespace = k.a and p.kind = 3 and p.workflow_id = k.b and p.user_id = '' and p.key = k.c and p.run_id = k.d for update
    ) p
) k
where r.ctid = k.place;

-- name: take_stopped
-- What a retry goes on from, taken out; its timers run again. index: stopped_task_pkey, timer_pkey
with restarted as (
    update timer set parked = false where run_id = any(%(a)s)
), taken as (
    delete from stopped_task s using unnest(%(a)s) with ordinality k(a, ord)
    where s.run_id = any(%(a)s) and s.run_id = k.a
    returning k.ord, s.task_id, s.row
)
select ord, row from taken order by ord, task_id < 0, abs(task_id);

-- name: child
-- index: child_pkey
select k.ord, c.run_id, c.seq, c.child_run_id, c.place
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
cross join lateral (select * from child c where c.run_id = k.a and c.seq = k.b offset 0) c;

-- name: children
-- index: child_pkey
select k.ord, c.run_id, c.seq, c.child_run_id, c.place
from unnest(%(a)s) with ordinality k(a, ord)
cross join lateral (select * from child c where c.run_id = k.a order by c.seq offset 0) c;

-- name: request
-- index: request_pkey
select k.ord, r.fingerprint, r.answer
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
cross join lateral (select * from request r where r.run_id = k.a and r.request_id = k.b offset 0) r;

-- name: run_state
-- Another run, as it is: not locked. index: run_pkey
select k.ord, r.state, r.priority, r.user_id, r.control, r.output_seq, r.failure
from unnest(%(a)s) with ordinality k(a, ord)
cross join lateral (select * from run r where r.run_id = k.a offset 0) r;

-- name: pending_start
-- Is the start of a child still on its way? index: message_once
select k.ord, m.message_id
from unnest(%(a)s) with ordinality k(a, ord)
cross join lateral (select message_id from message m where m.target_run = k.a and m.kind = 1 limit 1) m;

-- name: removed
-- Whether a definition was removed. locks: the deployment row (share) until the commit, so that a removal that comes later finds the
-- run alive. It is taken after runs: who holds it for update wants no run. index: deployment_pkey
select k.ord, d.removed
from unnest(%(a)s, %(b)s, %(c)s) with ordinality k(a, b, c, ord)
cross join lateral (
    select k.c = any(p.removed) as removed from deployment p where p.namespace = k.a and p.workflow_id = k.b for share
) d;

-- name: child_on_its_way
-- Is the start of a child, or what its parent is told of it, still to be delivered? Asked for each: "exists" may be planned as a look
-- at all messages. index: message_once
select k.ord, true
from unnest(%(a)s, %(b)s) with ordinality k(a, b, ord)
where (select true from message m where m.target_run = k.a and m.kind = 1 limit 1)
   or (select true from message m where m.target_run = k.b and m.kind = 4 and m.source_run = k.a limit 1);

-- name: key_holder
-- The run that holds a dedupe key, locked until the commit. index: run_key_pkey
select k.ord, r.run_id
from unnest(%(a)s, %(b)s, %(c)s) with ordinality k(a, b, c, ord)
cross join lateral (
    select run_id from run_key r
    where r.namespace = k.a and r.kind = 3 and r.workflow_id = k.b and r.user_id = '' and r.key = k.c for update
) r;

-- name: take_key
-- A run that goes on holds its dedupe key again; one that another run has taken stays with that. index: run_key_pkey
with taken as (
    insert into run_key (namespace, kind, workflow_id, user_id, key, run_id, definition_hash, fingerprint, created)
    select a, 3, b, '', c, d, e, f, true
    from unnest(%(a)s, %(b)s, %(c)s, %(d)s, %(e)s, %(f)s) u(a, b, c, d, e, f)
    on conflict on constraint run_key_pkey do nothing
    returning run_id
)
select k.ord, true from unnest(%(d)s) with ordinality k(d, ord) join taken t on t.run_id = k.d;

-- name: insert_attribute
insert into run_attribute (run_id, key, value, namespace, created_at) select * from unnest(%(a)s, %(b)s, %(c)s, %(d)s, %(e)s);

-- name: insert_timer
insert into timer (run_id, seq, kind, namespace, fire_at, place)
select a, b, c, d, e, f::json from unnest(%(a)s, %(b)s, %(c)s, %(d)s, %(e)s, %(f)s) u(a, b, c, d, e, f);

-- name: delete_timer
-- index: timer_pkey
delete from timer t using unnest(%(a)s, %(b)s, %(c)s) k(a, b, c)
where t.run_id = any(%(a)s) and t.run_id = k.a and t.seq = k.b and t.kind = k.c;

-- name: park_timer
-- It fell due during a pause, which its place tells: it acts at the end of that. index: timer_pkey
update timer t set parked = true, place = k.d::json from unnest(%(a)s, %(b)s, %(c)s, %(d)s) k(a, b, c, d)
where t.run_id = any(%(a)s) and t.run_id = k.a and t.seq = k.b and t.kind = k.c;

-- name: stop_timers
-- Their run ends: those of nodes wait for a retry, the others (of tasks and of the run) are over. index: timer_pkey
with stopped as (
    update timer set parked = true where run_id = any(%(a)s) and kind in (1, 2, 7)
)
delete from timer where run_id = any(%(a)s) and kind not in (1, 2, 7);

-- name: insert_wait
insert into wait (run_id, seq, name, place) select a, b, c, d::json from unnest(%(a)s, %(b)s, %(c)s, %(d)s) u(a, b, c, d);

-- name: delete_wait
-- index: wait_pkey
delete from wait w using unnest(%(a)s, %(b)s, %(c)s) k(a, b, c)
where w.run_id = any(%(a)s) and w.run_id = k.a and w.seq = k.b and w.name = k.c;

-- name: insert_signal
insert into signal (run_id, seq, name, size) select * from unnest(%(a)s, %(b)s, %(c)s, %(d)s);

-- name: delete_signal
-- index: signal_pkey
delete from signal s using unnest(%(a)s, %(b)s, %(c)s) k(a, b, c)
where s.run_id = any(%(a)s) and s.run_id = k.a and s.seq = k.b and s.name = k.c;

-- name: insert_scope
insert into scope (run_id, scope_id, node_index, total, done, next_item, item_bytes, output_bytes, parent_scope, parent_item)
select * from unnest(%(a)s, %(b)s, %(c)s, %(d)s, %(e)s, %(f)s, %(g)s, %(h)s, %(i)s, %(j)s);

-- name: update_scope
-- HOT. index: scope_pkey
update scope s set done = k.c, next_item = k.d, output_bytes = k.e
from unnest(%(a)s, %(b)s, %(c)s, %(d)s, %(e)s) k(a, b, c, d, e)
where s.run_id = any(%(a)s) and s.run_id = k.a and s.scope_id = k.b;

-- name: delete_scope
-- A join is done: its counters and the places of its outputs go. index: scope_pkey, output_pkey
with outputs as (
    delete from output o using unnest(%(a)s, %(b)s) k(a, b)
    where o.run_id = any(%(a)s) and o.run_id = k.a and o.scope_id = k.b
)
delete from scope s using unnest(%(a)s, %(b)s) k(a, b)
where s.run_id = any(%(a)s) and s.run_id = k.a and s.scope_id = k.b;

-- name: insert_output
insert into output (run_id, scope_id, item, node_index, seq) select * from unnest(%(a)s, %(b)s, %(c)s, %(d)s, %(e)s)
on conflict on constraint output_pkey do update set seq = excluded.seq;

-- name: insert_child
insert into child (run_id, seq, child_run_id, place)
select a, b, c, d::json from unnest(%(a)s, %(b)s, %(c)s, %(d)s) u(a, b, c, d);

-- name: update_child
-- Where it is has something more to tell. index: child_pkey
update child c set place = k.c::json from unnest(%(a)s, %(b)s, %(c)s) k(a, b, c)
where c.run_id = any(%(a)s) and c.run_id = k.a and c.seq = k.b;

-- name: delete_child
-- index: child_pkey
delete from child c using unnest(%(a)s, %(b)s) k(a, b) where c.run_id = any(%(a)s) and c.run_id = k.a and c.seq = k.b;

-- name: insert_undo
insert into undo (run_id, of_seq, unfinished, node_index, task_id, input_seq, input_bytes, output_seq, token, scope_id, item, plan)
select a, b, c, d, e, f, g, h, i, j, k, l::json
from unnest(%(a)s, %(b)s, %(c)s, %(d)s, %(e)s, %(f)s, %(g)s, %(h)s, %(i)s, %(j)s, %(k)s, %(l)s) u(a, b, c, d, e, f, g, h, i, j, k, l);

-- name: update_undo
-- Its token goes on when it is tried again. index: undo_pkey
update undo u set token = k.c from unnest(%(a)s, %(b)s, %(c)s) k(a, b, c)
where u.run_id = any(%(a)s) and u.run_id = k.a and u.of_seq = k.b;

-- name: delete_undo
-- index: undo_pkey
delete from undo u using unnest(%(a)s, %(b)s) k(a, b) where u.run_id = any(%(a)s) and u.run_id = k.a and u.of_seq = k.b;

-- name: insert_message
insert into message (target_run, kind, source_run, source_seq, namespace, body)
select a, b, c, d, e, f::json from unnest(%(a)s, %(b)s, %(c)s, %(d)s, %(e)s, %(f)s) u(a, b, c, d, e, f)
on conflict on constraint message_once do nothing;

-- name: lock_messages
-- locks: messages that are delivered now; those that another server delivers are left out. Taken after all locks of runs and
-- tasks. index: message_pkey
select message_id from message where message_id = any(%(ids)s) order by message_id for update skip locked;

-- name: delete_message
-- index: message_pkey
delete from message where message_id = any(%(a)s);

-- name: insert_request
insert into request (run_id, request_id, fingerprint, answer)
select a, b, c, d::json from unnest(%(a)s, %(b)s, %(c)s, %(d)s) u(a, b, c, d);

-- name: insert_stopped
insert into stopped_task (run_id, task_id, row) select a, b, c::json from unnest(%(a)s, %(b)s, %(c)s) u(a, b, c);

-- name: delete_stopped
-- index: stopped_task_pkey
delete from stopped_task where run_id = any(%(a)s);

-- name: restore_task
-- A step that was stopped goes on: what its row had is put back into the new one. index: task_pkey
update task t
set checkpoint_number = k.c, last_failure = k.d::json, feedback = k.e::json, outcomes = k.f::json, token = k.g
from unnest(%(a)s, %(b)s, %(c)s, %(d)s, %(e)s, %(f)s, %(g)s) k(a, b, c, d, e, f, g)
where t.run_id = any(%(a)s) and t.run_id = k.a and t.task_id = k.b;

-- name: save_checkpoint
-- index: checkpoint_pkey, task_pkey
with task_ as (
    update task t set checkpoint_number = k.c from unnest(%(a)s, %(b)s, %(c)s) k(a, b, c)
    where t.run_id = any(%(a)s) and t.run_id = k.a and t.task_id = k.b
)
insert into checkpoint (run_id, task_id, number, payload, payload_binary, payload_metadata)
select a, b, c, d::json, e, f::json from unnest(%(a)s, %(b)s, %(c)s, %(d)s, %(e)s, %(f)s) u(a, b, c, d, e, f)
on conflict on constraint checkpoint_pkey do update
set number = excluded.number, payload = excluded.payload, payload_binary = excluded.payload_binary,
    payload_metadata = excluded.payload_metadata;

-- name: delete_checkpoint
-- index: checkpoint_pkey
delete from checkpoint c using unnest(%(a)s, %(b)s) k(a, b)
where c.run_id = any(%(a)s) and c.run_id = k.a and c.task_id = k.b;

-- name: cancel_task
-- Its run ends: its holder is told, and the lease runs out with the grace, whatever heartbeats say. index: task_pkey
update task t
set cancel_reason = k.d, attempt_deadline_at = least(t.attempt_deadline_at, k.c),
    lease_expires_at = least(t.lease_expires_at, k.c)
from unnest(%(a)s, %(b)s, %(c)s, %(d)s) k(a, b, c, d)
where t.run_id = any(%(a)s) and t.run_id = k.a and t.task_id = k.b;

-- name: clear_ended
-- Runs have ended for good. index: the primary keys, which begin with the run
with stopped as (delete from stopped_task where run_id = any(%(a)s)),
     timers as (delete from timer where run_id = any(%(a)s)),
     waits as (delete from wait where run_id = any(%(a)s)),
     signals as (delete from signal where run_id = any(%(a)s)),
     scopes as (delete from scope where run_id = any(%(a)s)),
     outputs as (delete from output where run_id = any(%(a)s)),
     checkpoints as (delete from checkpoint where run_id = any(%(a)s)),
     children as (delete from child where run_id = any(%(a)s))
delete from undo where run_id = any(%(a)s);

-- name: due_timers
-- Candidates, without locks: each is read again under the lock of its run. Pages by key, so that timers which can't fire now
-- do not hide those behind them. index: timer_due
select run_id, seq, kind, namespace, fire_at from timer
where not parked and fire_at <= (select clock_timestamp())
  and (fire_at, run_id, seq, kind) > (%(after_at)s, %(after_run)s, %(after_seq)s, %(after_kind)s)
order by fire_at, run_id, seq, kind limit %(limit)s;

-- name: messages
-- What is to be delivered, in order, without locks. index: message_pkey
select message_id, target_run, kind, source_run, source_seq, namespace, body from message
where message_id > %(after)s order by message_id limit %(limit)s;
