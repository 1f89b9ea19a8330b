"""Runs the local steps of code workflows: async functions on the users' loop, others in threads, with their retries.

Most local steps are short, so each is made to cost little:

- Async ones are run one after the other by one task, as long as they end without waiting for anything; the first that
  waits keeps the task for itself, and another one goes on with the rest. Each has a context of its own.
- Others are handed to one thread as a batch. Only if it has not come to the end of them after a moment do more threads
  help: the first few may be waiting for something.

Each attempt ends in exactly one result, and a step in one call of ``ended``, unless it was dropped. An attempt that
runs longer than its timeout is failed at once and told to stop; what it still does is nobody's.

Everything happens in the users' loop's thread but for the work of the threads, which report by one wake-up for all that
ended meanwhile. Threads are daemons of our own for the reason that `executor` has.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fencepost.errors import NotEncodable
from fencepost.failure import ATTEMPT_TIMEOUT, Completed, Failed, clean, failed, not_recordable, stopped
from fencepost.lease import CancelReason, Lease, cancellations
from fencepost.models import Failure, FailureKind
from fencepost.rest import Rest, marks
from fencepost.sdk_log import SdkLog

if TYPE_CHECKING:
    from fencepost.ops import LocalCall
    from fencepost.run_cache import RunEntry

logger = SdkLog("fencepost.worker")

HELP_AFTER = 0.001
HELP_AGAIN_AFTER = 1.0
"""Where no thread could be started."""
_LOGGED_MESSAGE = 500


class Underway:
    """A local step from its call to its end. ``entry`` is the run that waits for it, None if it was dropped.

    ``attempt`` is the one under way, from 1, and ``running`` tells that its code runs now: not while it waits for its
    turn or for the end of a pause.
    """

    __slots__ = (
        "attempt",
        "call",
        "corrective",
        "entry",
        "failure_before",
        "lease",
        "max_payload_bytes",
        "operational",
        "reason",
        "running",
        "task",
        "timer",
    )

    def __init__(self, entry: RunEntry, call: LocalCall, max_payload_bytes: int) -> None:
        self.entry: RunEntry | None = entry
        self.call = call
        self.max_payload_bytes = max_payload_bytes
        self.attempt = 1
        self.operational = 0
        self.corrective = 0
        self.running = False
        self.reason: CancelReason | None = None
        self.failure_before: Failure | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        # What the context of the attempt looks at, if the function takes one.
        self.lease: Lease | None = None


class LocalSteps:
    """The local steps of one worker; see the module. ``ended`` is called with each that has ended."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        max_threads: int,
        ended: Callable[[Underway, Completed | Failed], None],
        settled: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._max_threads = max_threads
        self._ended = ended
        self._settled = settled
        self._ready: deque[Underway] = deque()
        self._pump_planned = False
        # The loop itself keeps only weak references to its tasks.
        self._tasks: set[asyncio.Task[None]] = set()
        # For threads.
        self._work: deque[Underway] = deque()
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: deque[tuple[Underway, int, Completed | Failed]] = deque()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._delivery_planned = False
        self._help_planned = False
        self._closed = False

    def begin(self, steps: Iterable[Underway]) -> None:
        """Run these."""
        in_threads = False
        for step in steps:
            if step.call.is_async:
                self._ready.append(step)
            else:
                self._work.append(step)
                in_threads = True
        if self._ready:
            self._plan_pump()
        if in_threads:
            self._wake_threads(1)

    @property
    def has_ready(self) -> bool:
        """Whether async ones are about to run: ``settled`` is called when they have."""
        return self._pump_planned

    def drop(self, step: Underway) -> None:
        """Nobody wants this any more: it is told to stop, and has no end."""
        step.entry = None
        self._stop_timer(step)
        self.stop(step, CancelReason.LEASE_LOST)

    def stop(self, step: Underway, reason: CancelReason) -> None:
        """Tell a step to stop: its context is cancelled, and its task, if it has one; there are no more attempts."""
        if step.reason is not None:
            return
        step.reason = reason
        if step.running:
            self._interrupt(step, reason)
        elif step.timer is not None:
            # Between two attempts.
            self._stop_timer(step)
            self._ended(step, stopped(reason))

    @staticmethod
    def _interrupt(step: Underway, reason: CancelReason) -> None:
        if step.lease is not None:
            step.lease.cancel_reason = reason
            with cancellations:
                cancellations.notify_all()
        if step.task is not None:
            step.task.cancel()

    def close(self) -> None:
        """Let the threads end; a busy one ends after what it does."""
        self._closed = True
        self._work.clear()
        for _ in range(self._threads):
            self._wanted.put(False)

    # Attempts.

    @staticmethod
    def _arguments(step: Underway) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """What the function is called with in this attempt."""
        call = step.call
        arguments = call.bind(step.attempt)
        lease = call.lease
        if lease is not None:
            step.lease = lease
            lease.failure_before = step.failure_before
            lease.max_payload_bytes = step.max_payload_bytes
            # It may have been stopped before it began.
            lease.cancel_reason = step.reason
        return arguments

    def _time_out(self, step: Underway, attempt: int) -> None:
        step.timer = None
        if step.entry is None or step.attempt != attempt or not step.running:
            return
        self._interrupt(step, CancelReason.ATTEMPT_TIMEOUT)
        text = "the attempt ran longer than the step's timeout"
        failure = _told(step, Failed(FailureKind.OPERATIONAL, ATTEMPT_TIMEOUT, text))
        self._attempt_ended(step, attempt, failure)
        self._settled()

    @staticmethod
    def _stop_timer(step: Underway) -> None:
        if step.timer is not None:
            step.timer.cancel()
            step.timer = None

    def _attempt_ended(self, step: Underway, attempt: int, result: Completed | Failed) -> None:
        """In the users' loop: an attempt has a result, which counts unless another end came before it."""
        if step.entry is None or step.attempt != attempt or not step.running:
            return
        step.running = False
        step.task = step.lease = None
        if step.timer is not None:
            self._stop_timer(step)
        if isinstance(result, Failed):
            pause = self._pause_after(step, result)
            if pause is not None:
                step.attempt += 1
                step.timer = self._loop.call_later(pause, self._again, step) if pause else None
                if not pause:
                    self.begin((step,))
                return
        self._ended(step, result)

    def _again(self, step: Underway) -> None:
        step.timer = None
        if step.entry is not None:
            self.begin((step,))

    @staticmethod
    def _pause_after(step: Underway, result: Failed) -> float | None:
        """Seconds before the next attempt, None if there is none."""
        call = step.call
        if result.kind is FailureKind.CORRECTIVE:
            step.corrective += 1
        elif result.kind is FailureKind.OPERATIONAL:
            step.operational += 1
        pause = call.retry.pause_after(result.kind, step.operational, step.corrective, result.retry_after)
        if step.reason is not None or call.cancelled:
            pause = None
        step.failure_before = Failure(
            result.kind, result.code, result.message, feedback=result.feedback, attempt=step.attempt
        )
        return pause

    # Async functions, in the users' loop.

    def _plan_pump(self) -> None:
        if not self._pump_planned:
            self._pump_planned = True
            self._pump()

    def _pump(self) -> None:
        """Let a new task run what is ready, and look after it when it has had its first turn."""
        try:
            task = self._loop.create_task(self._run_ready())
        except BaseException:
            self._pump_planned = False  # a task factory of the user's has raised: the next time it may not
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._loop.call_soon(self._look_after)

    def _look_after(self) -> None:
        if self._ready:
            # The task waits in one of them, or was cancelled by one, or before it began.
            self._pump()
            return
        self._pump_planned = False
        self._settled()

    async def _run_ready(self) -> None:
        """Run what is ready, until something has to wait; that is run to its end, and then nothing more."""
        task = asyncio.current_task()
        assert task is not None
        ready = self._ready
        before = marks(task)
        while ready:
            step = ready.popleft()
            if step.entry is None:
                continue
            attempt = step.attempt
            step.running = True
            if step.reason is not None:
                self._attempt_ended(step, attempt, stopped(step.reason))
                continue
            context = contextvars.Context()
            try:
                arguments, keywords = self._arguments(step)
                coroutine = step.call.function(*arguments, **keywords)
                waits_for = context.run(coroutine.send, None)
            except StopIteration as end:
                result = _completed(step, end.value)
            except BaseException as error:  # noqa: BLE001 - SystemExit and the like are the step's own failure
                result = _failed(step, error)
            else:
                rest = Rest(coroutine, context, waits_for)
                del coroutine, waits_for
                await self._wait(step, attempt, task, rest)
                return
            self._attempt_ended(step, attempt, result)
            if marks(task) != before:
                # It has left something that must not reach the next one.
                return

    async def _wait(self, step: Underway, attempt: int, task: asyncio.Task[None], rest: Rest[Any]) -> None:
        """Run the rest of an attempt that did not end at once."""
        step.task = task
        timeout = step.call.timeout
        if timeout is not None:
            step.timer = self._loop.call_later(timeout, self._time_out, step, attempt)
        result: Completed | Failed
        try:
            output = await rest
        except BaseException as error:  # noqa: BLE001 - as in _run_ready
            result = _failed(step, error)
        else:
            result = _completed(step, output)
        self._attempt_ended(step, attempt, result)
        # What ends in one turn of the loop is settled together.
        self._loop.call_soon(self._settled)

    # Functions that are not async, in threads.

    def _wake_threads(self, count: int) -> None:
        with self._lock:
            fresh = min(max(0, count - self._idle), self._max_threads - self._threads)
            first = self._threads + 1
            self._threads += fresh
        after = HELP_AFTER
        for number in range(first, first + fresh):
            try:
                threading.Thread(target=self._serve, name=f"fencepost-local-{number}", daemon=True).start()
            except RuntimeError as error:
                # Those that are there do the work; where there are none it is tried again.
                with self._lock:
                    self._threads -= first + fresh - number
                after = HELP_AGAIN_AFTER
                logger.warning("no thread can be started for local steps, %d are there: %s", self._threads, error)
                break
        for _ in range(count):
            # Also for those that are about to become idle, having seen nothing to do.
            self._wanted.put(True)
        if not self._help_planned:
            self._help_planned = True
            self._loop.call_later(after, self._help, count)

    def _help(self, count: int) -> None:
        """Let more threads work if what there was is not yet begun: the others may be waiting for something."""
        self._help_planned = False
        if self._work and not self._closed and (self._idle or self._threads < self._max_threads):
            self._wake_threads(min(2 * count, len(self._work)))

    def _serve(self) -> None:
        """A thread's life."""
        while True:
            with self._lock:
                self._idle += 1
            wanted = self._wanted.get()
            with self._lock:
                self._idle -= 1
            if not wanted:
                return
            while self._work:
                try:
                    step = self._work.popleft()
                except IndexError:
                    break
                contextvars.Context().run(self._run_in_thread, step)

    def _run_in_thread(self, step: Underway) -> None:
        if step.entry is None:
            return
        attempt = step.attempt
        step.running = True
        timeout = step.call.timeout
        result: Completed | Failed
        try:
            if step.reason is not None:
                raise asyncio.CancelledError
            arguments, keywords = self._arguments(step)
            if timeout is not None:
                # Not before the attempt has its context: who fails it tells that to stop, and may begin the next one.
                self._call_loop(self._watch, step, attempt, timeout)
            output = step.call.function(*arguments, **keywords)
        except BaseException as error:  # noqa: BLE001 - as in _run_ready
            result = _failed(step, error)
        else:
            result = _completed(step, output)
        self._results.append((step, attempt, result))
        if not self._delivery_planned:
            self._delivery_planned = True
            self._call_loop(self._take_results)

    def _call_loop(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            logger.debug("a local step ended after its worker had")

    def _watch(self, step: Underway, attempt: int, timeout: float) -> None:
        if step.entry is not None and step.attempt == attempt and step.running:
            step.timer = self._loop.call_later(timeout, self._time_out, step, attempt)

    def _take_results(self) -> None:
        # First the flag: a result that is added from here on plans a delivery of its own.
        self._delivery_planned = False
        results = self._results
        while results:
            self._attempt_ended(*results.popleft())
        self._settled()


def _completed(step: Underway, output: object) -> Completed | Failed:
    call = step.call
    try:
        return call.completed(output, step.max_payload_bytes)
    except NotEncodable as error:
        return _told(step, not_recordable(f"the output of local step {call.name} can't be recorded: {error.message}"))
    except BaseException as error:  # noqa: BLE001 - the user's classes are written in here
        return _failed(step, error)


def _failed(step: Underway, error: BaseException) -> Failed:
    if isinstance(error, asyncio.CancelledError) and step.reason is not None:
        return stopped(step.reason)
    return _told(step, failed(error, step.max_payload_bytes), error)


def _told(step: Underway, failure: Failed, error: BaseException | None = None) -> Failed:
    """Log a failure that is the step's own, in a line, with a traceback if nobody foresaw it."""
    call = step.call
    # Not of an attempt that has timed out: that has been told.
    if step.reason is None and step.entry is not None and step.running:
        logger.warning(
            "local step %s failed: op %d, run %s, attempt %d: %s %s: %s",
            call.name,
            call.op,
            call.run_id,
            step.attempt,
            failure.kind.value,
            failure.code,
            clean(failure.message.partition("\n")[0], _LOGGED_MESSAGE),
            exc_info=error if failure.unexpected else None,
            extra={"run_id": call.run_id, "attempt": step.attempt},
        )
    return failure
