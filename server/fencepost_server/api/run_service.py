"""RunService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from uuid import UUID

from fencepost.v1 import run_pb2, run_service_pb2_grpc
from fencepost.v1 import run_service_pb2 as pb
from fencepost_server.api import views
from fencepost_server.api.calls import call, stream
from fencepost_server.api.checks import Checks, page_token, read_page_token
from fencepost_server.api.queries import RunQueries
from fencepost_server.config import Config
from fencepost_server.domain.durations import MAX_MILLISECONDS
from fencepost_server.domain.errors import FencepostError, InvalidPageToken, NoWorker
from fencepost_server.engine import control, reading
from fencepost_server.engine.engine import Engine
from fencepost_server.engine.operations import Commanded, Started
from fencepost_server.engine.reading import RunView
from fencepost_server.engine.starting import StartRequest
from fencepost_server.store import cluster, runs
from fencepost_server.store.runs import RunFilter
from fencepost_server.wire.events import event
from fencepost_server.wire.payloads import payload_in, payload_out
from fencepost_server.wire.status import item_error

_DEFAULT_PAGE, _DEFAULT_WAIT, _PAGE_BYTES = 100, 30.0, 2 << 20
_LONGEST_TIME, _SHORTEST_TIMEOUT = MAX_MILLISECONDS / 1000, 0.001
_LONGEST_REASON, _LONGEST_GRACE = 1000, 86_400.0
_MOST_SOUGHT = 8
_DEFAULT_QUERY, _LONGEST_QUERY = 10.0, 60.0
_UNTAKEN = (run_pb2.STEP_STATE_READY, run_pb2.STEP_STATE_RETRYING)
_MOST_PLACES = 50
"""Of so many queues and handlers of a run's steps it is told whether anybody takes them."""
_RUNS, _HISTORY = "runs", "history"


class RunService(run_service_pb2_grpc.RunServiceServicer):
    """See proto/fencepost/v1/run_service.proto."""

    def __init__(self, config: Config, engine: Engine, queries: RunQueries) -> None:
        self._config = config
        self._engine = engine
        self._queries = queries

    @call
    async def StartRun(self, request: pb.StartRunRequest) -> pb.StartRunResponse:
        """Start one run."""
        return _started(await self._engine.start_run(self._start_request(request, None)))

    @call
    async def BatchStartRuns(self, request: pb.BatchStartRunsRequest) -> pb.BatchStartRunsResponse:
        """Start many; each is answered by itself."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        if not 1 <= len(request.runs) <= self._config.max_batch_starts:
            checks.note("runs", f"must have 1 to {self._config.max_batch_starts} items")
        checks.done()
        outcomes: list[FencepostError | asyncio.Future[Started | FencepostError]] = []
        for item in request.runs:
            try:
                outcomes.append(self._engine.submit_start(self._start_request(item, namespace)))
            except FencepostError as error:
                outcomes.append(error)
        results = []
        for outcome in outcomes:
            settled = outcome if isinstance(outcome, FencepostError) else await outcome
            if isinstance(settled, FencepostError):
                results.append(pb.BatchStartRunsResult(error=item_error(settled)))
            else:
                results.append(pb.BatchStartRunsResult(started=_started(settled)))
        return pb.BatchStartRunsResponse(results=results)

    def _start_request(self, request: pb.StartRunRequest, batch_namespace: str | None) -> StartRequest:
        checks = Checks()
        namespace = checks.namespace(request.namespace or batch_namespace or "")
        if batch_namespace is not None and namespace != batch_namespace:
            checks.note("namespace", "must be that of the batch")
        workflow_id = checks.name(request.workflow_id, "workflow_id")
        definition_hash = checks.hash(request.definition_hash)
        user_id = checks.text(request.user_id, "user_id")
        request_key = checks.text(request.request_key, "request_key")
        request_id = checks.text(request.request_id, "request_id")
        priority = checks.number(request.priority, "priority", 1, 5, 3)
        dedupe_key = checks.text(request.dedupe_key, "dedupe_key")
        if request.on_active_duplicate not in pb.DuplicatePolicy.values():
            checks.note("on_active_duplicate", "is not a policy")
        elif request.on_active_duplicate and not dedupe_key:
            checks.note("on_active_duplicate", "needs a dedupe_key")
        bind_duplicate = request.on_active_duplicate == pb.DUPLICATE_POLICY_BIND
        attributes = checks.attributes(request.attributes, "attributes")
        start_delay = checks.seconds(request.start_delay, "start_delay", _LONGEST_TIME)
        run_timeout = None
        if request.HasField("run_timeout"):
            run_timeout = checks.seconds(request.run_timeout, "run_timeout", _LONGEST_TIME, _SHORTEST_TIMEOUT)
        checks.done()
        payload, value = payload_in(request.input, self._config.max_payload_bytes, "input")
        return StartRequest(
            namespace,
            workflow_id,
            definition_hash,
            payload,
            value,
            user_id,
            request_key,
            request_id,
            priority,
            dedupe_key,
            bind_duplicate,
            attributes,
            start_delay,
            run_timeout,
        )

    @call
    async def GetRun(self, request: pb.GetRunRequest) -> pb.GetRunResponse:
        """Read one run."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        key = request.request_key
        if request.WhichOneof("run") == "request_key":
            checks.name(key.workflow_id, "request_key.workflow_id")
            checks.text(key.user_id, "request_key.user_id")
            checks.text(key.request_key, "request_key.request_key", required=True)
            checks.done()
            view = await reading.find(self._engine, namespace, key.workflow_id, key.user_id, key.request_key)
        else:
            run_id = checks.run_id(request.run_id)
            checks.done()
            view = await reading.get(self._engine, namespace, run_id)
        return pb.GetRunResponse(run=await self._told(view))

    async def _told(self, view: RunView) -> run_pb2.Run:
        """A run with all that is known of it."""
        message, code = views.run_detail(view.run, view.graph), view.graph.code
        waits = any(step.decide and step.state in _UNTAKEN for step in message.open_steps)
        if waits and code is not None and await self._queries.no_worker(view.run.summary.namespace, code):
            message.waiting_reason = NoWorker.reason
        ready = [step for step in message.open_steps if step.state == run_pb2.STEP_STATE_READY and not step.decide]
        places = list({(step.queue, step.handler): None for step in ready})[:_MOST_PLACES]
        if places:
            timeout = self._config.server_timeout
            unserved = await cluster.unserved(self._engine.reads, view.run.summary.namespace, places, timeout)
            for step in ready:
                if (step.queue, step.handler) in unserved:
                    step.waiting_reason = NoWorker.reason
        return message

    @call
    async def ListRuns(self, request: pb.ListRunsRequest) -> pb.ListRunsResponse:
        """List runs, newest first."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        wanted = _filter(checks, namespace, request)
        limit = checks.number(request.page_size, "page_size", 1, self._config.max_page_size, _DEFAULT_PAGE)
        checks.done()
        before = None
        if request.page_token:
            at, run_id = read_page_token(_RUNS, request.page_token, (datetime, UUID))
            before = (at, run_id)
        page = await runs.list_runs(self._engine.reads, wanted, before, limit)
        listed, next_before, size = [], page.next_before, 0
        for index, run in enumerate(page.runs):
            listed.append(views.run_summary(run))
            size += listed[-1].ByteSize()
            if size > _PAGE_BYTES and index + 1 < len(page.runs):
                next_before = (run.created_at, run.run_id)
                break
        token = "" if next_before is None else page_token(_RUNS, list(next_before))
        return pb.ListRunsResponse(runs=listed, next_page_token=token)

    @call
    async def WaitRun(self, request: pb.WaitRunRequest) -> pb.WaitRunResponse:
        """Wait for the end of a run."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        run_id = checks.run_id(request.run_id)
        timeout = _DEFAULT_WAIT
        if request.HasField("timeout"):
            timeout = checks.seconds(request.timeout, "timeout", self._config.max_wait)
        checks.done()
        view, ended = await reading.wait(self._engine, namespace, run_id, timeout)
        return pb.WaitRunResponse(run=await self._told(view), ended=ended)

    @call
    async def SignalRun(self, request: pb.SignalRunRequest) -> pb.SignalRunResponse:
        """Give a run a signal."""
        checks = Checks()
        namespace, run_id, request_id = _target(checks, request)
        name = checks.name(request.signal_name, "signal_name")
        checks.done()
        payload, _ = payload_in(request.payload, self._config.max_payload_bytes, "payload")
        answer = await control.signal(self._engine, namespace, run_id, name, payload, request_id)
        return pb.SignalRunResponse(state=_state(answer), seq=answer.seq)

    @call
    async def CancelRun(self, request: pb.CancelRunRequest) -> pb.CancelRunResponse:
        """Ask a run to end."""
        checks = Checks()
        namespace, run_id, request_id = _target(checks, request)
        reason = checks.text(request.reason, "reason", most=_LONGEST_REASON)
        grace = checks.seconds(request.grace, "grace", _LONGEST_GRACE) if request.HasField("grace") else None
        checks.done()
        answer = await control.cancel(self._engine, namespace, run_id, reason, grace, request_id)
        return pb.CancelRunResponse(state=_state(answer))

    @call
    async def TerminateRun(self, request: pb.TerminateRunRequest) -> pb.TerminateRunResponse:
        """End a run at once."""
        answer = await control.terminate(self._engine, *_plain(request))
        return pb.TerminateRunResponse(state=_state(answer))

    @call
    async def PauseRun(self, request: pb.PauseRunRequest) -> pb.PauseRunResponse:
        """Stop leasing steps of a run."""
        answer = await control.pause(self._engine, *_plain(request))
        return pb.PauseRunResponse(state=_state(answer))

    @call
    async def ResumeRun(self, request: pb.ResumeRunRequest) -> pb.ResumeRunResponse:
        """Let a paused run go on."""
        answer = await control.resume(self._engine, *_plain(request))
        return pb.ResumeRunResponse(state=_state(answer))

    @call
    async def RetryRun(self, request: pb.RetryRunRequest) -> pb.RetryRunResponse:
        """Let a failed or blocked run go on."""
        checks = Checks()
        namespace, run_id, request_id = _target(checks, request)
        reason = checks.text(request.reason, "reason", most=_LONGEST_REASON, required=request.skip_undo)
        checks.done()
        answer = await control.retry(self._engine, namespace, run_id, reason, request_id, skip_undo=request.skip_undo)
        return pb.RetryRunResponse(state=_state(answer))

    @call
    async def QueryRun(self, request: pb.QueryRunRequest) -> pb.QueryRunResponse:
        """Ask a code run something."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        run_id = checks.run_id(request.run_id)
        name = checks.text(request.name, "name", required=True)
        timeout = _DEFAULT_QUERY
        if request.HasField("timeout"):
            timeout = checks.seconds(request.timeout, "timeout", _LONGEST_QUERY)
        checks.done()
        payload, _ = payload_in(request.input, self._config.max_payload_bytes, "input")
        return pb.QueryRunResponse(
            output=payload_out(await self._queries.ask(namespace, run_id, name, payload, timeout))
        )

    @stream
    async def WatchRun(self, request: pb.WatchRunRequest) -> AsyncIterator[pb.WatchRunResponse]:
        """Stream the events of a run."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        run_id = checks.run_id(request.run_id)
        if not 0 <= request.after_seq < 1 << 62:
            checks.note("after_seq", "must be between 0 and 2^62")
        checks.done()
        async for page, record in reading.watch(self._engine, namespace, run_id, request.after_seq, _PAGE_BYTES):
            yield pb.WatchRunResponse(event=event(record, page.graph, page.run))

    @call
    async def GetHistory(self, request: pb.GetHistoryRequest) -> pb.GetHistoryResponse:
        """Read a page of a history."""
        checks = Checks()
        namespace = checks.namespace(request.namespace)
        run_id = checks.run_id(request.run_id)
        limit = checks.number(request.page_size, "page_size", 1, self._config.max_page_size, _DEFAULT_PAGE)
        after = request.after_seq
        if not 0 <= after < 1 << 62:
            checks.note("after_seq", "must be between 0 and 2^62")
        checks.done()
        if request.page_token:
            token_run, after = read_page_token(_HISTORY, request.page_token, (UUID, int))
            if token_run != run_id:
                raise InvalidPageToken("page_token is not one of this history")
        page = await reading.history(self._engine, namespace, run_id, after, limit, _PAGE_BYTES)
        events = [event(record, page.graph, page.run) for record in page.events]
        token = page_token(_HISTORY, [run_id, page.events[-1].seq]) if page.more else ""
        return pb.GetHistoryResponse(events=events, next_page_token=token)


def _filter(checks: Checks, namespace: str, request: pb.ListRunsRequest) -> RunFilter:
    """Which runs are to be listed."""
    known = {state for state in run_pb2.RunState.values() if state}
    for index, state in enumerate(request.states):
        if state not in known:
            checks.note(f"states[{index}]", "is not a state of a run")
    return RunFilter(
        namespace,
        checks.name(request.workflow_id, "workflow_id", required=False),
        frozenset(request.states),
        checks.text(request.user_id, "user_id"),
        checks.attributes(request.attributes, "attributes", _MOST_SOUGHT),
        checks.time(request.created_after, "created_after") if request.HasField("created_after") else None,
        checks.time(request.created_before, "created_before") if request.HasField("created_before") else None,
        checks.text(request.failure_code, "failure_code"),
        checks.run_id(request.parent_run_id, "parent_run_id") if request.parent_run_id else None,
    )


_Control = (
    pb.SignalRunRequest
    | pb.CancelRunRequest
    | pb.TerminateRunRequest
    | pb.PauseRunRequest
    | pb.ResumeRunRequest
    | pb.RetryRunRequest
)


def _target(checks: Checks, request: _Control) -> tuple[str, str, str]:
    """Namespace, run id and request id of a request that asks something of a run."""
    return (
        checks.namespace(request.namespace),
        checks.run_id(request.run_id),
        checks.text(request.request_id, "request_id"),
    )


def _plain(request: pb.TerminateRunRequest | pb.PauseRunRequest | pb.ResumeRunRequest) -> tuple[str, str, str, str]:
    """Namespace, run id, reason and request id of a request that has no more. Raises InvalidRequest."""
    checks = Checks()
    namespace, run_id, request_id = _target(checks, request)
    reason = checks.text(request.reason, "reason", most=_LONGEST_REASON)
    checks.done()
    return namespace, run_id, reason, request_id


def _state(answer: Commanded) -> run_pb2.RunState.ValueType:
    return run_pb2.RunState.ValueType(answer.state)


def _started(started: Started) -> pb.StartRunResponse:
    return pb.StartRunResponse(
        run_id=started.run_id,
        created=started.created,
        definition_hash=started.definition_hash.hex(),
        input_differs=started.input_differs,
    )
