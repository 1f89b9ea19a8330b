"""What the clients ask of runs under way: to take a signal, to end, to pause, to go on, to tell; `plans` says how.

What changes something carries a request id, a random one unless the caller brings its own, so that a repeat gets the
first answer.
"""

from __future__ import annotations

import time
from typing import Any, TypeAlias

from fencepost.channel import Backoff
from fencepost.codec import codec_for, encode
from fencepost.errors import NoWorker
from fencepost.models import RUN_STATES, RunState, Signalled, duration_of, fill_payload, value_of
from fencepost.plans import Asker, Pause, Plan, new_id
from fencepost.policies import limit_in
from fencepost.v1 import run_pb2
from fencepost.v1 import run_service_pb2 as runs

_Control: TypeAlias = (
    runs.CancelRunRequest
    | runs.TerminateRunRequest
    | runs.PauseRunRequest
    | runs.ResumeRunRequest
    | runs.RetryRunRequest
)
_MARGIN = 5.0
"""Seconds beyond a server's own limit until a call counts as lost."""


class ControlRequests(Asker):
    """Plans of everything that is done to runs."""

    def signal_run(self, run_id: str, signal_name: str, payload: object, request_id: str) -> Plan[Signalled]:
        """Give a run a signal. Raises NotEncodable."""
        request = runs.SignalRunRequest(
            namespace=self._namespace, run_id=run_id, signal_name=signal_name, request_id=request_id or new_id()
        )
        fill_payload(request.payload, encode(payload))
        response = yield from self._ask("runs", "SignalRun", request)
        return Signalled(_state_of(response.state), response.seq)

    def cancel_run(self, run_id: str, reason: str, grace: float | None, request_id: str) -> Plan[RunState]:
        """Ask a run to end."""
        request = runs.CancelRunRequest(run_id=run_id, reason=reason, request_id=request_id)
        if grace is not None:
            request.grace.CopyFrom(duration_of(limit_in(grace, "grace")))
        return self._control("CancelRun", request)

    def terminate_run(self, run_id: str, reason: str, request_id: str) -> Plan[RunState]:
        """End a run at once."""
        request = runs.TerminateRunRequest(run_id=run_id, reason=reason, request_id=request_id)
        return self._control("TerminateRun", request)

    def pause_run(self, run_id: str, reason: str, request_id: str) -> Plan[RunState]:
        """Stop leasing steps of a run."""
        return self._control("PauseRun", runs.PauseRunRequest(run_id=run_id, reason=reason, request_id=request_id))

    def resume_run(self, run_id: str, reason: str, request_id: str) -> Plan[RunState]:
        """Let a paused run go on."""
        return self._control("ResumeRun", runs.ResumeRunRequest(run_id=run_id, reason=reason, request_id=request_id))

    def retry_run(self, run_id: str, reason: str, skip_undo: bool, request_id: str) -> Plan[RunState]:
        """Let a failed or blocked run go on."""
        request = runs.RetryRunRequest(run_id=run_id, reason=reason, skip_undo=skip_undo, request_id=request_id)
        return self._control("RetryRun", request)

    def query_run(self, run_id: str, name: str, arguments: object, timeout: float, result_type: Any) -> Plan[Any]:
        """Ask the function of a code run. Raises NotEncodable, NotDecodable.

        While no worker has the code it is asked again, for one may just be coming back; but no longer than ``timeout``,
        and not for as long as a server that does not answer.
        """
        timeout = limit_in(timeout, "timeout")
        request = runs.QueryRunRequest(namespace=self._namespace, run_id=run_id, name=name)
        fill_payload(request.input, encode(arguments))
        end, left, backoff = time.monotonic() + timeout, timeout, Backoff()
        while True:
            request.timeout.CopyFrom(duration_of(left))
            try:
                response = yield from self._ask("runs", "QueryRun", request, attempt=left + _MARGIN, final=NoWorker)
                return codec_for(result_type).decode(value_of(response.output))
            except NoWorker:
                delay = backoff.next()
                left = end - time.monotonic() - delay
                if left <= 0:
                    raise
            yield Pause(delay)

    def _control(self, method: str, request: _Control) -> Plan[RunState]:
        request.namespace = self._namespace
        request.request_id = request.request_id or new_id()
        response = yield from self._ask("runs", method, request)
        return _state_of(response.state)


def _state_of(state: run_pb2.RunState.ValueType) -> RunState:
    return RUN_STATES.get(state, RunState.UNSPECIFIED)
