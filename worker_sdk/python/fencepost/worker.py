"""The worker: takes tasks from a server and runs its steps, until it is told to stop.

Two threads and a pool: the session (gRPC, heartbeats, pongs) has a thread and a loop of its own; async
handlers and code workflows run on another loop; sync handlers in up to ``slots`` threads. So a handler that
blocks its loop or its thread silences nothing. (Code in C that keeps the interpreter's lock for as long as a
lease does: run it in a process of its own.)
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import signal
import socket
import threading
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fencepost.channel import Targets
from fencepost.decider import Decider
from fencepost.deterministic import escapes
from fencepost.identity import Identity, WorkflowKey
from fencepost.ledger import Counters
from fencepost.runtime import Runtime, Settings
from fencepost.sdk_log import SdkLog
from fencepost.steps import Step
from fencepost.workflow import Workflow

logger = SdkLog("fencepost.worker")

MAX_SLOTS = 10_000
MAX_HANDLERS = 1_000
MAX_WORKER_NAME = 200
DEFAULT_FRAME_BYTES = 8 << 20
_USERS_LOOP_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What a worker has done since it was made.

    ``started`` steps were taken; ``completed`` and ``failed`` outcomes were recorded by the server; ``lost``
    leases went to somebody else or ended otherwise; ``released`` were given back; ``held`` are here now;
    ``reconnects`` counts sessions after the first. Of code workflows, ``advanced`` counts what was decided and
    recorded, and ``cached`` are the runs in memory now; tasks to decide are among ``held`` and the rest, but for
    ``started``.
    """

    started: int
    completed: int
    failed: int
    lost: int
    released: int
    held: int
    reconnects: int
    advanced: int = 0
    cached: int = 0


class Worker:
    """Runs steps and code workflows for the servers at ``target`` ("host:port", several separated by commas).

    ``steps`` are handlers made with `fencepost.step` and `fencepost.undo`; at most ``slots`` of their attempts run at
    a time. ``workflows`` are made with `fencepost.workflow`, and are registered with the server at the start; at most
    ``workflow_slots`` of their runs are at work at a time, and about ``workflow_cache`` are kept in memory, where
    they wait for their next event. A workflow that does not come to a wait within ``deadlock_timeout`` seconds is
    interrupted. ``on_input_change`` says what becomes of a run whose code gives a step or a child another input at a
    replay than its history has: with "warn" that is logged and the run goes on with what is recorded, with "block" it
    is BLOCKED until a worker comes whose code fits.
    ``drain_timeout`` is how long, in seconds, a stopped worker lets steps finish before it cuts them off.
    ``cancel_after_lease`` cancels a step when its lease could not be renewed for that many seconds after its
    end; by default a step goes on while no server can be heard, because the server, when it is back, decides
    whether the lease still holds.
    ``loop_factory`` makes the loops of the session and, under `run`, of the async handlers: ``uvloop.new_event_loop``
    is faster where a worker is busy with many short steps. Raises ValueError or TypeError for settings that can't be.
    """

    def __init__(
        self,
        target: str,
        steps: Sequence[Step[..., Any]] = (),
        *,
        workflows: Sequence[Workflow[..., Any]] = (),
        slots: int = 10,
        workflow_slots: int = 200,
        workflow_cache: int = 1000,
        deadlock_timeout: float = 2.0,
        on_input_change: Literal["warn", "block"] = "warn",
        namespace: str = "default",
        name: str | None = None,
        drain_timeout: float = 30.0,
        cancel_after_lease: float | None = None,
        labels: Mapping[str, str] | None = None,
        max_frame_bytes: int = DEFAULT_FRAME_BYTES,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots must be 1 to {MAX_SLOTS}, not {slots}")
        if not 1 <= workflow_slots <= MAX_SLOTS:
            raise ValueError(f"workflow_slots must be 1 to {MAX_SLOTS}, not {workflow_slots}")
        if workflow_cache < 0:
            raise ValueError(f"workflow_cache must not be negative: {workflow_cache}")
        if deadlock_timeout <= 0:
            raise ValueError(f"deadlock_timeout must be positive: {deadlock_timeout}")
        if on_input_change not in ("warn", "block"):
            raise ValueError(f"on_input_change is 'warn' or 'block', not {on_input_change!r}")
        if drain_timeout < 0:
            raise ValueError(f"drain_timeout must not be negative: {drain_timeout}")
        self._targets = Targets(target)
        self._workflows = _by_key(workflows)
        self._steps = _by_name(steps, needed=not self._workflows)
        self._slots = slots
        self._workflow_slots = workflow_slots
        self._workflow_cache = workflow_cache
        self._deadlock_timeout = deadlock_timeout
        self._on_input_change: Literal["warn", "block"] = on_input_change
        self._namespace = namespace
        self._name = name or f"{socket.gethostname()}-{os.getpid()}"[:MAX_WORKER_NAME]
        self._drain_timeout = drain_timeout
        self._cancel_after_lease = cancel_after_lease
        self._labels = dict(labels or {})
        self._max_frame_bytes = max_frame_bytes
        self._loop_factory = loop_factory
        self._decider: type[Decider] = Decider  # the test kit has another
        self._counters = Counters()
        self._lock = threading.RLock()  # a signal may call `stop` amid a `stop`
        self._running = False
        self._stop_asked = False
        self._hurry_asked = False
        self._runtime: Runtime | None = None
        self._session_loop: asyncio.AbstractEventLoop | None = None
        self._connected = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Work until stopped, by `stop`, SIGTERM or SIGINT. Blocks; async handlers run on a loop in another
        thread.

        Stopped, it takes no new tasks, gives back what it has not begun, lets the rest finish, and returns; a
        second signal, or the end of ``drain_timeout``, cuts off what still runs. (Signals are handled only if
        it is called in the main thread.) Raises FencepostError if a server refuses the worker for good.

        If the program has set up no logging, the SDK's log from INFO on goes to standard error meanwhile: where
        the worker is connected, what failed. Any handler, or a level of the logger "fencepost", is respected.
        """
        self._claim()
        ended = threading.Event()
        users_loop = self._loop_factory()
        users_thread = threading.Thread(target=_run_users_loop, args=(users_loop,), name="fencepost-steps", daemon=True)
        try:
            # Signals are handled to the very end: a second one must not interrupt the end of the steps' loop.
            with self._signals(), _log_shown():
                try:
                    users_thread.start()
                    self._start_session(users_loop, ended.set)
                    ended.wait()
                finally:
                    if not ended.is_set():
                        self.stop(now=True)
                    _stop_users_loop(users_loop, users_thread)
        finally:
            self._running = False
        self._raise_error()

    async def run_async(self) -> None:
        """Work until stopped, with async handlers on the running loop. Cancelled, it stops as `run` does.

        Cancelled a second time, it cuts off what still runs. Raises FencepostError as `run` does.
        """
        self._claim()
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        try:
            self._start_session(loop, tell)
            await self._wait_or_stop(ended)
        finally:
            self._running = False
        self._raise_error()

    async def _wait_or_stop(self, ended: asyncio.Event) -> None:
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self.stop()
            try:
                await ended.wait()
            except asyncio.CancelledError:
                self.stop(now=True)
                await ended.wait()
            raise

    def stop(self, *, now: bool = False) -> None:
        """Stop working, from any thread; ``now`` does not wait for steps that run. Returns at once."""
        with self._lock:
            self._stop_asked = True
            self._hurry_asked = self._hurry_asked or now
            runtime, loop = self._runtime, self._session_loop
        if runtime is not None and loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: runtime.stop(now=now))

    def wait_connected(self, timeout: float) -> bool:
        """Wait, in a thread, until a server has taken the worker; False if ``timeout`` seconds pass first."""
        return self._connected.wait(timeout)

    def stats(self) -> WorkerStats:
        """What it has done so far. From any thread; the numbers are those of a moment ago."""
        counters, runtime = self._counters, self._runtime
        return WorkerStats(
            started=counters.started,
            completed=counters.completed,
            failed=counters.failed,
            lost=counters.lost,
            released=counters.released,
            held=runtime.held_count if runtime is not None else 0,
            reconnects=max(0, counters.connects - 1),
            advanced=counters.advanced,
            cached=runtime.cached_count if runtime is not None else 0,
        )

    # Inside.

    def _claim(self) -> None:
        for handler in self._steps.values():
            handler.prepare()
        for workflow in self._workflows.values():
            workflow.prepare()
            for escape in escapes(workflow.function):
                # A guess from the code alone, so no reason to refuse it.
                logger.warning(
                    "workflow %s: %s (no guard sees this, and a replay gets another value)",
                    workflow.workflow_id,
                    escape,
                )
        with self._lock:
            if self._running:
                raise RuntimeError("this worker runs already")
            self._running = True
            self._error = None

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _start_session(self, users_loop: asyncio.AbstractEventLoop, tell: Callable[[], None]) -> None:
        identity = Identity(
            namespace=self._namespace,
            worker_name=self._name,
            process_nonce=uuid.uuid4().hex,
            sdk_version=_version(),
            steps=self._steps,
            labels=self._labels,
            max_frame_bytes=self._max_frame_bytes,
            workflows=self._workflows,
        )
        settings = Settings(
            identity=identity,
            targets=self._targets,
            slots=self._slots,
            workflow_slots=self._workflow_slots,
            workflow_cache=self._workflow_cache,
            deadlock_timeout=self._deadlock_timeout,
            on_input_change=self._on_input_change,
            drain_timeout=self._drain_timeout,
            cancel_after_lease=self._cancel_after_lease,
            decider=self._decider,
        )
        threading.Thread(
            target=self._run_session,
            args=(settings, users_loop, tell),
            name="fencepost-session",
            daemon=True,
        ).start()

    def _run_session(self, settings: Settings, users_loop: asyncio.AbstractEventLoop, tell: Callable[[], None]) -> None:
        try:
            with asyncio.Runner(loop_factory=self._loop_factory) as runner:
                runner.run(self._session(settings, users_loop))
        except BaseException as error:  # noqa: BLE001 - it is raised to who runs the worker
            self._error = error
        finally:
            tell()

    async def _session(self, settings: Settings, users_loop: asyncio.AbstractEventLoop) -> None:
        runtime = Runtime(settings, self._counters, users_loop, self._connected.set)
        with self._lock:
            self._runtime = runtime
            self._session_loop = asyncio.get_running_loop()
            if self._stop_asked:
                runtime.stop(now=self._hurry_asked)
        try:
            await runtime.main()
        finally:
            with self._lock:
                self._runtime = None
                self._session_loop = None
                self._stop_asked = False
                self._hurry_asked = False
            self._connected.clear()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the worker, the second one at once, the third one interrupts."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        seen = 0

        def handle(number: int, _frame: types.FrameType | None) -> None:
            nonlocal seen
            seen += 1
            if seen > 2:
                raise KeyboardInterrupt
            logger.info("%s: the worker stops%s", signal.Signals(number).name, " at once" if seen == 2 else "")
            self.stop(now=seen == 2)

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _log_shown() -> Iterator[None]:
    """Show the SDK's log within the block, if nobody has said what is to become of it."""
    log = logging.getLogger("fencepost")
    if log.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = log.level
    log.addHandler(handler)
    if level == logging.NOTSET:
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _version() -> str:
    try:
        return importlib.metadata.version("fencepost")
    except importlib.metadata.PackageNotFoundError:
        # A copy of the source that was never installed.
        return "unknown"


def _by_key(workflows: Sequence[Workflow[..., Any]]) -> Mapping[WorkflowKey, Workflow[..., Any]]:
    """The workflows by id and compatibility_id.

    Raises TypeError for what is none, ValueError for two that can't be told apart, or too many.
    """
    by_key: dict[WorkflowKey, Workflow[..., Any]] = {}
    for offered in workflows:
        if not isinstance(offered, Workflow):
            raise TypeError(f"{offered!r} is not a workflow: decorate it with @fencepost.workflow(id, …)")
        key = (offered.workflow_id, offered.compatibility_id)
        if key in by_key:
            raise ValueError(f"two workflows are {offered.workflow_id!r} with compatibility_id {key[1]!r}")
        by_key[key] = offered
    if len(by_key) > MAX_HANDLERS:
        raise ValueError(f"a worker has at most {MAX_HANDLERS} workflows, not {len(by_key)}")
    return by_key


def _by_name(steps: Sequence[Step[..., Any]], *, needed: bool) -> Mapping[str, Step[..., Any]]:
    """The handlers by name; at least one if ``needed``.

    Raises TypeError for what is none, ValueError for two of one name or a wrong number.
    """
    by_name: dict[str, Step[..., Any]] = {}
    for handler in steps:
        if isinstance(handler, Workflow):
            raise TypeError(f"{handler!r} is a workflow, not a handler: give it as Worker(…, workflows=[…])")
        if not isinstance(handler, Step):
            raise TypeError(
                f"{handler!r} is not a handler: decorate it with @fencepost.step(name) or @fencepost.undo(name)"
            )
        if handler.name in by_name:
            raise ValueError(f"two handlers are named {handler.name!r}")
        by_name[handler.name] = handler
    if needed and not by_name:
        raise ValueError("a worker has at least one handler or one workflow, and this one has none")
    if len(by_name) > MAX_HANDLERS:
        raise ValueError(f"a worker has at most {MAX_HANDLERS} handlers, not {len(by_name)}")
    return by_name


def _run_users_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped. A task that a step has begun and left may raise what ends programs: that ends
    the task, not the loop, without which the worker would go on holding leases and do nothing.
    """
    try:
        while True:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                logger.exception("a task that a step has begun raised this; the worker goes on")
            else:
                break
    finally:
        loop.close()


def _stop_users_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End the loop and what still runs on it; one that a handler blocks is left behind in its daemon thread."""
    if not thread.is_alive():
        loop.close()
        return
    ending: list[asyncio.Task[None]] = []

    async def end() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_USERS_LOOP_TIMEOUT / 2):
                await asyncio.gather(*rest, return_exceptions=True)
                await loop.shutdown_asyncgens()
                await loop.shutdown_default_executor()
        loop.stop()

    # The coroutine is made in the loop: if that is blocked for good, none was made that nobody awaits.
    loop.call_soon_threadsafe(lambda: ending.append(loop.create_task(end())))
    thread.join(_USERS_LOOP_TIMEOUT)
    if thread.is_alive():
        logger.warning("a step blocks the event loop of the steps and is left behind")
