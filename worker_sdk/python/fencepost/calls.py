"""What the clients ask of runs, but for control; `plans` says how. `Requests` has all that a client can ask but
schedules.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fencepost.channel import Backoff
from fencepost.client_arguments import check_start, label_faults, state_faults, states_in, text_faults
from fencepost.codec import NULL, codec_for, encode
from fencepost.control_calls import ControlRequests
from fencepost.definition_calls import DefinitionRequests
from fencepost.errors import (
    FencepostError,
    RunCancelled,
    RunFailed,
    RunNotCompleted,
    RunTerminated,
    Unavailable,
)
from fencepost.events import Event, EventKind, event_of
from fencepost.models import (
    RUN_STATE_NUMBERS,
    Failure,
    FailureKind,
    Run,
    RunState,
    StartRun,
    duration_of,
    fill_payload,
    run_of,
    stamp_of,
)
from fencepost.plans import ATTEMPT_TIMEOUT, Asker, Page, Pause, Plan, new_id
from fencepost.policies import Fault, limit_in, raise_all, seconds_in
from fencepost.status import error_of_item
from fencepost.v1 import run_service_pb2 as runs

LONGEST_WAIT = 30.0
MAX_BATCH_ITEMS = 1_000
MAX_BATCH_BYTES = 2 << 20
# Refusing is the server's default, and a policy without a dedupe key is a fault: so only what was asked for is sent.
_POLICIES: dict[str, runs.DuplicatePolicy.ValueType] = {
    "conflict": runs.DUPLICATE_POLICY_UNSPECIFIED,
    "bind": runs.DUPLICATE_POLICY_BIND,
}


_ENDS = {
    RunState.FAILED: RunFailed,
    RunState.CANCELLED: RunCancelled,
    RunState.TERMINATED: RunTerminated,
}


@dataclass(frozen=True, slots=True)
class Started:
    """A run that was started, or found by its request key or dedupe key (``created`` is False)."""

    run_id: str
    created: bool
    definition_hash: str
    input_differs: bool


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs to list: those for which all that is given holds. `Client.list_runs` says what the fields mean.

    Raises TypeError for what is none of a field's type.
    """

    workflow_id: str = ""
    states: Iterable[RunState | str] | RunState | str = ()
    user_id: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    created_after: dt.datetime | None = None
    created_before: dt.datetime | None = None
    failure_code: str = ""
    parent_run_id: str = ""

    def __post_init__(self) -> None:
        several = states_in(self.states)
        object.__setattr__(self, "states", several)
        faults: list[Fault] = [
            *text_faults(
                workflow_id=self.workflow_id,
                user_id=self.user_id,
                failure_code=self.failure_code,
                parent_run_id=self.parent_run_id,
            ),
            *state_faults(several),
            *label_faults(self.attributes),
        ]
        raise_all("list of runs", faults)


class RunRequests(Asker):
    """Plans of starting, reading and following runs."""

    # Starting runs.

    def start_run(self, start: StartRun) -> Plan[Started]:
        """Start one run. Raises TypeError and ValueError for arguments that can't be right."""
        request = _start_request(start)
        request.namespace = self._namespace
        response = yield from self._ask("runs", "StartRun", request)
        return _started(response)

    def start_runs(self, starts: Iterable[StartRun]) -> Plan[list[Started | FencepostError]]:
        """Start many runs; each is started or has its error, in order.

        Raises TypeError and ValueError, before anything is sent, for arguments that can't be right.
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

    def list_runs(self, chosen: RunFilter, size: int, token: str) -> Plan[Page[Run]]:
        """Read one page of runs. Raises ValueError for a state that there is not, or a time without a zone."""
        request = runs.ListRunsRequest(
            namespace=self._namespace,
            workflow_id=chosen.workflow_id,
            states=[RUN_STATE_NUMBERS[RunState(state)] for state in chosen.states],
            page_size=size,
            page_token=token,
            user_id=chosen.user_id,
            attributes=chosen.attributes,
            failure_code=chosen.failure_code,
            parent_run_id=chosen.parent_run_id,
        )
        if chosen.created_after is not None:
            request.created_after.CopyFrom(stamp_of(chosen.created_after))
        if chosen.created_before is not None:
            request.created_before.CopyFrom(stamp_of(chosen.created_before))
        response = yield from self._ask("runs", "ListRuns", request)
        return [run_of(run) for run in response.runs], response.next_page_token

    def history(self, run_id: str, size: int, token: str) -> Plan[Page[Event]]:
        """Read one page of a run's events."""
        request = runs.GetHistoryRequest(namespace=self._namespace, run_id=run_id, page_size=size, page_token=token)
        response = yield from self._ask("runs", "GetHistory", request)
        return [event_of(event) for event in response.events], response.next_page_token

    def wait_run(self, run_id: str, timeout: float | None) -> Plan[Run]:
        """Wait until a run has ended. Raises TimeoutError; ValueError and TypeError for a timeout that is none."""
        end = None if timeout is None else time.monotonic() + limit_in(timeout, "timeout")
        while True:
            left = LONGEST_WAIT if end is None else max(0.001, end - time.monotonic())
            wait = min(LONGEST_WAIT, left)
            request = runs.WaitRunRequest(namespace=self._namespace, run_id=run_id, timeout=duration_of(wait))
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
                raise TimeoutError(f"run {run_id} was not seen to end within {timeout:g} s: {error}") from error
            if response.ended:
                return run_of(response.run)
            if end is not None and time.monotonic() >= end:
                state = run_of(response.run).state
                raise TimeoutError(f"run {run_id} has not ended within {timeout:g} s; it is {state}")

    def result(self, run_id: str, timeout: float | None, result_type: Any) -> Plan[Any]:
        """Wait for a run's output. Raises RunNotCompleted, TimeoutError, NotDecodable."""
        run = yield from self.wait_run(run_id, timeout)
        if run.state is not RunState.COMPLETED:
            # An end that this SDK does not know is no success either.
            kind = _ENDS.get(run.state, RunNotCompleted)
            raise kind(run, run.failure or Failure(FailureKind.UNSPECIFIED, run.state, "the run has ended"))
        return codec_for(result_type).decode(run.output or NULL)

    def watch(self, run_id: str, after_seq: int) -> Watch:
        """Follow a run's events."""
        return Watch(self._namespace, run_id, after_seq, self._patience)


class Requests(RunRequests, ControlRequests, DefinitionRequests):
    """Plans of everything that a client can ask in one namespace, but for schedules."""


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
        # A run that has failed may have been retried since: only the server knows what follows.
        self.finished = event.kind.is_final and event.kind is not EventKind.RUN_FAILED
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


def _start_request(start: StartRun) -> runs.StartRunRequest:
    """A request without its namespace. Raises NotEncodable, TypeError, ValueError."""
    check_start(start)
    workflow = start.workflow_id
    request = runs.StartRunRequest(
        workflow_id=workflow if isinstance(workflow, str) else workflow.workflow_id,
        definition_hash=start.definition_hash,
        user_id=start.user_id,
        request_key=start.request_key,
        request_id=new_id(),
        priority=start.priority,
        dedupe_key=start.dedupe_key,
        on_active_duplicate=_POLICIES[start.on_active_duplicate],
        attributes=start.attributes,
    )
    if start.start_delay:
        request.start_delay.CopyFrom(duration_of(seconds_in(start.start_delay)))
    if start.run_timeout is not None:
        request.run_timeout.CopyFrom(duration_of(seconds_in(start.run_timeout)))
    value = encode(start.input) if isinstance(workflow, str) else workflow.encode_input(start.input)
    fill_payload(request.input, value)
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
