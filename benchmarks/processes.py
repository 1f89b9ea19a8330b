"""The processes of a benchmark besides PostgreSQL: a server, and workers that are told when to work.

Both print lines of JSON with an ``event``; their logs go to a file each. They are on a leash: if the benchmark is
killed, they end. Start them from the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fencepost_server.leash import leashed

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT = 60.0
EVENT_TIMEOUT = 60.0
STOP_TIMEOUT = 30.0
STREAMS_TIMEOUT = 330.0
_LOG_SHOWN = 4000


class ProcessFailed(Exception):
    """A process ended, or was silent, when it should have said something. The message has the end of its log."""


class Child:
    """A process of this benchmark."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], variables: Mapping[str, str], folder: Path, cwd: Path = ROOT
    ) -> Self:
        """Start ``command``, whose first word is an absolute path. Its log is a file of its name in ``folder``.

        None of this process's settings reach it.
        """
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("FENCEPOST_")}
        log = folder / f"{name}.log"
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *leashed(command, at_death=signal.SIGKILL),
                cwd=cwd,
                env={**inherited, **variables},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                # A Ctrl-C at the terminal is for the benchmark alone, which then ends the others in order.
                start_new_session=True,
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def event(self, name: str, timeout: float = EVENT_TIMEOUT) -> dict[str, Any]:
        """The next line with this ``event``; others are passed over. Raises ProcessFailed."""
        assert self._process.stdout is not None  # it was started with a pipe
        try:
            async with asyncio.timeout(timeout):
                while line := await self._process.stdout.readline():
                    if line.startswith(b"{"):
                        entry: dict[str, Any] = json.loads(line)
                        if entry.get("event") == name:
                            return entry
        except TimeoutError:
            raise self._failed(f"did not say {name!r} within {timeout:g} s") from None
        raise self._failed(f"ended without saying {name!r}")

    async def tell(self, **command: Any) -> None:
        """Send it a line of JSON. Raises ProcessFailed if it is gone."""
        assert self._process.stdin is not None  # it was started with a pipe
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            raise self._failed("is gone") from None

    async def finished(self, timeout: float) -> None:
        """Wait until it has ended by itself, and well. Raises ProcessFailed."""
        try:
            async with asyncio.timeout(timeout):
                await self._process.communicate()
        except TimeoutError:
            raise self._failed(f"has not ended within {timeout:g} s") from None
        if self._process.returncode:
            raise self._failed(f"ended with {self._process.returncode}")

    async def end(self) -> None:
        """SIGTERM, after a while SIGKILL; it has ended when this returns, even if this is cancelled."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                await self._process.wait()
        except (TimeoutError, asyncio.CancelledError) as error:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            if isinstance(error, asyncio.CancelledError):
                raise

    def _failed(self, what: str) -> ProcessFailed:
        log = self._log.read_text(errors="replace")[-_LOG_SHOWN:].strip()
        return ProcessFailed(f"{self.name} {what}" + (f":\n{log}" if log else ""))


class Server(Child):
    """`fencepost serve`."""

    address = ""

    @classmethod
    async def serving(cls, name: str, variables: Mapping[str, str], folder: Path) -> Self:
        """Start it on free ports and wait until it serves. ``variables`` are its settings."""
        ports = {"FENCEPOST_GRPC_PORT": "0", "FENCEPOST_HTTP_PORT": "0", "FENCEPOST_LOG_FORMAT": "json"}
        server = await cls.start(
            name, [sys.executable, "-m", "fencepost_server.cli", "serve"], {**variables, **ports}, folder
        )
        try:
            ready = await server.event("serving", START_TIMEOUT)
        except BaseException:
            await server.end()
            raise
        server.address = f"127.0.0.1:{ready['grpc_port']}"
        return server


class Told(Child):
    """A process that waits to be told what to do with the server at an address: ``module`` is what it runs."""

    module = ""

    @classmethod
    async def ready(cls, name: str, address: str, folder: Path) -> Self:
        """Start it and wait until it can be told something."""
        worker = await cls.start(name, [sys.executable, "-m", cls.module, address, name], {}, folder)
        try:
            await worker.event("ready", START_TIMEOUT)
        except BaseException:
            await worker.end()
            raise
        return worker


class Worker(Told):
    """`python -m benchmarks.worker`: connects to a server only while it is told to work."""

    module = "benchmarks.worker"

    async def work(self, slots: int, *, timed: bool = False, code: int = 0, cache: int = 1000) -> None:
        """Let it take tasks. ``timed``: each run that has come to its last step is told as the event "run".
        ``code``: how many code runs it decides at a time; ``cache``: how many that wait it keeps.
        """
        await self.tell(do="work", slots=slots, timed=timed, code=code, cache=cache)
        await self.event("working")

    async def stats(self) -> dict[str, Any]:
        """What it has done since it was last told to work: see benchmarks.worker."""
        await self.tell(do="stats")
        return await self.event("stats")

    async def stop(self) -> dict[str, Any]:
        """Let it finish and disconnect; returns its last stats."""
        await self.tell(do="stop")
        return await self.event("stopped")


class Streams(Told):
    """`python -m benchmarks.stream_worker`: very many workers in one process."""

    module = "benchmarks.stream_worker"

    async def connect(self, streams: int, capacity: int) -> None:
        """Let it connect so many workers, which hold up to ``capacity`` tasks each."""
        await self.tell(do="connect", streams=streams, capacity=capacity)
        await self.event("connected", STREAMS_TIMEOUT)

    async def hold(self, tasks: int) -> None:
        """Wait until they hold so many tasks together."""
        await self.tell(do="hold", tasks=tasks)
        await self.event("holding", STREAMS_TIMEOUT)

    async def complete(self, steps: int) -> dict[str, Any]:
        """Let them complete what they hold and get, until so many steps are acknowledged; returns how many were."""
        await self.tell(do="complete", steps=steps)
        return await self.event("completed", STREAMS_TIMEOUT)
