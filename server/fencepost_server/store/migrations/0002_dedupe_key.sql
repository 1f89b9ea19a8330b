-- A key that a run holds until it has ended. The row in run_key is deleted in the transaction of the end.

alter table run add column dedupe_key text collate "C" not null default '';

-- The first answer, for repeats: was the run bound although it has another input?
alter table run_key add column input_differs boolean not null default false;
