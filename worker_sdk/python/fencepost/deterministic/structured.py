"""TaskGroup and wait_for, as asyncio has them and in an order of their own making.

asyncio's TaskGroup keeps its tasks in a set, so the order in which it cancels them depends on addresses; its wait_for
differs between versions of Python. These two do the same everywhere, on every event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextvars import Context
from types import TracebackType
from typing import Any, Self, TypeVar

from fencepost.deterministic.loop import awaited
from fencepost.deterministic.waiting import wait

_T = TypeVar("_T")


class TaskGroup:
    """Tasks that end together, as asyncio.TaskGroup; they are cancelled in the order in which they were created.

    Leaving the `async with` waits for all of them. When one fails, the others and the body are cancelled, and an
    ExceptionGroup has every failure. KeyboardInterrupt and SystemExit are raised as they are.
    """

    def __init__(self) -> None:
        self._parent: asyncio.Task[Any] | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._errors: list[BaseException] = []
        self._fatal: BaseException | None = None
        self._aborting = False
        self._closed = False
        self._cancelled_parent = False
        self._all_ended: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<TaskGroup tasks={len(self._tasks)} errors={len(self._errors)}{' aborting' * self._aborting}>"

    async def __aenter__(self) -> Self:
        if self._parent is not None:
            raise RuntimeError("a TaskGroup can be entered once only")
        self._parent = asyncio.current_task()
        if self._parent is None:
            raise RuntimeError("a TaskGroup needs a task around it")
        return self

    def create_task(
        self,
        coro: Coroutine[Any, Any, _T] | asyncio.Future[_T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[_T]:
        """Run `coro`, or wait for a future, as a task of this group.

        RuntimeError before it is entered, and when it is ending.
        """
        if self._parent is None or self._closed or self._aborting:
            if not isinstance(coro, asyncio.Future):
                coro.close()
            state = "has not been entered" if self._parent is None else "has ended" if self._closed else "is ending"
            raise RuntimeError(f"this TaskGroup {state}: it takes no task")
        if isinstance(coro, asyncio.Future):
            coro = awaited(coro)
        task = asyncio.get_running_loop().create_task(coro, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._task_ended)
        return task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._end(error)
        finally:
            # What is raised holds this frame, and this frame the errors.
            self._errors = []
            self._fatal = error = None

    async def _end(self, error: BaseException | None) -> None:
        parent = self._parent
        assert parent is not None
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
        if self._take_back_cancel(parent):
            cancelled = None
        if error is not None:
            self._note_fatal(error)
            self._abort()
        cancelled = await self._wait_for_tasks() or cancelled
        self._closed = True
        if self._fatal is not None:
            raise self._fatal
        if self._take_back_cancel(parent):
            cancelled = None
        if cancelled is not None and not self._errors:
            raise cancelled
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self._errors.append(error)
        if self._errors:
            # Somebody else's cancellation is not used up by the group's failure: the next await raises it.
            if parent.cancelling():
                parent.uncancel()
                parent.cancel()
            raise BaseExceptionGroup("tasks of a group failed", self._errors) from None

    async def _wait_for_tasks(self) -> asyncio.CancelledError | None:
        """Wait until no task is left, and return the cancellation from outside that came meanwhile."""
        cancelled = None
        while self._tasks:
            self._all_ended = asyncio.get_running_loop().create_future()
            try:
                await self._all_ended
            except asyncio.CancelledError as error:
                # The group's own request to cancel the parent has done its work already.
                if not self._aborting:
                    cancelled = error
                    self._abort()
        self._all_ended = None
        return cancelled

    def _take_back_cancel(self, parent: asyncio.Task[Any]) -> bool:
        """Undo the group's own request to cancel its parent; whether that was the only one."""
        if not self._cancelled_parent:
            return False
        self._cancelled_parent = False
        return parent.uncancel() == 0

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if self._all_ended is not None and not self._tasks and not self._all_ended.done():
            self._all_ended.set_result(None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        self._errors.append(error)
        self._note_fatal(error)
        parent = self._parent
        assert parent is not None
        if not self._aborting and not parent.done():
            self._abort()
            # Inside __aexit__ the parent waits for the tasks, which end by themselves now.
            if self._all_ended is None:
                self._cancelled_parent = True
                parent.cancel()

    def _note_fatal(self, error: BaseException) -> None:
        if self._fatal is None and isinstance(error, SystemExit | KeyboardInterrupt):
            self._fatal = error

    def _abort(self) -> None:
        self._aborting = True
        for task in list(self._tasks):
            task.cancel()


async def wait_for(awaitable: Awaitable[_T], timeout: float | None) -> _T:
    """The result of `awaitable`; TimeoutError when that takes longer than `timeout` seconds, once it is cancelled.

    None waits for ever. With a timeout of 0 or less only what is done already has a result.
    """
    if timeout is not None and timeout <= 0:
        future = asyncio.ensure_future(awaitable)
        if not future.done():
            future.cancel()
            await wait([future])
            if future.cancelled():
                raise TimeoutError
        return future.result()
    async with asyncio.timeout(timeout):
        return await awaitable
