"""Runs the users' code: async handlers on the users' loop, sync ones in threads, away from the session.

The session's thread submits leases in batches and gets results in batches: one wake-up of the users' loop for
all the tasks of a frame, one of the session's loop for all that ended meanwhile. Async handlers are begun one after the
other by one task, as long as they end without waiting; one that waits keeps it, and has one of its own from then on.
Whatever a handler does (block, raise SystemExit, ignore its cancellation, end after its lease was lost) ends in exactly
one `Result` for each lease that was begun, and in none for one that was taken back.

Threads are daemons of our own and not a ThreadPoolExecutor's, which waits for its threads when the
interpreter exits: a handler that never returns must not keep a worker alive past its drain.

Checkpoints go the way of results, so they reach the session in order and before the result of their step.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from fencepost.checkpoints import Saving
from fencepost.errors import LeaseLost, NotDecodable, NotEncodable
from fencepost.failure import (
    INPUT_NOT_DECODABLE,
    Failed,
    Outcome,
    Released,
    clean,
    failed,
    not_recordable,
    stopped,
)
from fencepost.lease import Lease, cancellations
from fencepost.models import FailureKind
from fencepost.rest import Rest, marks
from fencepost.sdk_log import SdkLog

if TYPE_CHECKING:
    from fencepost.steps import Step

logger = SdkLog("fencepost.worker")

_LOGGED_MESSAGE = 500

Result: TypeAlias = tuple[Lease, Outcome | Saving]
"""What a step has to say: how it ended, or, before that, a state to be saved."""


class Executor:
    """Runs the steps of one worker. ``users_loop`` is where async handlers run; ``threads`` bounds the sync
    ones.

    ``deliver`` is called in the session's loop when results are there; it takes them with `take_results`.
    """

    def __init__(
        self,
        users_loop: asyncio.AbstractEventLoop,
        session_loop: asyncio.AbstractEventLoop,
        threads: int,
        deliver: Callable[[], object],
    ) -> None:
        self._users_loop = users_loop
        self._session_loop = session_loop
        self._max_threads = threads
        self._deliver = deliver
        self._lock = threading.Lock()
        self._results: deque[Result] = deque()
        self._hand_over_planned = False
        self._delivery_planned = False
        self._closed = False
        self._ready: deque[Lease] = deque()
        self._beginning = False
        # Those of the worker's handlers that had to wait once, or left something on the task. From then on their steps
        # have tasks of their own: what is left for another task begins in the next turn of the loop only.
        self._alone: set[Step[..., Any]] = set()
        # The loop itself keeps only weak references to its tasks.
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle_threads = 0
        self._unclaimed = 0

    # In the session's thread.

    def submit(self, leases: Sequence[Lease]) -> None:
        """Run these leases."""
        for lease in leases:
            lease.reporter = self
        async_leases = [lease for lease in leases if lease.step.is_async]
        if async_leases:
            self._call_users_loop(self._begin_async, async_leases)
        for lease in leases:
            if not lease.step.is_async:
                self._submit_to_threads(lease)

    def withdraw(self, leases: Iterable[Lease]) -> list[Lease]:
        """Take back those of ``leases`` that were not begun; these never run and have no result."""
        withdrawn = []
        with self._lock:
            for lease in leases:
                if not lease.begun and not lease.withdrawn:
                    lease.withdrawn = True
                    withdrawn.append(lease)
        return withdrawn

    def cancel(self, leases: Sequence[Lease]) -> list[Lease]:
        """Stop these leases, whose `cancel_reason` is set; returns those that were not begun and now never
        will.
        """
        withdrawn = self.withdraw(leases)
        with cancellations:
            cancellations.notify_all()
        begun = [lease for lease in leases if not lease.withdrawn and lease.step.is_async]
        if begun:
            self._call_users_loop(self._cancel_async, begun)
        return withdrawn

    def take_results(self) -> list[Result]:
        """All results that are there, in the order in which the steps ended."""
        # First the flag: a result that is added from here on plans a delivery of its own.
        self._delivery_planned = False
        results: list[Result] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def close(self) -> None:
        """Let idle threads end; busy ones end after what they do."""
        for _ in range(self._threads):
            self._queue.put(None)
        self._closed = True
        # Who waits for a checkpoint that came up to here is answered by the session, who comes later by `report`.
        self._deliver()

    def report(self, lease: Lease, saving: Saving) -> None:
        """A step has a new state; from any thread."""
        self._results.append((lease, saving))
        if self._closed or not self._wake_session():
            saving.fail(LeaseLost("the worker has ended: no checkpoint of it will count"))

    def _call_users_loop(self, function: Callable[[Sequence[Lease]], None], leases: Sequence[Lease]) -> None:
        try:
            self._users_loop.call_soon_threadsafe(function, leases)
        except RuntimeError:
            # The loop was closed under us, by who called `run_async`: nothing of these will run.
            logger.warning("the event loop of the steps is closed, %d steps can't be run there", len(leases))

    # In the users' loop.

    def _begin_async(self, leases: Sequence[Lease]) -> None:
        with self._lock:
            leases = [lease for lease in leases if not lease.withdrawn]
            for lease in leases:
                lease.begun = True
        self._start(leases)

    def _start(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            if lease.step in self._alone:
                # An empty context, as the others have.
                contextvars.Context().run(self._create_task, self._run_alone(lease))
            else:
                self._ready.append(lease)
        if self._ready and not self._beginning:
            self._begin_ready()

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._users_loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin_ready(self) -> None:
        """Let a new task begin what is ready, and look after it when it has had its first turn."""
        self._beginning = True
        try:
            self._create_task(self._run_ready())
        except BaseException:
            self._beginning = False  # a task factory of the user's has raised: the next time it may not
            raise
        self._users_loop.call_soon(self._look_after)

    def _look_after(self) -> None:
        # What is left is there because the task waits in a step, or was cancelled by one, or before it began. The
        # handler that brought it about is known by now, so that its other steps do not wait for one another.
        leases = list(self._ready)
        self._ready.clear()
        self._beginning = False
        self._start(leases)

    def _cancel_async(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            if lease.runner is not None:
                lease.runner.cancel()

    async def _run_ready(self) -> None:
        """Run what is ready, until something has to wait; that is run to its end, and then nothing more."""
        task = asyncio.current_task()
        assert task is not None
        before = marks(task)
        while self._ready:
            lease = self._ready.popleft()
            context = contextvars.Context()
            attempt = self._attempt_async(lease)
            try:
                waits_for = context.run(attempt.send, None)
            except StopIteration as end:
                self._ended(lease, end.value)
            else:
                self._alone.add(lease.step)
                lease.runner = task
                rest = Rest(attempt, context, waits_for)
                del attempt, waits_for
                outcome = await rest
                lease.runner = None
                self._ended(lease, outcome)
                return
            if marks(task) != before:
                # It has left something that must not reach the next one.
                self._alone.add(lease.step)
                return

    async def _run_alone(self, lease: Lease) -> None:
        # From here on it can be cancelled. A task that was cancelled before its first line would end without a result.
        lease.runner = asyncio.current_task()
        outcome = await self._attempt_async(lease)
        lease.runner = None
        self._ended(lease, outcome)

    def _ended(self, lease: Lease, outcome: Outcome) -> None:
        self._results.append((lease, outcome))
        if not self._hand_over_planned and not self._users_loop.is_closed():
            # At the end of this turn of the loop, so that all that ends in it costs one wake-up.
            self._hand_over_planned = True
            self._users_loop.call_soon(self._hand_over)

    async def _attempt_async(self, lease: Lease) -> Outcome:
        step = lease.step
        if lease.cancel_reason is not None:
            return stopped(lease.cancel_reason)
        try:
            arguments, keywords = step.bind(lease)
        except BaseException as error:  # noqa: BLE001 - as below: the user's classes are made in here
            return _not_bound(lease, error)
        try:
            output = await step.function(*arguments, **keywords)
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like are the step's own failure
            return _failed(lease, error)
        return _completed(lease, output)

    def _hand_over(self) -> None:
        self._hand_over_planned = False
        self._wake_session()

    def _wake_session(self) -> bool:
        """Let the results be taken; False if nobody is there to take them."""
        if self._delivery_planned:
            return True
        self._delivery_planned = True
        try:
            self._session_loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            self._delivery_planned = False
            logger.debug("a step ended after its worker had")
            return False
        return True

    # In threads of our own.

    def _submit_to_threads(self, lease: Lease) -> None:
        start = 0
        with self._lock:
            self._unclaimed += 1
            if self._idle_threads < self._unclaimed and self._threads < self._max_threads:
                self._idle_threads += 1
                self._threads += 1
                start = self._threads
        self._queue.put(lease)
        if start:
            try:
                threading.Thread(target=self._work, name=f"fencepost-step-{start}", daemon=True).start()
            except RuntimeError as error:
                self._thread_failed(lease, error)

    def _thread_failed(self, lease: Lease, error: RuntimeError) -> None:
        """The system has no thread for a lease: one of those that are there takes it in its turn. Without any, others
        may have it.
        """
        logger.warning("no thread can be started for a step, %d are there: %s", self._threads - 1, error)
        with self._lock:
            self._idle_threads -= 1
            self._threads -= 1
            lease.withdrawn = not self._threads
        if lease.withdrawn:
            self._results.append((lease, Released()))
            self._wake_session()

    def _work(self) -> None:
        """A thread's life.

        It counts as idle from before it is started, so that no lease waits behind a busy one.
        """
        while (lease := self._queue.get()) is not None:
            with self._lock:
                self._idle_threads -= 1
                self._unclaimed -= 1
                lease.begun = not lease.withdrawn
            if lease.begun:
                # A fresh context for each step: what one sets in a context variable is not the next one's.
                contextvars.Context().run(self._run_sync, lease)
            with self._lock:
                self._idle_threads += 1

    def _run_sync(self, lease: Lease) -> None:
        outcome = self._attempt_sync(lease)
        self._results.append((lease, outcome))
        self._wake_session()

    @staticmethod
    def _attempt_sync(lease: Lease) -> Outcome:
        step = lease.step
        try:
            arguments, keywords = step.bind(lease)
        except BaseException as error:  # noqa: BLE001 - as below: the user's classes are made in here
            return _not_bound(lease, error)
        try:
            output = step.function(*arguments, **keywords)
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like are the step's own failure
            return _failed(lease, error)
        return _completed(lease, output)


def _not_bound(lease: Lease, error: BaseException) -> Failed:
    if not isinstance(error, NotDecodable):
        return _failed(lease, error)
    text = f"the input does not fit the handler: {error.message}"
    return _told(lease, Failed(FailureKind.PERMANENT, INPUT_NOT_DECODABLE, clean(text)))


def _completed(lease: Lease, output: object) -> Outcome:
    try:
        return lease.step.completed(output, lease.max_payload_bytes)
    except NotEncodable as error:
        text = f"the output of step {lease.step.name} can't be recorded: {error.message}"
        return _told(lease, not_recordable(text))
    except BaseException as error:  # noqa: BLE001 - the user's classes are written in here
        return _failed(lease, error)


def _failed(lease: Lease, error: BaseException) -> Failed:
    if isinstance(error, asyncio.CancelledError) and lease.cancel_reason is not None:
        return _told(lease, stopped(lease.cancel_reason))
    return _told(lease, failed(error, lease.max_payload_bytes), error)


def _told(lease: Lease, failure: Failed, error: BaseException | None = None) -> Failed:
    """Log a failure that is the step's own, in a line. Only what nobody foresaw has its traceback: the history keeps
    the text alone, and where it came from is for this log.
    """
    if lease.cancel_reason is None:
        logger.warning(
            "step %s failed: node %s, run %s, attempt %d: %s %s: %s",
            lease.step.name,
            lease.node_id,
            lease.run_id,
            lease.attempt,
            failure.kind.value,
            failure.code,
            clean(failure.message.partition("\n")[0], _LOGGED_MESSAGE),
            exc_info=error if failure.unexpected else None,
            extra={"run_id": lease.run_id, "node_id": lease.node_id, "attempt": lease.attempt},
        )
    return failure
