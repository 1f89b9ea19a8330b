"""The sync client: starts runs, follows them, registers definitions.

::

    with Client("127.0.0.1:7654") as client:
        run = client.start_run("order-fulfilment", order, request_key=f"order-{order.id}")
        print(run.result(timeout=60))

What is asked and how it is repeated is in `calls`, shared with `AsyncClient`; here it is done, blocking. A
client may be used by many threads at once.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from fencepost.calls import Requests, RunFilter, Started
from fencepost.channel import Targets, channel_options
from fencepost.definition_calls import Manifest
from fencepost.errors import ClientClosed, FencepostError, Unavailable, Violation
from fencepost.events import Event
from fencepost.handles import RunHandle
from fencepost.models import (
    Activation,
    Definition,
    DuplicatePolicy,
    Removal,
    Run,
    RunState,
    Signalled,
    StartRun,
)
from fencepost.plans import PAGE_SIZE, Call, Page, Pause, Plan, Service, outside_of_workflows
from fencepost.policies import Seconds
from fencepost.schedule_calls import ScheduleRequests
from fencepost.schedule_client import Schedules
from fencepost.status import error_of_call
from fencepost.v1 import definition_service_pb2_grpc, run_service_pb2_grpc, schedule_service_pb2_grpc
from fencepost.workflow import Workflow

T = TypeVar("T")

MAX_RECEIVE_BYTES = 16 << 20
STUBS: Mapping[Service, Callable[..., Any]] = {
    "runs": run_service_pb2_grpc.RunServiceStub,
    "definitions": definition_service_pb2_grpc.DefinitionServiceStub,
    "schedules": schedule_service_pb2_grpc.ScheduleServiceStub,
}
"""What makes a stub for a channel, of either kind."""


class Client:
    """A client of the servers at ``target`` ("host:port", several separated by commas), in one namespace.

    ``timeout`` is how many seconds a call is repeated while no server can do it. Calls raise FencepostError
    or a subclass of it, never an error of gRPC. ``channel`` takes the place of ``target``, for tests.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:7654",
        *,
        namespace: str = "default",
        timeout: float = 30.0,
        channel: grpc.Channel | None = None,
    ) -> None:
        outside_of_workflows()
        self._targets = Targets(target)
        self._requests = Requests(namespace, timeout)
        self._schedules = ScheduleRequests(namespace, timeout)
        self._lock = threading.Lock()
        self._given = channel
        self._channels: dict[str, grpc.Channel] = {}
        self._closings = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections; calls under way raise ClientClosed, later ones connect anew."""
        with self._lock:
            self._closings += 1
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    # Definitions.

    def register_definition(self, manifest: Manifest) -> Definition:
        """Register a manifest: text (JSON or YAML), the path of a file, or a dict.

        Raises InvalidManifest with every fault, or DefinitionDrift.
        """
        return self._run(self._requests.register_definition(manifest))

    def validate_definition(self, manifest: Manifest) -> list[Violation]:
        """Find what `register_definition` would refuse; changes nothing."""
        return self._run(self._requests.validate_definition(manifest))

    def get_definition(self, workflow_id: str, definition_hash: str = "") -> Definition:
        """Read a definition, the active one by default. Raises UnknownWorkflow, UnknownDefinition."""
        return self._run(self._requests.get_definition(workflow_id, definition_hash))

    def list_definitions(self, workflow_id: str = "") -> Iterator[Definition]:
        """List definitions by workflow, the newest of each first."""
        return self._pages(lambda token: self._requests.list_definitions(workflow_id, PAGE_SIZE, token))

    def activate_definition(self, workflow_id: str, definition_hash: str) -> Activation:
        """Let new runs take a definition that is PREVIOUS. Raises UnknownDefinition, DefinitionRemoved."""
        return self._run(self._requests.activate_definition(workflow_id, definition_hash))

    def remove_definition(self, workflow_id: str, definition_hash: str) -> Removal:
        """Let no run take a definition, and end those that have: their completed steps are undone, they fail.

        Returns how many of them have not ended: repeat it until none remains.
        """
        return self._run(self._requests.remove_definition(workflow_id, definition_hash))

    # Runs.

    def start_run(
        self,
        workflow_id: str | Workflow[..., Any],
        input: object = None,
        *,
        request_key: str = "",
        user_id: str = "",
        priority: int = 0,
        definition_hash: str = "",
        dedupe_key: str = "",
        on_active_duplicate: DuplicatePolicy = "conflict",
        attributes: Mapping[str, str] | None = None,
        start_delay: Seconds = 0.0,
        run_timeout: Seconds | None = None,
    ) -> RunHandle:
        """Start a run; it has been committed when this returns. A code workflow may be given itself, for its id.

        ``request_key`` makes it happen once for ever: the same key again returns the run that exists.
        ``dedupe_key`` makes it happen one at a time: the same key again returns the run that exists until that
        has ended; if its input is another, ``on_active_duplicate`` says whether that is a "conflict", or whether to
        "bind" to it all the same.
        ``priority`` is 1 (first) to 5 (last), 3 if it is 0. ``attributes`` are labels for `list_runs`. The first node
        begins ``start_delay`` later; the run fails (RUN_TIMEOUT) if it has not ended within ``run_timeout``: both are
        seconds or a timedelta. Raises UnknownWorkflow, InputSchemaMismatch, RequestKeyConflict, DedupeKeyConflict, …;
        TypeError and ValueError, before anything is sent, for arguments that can't be right.
        """
        start = StartRun(
            workflow_id=workflow_id,
            input=input,
            request_key=request_key,
            user_id=user_id,
            priority=priority,
            definition_hash=definition_hash,
            dedupe_key=dedupe_key,
            on_active_duplicate=on_active_duplicate,
            attributes=attributes or {},
            start_delay=start_delay,
            run_timeout=run_timeout,
        )
        return self._handle(self._run(self._requests.start_run(start)))

    def start_runs(self, starts: Iterable[StartRun]) -> list[RunHandle | FencepostError]:
        """Start many runs; returns for each, in order, its handle or the error that it was refused with.

        Raises TypeError and ValueError, before anything is sent, for what `start_run` raises them for.
        """
        outcomes = self._run(self._requests.start_runs(starts))
        return [outcome if isinstance(outcome, FencepostError) else self._handle(outcome) for outcome in outcomes]

    def handle(self, run_id: str) -> RunHandle:
        """A handle of a run whose id is known. Asks nothing."""
        return RunHandle(self, run_id)

    def get_run(self, run_id: str) -> Run:
        """Read a run. Raises RunNotFound."""
        return self._run(self._requests.get_run(run_id))

    def find_run(self, workflow_id: str, request_key: str, user_id: str = "") -> Run:
        """Read the run that was started with a request key. Raises RunNotFound."""
        return self._run(self._requests.find_run(workflow_id, request_key, user_id))

    def list_runs(
        self,
        workflow_id: str | None = None,
        states: RunState | str | Sequence[RunState | str] = (),
        limit: int | None = None,
        *,
        user_id: str = "",
        attributes: Mapping[str, str] | None = None,
        created_after: dt.datetime | None = None,
        created_before: dt.datetime | None = None,
        failure_code: str = "",
        parent_run_id: str = "",
    ) -> Iterator[Run]:
        """List runs, newest first, at most ``limit``; pages are read as they are needed.

        Only those for which all that is given holds: in one of ``states`` (or in the only one), started for
        ``user_id``, with all of ``attributes``, created at or after ``created_after`` and before ``created_before``,
        failed with ``failure_code``, children of ``parent_run_id``. Raises ValueError for a state that there is not or
        a time without a zone, TypeError for what is no text or no state.
        """
        size = PAGE_SIZE if limit is None else max(1, min(limit, PAGE_SIZE))
        chosen = RunFilter(
            workflow_id=workflow_id or "",
            states=states,
            user_id=user_id,
            attributes=attributes or {},
            created_after=created_after,
            created_before=created_before,
            failure_code=failure_code,
            parent_run_id=parent_run_id,
        )
        found = self._pages(lambda token: self._requests.list_runs(chosen, size, token))
        return itertools.islice(found, limit)

    def wait_run(self, run_id: str, timeout: float | None = None) -> Run:
        """Wait until a run has ended. Raises TimeoutError after ``timeout`` seconds; None waits for ever."""
        return self._run(self._requests.wait_run(run_id, timeout))

    def history(self, run_id: str) -> Iterator[Event]:
        """Read a run's events in order; pages are read as they are needed."""
        return self._pages(lambda token: self._requests.history(run_id, PAGE_SIZE, token))

    def watch_run(self, run_id: str, after_seq: int = 0) -> Iterator[Event]:
        """Follow a run's events, those that exist and those to come, until its last one.

        Each event comes once, in order; a stream that breaks is made again by itself.
        """
        outside_of_workflows()
        watch, closings = self._requests.watch(run_id, after_seq), self._closings
        while not watch.finished:
            address = self._targets.current
            with self._unless_closed(closings):
                stub = run_service_pb2_grpc.RunServiceStub(self._channel())
                stream = stub.WatchRun(watch.request())
            try:
                for response in stream:
                    event = watch.accept(response)
                    if event is not None:
                        yield event
                watch.ended()
            except grpc.RpcError as error:
                self._check_open(closings)
                pause = watch.broke(error_of_call(error))
                self._targets.advance(address)
                time.sleep(pause)
            finally:
                stream.cancel()

    # Control. The same request_id again gets the first answer; without one, each call has its own.

    def signal_run(self, run_id: str, signal_name: str, payload: object = None, *, request_id: str = "") -> Signalled:
        """Give a run a signal; it is an event of the run when this returns, whether or not the run waits for it.

        Raises RunNotFound, IllegalTransition if the run has ended, TooManySignals.
        """
        return self._run(self._requests.signal_run(run_id, signal_name, payload, request_id))

    def cancel_run(
        self, run_id: str, reason: str = "", *, grace: float | None = None, request_id: str = ""
    ) -> RunState:
        """Ask a run to end: its steps may go on for ``grace`` seconds, completed ones are undone, then it is CANCELLED.

        Returns its state after the call. Raises RunNotFound, IllegalTransition.
        """
        return self._run(self._requests.cancel_run(run_id, reason, grace, request_id))

    def terminate_run(self, run_id: str, reason: str = "", *, request_id: str = "") -> RunState:
        """End a run at once, without undoing anything. Returns and raises as `cancel_run`."""
        return self._run(self._requests.terminate_run(run_id, reason, request_id))

    def pause_run(self, run_id: str, reason: str = "", *, request_id: str = "") -> RunState:
        """Let workers take no more steps of a run. Returns and raises as `cancel_run`."""
        return self._run(self._requests.pause_run(run_id, reason, request_id))

    def resume_run(self, run_id: str, reason: str = "", *, request_id: str = "") -> RunState:
        """Let a paused run go on. Returns and raises as `cancel_run`."""
        return self._run(self._requests.resume_run(run_id, reason, request_id))

    def retry_run(self, run_id: str, reason: str = "", *, skip_undo: bool = False, request_id: str = "") -> RunState:
        """Let a FAILED run that was not undone, or a BLOCKED one, go on from where it stopped, with fresh attempts.

        ``skip_undo`` leaves the step that could not be undone as it is; it needs a reason. Returns the run's state.
        Raises as `cancel_run`, and AlreadyUndone, KeyTaken, ParentDecided.
        """
        return self._run(self._requests.retry_run(run_id, reason, skip_undo, request_id))

    def query_run(self, run_id: str, name: str, input: object = None, *, timeout: float = 10.0, type: Any = Any) -> Any:
        """Ask the function of a code run: its query ``name``, with ``input``. Returns the answer as plain JSON or as
        ``type``. Changes nothing; a run that has ended can be asked as well.

        Waits for a worker's answer up to ``timeout`` seconds, 60 at most. Raises QueryFailed if the code has no such
        query, if it raised an error or did not answer in time, NoWorker if until then no connected worker has the run's
        code, IllegalTransition for a run of a graph, NotDecodable.
        """
        return self._run(self._requests.query_run(run_id, name, input, timeout, type))

    @property
    def schedules(self) -> Schedules:
        """The schedules of the namespace."""
        return Schedules(self, self._schedules)

    # Inside.

    def _handle(self, started: Started) -> RunHandle:
        return RunHandle(
            self,
            started.run_id,
            created=started.created,
            definition_hash=started.definition_hash,
            input_differs=started.input_differs,
        )

    def _pages(self, page: Callable[[str], Plan[Page[T]]]) -> Iterator[T]:
        token = ""
        while True:
            items, token = self._run(page(token))
            yield from items
            if not token:
                return

    def _channel(self) -> grpc.Channel:
        if self._given is not None:
            return self._given
        with self._lock:
            address = self._targets.current
            if address not in self._channels:
                options = channel_options(MAX_RECEIVE_BYTES)
                self._channels[address] = grpc.insecure_channel(address, options=options)
            return self._channels[address]

    def _run(self, plan: Plan[T]) -> T:
        """Do what a plan asks for, until it returns."""
        outside_of_workflows()
        closings = self._closings
        try:
            action = next(plan)
            while True:
                try:
                    response = self._perform(action, closings)
                except FencepostError as error:
                    action = plan.throw(error)
                else:
                    action = plan.send(response)
        except StopIteration as end:
            result: T = end.value
            return result

    def _perform(self, action: Call | Pause, closings: int) -> Any:
        """``closings``: how often it had been closed when the plan began, which ends with the next one."""
        if isinstance(action, Pause):
            time.sleep(action.seconds)
            return None
        address = self._targets.current
        try:
            with self._unless_closed(closings):
                return self._call(action)
        except grpc.RpcError as failure:
            # Else its end would be taken for that of a server, and asked again over a new connection.
            self._check_open(closings)
            error = error_of_call(failure)
            if isinstance(error, Unavailable):
                self._targets.advance(address)
            # Not from it: what gRPC says is in ours, and its text would only confuse.
            raise error from None

    @contextlib.contextmanager
    def _unless_closed(self, closings: int) -> Iterator[None]:
        self._check_open(closings)
        try:
            yield
        except ValueError:  # of gRPC, if the channel is closed between its being had and its being used
            self._check_open(closings)
            raise

    def _check_open(self, closings: int) -> None:
        if self._closings != closings:
            raise ClientClosed from None

    def _call(self, call: Call) -> Any:
        channel = self._channel()
        stub: Any = STUBS[call.service](channel)
        return getattr(stub, call.method)(call.request, timeout=call.timeout)
