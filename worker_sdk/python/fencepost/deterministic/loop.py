"""An asyncio event loop in which everything happens in an order that depends on the events fed to it alone.

It waits for nothing and reads no clock: `run_until_blocked` runs what is ready, first in, first out, and returns when
nothing is; whoever owns the run then settles futures or fires timers, and runs it again. Time and timers are the
host's, so asyncio.sleep and asyncio.timeout become durable timers. Tasks and futures are asyncio's own.

Invariants: callbacks run in the order in which they became ready; tasks are held until they end, so that no garbage
collection decides what runs; after `evict` no code of the run can get anything from the host. A loop is used by one
thread at a time, and mostly inside a callback of another loop, whose running loop and task it puts back.

Called by the replay machine of code workflows.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import weakref
from asyncio import events, tasks
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, TypeVar

from fencepost.deterministic.collecting import is_collecting, watch_collections
from fencepost.deterministic.eviction import Unwinding
from fencepost.deterministic.outside import NoOutside
from fencepost.deterministic.refusals import Evicted, refuse
from fencepost.deterministic.timers import Callback, Host, Timer
from fencepost.sdk_log import SdkLog

log = SdkLog("fencepost.workflow")

_T = TypeVar("_T")
_ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]

# Whether a thread has one current task, not one per loop.
_ONE_TASK = sys.version_info >= (3, 14)

# What ran before: the loop, its task where a thread has only one, and the hooks of asynchronous generators.
_Outside = tuple[asyncio.AbstractEventLoop | None, asyncio.Task[Any] | None, Any]


class DeterministicLoop(NoOutside):
    """The event loop of one run in memory.

    `host` keeps its time and timers. Everything of asyncio that needs the outside world raises NonDeterministic.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._ready: deque[Any] = deque()
        self._tasks: dict[asyncio.Task[Any], Context] = {}
        self._agens: weakref.WeakValueDictionary[int, AsyncGenerator[Any, Any]] = weakref.WeakValueDictionary()
        self._agens_seen = 0
        self._errors: list[Exception] = []
        self._exception_handler: _ExceptionHandler | None = None
        self._thread = 0  # the ident of the thread that runs it now
        self._evicted = False

    # What the host does with it

    def run_until_blocked(self) -> None:
        """Run what is ready, and what becomes ready by that, until nothing is.

        Raises what callbacks raised, when all are done: the error itself, or an ExceptionGroup of several. An error
        of a task is not among these: it is the task's result. What is no Exception (KeyboardInterrupt, or whatever a
        watchdog raises in the thread) leaves at once.
        """
        if self._evicted or not self._ready:
            return
        outside = self._enter()
        try:
            self._run_ready()
        finally:
            self._leave(outside)
        if self._errors:
            errors, self._errors = self._errors, []
            raise errors[0] if len(errors) == 1 else ExceptionGroup("callbacks of the workflow failed", errors)

    def _run_ready(self) -> None:
        ready = self._ready
        take = ready.popleft
        while ready:
            handle = take()
            callback = handle._callback
            if callback is None:
                continue
            try:
                handle._context.run(callback, *handle._args)
            except Exception as error:  # noqa: BLE001 (collected: run_until_blocked raises it)
                self._callback_failed(error, handle)
            except asyncio.CancelledError as error:
                # The host runs in a task of another loop, which this must not cancel.
                failed = RuntimeError("a callback of the workflow raised CancelledError")
                failed.__cause__ = error
                self._callback_failed(failed, handle)

    def _callback_failed(self, error: Exception, handle: asyncio.Handle) -> None:
        if self._exception_handler is None:
            self._errors.append(error)
            return
        context = {"message": "Exception in a callback", "exception": error, "handle": handle}
        try:
            self._exception_handler(self, context)
        except Exception as worse:  # noqa: BLE001 (collected likewise)
            self._errors.append(worse)

    def _enter(self) -> _Outside:
        """Make this the running loop, and return what was there."""
        if self._thread:
            raise RuntimeError("this loop is running already")
        outer = events._get_running_loop()
        # From 3.14 a thread has one current task, not one per loop: the outer one steps aside meanwhile.
        task = tasks.current_task(outer) if _ONE_TASK and outer is not None else None
        if task is not None:
            tasks._leave_task(outer, task)  # type: ignore[arg-type]  # there is a task, so there is a loop
        outside = outer, task, sys.get_asyncgen_hooks()
        self._thread = threading.get_ident()
        sys.set_asyncgen_hooks(self._agen_begins, self._agen_dropped)
        events._set_running_loop(self)
        return outside

    def _leave(self, outside: _Outside) -> None:
        outer, task, hooks = outside
        events._set_running_loop(outer)
        sys.set_asyncgen_hooks(*hooks)
        self._thread = 0
        if task is not None:
            tasks._enter_task(outer, task)  # type: ignore[arg-type]  # as in _enter

    # Callbacks and timers

    def call_soon(  # type: ignore[override]  # typeshed ties args to the callback; this is the loose form
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Run `callback(*args)` after all that is ready now."""
        handle = Callback(callback, args, self, context)
        if self._evicted:
            self._drop(handle)
        else:
            self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]  # as call_soon
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run `callback(*args)` when a timer of the host fires, `delay` seconds from now; at once if delay <= 0.

        An endless delay never fires. Raises ValueError for NaN, and what the host raises.
        """
        if math.isnan(delay):
            raise ValueError("a delay must be a number of seconds, not NaN")
        handle = Timer(self._host.time() + delay, callback, args, self, context)
        if self._evicted:
            self._drop(handle)
            return handle
        # Less than a microsecond is what is left of a moment computed by adding seconds to a time.
        if delay < math.inf:
            delay = round(delay, 6)
            if delay > 0:
                handle.start(self._host, delay, self._ready)
            else:
                self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]  # as call_soon
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run `callback(*args)` when the run's time is `when`, as call_later."""
        return self.call_later(when - self._host.time(), callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]  # as call_soon
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As call_soon, from the thread that runs the loop; raises NonDeterministic elsewhere."""
        if self._thread != threading.get_ident():
            refuse("calling the loop from another thread", "let ctx.run(...) do the work and await its result")
        return self.call_soon(callback, *args, context=context)

    def _drop(self, handle: asyncio.Handle) -> None:
        # Code of the run asks while it unwinds; afterwards only the host can, by settling a future.
        if self._thread:
            raise Evicted
        handle.cancel()

    def time(self) -> float:
        """The run's time in seconds: that of the last event fed."""
        return self._host.time()

    # Futures, tasks, asynchronous generators

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: str | None = None,
        context: Context | None = None,
        eager_start: bool | None = None,
    ) -> asyncio.Task[_T]:
        """Run `coro`, or wait for a future, as a task, after all that is ready now. The loop holds it until it ends."""
        if eager_start:
            _close(coro)
            refuse("a task that starts eagerly", "tasks of a workflow begin in the order in which they are created")
        if self._evicted:
            _close(coro)
            raise Evicted
        if isinstance(coro, asyncio.Future):
            coro = awaited(coro)
        if context is None:
            context = copy_context()
        task = asyncio.Task(coro, loop=self, name=name or f"Task-{self._next_name()}", context=context)
        self._tasks[task] = context
        task.add_done_callback(self._tasks.pop)
        return task

    _names = 0

    def _next_name(self) -> int:
        # asyncio numbers tasks by process, which a replay could not repeat.
        self._names += 1
        return self._names

    def get_task_factory(self) -> None:
        """None: tasks are asyncio's own."""

    def set_task_factory(self, factory: object) -> None:
        """Refused but for None: a task that begins eagerly changes the order of all that follows."""
        if factory is not None:
            refuse("a task factory", "tasks of a workflow begin in the order in which they are created")

    def _agen_begins(self, agen: AsyncGenerator[Any, Any]) -> None:
        watch_collections()
        self._agens_seen += 1
        self._agens[self._agens_seen] = agen

    def _agen_dropped(self, agen: AsyncGenerator[Any, Any]) -> None:
        # One that a collection found in a cycle ends without its finally blocks: when it does differs between replays.
        if not self._evicted and self._thread == threading.get_ident() and not is_collecting():
            _ = self.create_task(agen.aclose())

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that are suspended, oldest first."""
        for agen in list(self._agens.values()):
            await agen.aclose()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there is none."""

    # State and errors

    @property
    def runs_here(self) -> bool:
        """Whether run_until_blocked is on the stack of this thread. (Asking asyncio costs a call of the system.)"""
        return self._thread == threading.get_ident()

    def is_running(self) -> bool:
        """Whether run_until_blocked is on the stack."""
        return self._thread != 0

    def is_closed(self) -> bool:
        """Whether the run was evicted."""
        return self._evicted

    def get_debug(self) -> bool:
        """False."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Ignored: asyncio's debug mode reads clocks."""

    def get_exception_handler(self) -> _ExceptionHandler | None:
        """What set_exception_handler was given."""
        return self._exception_handler

    def set_exception_handler(self, handler: _ExceptionHandler | None) -> None:
        """Let `handler(loop, context)` have the errors of callbacks, instead of the host."""
        self._exception_handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log what is wrong, e.g. a failed task whose result nobody awaited."""
        log.error(context.get("message", "error in a workflow"), exc_info=context.get("exception"))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Tell of an error that has no other way out: asyncio's futures do. After an eviction nobody cares."""
        if self._evicted:
            return
        (self._exception_handler or _by_default)(self, context)

    # The end

    def evict(self) -> None:
        """Drop every task, so that no code of the run can ask for anything any more, and without a complaint.

        Coroutines and asynchronous generators are closed, in the order in which they began: their finally blocks run,
        until they want something of the loop or of the host (see raise_if_evicted), which raises Evicted. What they
        raise is dropped. Harmless the second time; an error while the loop runs.
        """
        if self._evicted:
            return
        outside = self._enter()
        self._evicted = True
        self._ready.clear()
        self._errors.clear()
        held = self._tasks.copy()
        self._tasks.clear()
        try:
            with Unwinding() as unwinding:
                while held:
                    task = next(iter(held))
                    if not task.done():
                        unwinding.task(task, held[task])
                    # The frames' variables go with it, so here and not later, when Python would complain of some.
                    del held[task], task
                for agen in list(self._agens.values()):
                    unwinding.generator(agen)
        finally:
            self._leave(outside)

    def raise_if_evicted(self) -> None:
        """Raise Evicted if the run was. A host calls it wherever workflow code may ask for something."""
        if self._evicted:
            raise Evicted

    def close(self) -> None:
        """As evict."""
        self.evict()


async def awaited(future: asyncio.Future[_T]) -> _T:
    """A coroutine that waits for a future: what a durable call returns has begun, and may be awaited like one."""
    return await future


def _close(coro: object) -> None:
    close = getattr(coro, "close", None)
    if close is not None:
        close()


def _by_default(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    loop.default_exception_handler(context)
