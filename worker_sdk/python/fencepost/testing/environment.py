"""What a test without a loop has: the same as `AsyncEnvironment`, with calls that block."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

from fencepost.client import Client
from fencepost.policies import Seconds
from fencepost.steps import Step
from fencepost.testing.clients import BlockingClient
from fencepost.testing.kit import AnyRun, Kit, id_of
from fencepost.testing.workers import Patience, make_worker
from fencepost.worker import Worker

T = TypeVar("T")


class Environment:
    """A server of the test's own. Made by `TestServer.start` and by the fixture `fencepost_env`.

    All time-outs here are in seconds of the test's time, not of the server's.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self.client: Client = BlockingClient(kit.address)

    @property
    def address(self) -> str:
        """host:port of the server's gRPC, for a program that connects by itself."""
        return self._kit.address

    @property
    def dsn(self) -> str:
        """The connection string of the server's database, to look into it. It goes with the environment."""
        return self._kit.dsn

    @contextlib.contextmanager
    def worker(
        self, steps: Sequence[Step[..., Any]] = (), *, workflows: Sequence[Any] = (), **options: Any
    ) -> Iterator[Worker]:
        """A worker within the block, in a thread, connected when it begins. As `AsyncEnvironment.worker`."""
        worker = make_worker(self.address, steps, workflows, options)
        errors: list[BaseException] = []

        def run() -> None:
            try:
                worker.run()
            except BaseException as error:  # noqa: BLE001 - it is raised to the test
                errors.append(error)

        thread = threading.Thread(target=run, name="fencepost-test-worker", daemon=True)
        thread.start()
        cut_off = True
        try:
            patience = Patience()
            while not worker.wait_connected(patience.pause()) and thread.is_alive():
                pass
            if thread.is_alive():
                yield worker
            cut_off = False
        finally:
            worker.stop(now=cut_off)
            thread.join()
        if errors:
            raise errors[0]

    def run(
        self, workflow: Any, input: object = None, *, type: Any = Any, timeout: float | None = 60.0, **options: Any
    ) -> Any:
        """Start a run and return its `result`. ``workflow`` is an id or a function with `@workflow`; ``options`` are
        those of `Client.start_run`.
        """
        handle = self.client.start_run(workflow, input, **options)
        return self.result(handle, type=type, timeout=timeout)

    @overload
    def result(self, run: AnyRun, *, timeout: float | None = 60.0) -> Any: ...
    @overload
    def result(self, run: AnyRun, *, type: type[T], timeout: float | None = 60.0) -> T: ...
    def result(self, run: AnyRun, *, type: Any = Any, timeout: float | None = 60.0) -> Any:
        """Wait for a run's output while time skips, as `AsyncEnvironment.result`."""
        self._kit.call(self._kit.finish(id_of(run), timeout))
        return self.client.handle(id_of(run)).result(type=type)

    def skip(self, by: Seconds, *, timeout: float = 60.0) -> dt.datetime:
        """Let that much time pass, as `AsyncEnvironment.skip`."""
        return self._kit.call(self._kit.skip(by, timeout))

    def settle(self, *, timeout: float = 60.0) -> None:
        """Wait until nothing is to be done now, as `AsyncEnvironment.settle`."""
        self._kit.call(self._kit.settle(timeout))

    def now(self) -> dt.datetime:
        """The server's time, in UTC."""
        return self._kit.call(self._kit.now()).astimezone(dt.UTC)
