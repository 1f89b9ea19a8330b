-- Which steps workers take, so that what waits for nobody can be told.

alter table session
    add column handlers text[] collate "C",                       -- of the steps that it takes; null: its server does not tell
    add column handler_queues text[] collate "C";                 -- of each its queue
create index session_serving on session (namespace) where ended_at is null and handlers is distinct from '{}';
