-- An attempt may take up to a year (manifests.md), which is more milliseconds than timeout_ms holds.

alter table task add column long_timeout_ms bigint;               -- a timeout that timeout_ms, which is null then, can't hold
