-- Code runs. Their events and tasks are in the tables that are there; what an op is made of is kept with its rows.

alter table undo add column plan json;                            -- of an op of a code run: kind, name, options; null: the node says it
alter table undo add column origin uuid;                          -- the run of the chain whose events these are, if it is another one
alter table undo add column origin_seq bigint;                    -- of_seq there
create index undo_origin on undo (origin) where origin is not null;

alter table run add column chain_id uuid;                         -- the first run of a chain, in each later one
create index run_chain on run (chain_id, created_at desc, run_id desc) where chain_id is not null;
