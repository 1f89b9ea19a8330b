"""The gRPC server of a process: services, health, reflection, limits."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fencepost.v1 import definition_service_pb2, run_service_pb2, schedule_service_pb2, worker_service_pb2
from fencepost_server.api.calls import CallLimit, handlers
from fencepost_server.api.definition_service import DefinitionService
from fencepost_server.api.queries import RunQueries
from fencepost_server.api.run_service import RunService
from fencepost_server.api.schedule_service import ScheduleService
from fencepost_server.config import Config, address_of
from fencepost_server.engine.engine import Engine
from fencepost_server.session.stream import WorkerStreams

_RUNS = run_service_pb2.DESCRIPTOR.services_by_name["RunService"]
_DEFINITIONS = definition_service_pb2.DESCRIPTOR.services_by_name["DefinitionService"]
_SCHEDULES = schedule_service_pb2.DESCRIPTOR.services_by_name["ScheduleService"]
_WORKERS = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"]
SERVICES = (_RUNS.full_name, _DEFINITIONS.full_name, _SCHEDULES.full_name, _WORKERS.full_name)


class PortInUse(OSError):
    """The gRPC port is taken."""


_MESSAGES: Any = health_pb2
"""With those that its type stubs lack."""


class _Health(health.aio.HealthServicer):
    """The health service with the call that its library lacks, and would answer with a traceback in the log."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str, int] = {}

    async def set(self, service: str, status: int) -> None:
        """Tell a service's status from now on."""
        self._told[service] = status
        await super().set(service, status)

    async def List(self, request: Any, context: Any) -> Any:
        """Called by gRPC: what Check tells, of all services."""
        return _MESSAGES.HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=status) for name, status in self._told.items()}
        )


class GrpcServer:
    """Serves an engine on a port. ``shared_port``: other processes of the same command listen on it as well."""

    def __init__(self, config: Config, engine: Engine, *, shared_port: bool = False) -> None:
        self._config = config
        self.streams = WorkerStreams(config, engine)
        self._queries = RunQueries(config, engine, self.streams)
        self._health = _Health()
        self._server = grpc.aio.server(
            interceptors=[CallLimit(config.max_concurrent_calls)], options=_options(config, shared_port=shared_port)
        )
        self._server.add_generic_rpc_handlers(
            (
                handlers(_RUNS, RunService(config, engine, self._queries)),
                handlers(_DEFINITIONS, DefinitionService(config, engine)),
                handlers(_SCHEDULES, ScheduleService(config, engine)),
                self.streams.handler(),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self.port = 0
        self._serving: bool | None = None

    async def start(self) -> None:
        """Bind and serve. Raises PortInUse."""
        address = address_of(self._config.grpc_host, self._config.grpc_port)
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise PortInUse(f"can't listen on {address}: is the port in use?") from error
        await self.set_serving(serving=False)
        await self._server.start()
        self._queries.loop.start()

    async def set_serving(self, *, serving: bool) -> None:
        """Tell load balancers whether to send work here."""
        if serving == self._serving:
            return
        self._serving = serving
        state = health_pb2.HealthCheckResponse
        status = state.SERVING if serving else state.NOT_SERVING
        for name in ("", *SERVICES):
            await self._health.set(name, status)

    async def stop(self) -> None:
        """End all calls that are left."""
        await self._queries.stop()
        await self._server.stop(0)


def _options(config: Config, *, shared_port: bool) -> list[tuple[str, int]]:
    """Channel options by their exact names: an unknown one is ignored without a word."""
    return [
        # Else whoever comes second on a port that is taken would share it without a word. See reserved.py.
        ("grpc.so_reuseport", int(shared_port)),
        # Frames over the limit get a typed error of ours up to twice the limit, gRPC's own beyond it.
        ("grpc.max_receive_message_length", 2 * config.max_frame_bytes + 4096),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]
