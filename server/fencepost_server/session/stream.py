"""The I/O around a session: one reader, one writer, one clock, and an end that always comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.config import Config
from fencepost_server.domain.errors import (
    FencepostError,
    FrameTooLarge,
    HelloRequired,
    InvalidHello,
    ServerDraining,
    SessionTimedOut,
    TooManySessions,
)
from fencepost_server.domain.model import DECIDE_TASK
from fencepost_server.engine.engine import Engine
from fencepost_server.engine.leases import Renewal
from fencepost_server.engine.operations import Report, WorkerSession
from fencepost_server.session.hello import Greeting, greet
from fencepost_server.session.session import Session
from fencepost_server.store import runs
from fencepost_server.store.cluster import SessionRow
from fencepost_server.wire.payloads import duration, timestamp
from fencepost_server.wire.status import aborting, sanitised

log = logging.getLogger("fencepost.session")

_ENDING = 1.5

Frame = tuple[int, pb.SessionRequest | None]
"""Size in bytes, and the message, or None if the bytes are none."""
Context = grpc.aio.ServicerContext[Frame, bytes]


def decode(data: bytes) -> Frame:
    """Bytes that are no message are a fault of that frame, not of the stream."""
    try:
        return len(data), pb.SessionRequest.FromString(data)
    except DecodeError:
        return len(data), None


@dataclass(slots=True)
class _EngineDesk:
    engine: Engine

    def report(self, reports: Sequence[Report]) -> None:
        self.engine.report(reports)

    def renew(self, renewal: Renewal) -> None:
        self.engine.renewer.submit(renewal)

    def wake(self) -> None:
        self.engine.dispatcher.wake()


class WorkerStreams:
    """All worker streams of this server."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._streams: dict[str, _Stream] = {}
        self._opening: set[Session] = set()
        self._fewer = asyncio.Event()
        """Set when ``count`` may be less."""
        self._leave_by = 0.0
        """Monotonic time by which the workers have to be gone; 0: this server does not drain."""
        self._cut_off = False
        """Whether that time is over."""
        self.on_decider: Callable[[], None] = lambda: None
        """Called when a worker with code workflows has come."""

    @property
    def count(self) -> int:
        """Streams that are open."""
        return len(self._streams) + len(self._opening)

    def deciders(self, namespace: str, handler: str) -> list[Session]:
        """The sessions of this server whose workers have a code workflow, and stay."""
        sessions = [stream.session for stream in self._streams.values()]
        return [
            s
            for s in sessions
            if s.namespace == namespace and s.stays and s.decider is not None and s.decider.decides(handler)
        ]

    def workflows(self) -> set[tuple[str, str]]:
        """(namespace, handler) of all code workflows that workers of this server have."""
        return {
            (stream.session.namespace, handler)
            for stream in self._streams.values()
            if stream.session.stays and stream.session.decider is not None
            for _, handler in stream.session.decider.handlers
        }

    def handler(self) -> grpc.GenericRpcHandler:
        """WorkerService. Frames are decoded and encoded here, so that their sizes are known and bad ones can be
        answered.
        """
        session = grpc.stream_stream_rpc_method_handler(
            self._serve, request_deserializer=decode, response_serializer=lambda data: data
        )
        return grpc.method_handlers_generic_handler("fencepost.v1.WorkerService", {"Session": session})

    async def drain(self, grace: float) -> None:
        """Ask all workers to go elsewhere, also those that are being welcomed, and wait until their tasks have ended,
        at most ``grace`` seconds. Whoever is still there then is cut off.
        """
        self._leave_by = time.monotonic() + grace
        for stream in list(self._streams.values()):
            _send_away(stream.session, grace)
        await self._gone(grace)
        self._cut_off = True
        for stream in list(self._streams.values()):
            stream.session.end(ServerDraining("the server is shutting down"))
        # What they leave (tasks to give back, leases to cut) is the engine's to write only once they have ended.
        await self._gone(_ENDING)
        for session in [*(stream.session for stream in self._streams.values()), *self._opening]:
            self._engine.close_session(session)

    async def _gone(self, timeout: float) -> None:
        """Wait until nobody is left, at most so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.count:
                    self._fewer.clear()
                    await self._fewer.wait()

    async def _serve(self, _requests: AsyncIterator[Frame], context: Context) -> None:
        try:
            await self._run(context)
        except FencepostError as error:
            await _abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001  # sanitised logs it and tells an incident id
            await _abort(context, sanitised(error))

    async def _run(self, context: Context) -> None:
        greeting = await self._hello(context)
        if self._engine.draining:
            raise ServerDraining("this server is shutting down")
        if self.count >= self._config.max_sessions:
            raise TooManySessions(f"this server holds {self._config.max_sessions} sessions already")
        session = Session(greeting.session_id or str(uuid.uuid4()), greeting, self._config, _EngineDesk(self._engine))
        self._opening.add(session)
        try:
            await self._welcome(session, greeting)
        except InvalidHello:
            raise  # nothing was written, and the id may be that of a session which goes on
        except BaseException:
            # The row of the session or an adopted lease may have been committed: cut them to the grace.
            session.close()
            self._engine.close_session(session)
            raise
        finally:
            self._opening.remove(session)
            self._fewer.set()
        stream = _Stream(session, context, self._config)
        self._streams[session.session_id] = stream
        for side in _sides(session):
            self._engine.dispatcher.add(side)
        if session.decider is not None:
            self.on_decider()
        if self._leave_by:  # since it said Hello
            _send_away(session, max(0.0, self._leave_by - time.monotonic()))
        if self._cut_off:
            session.end(ServerDraining("the server is shutting down"))
        try:
            await stream.run()
        finally:
            session.close()
            del self._streams[session.session_id]
            for side in _sides(session):
                self._engine.dispatcher.remove(side)
            self._engine.close_session(session)
            self._fewer.set()

    async def _hello(self, context: Context) -> Greeting:
        try:
            async with asyncio.timeout(self._config.hello_timeout):
                first: Frame | object = await context.read()
        except TimeoutError:
            raise SessionTimedOut("no Hello came in time") from None
        if not isinstance(first, tuple):
            raise HelloRequired("the stream ended before Hello")
        size, message = first
        if size > self._config.max_frame_bytes:
            raise FrameTooLarge(f"Hello has {size} bytes, more than {self._config.max_frame_bytes}")
        if message is None or message.WhichOneof("frame") != "hello" or message.frame_id != 1:
            raise HelloRequired(f"the first frame must be Hello with frame_id 1, not {_came(message)}")
        return greet(message.hello, self._config)

    async def _welcome(self, session: Session, greeting: Greeting) -> None:
        for previous in greeting.previous:
            former = self._streams.get(previous)
            if former is None or former.session.namespace != greeting.namespace:
                continue
            if former.session.nonce == greeting.nonce:
                former.session.end(SessionTimedOut("the process has a newer session"))
                for side in _sides(former.session):
                    self._engine.dispatcher.remove(side)
        row = SessionRow(
            session.session_id,
            greeting.namespace,
            self._engine.server_id,
            greeting.nonce,
            greeting.worker_name,
            greeting.sdk,
            greeting.deciders,
            tuple(sorted(greeting.handlers)),
        )
        now, adopted = await self._engine.open_session(row, greeting.previous, greeting.held)
        deciding = [ref[0] for ref in adopted.kept if ref[1] == DECIDE_TASK]
        workflows = await runs.workflows(self._engine.reads, deciding) if deciding else {}
        results = []
        for ref in greeting.held:
            lease = adopted.kept.get(ref)
            result = pb.HeldResult(
                task=pb.TaskRef(run_id=ref[0], task_id=ref[1], fencing_token=ref[2]), kept=lease is not None
            )
            if lease is not None:
                session.adopt(ref, workflows.get(ref[0], ""))
                result.lease_duration.CopyFrom(duration(max(0.0, lease.seconds)))
            results.append(result)
        config = self._config
        session.welcome(
            pb.Welcome(
                session_id=session.session_id,
                server_id=self._engine.server_id,
                heartbeat_interval=duration(config.heartbeat_interval),
                ping_interval=duration(config.ping_interval),
                disconnect_grace=duration(config.disconnect_grace),
                max_payload_bytes=config.max_payload_bytes,
                max_frame_bytes=config.max_frame_bytes,
                max_frame_items=config.max_frame_items,
                database_time=timestamp(now),
                held=results,
            )
        )


class _Stream:
    """One open stream: runs until the worker leaves, the session has to end, or the connection breaks."""

    def __init__(self, session: Session, context: Context, config: Config) -> None:
        self.session = session
        self._context = context
        self._config = config
        self._output = asyncio.Event()
        self._eof = False
        session.outbox.on_output = self._output.set

    async def run(self) -> None:
        """Read, write and tick until one of them ends the stream."""
        parts = [
            asyncio.create_task(self._read(), name="session-read"),
            asyncio.create_task(self._write(), name="session-write"),
            asyncio.create_task(self._tick(), name="session-tick"),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        for part in done:
            if not part.cancelled() and (error := part.exception()) is not None:
                raise error

    async def _read(self) -> None:
        while True:
            if self.session.crowded:
                await self.session.thinned.wait()
            frame: Frame | object = await self._context.read()
            if not isinstance(frame, tuple):  # grpc.aio.EOF
                self._eof = True
                self.session.leave()
                self._output.set()
                break
            try:
                self.session.receive(frame[1], frame[0])
            except FencepostError as error:
                self.session.end(error)
                break
        # The writer ends the stream, when what was read has been answered: gRPC takes no status amid a write.
        await asyncio.Event().wait()

    async def _write(self) -> None:
        while True:
            self._output.clear()
            while (data := self.session.take()) is not None:
                try:
                    async with asyncio.timeout(self._config.write_timeout):
                        await self._context.write(data)
                except TimeoutError:
                    raise SessionTimedOut("the worker does not read what it is sent") from None
            if self.session.error is not None:
                raise self.session.error
            if self._eof and self.session.settled:
                return
            if self.session.finished:
                raise ServerDraining("this stream was asked to go, and its tasks have ended")
            await self._output.wait()

    async def _tick(self) -> None:
        born, intervals = time.monotonic(), 1.0
        while True:
            await asyncio.sleep(intervals * self._config.ping_interval)
            intervals = self.session.tick()
            if 0 < self._config.session_max_age < time.monotonic() - born:
                self.session.drain("the session is old: reconnect to spread the load", self._config.shutdown_grace)


def _send_away(session: Session, grace: float) -> None:
    session.drain("the server is shutting down", grace)


def _came(first: pb.SessionRequest | None) -> str:
    """What the first frame was, for whoever writes a worker: a misspelt field is unset, and says nothing else."""
    if first is None:
        return "bytes that are no frame"
    kind = first.WhichOneof("frame")
    return f"{'no content' if kind is None else kind.title().replace('_', '')} with frame_id {first.frame_id}"


def _sides(session: Session) -> list[WorkerSession]:
    """A session, as the dispatcher knows it."""
    return [session] if session.decider is None else [session, session.decider]


async def _abort(context: Context, error: FencepostError) -> None:
    code, details, metadata = aborting(error)
    await context.abort(code, details, metadata)
