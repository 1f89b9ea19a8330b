"""The sync client: starts runs, follows them, registers definitions.

::

    with Client("127.0.0.1:7654") as client:
        run = client.start_run("order-fulfilment", order, request_key=f"order-{order.id}")
        print(run.result(timeout=60))

What is asked and how it is repeated is in `calls`, shared with `AsyncClient`; here it is done, blocking. A
client may be used by many threads at once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import grpc

from fencepost.calls import PAGE_SIZE, Call, Manifest, Page, Pause, Plan, Requests, Started
from fencepost.channel import Targets, channel_options
from fencepost.errors import FencepostError, Unavailable, Violation
from fencepost.models import Definition, DuplicatePolicy, Event, Run, RunState, StartRun
from fencepost.status import error_of_call
from fencepost.v1 import definition_service_pb2_grpc, run_service_pb2_grpc

T = TypeVar("T")

MAX_RECEIVE_BYTES = 16 << 20


class RunHandle:
    """One run, started or found.

    ``created`` tells whether this start made it, None if nothing was started. ``input_differs`` tells that the
    start was bound to a run with another input (``on_active_duplicate="bind"``).
    """

    def __init__(
        self,
        client: Client,
        run_id: str,
        *,
        created: bool | None = None,
        definition_hash: str = "",
        input_differs: bool = False,
    ) -> None:
        self._client = client
        self.run_id = run_id
        self.created = created
        self.definition_hash = definition_hash
        self.input_differs = input_differs

    def __repr__(self) -> str:
        return f"<RunHandle {self.run_id}>"

    @overload
    def result(self, timeout: float | None = None) -> Any: ...
    @overload
    def result(self, timeout: float | None = None, *, type: type[T]) -> T: ...
    def result(self, timeout: float | None = None, *, type: Any = Any) -> Any:
        """Wait for the output, as plain JSON or as ``type``.

        Raises RunFailed if the run failed, TimeoutError if it has not ended within ``timeout`` seconds (None:
        wait for ever), NotDecodable if the output is no ``type``.
        """
        return self._client._run(self._client._requests.result(self.run_id, timeout, type))

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until it has ended, well or not. Raises TimeoutError."""
        return self._client.wait_run(self.run_id, timeout)

    def get(self) -> Run:
        """Read it as it is now."""
        return self._client.get_run(self.run_id)

    def events(self, after_seq: int = 0) -> Iterator[Event]:
        """Follow its events, those that exist and those to come, until its last one; goes on by itself after
        a break.
        """
        return self._client.watch_run(self.run_id, after_seq)

    def history(self) -> Iterator[Event]:
        """Read the events that exist."""
        return self._client.history(self.run_id)


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
        self._targets = Targets(target)
        self._requests = Requests(namespace, timeout)
        self._lock = threading.Lock()
        self._given = channel
        self._channels: dict[str, grpc.Channel] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections; calls under way fail, later ones connect anew."""
        with self._lock:
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

    # Runs.

    def start_run(
        self,
        workflow_id: str,
        input: object = None,
        *,
        request_key: str = "",
        user_id: str = "",
        priority: int = 0,
        definition_hash: str = "",
        dedupe_key: str = "",
        on_active_duplicate: DuplicatePolicy = "conflict",
    ) -> RunHandle:
        """Start a run; it has been committed when this returns.

        ``request_key`` makes it happen once for ever: the same key again returns the run that exists.
        ``dedupe_key`` makes it happen one at a time: the same key again returns the run that exists until that
        has ended; if its input is another, ``on_active_duplicate`` says whether that is a "conflict", or whether to
        "bind" to it all the same.
        ``priority`` is 1 (first) to 5 (last), 3 if it is 0. Raises UnknownWorkflow, InputSchemaMismatch,
        RequestKeyConflict, DedupeKeyConflict, …; ValueError for another ``on_active_duplicate``.
        """
        start = StartRun(
            workflow_id, input, request_key, user_id, priority, definition_hash, dedupe_key, on_active_duplicate
        )
        return self._handle(self._run(self._requests.start_run(start)))

    def start_runs(self, starts: Iterable[StartRun]) -> list[RunHandle | FencepostError]:
        """Start many runs; returns for each, in order, its handle or the error that it was refused with.

        Raises ValueError, before anything is sent, for an ``on_active_duplicate`` that there is not.
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
        states: Sequence[RunState | str] = (),
        limit: int | None = None,
    ) -> Iterator[Run]:
        """List runs, newest first, at most ``limit``; pages are read as they are needed."""
        size = PAGE_SIZE if limit is None else max(1, min(limit, PAGE_SIZE))
        found = self._pages(lambda token: self._requests.list_runs(workflow_id or "", states, size, token))
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
        watch = self._requests.watch(run_id, after_seq)
        while not watch.finished:
            stub = run_service_pb2_grpc.RunServiceStub(self._channel())
            stream = stub.WatchRun(watch.request())
            try:
                for response in stream:
                    event = watch.accept(response)
                    if event is not None:
                        yield event
                watch.ended()
            except grpc.RpcError as error:
                pause = watch.broke(error_of_call(error))
                self._targets.advance()
                time.sleep(pause)
            finally:
                stream.cancel()

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
        try:
            action = next(plan)
            while True:
                try:
                    response = self._perform(action)
                except FencepostError as error:
                    action = plan.throw(error)
                else:
                    action = plan.send(response)
        except StopIteration as end:
            result: T = end.value
            return result

    def _perform(self, action: Call | Pause) -> Any:
        if isinstance(action, Pause):
            time.sleep(action.seconds)
            return None
        try:
            return self._call(action)
        except grpc.RpcError as failure:
            error = error_of_call(failure)
            if isinstance(error, Unavailable):
                self._targets.advance()
            # Not from it: what gRPC says is in ours, and its text would only confuse.
            raise error from None

    def _call(self, call: Call) -> Any:
        channel = self._channel()
        stub: Any = (
            run_service_pb2_grpc.RunServiceStub(channel)
            if call.service == "runs"
            else definition_service_pb2_grpc.DefinitionServiceStub(channel)
        )
        return getattr(stub, call.method)(call.request, timeout=call.timeout)
