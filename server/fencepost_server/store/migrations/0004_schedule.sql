-- Schedules. A row is its own outbox: what it has decided to start stays in starting_at until the run is known.

create table schedule (
    namespace text collate "C" not null,
    schedule_id text collate "C" not null,
    uuid uuid not null,                                           -- of this row: one that is made again is another schedule
    spec json not null,                                           -- all but the input
    input json,
    input_binary bytea,
    input_metadata json,
    version bigint not null default 1,                            -- + 1 with each update
    update_request text collate "C" not null default '',          -- the request id of the last update
    paused boolean not null,
    pause_reason text not null default '',
    next_fire_at timestamptz,                                     -- null: paused, or past its end
    starting_at timestamptz,
    pending_at timestamptz,
    due_at timestamptz,                                           -- when somebody should look at it again
    last_fire_at timestamptz,
    last_run_id uuid,
    started_runs bigint not null default 0,
    failed_starts bigint not null default 0,
    skipped_overlap bigint not null default 0,
    skipped_missed bigint not null default 0,
    last_error text not null default '',
    created_at timestamptz not null default clock_timestamp(),
    constraint schedule_pkey primary key (namespace, schedule_id),
    constraint schedule_uuid unique (uuid)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);
create index schedule_due on schedule (due_at) where due_at is not null;
