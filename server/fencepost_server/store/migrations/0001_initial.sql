-- The first schema. Names are singular. Identifiers compare by byte ("C"), which is faster and the same on every machine.

create table cluster (
    only_row boolean primary key default true constraint cluster_has_one_row check (only_row),
    epoch integer not null default 0 constraint epoch_is_positive check (epoch >= 0), -- high bits of every fencing token (I3)
    last_pass_at timestamptz not null default clock_timestamp(),  -- when any server last probed: the outage guard
    hold_until timestamptz not null default 'epoch'           -- no lease expires before this
);
insert into cluster default values;

create table server (
    server_id uuid primary key,
    started_at timestamptz not null default clock_timestamp(),
    seen_at timestamptz not null default clock_timestamp()
);

create table definition (
    namespace text collate "C" not null,
    workflow_id text collate "C" not null,
    hash bytea not null,
    compatibility_id text collate "C" not null,
    manifest text not null,                                       -- canonical JSON; never changes
    created_at timestamptz not null default clock_timestamp(),
    constraint definition_pkey primary key (namespace, workflow_id, hash),
    constraint definition_compatibility_id unique (namespace, workflow_id, compatibility_id)
);
create index definition_hash on definition (hash);

-- One row a workflow: the lock point between starts (share) and whatever changes what starts take (update).
create table deployment (
    namespace text collate "C" not null,
    workflow_id text collate "C" not null,
    active_hash bytea not null,
    constraint deployment_pkey primary key (namespace, workflow_id)
);

-- No index and no predicate names a column that changes per step, so that every update of a run is HOT.
create table run (
    run_id uuid constraint run_pkey primary key,
    namespace text collate "C" not null,
    workflow_id text collate "C" not null,
    definition_hash bytea not null,
    user_id text collate "C" not null,
    request_key text collate "C" not null,
    priority smallint not null,
    state smallint not null,
    node_index integer not null,                                  -- the decider's cursor: the open node of the sequence
    next_seq bigint not null,
    last_event_at timestamptz not null,
    output_seq bigint,                                            -- the event that holds the output
    failure json,
    created_at timestamptz not null,
    ended_at timestamptz
) with (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.05);
create index run_list on run (namespace, created_at desc, run_id desc);
create index run_list_workflow on run (namespace, workflow_id, created_at desc, run_id desc);

create table run_key (
    namespace text collate "C" not null,
    kind smallint not null,                                       -- 1 request_key, 2 request_id
    workflow_id text collate "C" not null,
    user_id text collate "C" not null,
    key text collate "C" not null,
    run_id uuid not null,
    definition_hash bytea not null,
    fingerprint bytea not null,
    created boolean not null,                                     -- the first answer: was the run made by this request?
    expires_at timestamptz,                                       -- null: lives as long as its run
    constraint run_key_pkey primary key (namespace, kind, workflow_id, user_id, key)
);
create index run_key_expiry on run_key (expires_at) where expires_at is not null;

-- The history. Append only; payloads live here and are stored once, byte for byte.
create table event (
    run_id uuid not null,
    seq bigint not null,
    type smallint not null,
    at timestamptz not null,
    node_index integer,
    task_id bigint,
    token bigint,
    attempt integer,
    input_seq bigint,                                             -- the event that holds the input or output meant here
    digest bytea,                                                 -- of the outcome as reported, for repeats (I6)
    payload json,
    payload_binary bytea,
    payload_metadata json,
    detail json,                                                  -- failure and counters
    constraint event_pkey primary key (run_id, seq)
) with (autovacuum_vacuum_insert_scale_factor = 0.1);

-- Work that is ready, leased, or waiting for its next attempt. Small and hot: the input is where input_seq points.
create table task (
    run_id uuid not null,
    task_id bigint not null,                                      -- the seq of the event that scheduled it
    namespace text collate "C" not null,
    queue text collate "C" not null,
    handler text collate "C" not null,
    priority smallint not null,
    node_index integer not null,
    input_seq bigint not null,
    input_bytes integer not null default 0,                              -- about the size of the input, so that claims are bounded in bytes
    visible_at timestamptz not null,
    attempt integer not null,
    operational_failures integer not null,
    corrective_failures integer not null,
    redeliveries integer not null,                                -- times it came back for free
    token bigint not null,
    lease_ms integer not null,
    timeout_ms integer,
    lease_session uuid,
    lease_expires_at timestamptz,
    attempt_deadline_at timestamptz,
    last_failure json,
    feedback json,
    outcomes json,                                                -- the newest outcomes that left the task alive (I6)
    constraint task_pkey primary key (run_id, task_id)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
create index task_ready on task (namespace, queue, handler, priority, visible_at) where lease_session is null;
create index task_lease on task (lease_expires_at) where lease_session is not null;
create index task_session on task (lease_session) where lease_session is not null;

create table session (
    session_id uuid primary key,
    namespace text collate "C" not null,
    server_id uuid not null,
    process_nonce text collate "C" not null,
    worker_name text not null,
    sdk text not null,
    started_at timestamptz not null default clock_timestamp(),
    ended_at timestamptz
);
create index session_ended on session (ended_at) where ended_at is not null;
