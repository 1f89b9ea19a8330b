"""Fixtures of the fault tests: the scene, the outside system that steps act on, and workers that act on it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

import pytest

from tests.faults.scene import Scene
from tests.faults.sink import Sink
from tests.fixtures.api import Api
from tests.fixtures.processes import Process
from tests.fixtures.proxy import Proxy
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import StartInProcessServer


@pytest.fixture
def scene(
    dsn: str,
    new_proxy: Callable[[str], Proxy],
    in_process_server: StartInProcessServer,
    connect_api: Callable[[str], Api],
    connect_worker: Callable[..., Awaitable[RawWorker]],
) -> Scene:
    """A clean database and what to play with on it. Proxies outlive servers, which end well with their database."""
    return Scene(dsn, connect_api, connect_worker, new_proxy, in_process_server)


@pytest.fixture
def sink(new_database: Callable[..., str]) -> Iterator[Sink]:
    """An empty outside system."""
    sink = Sink(new_database())
    sink.create()
    yield sink
    sink.close()


class StartWorker(Protocol):
    """The fixture `worker_process`."""

    def __call__(
        self, *addresses: str, steps: int = 1, slots: int = 10, gate: str = "", drain_timeout: float = 30.0
    ) -> Process:
        """Start a worker for the servers at ``addresses``; see worker_program. Returns before it is connected."""


@pytest.fixture
def worker_process(python_process: Callable[..., Process], sink: Sink) -> StartWorker:
    """Starts workers of the SDK as processes."""

    def start(*addresses: str, steps: int = 1, slots: int = 10, gate: str = "", drain_timeout: float = 30.0) -> Process:
        arguments = (",".join(addresses), sink.dsn, str(steps), str(slots), gate, str(drain_timeout))
        return python_process("-m", "tests.faults.worker_program", *arguments)

    return start


class StartCodeWorker(Protocol):
    """The fixture `code_process`."""

    def __call__(self, *addresses: str, **options: Any) -> Process:
        """Start a worker for the servers at ``addresses``; see code_program. Returns before it is connected.

        Unless told otherwise it takes no workflow for stuck that it was only not given the time to run; with
        ``deadlock_timeout=None`` as workers do of themselves.
        """


@pytest.fixture
def code_process(python_process: Callable[..., Process], sink: Sink) -> StartCodeWorker:
    """Starts workers that decide code workflows, as processes."""

    def start(*addresses: str, **options: Any) -> Process:
        options = {"deadlock_timeout": 60.0, **options}
        given = json.dumps({name: value for name, value in options.items() if value is not None})
        return python_process("-m", "tests.faults.code_program", ",".join(addresses), sink.dsn, given)

    return start
