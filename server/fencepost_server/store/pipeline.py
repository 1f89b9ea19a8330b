"""A pipeline that sends what it is given when it is synced, in one write.

psycopg's own writes each statement to the socket as it is queued, and asks the socket before and after: with some eight
short statements a transaction that is more work than the statements. What differs is when, not what: results,
prepared statements and errors are psycopg's. It rests on names of psycopg that are not public, so
server/pyproject.toml allows no other minor version, and tests/store/test_pipeline.py counts the writes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.generators import send

if TYPE_CHECKING:
    from psycopg.abc import PQGen


class Gathering(psycopg.AsyncPipeline):
    """See the module."""

    _sending = False

    def _communicate_gen(self) -> PQGen[None]:
        if not self._sending:
            return
        queue = self.command_queue
        while queue:
            queue.popleft()()  # into libpq's buffer
        # To the last byte, reading meanwhile: who fetches results waits for the server, which waits for what is left.
        yield from send(self.pgconn)

    def _sync_gen(self) -> PQGen[None]:
        self._sending = True
        try:
            yield from super()._sync_gen()
        finally:
            self._sending = False

    def _exit_gen(self) -> PQGen[None]:
        self._sending = True
        synced = False
        try:
            self._enqueue_sync()
            yield from self._communicate_gen()
            synced = True
        finally:
            self._sending = False
            yield from self._fetch_gen(flush=not synced)  # a sync brings all results unasked


@asynccontextmanager
async def gathering(connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[Gathering]:
    """The connection in pipeline mode within the block, with such a pipeline."""
    assert connection._pipeline is None  # transactions are not inside each other
    pipeline = Gathering(connection)
    connection._pipeline = pipeline
    try:
        async with pipeline:
            yield pipeline
    finally:
        connection._pipeline = None
