"""What the clients ask and how they go on when it fails, without I/O: one logic for the sync and the async
client.

A `Plan` is a generator. It yields a `Call` to be made or a `Pause` to be kept, is sent the call's response or
thrown the FencepostError that it ended with, and returns its result. Every call can be repeated: reads change
nothing, starts carry a random request id, definitions are known by their hash. So a plan repeats whatever may
pass by itself (`Unavailable`), with jitter, as the server asks, until its time is up.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from fencepost.channel import Backoff
from fencepost.codec import NULL, codec_for, encode
from fencepost.errors import FencepostError, RunFailed, Unavailable, Violation
from fencepost.models import (
    RUN_STATE_NUMBERS,
    Definition,
    Event,
    Failure,
    FailureKind,
    Run,
    RunState,
    StartRun,
    definition_of,
    event_of,
    fill_payload,
    run_of,
    violations_of,
)
from fencepost.status import error_of_item
from fencepost.v1 import definition_service_pb2 as definitions
from fencepost.v1 import run_service_pb2 as runs

T = TypeVar("T")

Manifest: TypeAlias = str | Path | dict[str, Any]
"""A manifest: its text (JSON or YAML), the path of a .json, .yaml or .yml file, or a dict."""

ATTEMPT_TIMEOUT = 10.0
LONGEST_WAIT = 30.0
PAGE_SIZE = 100
MAX_BATCH_ITEMS = 1_000
MAX_BATCH_BYTES = 2 << 20
_SUFFIXES = (".json", ".yaml", ".yml")
# Refusing is the server's default, and a policy without a dedupe key is a fault: so only what was asked for is sent.
_POLICIES: dict[str, runs.DuplicatePolicy.ValueType] = {
    "conflict": runs.DUPLICATE_POLICY_UNSPECIFIED,
    "bind": runs.DUPLICATE_POLICY_BIND,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A unary call to make, within ``timeout`` seconds."""

    service: Literal["runs", "definitions"]
    method: str
    request: Message
    timeout: float


@dataclass(frozen=True, slots=True)
class Pause:
    """A time to wait, in seconds."""

    seconds: float


Plan: TypeAlias = Generator[Call | Pause, Any, T]
Page: TypeAlias = tuple[list[T], str]
"""Some items, and the token of the next page; '' on the last one."""


@dataclass(frozen=True, slots=True)
class Started:
    """A run that was started, or found by its request key or dedupe key (``created`` is False)."""

    run_id: str
    created: bool
    definition_hash: str
    input_differs: bool


class Requests:
    """Plans of everything that a client can ask, in one namespace.

    ``patience``: seconds to repeat what fails.
    """

    def __init__(self, namespace: str, patience: float) -> None:
        self._namespace = namespace
        self._patience = patience

    def _ask(
        self,
        service: Literal["runs", "definitions"],
        method: str,
        request: Message,
        *,
        attempt: float | None = None,
        patience: float | None = None,
    ) -> Plan[Any]:
        """One call, repeated while it is Unavailable and ``patience`` lasts."""
        backoff = Backoff()
        end = time.monotonic() + (self._patience if patience is None else patience)
        while True:
            left = max(0.001, end - time.monotonic())
            limit = min(ATTEMPT_TIMEOUT, left) if attempt is None else attempt
            try:
                return (yield Call(service, method, request, limit))
            except Unavailable as error:
                delay = backoff.next(error.retry_after)
                if time.monotonic() + delay >= end:
                    raise
                yield Pause(delay)

    # Definitions.

    def register_definition(self, manifest: Manifest) -> Plan[Definition]:
        """Register a manifest."""
        request = definitions.RegisterDefinitionRequest(
            namespace=self._namespace, request_id=_new_id(), **_manifest(manifest)
        )
        response = yield from self._ask("definitions", "RegisterDefinition", request)
        return definition_of(response.definition, created=response.created)

    def validate_definition(self, manifest: Manifest) -> Plan[list[Violation]]:
        """Find what registering would refuse."""
        request = definitions.ValidateDefinitionRequest(namespace=self._namespace, **_manifest(manifest))
        response = yield from self._ask("definitions", "ValidateDefinition", request)
        return list(violations_of(response.violations))

    def get_definition(self, workflow_id: str, definition_hash: str) -> Plan[Definition]:
        """Read a definition."""
        request = definitions.GetDefinitionRequest(
            namespace=self._namespace, workflow_id=workflow_id, definition_hash=definition_hash
        )
        response = yield from self._ask("definitions", "GetDefinition", request)
        return definition_of(response.definition)

    def list_definitions(self, workflow_id: str, size: int, token: str) -> Plan[Page[Definition]]:
        """Read one page of definitions."""
        request = definitions.ListDefinitionsRequest(
            namespace=self._namespace, workflow_id=workflow_id, page_size=size, page_token=token
        )
        response = yield from self._ask("definitions", "ListDefinitions", request)
        return [definition_of(found) for found in response.definitions], response.next_page_token

    # Starting runs.

    def start_run(self, start: StartRun) -> Plan[Started]:
        """Start one run. Raises ValueError for a policy that there is not."""
        request = _start_request(start)
        request.namespace = self._namespace
        response = yield from self._ask("runs", "StartRun", request)
        return _started(response)

    def start_runs(self, starts: Iterable[StartRun]) -> Plan[list[Started | FencepostError]]:
        """Start many runs; each is started or has its error, in order.

        Raises ValueError, before anything is sent, for a policy that there is not.
        """
        outcomes: dict[int, Started | FencepostError] = {}
        waiting: list[tuple[int, runs.StartRunRequest]] = []
        count = 0
        for start in starts:
            try:
                waiting.append((count, _start_request(start)))
            except FencepostError as error:
                outcomes[count] = error
            count += 1
        backoff = Backoff()
        end = time.monotonic() + self._patience
        while waiting:
            again: list[tuple[int, runs.StartRunRequest]] = []
            for batch in _batches(waiting):
                results = yield from self._start_batch([request for _, request in batch])
                for (index, request), outcome in zip(batch, results, strict=True):
                    outcomes[index] = outcome
                    if isinstance(outcome, Unavailable):
                        again.append((index, request))
            delay = backoff.next()
            if not again or time.monotonic() + delay >= end:
                break
            yield Pause(delay)
            waiting = again
        return [outcomes[index] for index in range(count)]

    def _start_batch(self, requests: list[runs.StartRunRequest]) -> Plan[list[Started | FencepostError]]:
        """One batch.

        A refusal of the whole is that of each: what was started before it must not be forgotten.
        """
        request = runs.BatchStartRunsRequest(namespace=self._namespace, runs=requests)
        try:
            response = yield from self._ask("runs", "BatchStartRuns", request)
        except FencepostError as error:
            return [error] * len(requests)
        return [
            _started(result.started) if result.HasField("started") else error_of_item(result.error)
            for result in response.results
        ]

    # Reading runs.

    def get_run(self, run_id: str) -> Plan[Run]:
        """Read a run by its id."""
        request = runs.GetRunRequest(namespace=self._namespace, run_id=run_id)
        response = yield from self._ask("runs", "GetRun", request)
        return run_of(response.run)

    def find_run(self, workflow_id: str, request_key: str, user_id: str) -> Plan[Run]:
        """Read a run by the key that it was started with."""
        key = runs.RequestKey(workflow_id=workflow_id, user_id=user_id, request_key=request_key)
        request = runs.GetRunRequest(namespace=self._namespace, request_key=key)
        response = yield from self._ask("runs", "GetRun", request)
        return run_of(response.run)

    def list_runs(self, workflow_id: str, states: Sequence[RunState | str], size: int, token: str) -> Plan[Page[Run]]:
        """Read one page of runs. Raises ValueError for a state that there is not."""
        request = runs.ListRunsRequest(
            namespace=self._namespace,
            workflow_id=workflow_id,
            states=[RUN_STATE_NUMBERS[RunState(state)] for state in states],
            page_size=size,
            page_token=token,
        )
        response = yield from self._ask("runs", "ListRuns", request)
        return [run_of(run) for run in response.runs], response.next_page_token

    def history(self, run_id: str, size: int, token: str) -> Plan[Page[Event]]:
        """Read one page of a run's events."""
        request = runs.GetHistoryRequest(namespace=self._namespace, run_id=run_id, page_size=size, page_token=token)
        response = yield from self._ask("runs", "GetHistory", request)
        return [event_of(event) for event in response.events], response.next_page_token

    def wait_run(self, run_id: str, timeout: float | None) -> Plan[Run]:
        """Wait until a run has ended. Raises TimeoutError."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LONGEST_WAIT if end is None else max(0.001, end - time.monotonic())
            wait = min(LONGEST_WAIT, left)
            request = runs.WaitRunRequest(namespace=self._namespace, run_id=run_id, timeout=_duration(wait))
            # Each wait is an answer; so without a time limit it is an outage that patience ends, not a long
            # run.
            patience = self._patience + wait if end is None else left
            try:
                response = yield from self._ask(
                    "runs", "WaitRun", request, attempt=wait + ATTEMPT_TIMEOUT, patience=patience
                )
            except Unavailable as error:
                if end is None:
                    raise
                raise TimeoutError(f"run {run_id} was not seen to end within {timeout} s: {error}") from error
            if response.ended:
                return run_of(response.run)
            if end is not None and time.monotonic() >= end:
                state = run_of(response.run).state
                raise TimeoutError(f"run {run_id} has not ended within {timeout} s; it is {state}")

    def result(self, run_id: str, timeout: float | None, result_type: Any) -> Plan[Any]:
        """Wait for a run's output. Raises RunFailed, TimeoutError, NotDecodable."""
        run = yield from self.wait_run(run_id, timeout)
        if run.state is not RunState.COMPLETED:
            # An end that this SDK does not know is no success either.
            raise RunFailed(run, run.failure or Failure(FailureKind.UNSPECIFIED, run.state, "the run has ended"))
        return codec_for(result_type).decode(run.output or NULL)

    def watch(self, run_id: str, after_seq: int) -> Watch:
        """Follow a run's events."""
        return Watch(self._namespace, run_id, after_seq, self._patience)


class Watch:
    """Follows one run's events over any number of streams: each event once, in order, until the last one."""

    def __init__(self, namespace: str, run_id: str, after_seq: int, patience: float) -> None:
        self._namespace = namespace
        self._run_id = run_id
        self._seq = after_seq
        self._patience = patience
        self._backoff = Backoff()
        self._failing_since: float | None = None
        self.finished = False

    def request(self) -> runs.WatchRunRequest:
        """Ask for what has not been seen."""
        return runs.WatchRunRequest(namespace=self._namespace, run_id=self._run_id, after_seq=self._seq)

    def accept(self, response: runs.WatchRunResponse) -> Event | None:
        """Take a response; None for an event that was seen before."""
        event = event_of(response.event)
        if event.seq <= self._seq:
            return None
        self._seq = event.seq
        self._failing_since = None
        self._backoff.reset()
        self.finished = event.kind.is_final
        return event

    def ended(self) -> None:
        """The stream ended well: nothing follows what was seen."""
        self.finished = True

    def broke(self, error: FencepostError) -> float:
        """The stream broke; returns how many seconds to wait before the next one.

        Raises the error if it can't pass by itself, or has lasted too long.
        """
        if not isinstance(error, Unavailable):
            raise error
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        delay = self._backoff.next(error.retry_after)
        if now + delay - self._failing_since >= self._patience:
            raise error
        return delay


def _new_id() -> str:
    return str(uuid.uuid4())


def _duration(seconds: float) -> Duration:
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def _manifest(manifest: Manifest) -> dict[str, str]:
    """The field of a manifest's request.

    Raises OSError or UnicodeDecodeError for a file that can't be read.
    """
    if isinstance(manifest, dict):
        return {"json": encode(manifest).json or "null"}
    if isinstance(manifest, Path) or ("\n" not in manifest and manifest.endswith(_SUFFIXES)):
        path = Path(manifest)
        return {"json" if path.suffix == ".json" else "yaml": path.read_text("utf-8")}
    try:
        json.loads(manifest)
    except ValueError:
        return {"yaml": manifest}
    return {"json": manifest}


def _start_request(start: StartRun) -> runs.StartRunRequest:
    """A request without its namespace. Raises NotEncodable, or ValueError for a policy that there is not."""
    if start.on_active_duplicate not in _POLICIES:
        raise ValueError(f"on_active_duplicate is {start.on_active_duplicate!r}, neither 'conflict' nor 'bind'")
    request = runs.StartRunRequest(
        workflow_id=start.workflow_id,
        definition_hash=start.definition_hash,
        user_id=start.user_id,
        request_key=start.request_key,
        request_id=_new_id(),
        priority=start.priority,
        dedupe_key=start.dedupe_key,
        on_active_duplicate=_POLICIES[start.on_active_duplicate],
    )
    fill_payload(request.input, encode(start.input))
    return request


def _started(response: runs.StartRunResponse) -> Started:
    return Started(response.run_id, response.created, response.definition_hash, response.input_differs)


def _batches(
    requests: list[tuple[int, runs.StartRunRequest]],
) -> Iterable[list[tuple[int, runs.StartRunRequest]]]:
    """Cut into what one call may carry."""
    batch: list[tuple[int, runs.StartRunRequest]] = []
    room = MAX_BATCH_BYTES
    for item in requests:
        size = item[1].ByteSize()
        if batch and (len(batch) == MAX_BATCH_ITEMS or size > room):
            yield batch
            batch, room = [], MAX_BATCH_BYTES
        batch.append(item)
        room -= size
    if batch:
        yield batch
