"""The other end of a client's channel, answered by the test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import grpc_testing
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from fencepost.v1 import definition_service_pb2 as definitions
from fencepost.v1 import run_pb2
from fencepost.v1 import run_service_pb2 as runs
from fencepost.v1 import schedule_service_pb2 as schedules

T = TypeVar("T")

RUNS = runs.DESCRIPTOR.services_by_name["RunService"]
DEFINITIONS = definitions.DESCRIPTOR.services_by_name["DefinitionService"]
SCHEDULES = schedules.DESCRIPTOR.services_by_name["ScheduleService"]
OK = grpc.StatusCode.OK


class Server:
    """The other end of the channel: the test takes each call and answers it."""

    def __init__(self) -> None:
        self.channel = grpc_testing.channel([RUNS, DEFINITIONS, SCHEDULES], grpc_testing.strict_real_time())
        self._pool = ThreadPoolExecutor(2)

    def ask(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> Future[T]:
        """Call the client in a thread."""
        return self._pool.submit(function, *arguments, **keywords)

    def answer(self, method: MethodDescriptor, response: Message) -> Any:
        """Answer the next call of ``method``; returns its request."""
        _, request, call = self.channel.take_unary_unary(method)
        call.send_initial_metadata(())
        call.terminate(response, (), OK, "")
        return request

    def refuse(
        self, method: MethodDescriptor, code: grpc.StatusCode, reason: str = "", retry: float | None = None
    ) -> Any:
        _, request, call = self.channel.take_unary_unary(method)
        call.send_initial_metadata(())
        call.terminate(None, trailing(reason, retry), code, "no")
        return request

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def trailing(reason: str = "", retry: float | None = None) -> tuple[tuple[str, bytes], ...]:
    status = status_pb2.Status()
    details: list[Message] = []
    if reason:
        details.append(error_details_pb2.ErrorInfo(reason=reason, domain="fencepost"))
    if retry is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return (("grpc-status-details-bin", status.SerializeToString()),)


def method(name: str) -> MethodDescriptor:
    services = (service for service in (RUNS, DEFINITIONS, SCHEDULES) if name in service.methods_by_name)
    return next(services).methods_by_name[name]


START, BATCH, GET, LIST = method("StartRun"), method("BatchStartRuns"), method("GetRun"), method("ListRuns")
WAIT, WATCH, HISTORY = method("WaitRun"), method("WatchRun"), method("GetHistory")


def run_of(state: str = "COMPLETED", run_id: str = "r1", **fields: Any) -> run_pb2.Run:
    run = run_pb2.Run(run_id=run_id, state=run_pb2.RunState.Value(f"RUN_STATE_{state}"), **fields)
    run.create_time.GetCurrentTime()
    return run


def event_of(seq: int, kind: str = "step_scheduled") -> run_pb2.Event:
    event = run_pb2.Event(seq=seq)
    event.event_time.GetCurrentTime()
    getattr(event, kind).SetInParent()
    return event
