-- Questions to code runs, and which workers have their code.

alter table session
    add column workflows text[] collate "C" not null default '{}',       -- the handlers of the DECIDE tasks that it takes
    add column workflow_queues text[] collate "C" not null default '{}'; -- of each its queue
create index session_deciding on session (namespace) where ended_at is null and workflows <> '{}';

-- A mailbox between servers: a question waits here for a server that has a worker for it, then for the one that was asked.
-- Nobody misses what a crash of the database takes with it: whoever asked is told, or asks again.
create unlogged table query (
    query_id uuid not null,
    namespace text collate "C" not null,
    handler text collate "C" not null,                            -- of the DECIDE tasks of the run
    run_id uuid not null,
    name text not null,
    input json,
    input_binary bytea,
    input_metadata json,
    asked_by uuid not null,                                       -- the server that was asked
    taken_by uuid,                                                -- the server whose worker was asked
    answered boolean not null default false,
    output json,
    output_binary bytea,
    output_metadata json,
    failure json,                                                 -- why there is no output: reason, message
    expires_at timestamptz not null,
    constraint query_pkey primary key (query_id)
);
create index query_open on query (namespace, handler) where taken_by is null;
create index query_answered on query (asked_by) where answered;
create index query_expiry on query (expires_at);
