"""The I/O of one session: makes its streams, moves frames, keeps its times, and comes back after a break.

Three tasks serve a stream: one reads, one writes, and one, which lives longer than the stream, ticks. The
reader never waits for the writer or for users' code, so neither side can block the other; what it makes
necessary is said with an event. Each stream has a channel of its own, closed with it: the frames that it had
not read are gone before the next Hello names what is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

import grpc

from fencepost.channel import MESSAGE_SLACK, Backoff, Targets, channel_options
from fencepost.errors import (
    AccessDenied,
    DefinitionDrift,
    DefinitionRemoved,
    FencepostError,
    InvalidManifest,
    SessionRefused,
    Unavailable,
    Unreachable,
)
from fencepost.lease import clock
from fencepost.sdk_log import SdkLog
from fencepost.status import error_of
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1 import worker_service_pb2_grpc as rpc

if TYPE_CHECKING:
    from fencepost.ledger import Effects
    from fencepost.session import Session

logger = SdkLog("fencepost.worker")

Call: TypeAlias = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]

STABLE_AFTER = 5.0
CLOSE_TIMEOUT = 2.0
LAST_WORD_SECONDS = 3.0
"""How long a worker that leaves and holds nothing tries to tell a server so whose stream broke before."""
FAULT_PAUSE = 1.0
_LAST_LOOK = 0.1
_LONGEST_SLEEP = 1.0
_LOG_INTERVAL = 1.0
_LONG_OUTAGE = 60.0
_LONG_OUTAGE_LOG_INTERVAL = 10.0

# Reasons that another try can't change. A frame that was refused is not among them: the next stream numbers
# anew.
_FATAL_REASONS = frozenset({"UNSUPPORTED_PROTOCOL", "INVALID_HELLO", "HELLO_REQUIRED", "INVALID_REQUEST"})


class Link:
    """Keeps one session connected until it is over. ``apply`` does what the session asks for; ``prepare`` is done over
    each new channel before the stream, and may raise FencepostError. ``channel`` is that of the stream, while there
    is one.
    """

    def __init__(
        self,
        session: Session,
        targets: Targets,
        backoff: Backoff,
        apply: Callable[[Link, Effects], None],
        prepare: Callable[[grpc.aio.Channel], Awaitable[None]] | None = None,
    ) -> None:
        self.session = session
        self._targets = targets
        self._backoff = backoff
        self._apply = apply
        self._prepare = prepare
        self.channel: grpc.aio.Channel | None = None
        self._wake = asyncio.Event()
        self._rebuild = asyncio.Event()
        self._retick = asyncio.Event()
        self._left = asyncio.Event()
        self._greeted = False
        # Until when it is worth while to come back for what a server sent over a stream that broke, and was not read.
        self._come_back_until = -math.inf
        self._next_tick = 0.0
        self._logged_at = -_LOG_INTERVAL
        self._away_since = clock()
        self._was_open = False
        self.address = targets.current
        """Where its stream was made last."""

    def wake(self) -> None:
        """The session may have something to write, or an earlier time to keep."""
        self._wake.set()
        if self.session.next_due() < self._next_tick:
            self._retick.set()

    def leave(self) -> None:
        """Want no more tasks, finish what is held, then end; `run` returns."""
        self.session.leave()
        self._left.set()
        if not self.session.held_count and not self._greeted:
            # Nothing is held and the stream is only being made. A server that has the Hello may give tasks already, and
            # is to hear that none are wanted: they would run out on this worker.
            self._rebuild.set()
        self.wake()

    async def run(self, delay: float = 0.0) -> None:
        """Serve the session until it is over; the first try after ``delay`` seconds.

        Raises SessionRefused, AccessDenied or another FencepostError if the server will never accept this
        worker.
        """
        ticker = asyncio.create_task(self._tick_forever())
        try:
            while True:
                await self._pause(delay)
                if self._is_over():
                    return
                began, recorded = clock(), self.session.recorded
                error = await self._stream()
                if self._is_over():
                    return
                if error is not None and self._is_fatal(error):
                    raise error
                if self.session.recorded > recorded or (self._was_open and clock() - began >= STABLE_AFTER):
                    # It did work, so the break is no sign of a server that can't.
                    self._backoff.reset()
                delay = self._backoff.next(error.retry_after if error is not None else None)
                if self.session.is_over() and (error is None or error.retry_after is None):
                    delay = min(delay, _LAST_LOOK)  # there is not much time to come back in
                self._log_break(error, delay)
                self._targets.advance(self.address)
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)

    def _is_over(self) -> bool:
        """Whether the session is over, and no server may have sent it tasks of late that were not read: they would run
        out on this worker, which nobody can tell from one that has begun them.
        """
        return self.session.is_over() and clock() >= self._come_back_until

    async def _pause(self, delay: float) -> None:
        """Wait before the next try; a session that leaves and holds nothing does not wait for a stream to say
        so.
        """
        if delay <= 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._left.wait()
                while not self._is_over():
                    self._wake.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LAST_LOOK):
                            await self._wake.wait()

    async def _stream(self) -> FencepostError | None:
        """Serve one stream until it ends. Returns its error; None if it ended well or from this side."""
        options = channel_options(self.session.identity.max_frame_bytes + MESSAGE_SLACK)
        self._rebuild.clear()
        self._greeted = False
        self.address = self._targets.current
        channel = grpc.aio.insecure_channel(self.address, options=options)
        try:
            if self._prepare is not None and not await self._done_before_leaving(self._prepare(channel)):
                await channel.close()
                return None
        except FencepostError as error:
            await channel.close()
            return error
        except BaseException:
            await channel.close()
            raise
        call: Call = rpc.WorkerServiceStub(channel).Session()
        self.session.begin(clock())
        self.channel = channel
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call))
        rebuild = asyncio.create_task(self._rebuild.wait())
        tasks: list[asyncio.Task[object]] = [reader, writer, rebuild]
        try:
            await asyncio.wait(tasks, timeout=self._time_left(), return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not reader.done():
                # It has said all, or could not write on; the server's end or status comes by the reader.
                ends = [reader, rebuild]
                await asyncio.wait(ends, timeout=CLOSE_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        finally:
            has_read_all = reader.done()
            for task in tasks:
                task.cancel()
            self.channel = None
            status = await self._status(call)
            is_refused = has_read_all and self._is_refusal(status)
            if self._greeted and self.session.may_have_unread and not is_refused:
                self._come_back_until = clock() + LAST_WORD_SECONDS
            self.session.end()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await self._close(call, channel)
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(
                outcome, grpc.RpcError | grpc.aio.UsageError | asyncio.InvalidStateError
            ):
                logger.error("a fault of the SDK ended a stream; the worker goes on", exc_info=outcome)
        return status

    async def _done_before_leaving(self, work: Awaitable[None]) -> bool:
        """Do what comes before the stream; False if the worker leaves meanwhile and waits for nothing of a server."""
        working, leaving = asyncio.ensure_future(work), asyncio.create_task(self._rebuild.wait())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return False
            await working
            return True
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    def _time_left(self) -> float | None:
        """For how long the next stream may be tried, in seconds; None: as long as the server is heard from."""
        return self._come_back_until - clock() if self.session.is_over() else None

    def _is_refusal(self, status: FencepostError | None) -> bool:
        """Whether this is a server's own word instead of a Welcome, as of one that shuts down: it has given nothing."""
        return not self.session.is_open and isinstance(status, Unavailable) and not isinstance(status, Unreachable)

    @staticmethod
    async def _status(call: Call) -> FencepostError | None:
        """How the server ended the call; None if it did not, or ended it well."""
        if not call.done():
            return None
        code = await call.code()
        if code is grpc.StatusCode.OK:
            return None
        return error_of(code, await call.details(), await call.trailing_metadata())

    @staticmethod
    async def _close(call: Call, channel: grpc.aio.Channel) -> None:
        """End the call, and wait until gRPC knows it.

        What it still has to tell would otherwise reach a loop that may be closed by then, and then hold up every
        other loop of the process that uses gRPC.
        """
        call.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await call.code()
        await channel.close()

    async def _read(self, call: Call) -> None:
        session = self.session
        while True:
            frame = await call.read()
            if not isinstance(frame, pb.SessionResponse):
                return
            was_open = session.is_open
            self._handle(session.receive(frame, clock()))
            if not was_open and session.is_open:
                self._come_back_until = -math.inf  # its Hello has settled what was before it
                self._away_since = math.inf
                self._log_connected(again=self._was_open)
                self._was_open = True

    async def _write(self, call: Call) -> None:
        session = self.session
        while True:
            frame = session.next_frame(clock())
            if frame is not None:
                await call.write(frame)
                self._greeted = True
            elif self._is_over():
                await call.done_writing()
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _tick_forever(self) -> None:
        """Keep the session's times, also while there is no stream: attempts time out then, too."""
        while True:
            # The loop's own clock stands still while the machine sleeps: look at least once a second.
            now = clock()
            self._next_tick = min(self.session.next_due(), now + _LONGEST_SLEEP)
            self._retick.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(self._next_tick - now, 0.0)):
                    await self._retick.wait()
            try:
                self._handle(self.session.tick(clock()))
            except Exception:
                # Without ticks no lease would be renewed and no silence noticed, and nobody would see why.
                logger.exception("a fault of the SDK at a tick; the worker goes on")
                await asyncio.sleep(FAULT_PAUSE)

    def _handle(self, effects: Effects) -> None:
        if effects.rebuild:
            self._log("the stream to %s is given up: %s", self.address, effects.rebuild)
            self._rebuild.set()
        self._apply(self, effects)
        self.wake()

    def _is_fatal(self, error: FencepostError) -> bool:
        if isinstance(error, AccessDenied):
            return True
        if isinstance(error, SessionRefused):
            return error.reason in _FATAL_REASONS
        if isinstance(error, InvalidManifest | DefinitionDrift | DefinitionRemoved):
            # Of its workflows, which are registered first.
            return True
        # Something else listens there. Once it was our server, this can only be a moment of its restart.
        return error.reason == "UNIMPLEMENTED" and not self._was_open

    def _log_connected(self, *, again: bool) -> None:
        identity = self.session.identity
        workflows = identity.workflows.values()
        queues = sorted({step.queue for step in identity.steps.values()} | {flow.queue for flow in workflows})
        logger.info(
            "worker %s %s to %s: %s%s on %s, %d slots, session %s",
            identity.worker_name,
            "reconnected" if again else "connected",
            self.address,
            _counted(len(identity.steps), "handler"),
            f" and {_counted(len(workflows), 'workflow')}" if workflows else "",
            f"queue {queues[0]}" if len(queues) == 1 else f"{len(queues)} queues",
            self.session.capacity,
            self.session.session_id,
        )

    def _log_break(self, error: FencepostError | None, delay: float) -> None:
        what = "the stream ended" if error is None else str(error).partition("\n")[0]
        kind = "unreachable" if isinstance(error, Unreachable) else "lost"
        self._log(
            "server %s %s, trying again in %.1f s: %s (%d leases held)",
            self.address,
            kind,
            delay,
            what,
            self.session.held_count,
        )

    def _log(self, message: str, *values: object) -> None:
        """Log at most once a second, and every ten seconds after a minute without a server: an outage is one story."""
        now = clock()
        self._away_since = min(self._away_since, now)  # infinite while there was a server
        interval = _LOG_INTERVAL if now - self._away_since < _LONG_OUTAGE else _LONG_OUTAGE_LOG_INTERVAL
        if now - self._logged_at >= interval:
            self._logged_at = now
            logger.warning(message, *values)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
