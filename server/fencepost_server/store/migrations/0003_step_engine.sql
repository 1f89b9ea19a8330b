-- Undo, control flow, control, timers, children. Rows of these tables are few a run, and gone when it has ended (but for what
-- RetryRun of a FAILED run needs). Nothing here is read or written for a run that is a plain sequence of steps.

alter table run add column control json;                          -- what is beyond one open step; null for a plain sequence
alter table run add column attributes json;                       -- as given at the start, for views; null for none
alter table run add column parent_run_id uuid;
create index run_list_parent on run (parent_run_id, created_at desc, run_id desc) where parent_run_id is not null;
create index run_list_user on run (namespace, user_id, created_at desc, run_id desc) where user_id <> '';

create table run_attribute (
    namespace text collate "C" not null,
    key text collate "C" not null,
    value text collate "C" not null,
    created_at timestamptz not null,                              -- the run's, so that a list is one range of the index
    run_id uuid not null,
    constraint run_attribute_pkey primary key (run_id, key)
);
create index run_attribute_list on run_attribute (namespace, key, value, created_at desc, run_id desc);

alter table task add column extra json;                           -- kind, scope, item, what is undone; null for a step of the top sequence
alter table task add column resume_at timestamptz;                -- set while the run is paused: when the task may be taken after it
alter table task add column cancel_reason text;                   -- set when its holder should stop; the lease runs out with the grace
alter table task add column checkpoint_number bigint not null default 0;
alter table task add column progress json;                        -- what the worker last said, for people

create table checkpoint (
    run_id uuid not null,
    task_id bigint not null,
    number bigint not null,
    payload json,
    payload_binary bytea,
    payload_metadata json,
    constraint checkpoint_pkey primary key (run_id, task_id)
) with (fillfactor = 70);

-- Open tasks of a run that ends, and results that came in its grace: what RetryRun goes on from.
create table stopped_task (
    run_id uuid not null,
    task_id bigint not null,
    row json not null,
    constraint stopped_task_pkey primary key (run_id, task_id)
);

create table timer (
    run_id uuid not null,
    seq bigint not null,                                          -- the event that began it
    kind smallint not null,                                       -- TimerKind of the contract
    namespace text collate "C" not null,
    fire_at timestamptz not null,
    parked boolean not null default false,                        -- its run has ended, or it fired during a pause
    place json not null,                                          -- node, scope, item
    constraint timer_pkey primary key (run_id, seq, kind)
) with (autovacuum_vacuum_scale_factor = 0.05);
create index timer_due on timer (fire_at, run_id, seq, kind) where not parked;

create table wait (
    run_id uuid not null,
    seq bigint not null,                                          -- the SIGNAL_AWAITED event
    name text collate "C" not null,
    place json not null,
    constraint wait_pkey primary key (run_id, name, seq)
);

-- Signals that no wait has taken yet.
create table signal (
    run_id uuid not null,
    seq bigint not null,                                          -- the SIGNAL_RECEIVED event
    name text collate "C" not null,
    size integer not null,                                        -- of its payload, about
    constraint signal_pkey primary key (run_id, name, seq)
);

-- An open parallel or map node: counters, so that a join reads nothing of its siblings.
create table scope (
    run_id uuid not null,
    scope_id bigint not null,                                     -- the SCOPE_OPENED event
    node_index integer not null,
    total integer not null,
    done integer not null,
    next_item integer not null,                                   -- of a map: the first that has not begun
    item_bytes integer not null,                                  -- of a map: the largest input
    output_bytes bigint not null,                                 -- of what has ended, so that a join knows its size
    parent_scope bigint not null,
    parent_item integer not null,
    constraint scope_pkey primary key (run_id, scope_id)
) with (fillfactor = 70);

-- Where the output of a node is that something later refers to; node_index -1: the output of a whole branch or item.
create table output (
    run_id uuid not null,
    scope_id bigint not null,
    item integer not null,
    node_index integer not null,
    seq bigint not null,
    constraint output_pkey primary key (run_id, scope_id, node_index, item)
);

create table child (
    run_id uuid not null,
    seq bigint not null,                                          -- the CHILD_SCHEDULED event
    child_run_id uuid not null,
    place json not null,
    constraint child_pkey primary key (run_id, seq)
);

-- What can be undone, a row a completed step, in the order of completion.
create table undo (
    run_id uuid not null,
    of_seq bigint not null,                                       -- the event of the completion, or of the end without one
    unfinished boolean not null,                                  -- the step may have acted without completing
    node_index integer not null,
    task_id bigint not null,                                      -- of the step
    input_seq bigint not null,
    input_bytes integer not null,
    output_seq bigint,
    token bigint not null,                                        -- the last of the step: its undo's tokens go on from it
    scope_id bigint not null,
    item integer not null,
    constraint undo_pkey primary key (run_id, of_seq)
);
create index undo_unfinished on undo (run_id, of_seq) where unfinished;

-- The outbox between runs: written in the source's transaction, applied and deleted in the target's.
create table message (
    message_id bigint generated always as identity constraint message_pkey primary key,
    target_run uuid not null,
    kind smallint not null,                                       -- 1 start child, 2 cancel child, 3 terminate child, 4 child ended
    source_run uuid not null,
    source_seq bigint not null,
    namespace text collate "C" not null,
    body json not null,
    constraint message_once unique (target_run, kind, source_run, source_seq)
) with (autovacuum_vacuum_scale_factor = 0.05);

-- Answers to calls on one run, by request id. They go with the run.
create table request (
    run_id uuid not null,
    request_id text collate "C" not null,
    fingerprint bytea not null,
    answer json not null,
    constraint request_pkey primary key (run_id, request_id)
);

alter table definition add column removed_at timestamptz;
alter table deployment add column removed bytea[] not null default '{}';  -- hashes that were removed: read under the lock of a start
