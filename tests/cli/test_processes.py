"""`fencepost serve --processes 2`: two real server processes on one port, their parent, and signals to all of them."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest

from fencepost.v1 import worker_service_pb2 as pb
from tests.cli.program import run
from tests.engine.rows import fetch
from tests.engine.tasks import end
from tests.faults.scene import samples
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.processes import START_TIMEOUT, Process
from tests.fixtures.raw_worker import OK, RawWorker, StreamEnded
from tests.fixtures.servers import ServerProcess, StartServerProcess
from tests.fixtures.waiting import eventually

ConnectWorker = Callable[..., Awaitable[RawWorker]]
MANY = 40
"""Connections of which not all go to one of two processes, but once in 2^39 times."""
SETTINGS: dict[str, Any] = {"processes": 2, "shutdown_grace": 40, "disconnect_grace": 20}


def children(server: Process) -> list[psutil.Process]:
    """The server processes that a parent has."""
    return psutil.Process(server.pid).children()


def pids(server: Process) -> dict[int, list[int]]:
    """By number of the process the pids that it has served with, the newest last."""
    found: dict[int, list[int]] = {}
    for number, pid in re.findall(r"process (\d+) \(pid (\d+)\) serves", server.logs):
        found.setdefault(int(number), []).append(int(pid))
    return found


def stopped(server: ServerProcess) -> set[int]:
    """The processes that have told that they ended in order."""
    events = server.events()
    return {entry["process"] for entry in events if entry.get("message") == "stopped" and "process" in entry}


async def told(server: ServerProcess, metric: str, wanted: dict[str, float]) -> None:
    """Wait until a metric is this, by process: one that is slow to tell is left out."""

    async def as_wanted() -> bool:
        found = {s.labels["process"]: s.value for s in await samples(server.http_address) if s.name == metric}
        assert found == wanted
        return True

    await eventually(as_wanted, interval=0.1)


async def workers_on_both(server: ServerProcess, connect_worker: ConnectWorker, dsn: str) -> list[RawWorker]:
    """Two workers with a task's room each, on streams to different processes."""
    seen: dict[str, RawWorker] = {}
    for _ in range(MANY):
        worker = await connect_worker(server.grpc_address, capacity=0)
        rows = await fetch(dsn, "select server_id from session where session_id = %s", [worker.sessions[0]])
        if seen.setdefault(rows[0][0], worker) is not worker:
            await worker.close()
        if len(seen) == 2:
            break
    assert len(seen) == 2, "all streams go to one process"
    for worker in seen.values():
        await worker.capacity(1)
    return list(seen.values())


async def come_back(worker: RawWorker) -> None:
    """Come back as the same process as soon as a server takes the stream."""

    async def back() -> bool:
        try:
            await worker.reconnect()
        except StreamEnded:
            return False
        return True

    await eventually(back, interval=0.1)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two processes that serve, and on each a worker with a task on lease."""

    server: ServerProcess
    workers: list[RawWorker]
    tasks: list[pb.Task]


@pytest.fixture
async def pair(
    server_process: StartServerProcess, connect_worker: ConnectWorker, connect_api: Callable[[str], Api], dsn: str
) -> Pair:
    server = server_process(dsn, **SETTINGS)
    workers = await workers_on_both(server, connect_worker, dsn)
    api = connect_api(server.grpc_address)
    await api.register(manifest(1))
    for _ in workers:
        await api.start()
    return Pair(server, workers, [await worker.task() for worker in workers])


async def test_both_processes_and_nobody_else_get_streams_and_one_that_is_killed_is_replaced(
    pair: Pair, connect_worker: ConnectWorker, dsn: str
) -> None:
    """I13: the worker of the killed one goes on at another with what it holds."""
    server, workers, tasks = pair.server, pair.workers, pair.tasks
    await told(server, "fencepost_process_up", {"1": 1, "2": 1})
    await told(server, "fencepost_sessions", {"1": 1, "2": 1})
    (first,) = pids(server)[1]
    psutil.Process(first).kill()
    ends = {asyncio.create_task(worker.ended()): worker for worker in workers}
    done, kept = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await end(kept)
    (cut_off,) = (ends[ended] for ended in done)
    await come_back(cut_off)
    for worker, task in zip(workers, tasks, strict=True):
        assert (await worker.complete(task)).outcome == OK
    await eventually(lambda: len(pids(server)[1]) == 2, START_TIMEOUT)
    assert "process 1 has ended with SIGKILL: starting it again" in server.logs
    await told(server, "fencepost_process_up", {"1": 1, "2": 1})
    await told(server, "fencepost_process_restarts_total", {"1": 1, "2": 0})
    await workers_on_both(server, connect_worker, dsn)
    await asyncio.to_thread(other_commands_are_refused, server, dsn)
    assert await asyncio.to_thread(server.terminate) == 0


async def test_sigterm_lets_the_workers_of_all_processes_finish(pair: Pair) -> None:
    server = pair.server
    ours = children(server)
    server.signal(signal.SIGTERM)
    for worker in pair.workers:
        await worker.next(pb.Drain)
    await finish_all(pair)
    assert await asyncio.to_thread(server.wait) == 0
    assert [child.is_running() for child in ours] == [False, False]
    assert stopped(server) == {1, 2}, "logs tell the process"


async def finish_all(pair: Pair) -> None:
    """The workers finish what they have, and go."""
    for worker, task in zip(pair.workers, pair.tasks, strict=True):
        assert (await worker.complete(task)).outcome == OK
        await worker.close()


async def test_sigterm_to_the_whole_group_lets_the_workers_finish(pair: Pair) -> None:
    """As service managers send it: each process gets it from them and from the parent."""
    server = pair.server
    ours = children(server)
    for process in (*ours, psutil.Process(server.pid)):
        process.send_signal(signal.SIGTERM)
    for worker in pair.workers:
        await worker.next(pb.Drain)
    for process in ours:
        process.send_signal(signal.SIGTERM)
    await finish_all(pair)
    assert await asyncio.to_thread(server.wait) == 0
    assert stopped(server) == {1, 2}


async def test_workers_finish_when_the_parent_is_killed_amid_a_shutdown(pair: Pair) -> None:
    server = pair.server
    ours = children(server)
    server.signal(signal.SIGTERM)
    for worker in pair.workers:
        await worker.next(pb.Drain)
    psutil.Process(server.pid).kill()
    await asyncio.to_thread(server.wait)
    await finish_all(pair)
    await eventually(lambda: not any(child.is_running() for child in ours))
    assert stopped(server) == {1, 2}


async def test_a_second_signal_ends_all_at_once(pair: Pair) -> None:
    server, workers = pair.server, pair.workers
    ours = children(server)
    server.signal(signal.SIGINT)
    for worker in workers:
        await worker.next(pb.Drain)
    server.signal(signal.SIGINT)
    assert await asyncio.to_thread(server.wait, 25) == 1
    assert [child.is_running() for child in ours] == [False, False]


async def test_the_other_process_is_ready_while_one_is_frozen(server_process: StartServerProcess, dsn: str) -> None:
    server = server_process(dsn, **SETTINGS)
    frozen = psutil.Process(pids(server)[1][0])
    frozen.suspend()
    await eventually(lambda: asyncio.to_thread(_ready, server), interval=0.1)
    await told(server, "fencepost_sessions", {"2": 0})
    frozen.resume()
    assert await asyncio.to_thread(server.terminate) == 0


def _ready(server: ServerProcess) -> bool:
    with suppress(HTTPError), urlopen(f"http://{server.http_address}/readyz", timeout=30) as answer:
        return bool(answer.status == 200)
    return False


async def test_processes_end_in_order_when_their_parent_is_killed(server_process: StartServerProcess, dsn: str) -> None:
    """Else they would keep the port, and nobody would start them again."""
    server = server_process(dsn, **SETTINGS)
    ours = children(server)
    psutil.Process(server.pid).kill()
    await asyncio.to_thread(server.wait)
    await eventually(lambda: not any(child.is_running() for child in ours))
    assert stopped(server) == {1, 2}


@contextmanager
def taken_ports(n: int) -> Iterator[list[str]]:
    """Ports that another program listens on, and lets nobody share."""
    listeners = [socket.socket() for _ in range(n)]
    try:
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
        yield [str(listener.getsockname()[1]) for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()


def test_all_that_keeps_the_processes_from_starting_is_told_at_once() -> None:
    with taken_ports(2) as (grpc_port, http_port):
        result = run(
            *("serve", "--processes", "2", "--grpc-port", grpc_port, "--http-port", http_port),
            *("--dsn", "postgresql://postgres@127.0.0.1:1/postgres"),
        )
    assert result.code == 1
    lines = result.error.splitlines()
    assert lines[:3] == [
        "fencepost: can't start:",
        f"  can't listen on 127.0.0.1:{grpc_port}: is the port in use?",
        f"  can't listen on 127.0.0.1:{http_port}: is the port in use?",
    ]
    assert lines[3].startswith("  DATABASE_UNAVAILABLE: the database can't be reached: ")
    assert len(lines) == 4


def other_commands_are_refused(server: ServerProcess, dsn: str) -> None:
    """Whether with one process or with several."""
    for processes in ("1", "2"):
        port = str(server.grpc_port)
        result = run("serve", "--dsn", dsn, "--processes", processes, "--grpc-port", port, "--http-port", "0")
        assert result.code == 1
        assert result.error.endswith(f"fencepost: can't listen on 127.0.0.1:{port}: is the port in use?\n")


@pytest.mark.parametrize("text", ["0", "65", "x"])
def test_a_number_of_processes_that_cannot_be_is_wrong_usage(text: str) -> None:
    result = run("serve", "--processes", text, "--lanes", "0")
    assert result.code == 2
    assert "--processes: " in result.error
    assert "--lanes: 0" in result.error
