"""A lane of the group commit.

Operations wait in the lane; when it is free it takes what waits, up to a limit, and hands it to ``work`` as one
transaction on the lane's own connection. No timer: an idle lane starts at once, a busy one gathers meanwhile. A
lane outlives its database: it reconnects, tries its batch again (``again`` is set, so that what was committed
is recognised), and gives up what nobody waits for past its deadline.

An operation that the database or our own code refuses is found by halving the batch, and it alone fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, Protocol, TypeVar

import psycopg

from fencepost_server.config import Config
from fencepost_server.domain.errors import DatabaseUnavailable, FencepostError, Internal, Overloaded
from fencepost_server.store.connection import connect, slam
from fencepost_server.store.errors import ALREADY_THERE, LOCK_TIMEOUT, RETRY_AT_ONCE, is_away, unavailable
from fencepost_server.store.outage import note_outage
from fencepost_server.store.pipeline import Connection

log = logging.getLogger("fencepost.lane")

_SLOW_TRIES = 2
_RETRIES_AT_ONCE = 20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_TAKEN_WHOLE = 64
_SEVERAL, _MOMENT, _MOMENTS = 3, 0.003, 4
_SKIPPED_PAUSE = 0.05


class Pending(Protocol):
    """What a lane knows of an operation."""

    again: bool
    deadline: float

    @property
    def size(self) -> int:
        """About its bytes."""

    @property
    def wanted(self) -> bool:
        """Keep trying past the deadline."""

    def give_up(self, error: FencepostError) -> None:
        """It was not committed, or is not known to be."""


Op = TypeVar("Op", bound=Pending)


class Lane(Generic[Op]):
    """One writer. ``work(connection, operations, skip_locked)`` commits, settles, and returns those that it had
    to skip.
    """

    def __init__(
        self, name: str, config: Config, work: Callable[[Connection, list[Op], bool], Awaitable[list[Op]]]
    ) -> None:
        self.name = name
        self._config = config
        self._work = work
        self._waiting: deque[Op] = deque()
        self._of_loops: deque[Op] = deque()
        self._delayed = 0
        self._taken = 0
        self._called = 0
        self._wake = asyncio.Event()
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.on_recovery: Callable[[], None] | None = None
        """Called after a batch that had to be tried again because the connection failed."""
        self.batches = 0
        self.operations = 0

    def start(self) -> None:
        """Begin to work."""
        self._task = asyncio.create_task(self._run(), name=f"lane-{self.name}")

    async def stop(self) -> None:
        """Stop at once; what waits is given up. ``drain`` first for a graceful end."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for line in (self._waiting, self._of_loops):
            while line:
                line.popleft().give_up(unavailable())
        self._disconnect()

    async def drain(self) -> None:
        """Wait until nothing waits, nor was put off because another transaction held it."""
        await self._idle.wait()

    @property
    def depth(self) -> int:
        """Operations that wait."""
        return len(self._waiting) + len(self._of_loops)

    def submit(self, operations: Iterable[Op], *, of_loop: bool = False) -> None:
        """Queue operations of workers, whose number is bounded by max_client_ops, or those of a loop, which are given
        up at their deadline and found again: these wait in a line of their own.
        """
        deadline = time.monotonic() + self._config.operation_timeout
        line = self._of_loops if of_loop else self._waiting
        for operation in operations:
            operation.deadline = deadline
            line.append(operation)
        if line:
            self._idle.clear()
            self._wake.set()

    def submit_one(self, operation: Op) -> None:
        """Queue an operation of a caller. Raises Overloaded if the queue is full."""
        if len(self._waiting) >= self._config.lane_queue:
            raise Overloaded("too many operations wait for the database")
        self._called += 1
        self.submit((operation,))

    async def _run(self) -> None:
        # The flag, because a cancel can get lost in a transaction (see engine.loops).
        while not self._stopping:
            if not self.depth:
                if not self._delayed:
                    self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            await self._gather()
            await self._settle(self._take())

    async def _gather(self) -> None:
        """Wait some moments for more, while more come, if several callers and nobody else are at work.

        gRPC lets one call in for each turn of the event loop. If each is committed by itself, turns are so long that
        few come, and so on: at 64 callers two a transaction.
        """
        for _ in range(_MOMENTS):
            waiting = self.depth
            if self._called < waiting or waiting + self._taken < _SEVERAL or waiting >= _TAKEN_WHOLE:
                break
            await asyncio.sleep(_MOMENT)
            if self.depth == waiting:
                break

    def _take(self) -> list[Op]:
        """What waits, up to the limits of one transaction; one operation at least.

        If much is under way, half of it: while one half is here, the workers and this server's other parts have the
        other one to work on. Taken all at once it would go round in one lump, and each in turn would wait for it.

        Of the two lines in turn: loops may bring very much at once, of which many transactions are made.
        """
        batch: list[Op] = []
        size = 0
        under_way = self.depth + self._taken
        most = min(self._config.lane_batch, max(_TAKEN_WHOLE, under_way // 2))
        line, other = self._waiting, self._of_loops
        while (line or other) and len(batch) < most:
            if not line:
                line, other = other, line
            size += line[0].size
            if batch and size > self._config.lane_batch_bytes:
                break
            batch.append(line.popleft())
            if other:
                line, other = other, line
        self._taken = len(batch)
        self._called = max(0, self._called - len(batch))
        return batch

    async def _settle(self, batch: list[Op], *, skip_locked: bool = False) -> None:
        """Commit a batch, however often it takes."""
        pause, tries, slow, recovering, collided = _FIRST_PAUSE, 0, 0, False, False
        while batch:
            tries += 1
            began = time.monotonic()
            try:
                skipped = await self._work(await self._connected(), batch, skip_locked)
            except RETRY_AT_ONCE:
                if tries > _RETRIES_AT_ONCE:
                    self._give_up(batch, unavailable())
                    break
            except LOCK_TIMEOUT:
                if skip_locked:
                    await self._pass_by(batch)
                    break
                batch = self._still_wanted(batch)
                skip_locked = True
            except Exception as error:  # noqa: BLE001  # sorted out below: away, or somebody's fault
                if isinstance(error, ALREADY_THERE) and not collided and any(op.again for op in batch):
                    collided = True  # Postgres has only now committed the try before: it is recognised this time
                    continue
                if not is_away(error):
                    await self._isolate(batch, error)
                    break
                if self._stopping:
                    self._give_up(batch, unavailable())
                    return
                recovering = True
                note_outage(f"lane {self.name}", error)
                self._disconnect()
                for operation in batch:
                    operation.again = True
                slow += time.monotonic() - began > 0.9 * min(self._config.statement_timeout, self._config.batch_timeout)
                if slow >= _SLOW_TRIES and len(batch) > 1:
                    # Too much for this database in the time that a transaction has: less at a time, then.
                    middle = len(batch) // 2
                    await self._settle(batch[:middle])
                    await self._settle(batch[middle:])
                    break
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                batch = self._still_wanted(batch)
                self._drop_expired()
            else:
                self.batches += 1
                self.operations += len(batch) - len(skipped)
                self._requeue(skipped)
                break
        if recovering and self.on_recovery is not None:
            self.on_recovery()

    async def _pass_by(self, batch: list[Op]) -> None:
        """Another transaction holds something that can't be skipped, such as a key that it is inserting: one by
        one the others get through, and the one that has to wait does so behind them.
        """
        if len(batch) == 1:
            self._requeue(batch)
            return
        for operation in batch:
            await self._settle([operation], skip_locked=True)

    async def _isolate(self, batch: list[Op], error: Exception) -> None:
        """Find the operation that can't be committed, by halving; the others are committed."""
        if isinstance(error, psycopg.Error):
            self._disconnect()
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._settle(batch[:middle])
            await self._settle(batch[middle:])
            return
        incident = uuid.uuid4().hex[:12]
        log.error("incident %s: an operation can't be committed", incident, exc_info=error)
        batch[0].give_up(Internal(f"internal error, incident {incident}"))

    def _requeue(self, skipped: list[Op]) -> None:
        """Runs that another transaction holds come again after a moment, behind what waits now."""
        if skipped:
            still = self._still_wanted(skipped)
            self._delayed += 1
            asyncio.get_running_loop().call_later(_SKIPPED_PAUSE, self._resubmit, still)

    def _resubmit(self, operations: list[Op]) -> None:
        self._delayed -= 1
        if self._stopping:
            self._give_up(operations, unavailable())
            return
        self._waiting.extend(operations)
        self._idle.clear()
        self._wake.set()

    def _still_wanted(self, batch: list[Op]) -> list[Op]:
        now = time.monotonic()
        kept = [op for op in batch if op.wanted or op.deadline > now]
        self._give_up([op for op in batch if not (op.wanted or op.deadline > now)], unavailable())
        return kept

    def _drop_expired(self) -> None:
        """While the database is away, what waits behind the batch runs out too."""
        self._waiting = deque(self._still_wanted(list(self._waiting)))
        self._of_loops = deque(self._still_wanted(list(self._of_loops)))

    def _give_up(self, batch: list[Op], error: DatabaseUnavailable) -> None:
        for operation in batch:
            operation.give_up(error)

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = await connect(self._config)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            slam(self._connection)
            self._connection.pgconn.finish()
            self._connection = None
