"""The parent of several server processes on one gRPC port: starts them, watches them, starts them again, ends them.

Each is a whole server; they share nothing but the port and the database. The parent serves no gRPC: it keeps the port
for them (reserved.py) and answers HTTP for all (web/gathered.py). They die with it, however it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fencepost_server.config import Config
from fencepost_server.leash import leashed
from fencepost_server.logs import tell_ports
from fencepost_server.reserved import ReservedPort
from fencepost_server.store import migrate
from fencepost_server.web.app import HttpServer
from fencepost_server.web.gathered import ProcessState, ToldByProcesses

log = logging.getLogger("fencepost")

FIRST_DELAY, MAX_DELAY = 0.2, 15.0
"""Seconds before a process is started again: the first after its end, twice as long each time, and at most."""
SETTLED = 30.0
"""Seconds that a process has to serve for its end to count as the first."""
GIVE_UP = 5
"""Ends in a row of each process after which all is given up: only while none serves."""
START_TIMEOUT = 60.0
STOP_SLACK = 10.0
"""Seconds that a process may take to end, beyond the grace of its workers."""
AT_ONCE = signal.SIGUSR1
"""Ends a process without waiting for anything. SIGTERM doesn't, however often it comes: it may come from the parent,
from whoever signals the whole group, and from the leash."""


class CannotStart(ExceptionGroup[Exception]):
    """One or more things keep the processes from being started: the error of each, with its traceback."""


class ProcessFailed(Exception):
    """A process has ended that was to serve; it has told why in the log. ``code`` is the command's exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class _Child:
    """One of the processes. ``process`` and ``served_since`` (on the clock of time.monotonic; None: it did not come to
    serve) are of its present life. ``failures``: its ends in a row, each soon after it served, or before.
    """

    number: int
    process: asyncio.subprocess.Process | None = None
    http_port: int | None = None
    served_since: float | None = None
    restarts: int = 0
    failures: int = 0

    @property
    def ended_well(self) -> bool:
        """At its own pace, or by the signal to stop before it could serve; or it was not there to be stopped."""
        return self.process is None or self.process.returncode in {0, -signal.SIGTERM}

    @property
    def settled(self) -> bool:
        """It has served for long enough to start from the beginning with its failures."""
        return self.served_since is not None and time.monotonic() - self.served_since > SETTLED


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a process. ``how`` completes "it …"; ``code`` is the exit code for a command that ends by it."""

    how: str
    code: int = 1


async def supervise(config: Config, command: Sequence[str]) -> int:
    """Serve with ``config.processes`` processes until SIGTERM or SIGINT, and return the exit code. ``command`` is
    started for each: it gets a line of JSON on its standard input (see Assignment), and writes one to its standard
    output when it serves.

    Raises CannotStart, and ProcessFailed if one does not come to serve, or if all fail again and again.
    """
    family = _Family(config, command)
    async with _prepared(config, family) as (port, http):
        family.grpc_port = port.port
        return await family.live(lambda: tell_ports(config, port.port, http.port))


@contextlib.asynccontextmanager
async def _prepared(config: Config, family: _Family) -> AsyncIterator[tuple[ReservedPort, HttpServer]]:
    """Both ports are ours, and the database can be served, within the block. Raises CannotStart with all faults."""
    causes: list[Exception] = []

    async def tried(work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await work()
        except Exception as error:  # noqa: BLE001  # all faults are told at once; the caller knows which are expected
            causes.append(error)

    async def reserve() -> ReservedPort:
        # In a thread, for it looks the host up.
        return stack.enter_context(await asyncio.to_thread(ReservedPort, config.grpc_host, config.grpc_port))

    async def serve_http() -> HttpServer:
        http = HttpServer(config, ToldByProcesses(family.states))
        await http.start()
        stack.push_async_callback(http.stop)
        return http

    async with contextlib.AsyncExitStack() as stack:
        port, http = await tried(reserve), await tried(serve_http)
        await tried(lambda: migrate.check(config.dsn))
        if causes:
            raise CannotStart("can't start", causes)
        yield port, http


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a process is told: which one it is, and its settings. Not in its arguments, where all could read them."""

    process: int
    config: Config

    def dump(self) -> bytes:
        """As a line."""
        return json.dumps({"process": self.process, "config": dataclasses.asdict(self.config)}).encode() + b"\n"

    @classmethod
    def load(cls, line: bytes) -> Assignment:
        """From a line."""
        found = json.loads(line)
        return cls(found["process"], Config(**found["config"]))


class _Family:
    def __init__(self, config: Config, command: Sequence[str]) -> None:
        self._config = config
        self._command = command
        self._children = [_Child(number) for number in range(1, config.processes + 1)]
        self._all_served = asyncio.Event()
        self._stopping = asyncio.Event()
        self._last_sent = signal.SIGTERM
        self.grpc_port = 0

    def states(self) -> Mapping[int, ProcessState]:
        """The processes by number."""
        return {child.number: ProcessState(child.http_port, child.restarts) for child in self._children}

    async def live(self, announce: Callable[[], None]) -> int:
        """Keep them all up until a signal, end them all, and return the exit code. ``announce``: all serve."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        keepers = [
            asyncio.create_task(self._keep_up(child), name=f"process {child.number}") for child in self._children
        ]
        announcing = asyncio.create_task(self._announce(announce), name="announcing")
        stopping = asyncio.create_task(self._stopping.wait(), name="stopping")
        # A keeper ends before the signal only by an error.
        await asyncio.wait([stopping, *keepers], return_when=asyncio.FIRST_COMPLETED)
        self._stop()
        await self._end_all(keepers)
        announcing.cancel()
        await asyncio.gather(announcing, stopping, return_exceptions=True)
        for keeper in keepers:
            keeper.result()  # raises its error
        log.info("stopped")
        return 0 if all(child.ended_well for child in self._children) else 1

    async def _announce(self, announce: Callable[[], None]) -> None:
        await self._all_served.wait()
        announce()

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            log.warning("a second signal: ending all processes at once")
            self._send_all(AT_ONCE)
        else:
            log.info("shutting down")
            self._stop()

    def _stop(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            self._send_all(signal.SIGTERM)

    def _send_all(self, number: signal.Signals) -> None:
        self._last_sent = number
        for child in self._children:
            if child.process is not None and child.process.returncode is None:
                _send(child.process, number)

    async def _end_all(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """Wait until all have ended, with a limit."""
        _, late = await asyncio.wait(keepers, timeout=self._config.shutdown_grace + STOP_SLACK)
        if late:
            log.error("%d processes have not ended in time: killing them", len(late))
            self._send_all(signal.SIGKILL)
            await asyncio.wait(late)

    async def _keep_up(self, child: _Child) -> None:
        """Start it, and again whenever it ends. Raises ProcessFailed when that is no use."""
        while not self._stopping.is_set():
            end = await self._live_once(child)
            if self._stopping.is_set():
                return
            if not self._all_served.is_set():
                raise ProcessFailed(f"process {child.number} could not start: it {end.how}", end.code)
            child.process = None  # how it ended is not the affair of a later stop
            child.failures = 1 if child.settled else child.failures + 1
            if all(other.failures >= GIVE_UP and other.http_port is None for other in self._children):
                raise ProcessFailed(f"all processes have failed {GIVE_UP} times in a row", 1)
            delay = min(FIRST_DELAY * 2 ** min(child.failures - 1, 10), MAX_DELAY)
            child.restarts += 1
            log.warning("process %d %s: starting it again in %.1f s", child.number, end.how, delay)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _live_once(self, child: _Child) -> _End:
        """One life of it."""
        child.served_since = None
        try:
            process = child.process = await self._start(child)
        except OSError as error:  # of the fork, or of a pipe: the system lacks something, perhaps not for long
            return _End(f"could not be started: {error}")
        if self._stopping.is_set():  # while it was started
            _send(process, self._last_sent)
        try:
            if await _serves(child, process):
                log.info("process %d (pid %d) serves", child.number, process.pid)
                if all(other.http_port is not None for other in self._children):
                    self._all_served.set()
            return _end(await process.wait())
        finally:
            child.http_port = None

    async def _start(self, child: _Child) -> asyncio.subprocess.Process:
        config = dataclasses.replace(
            self._config, grpc_port=self.grpc_port, http_host="127.0.0.1", http_port=0, processes=1
        )
        # In a session of its own: Ctrl-C at a terminal is for the parent, and would be a second signal after its own.
        process = await asyncio.create_subprocess_exec(
            *leashed(self._command, at_death=signal.SIGTERM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already; its exit code tells
            process.stdin.write(Assignment(child.number, config).dump())
            await process.stdin.drain()
        process.stdin.close()
        return process


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


async def _serves(child: _Child, process: asyncio.subprocess.Process) -> bool:
    """Wait until it says where it serves, and note it. One that does not say so as agreed is killed."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT):
            line = await process.stdout.readline()
        if not line:
            return False  # it ends
        child.http_port = int(json.loads(line)["http_port"])
    except TimeoutError:
        log.warning("process %d does not serve after %.0f s: killing it", child.number, START_TIMEOUT)
    except (ValueError, TypeError, KeyError):  # of the line, or that it has no end
        log.warning("process %d does not say where it serves, but something else: killing it", child.number)
    else:
        child.served_since = time.monotonic()
        return True
    _send(process, signal.SIGKILL)
    return False


def _end(code: int) -> _End:
    """``code``: as of a process, minus the signal that ended it."""
    if code >= 0:
        return _End(f"has ended with exit code {code}", code or 1)
    return _End(f"has ended with {signal.Signals(-code).name}")
