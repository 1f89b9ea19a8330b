"""The parent of server processes: when it starts them again and when it gives up; and how it keeps the port for them.

The processes are small programs here, which do not take seconds to start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fencepost_server import supervisor
from fencepost_server.cli.faults import explain
from fencepost_server.config import Config
from fencepost_server.leash import leashed
from fencepost_server.reserved import NotShared, ReservedPort
from fencepost_server.store import migrate
from fencepost_server.supervisor import GIVE_UP, CannotStart, ProcessFailed, supervise
from tests.fixtures.waiting import eventually

Pids = Callable[[int], list[int]]
PROGRAM = str(Path(__file__).with_name("child_program.py"))


@pytest.fixture
def pids(caplog: pytest.LogCaptureFixture) -> Pids:
    """By number of a process the pids that it has served with."""
    caplog.set_level(logging.INFO)

    def served(number: int) -> list[int]:
        return [int(pid) for pid in re.findall(rf"process {number} \(pid (\d+)\) serves", caplog.text)]

    return served


@asynccontextmanager
async def supervised(dsn: str, folder: Path) -> AsyncIterator[asyncio.Task[int]]:
    """Two processes under a supervisor in this event loop; it is ended by a signal, unless it has ended."""
    config = Config(dsn=dsn, grpc_port=0, http_port=0, processes=2)
    life = asyncio.create_task(supervise(config, [sys.executable, "-S", PROGRAM, str(folder)]))
    try:
        yield life
    finally:
        if not life.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait([life], timeout=30)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def test_a_process_that_cannot_start_again_is_tried_while_another_serves(
    dsn: str, tmp_path: Path, pids: Pids, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervised(dsn, tmp_path) as life:
        await eventually(lambda: pids(1) and pids(2))
        (tmp_path / "1").write_text("7")
        os.kill(pids(1)[-1], signal.SIGKILL)
        await eventually(lambda: caplog.text.count("process 1 has ended with exit code 7") >= 3)
        delays = re.findall(r"starting it again in ([\d.]+) s", caplog.text)
        assert delays[:4] == ["0.2", "0.4", "0.8", "1.6"], "each time twice as long"
        (tmp_path / "1").unlink()
        await eventually(lambda: len(pids(1)) == 2)
        assert len(pids(2)) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(life, 30) == 0


async def test_all_is_given_up_when_none_serves_any_more(dsn: str, tmp_path: Path, pids: Pids) -> None:
    async with supervised(dsn, tmp_path) as life:
        await eventually(lambda: pids(1) and pids(2))
        for number in (1, 2):
            (tmp_path / str(number)).write_text("7")
            os.kill(pids(number)[-1], signal.SIGKILL)
        with pytest.raises(ProcessFailed, match=f"failed {GIVE_UP} times in a row") as failure:
            await asyncio.wait_for(life, 30)
        assert failure.value.code == 1


async def test_all_is_given_up_when_none_comes_to_serve_again(
    dsn: str, tmp_path: Path, pids: Pids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes each time: it may be longer than one has to serve to have settled."""
    async with supervised(dsn, tmp_path) as life:
        await eventually(lambda: pids(1) and pids(2))
        monkeypatch.setattr(supervisor, "START_TIMEOUT", 0.2)
        monkeypatch.setattr(supervisor, "SETTLED", 0.1)
        monkeypatch.setattr(supervisor, "MAX_DELAY", 0.1)
        for number in (1, 2):
            (tmp_path / str(number)).write_text("hang")
            os.kill(pids(number)[-1], signal.SIGKILL)
        with pytest.raises(ProcessFailed, match=f"failed {GIVE_UP} times in a row"):
            await asyncio.wait_for(life, 30)


async def test_an_earlier_crash_is_no_fault_of_a_stop(
    dsn: str, tmp_path: Path, pids: Pids, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(dsn, tmp_path) as life:
        await eventually(lambda: pids(1) and pids(2))
        monkeypatch.setattr(supervisor, "FIRST_DELAY", 15)
        os.kill(pids(1)[-1], signal.SIGKILL)
        await eventually(lambda: "starting it again in 15.0 s" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(life, 30) == 0


async def test_a_process_that_was_being_started_is_told_to_stop_and_others_not_again(
    dsn: str, tmp_path: Path, pids: Pids, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_and_start(command: Sequence[str], **options: Any) -> list[str]:
        os.kill(os.getpid(), signal.SIGTERM)
        return leashed(command, **options)

    (tmp_path / "2").write_text("linger")
    async with supervised(dsn, tmp_path) as life:
        await eventually(lambda: pids(1) and pids(2))
        monkeypatch.setattr(supervisor, "leashed", stop_and_start)
        os.kill(pids(1)[-1], signal.SIGKILL)
        signals = tmp_path / "2.signals"
        await eventually(signals.exists)
        await eventually(lambda: ours() == pids(2))
        os.kill(pids(2)[-1], signal.SIGWINCH)
        assert await asyncio.wait_for(life, 30) == 0
        assert signals.read_text() == "SIGTERM\n"


def ours() -> list[int]:
    """The pids of the processes that the supervisor in this process has now."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if child.status() != psutil.STATUS_ZOMBIE and PROGRAM in child.cmdline():
                found.append(child.pid)
    return found


async def test_a_process_that_cannot_be_forked_is_tried_again(
    dsn: str, tmp_path: Path, pids: Pids, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(dsn, tmp_path) as life:
        await eventually(lambda: pids(1) and pids(2))
        with monkeypatch.context() as broken:
            broken.setattr(supervisor, "leashed", lambda *_words, **_options: ["/no/such/program"])
            os.kill(pids(1)[-1], signal.SIGKILL)
            await eventually(lambda: caplog.text.count("process 1 could not be started: [Errno 2]") == 2 or life.done())
        await eventually(lambda: len(pids(1)) == 2)
        assert len(pids(2)) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(life, 30) == 0


async def test_a_process_that_says_something_else_is_killed_and_tried_again(
    dsn: str, tmp_path: Path, pids: Pids, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervised(dsn, tmp_path):
        await eventually(lambda: pids(1) and pids(2))
        (tmp_path / "1").write_text("babble")
        os.kill(pids(1)[-1], signal.SIGKILL)
        await eventually(lambda: "process 1 does not say where it serves" in caplog.text)
        (tmp_path / "1").unlink()
        await eventually(lambda: len(pids(1)) == 2)
        assert len(pids(2)) == 1


async def test_an_unexpected_error_at_the_start_keeps_its_traceback(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def looks_up_what_is_not_there(_dsn: str) -> None:
        raise KeyError

    monkeypatch.setattr(migrate, "check", looks_up_what_is_not_there)
    async with supervised(dsn, tmp_path) as life:
        with pytest.raises(CannotStart) as failure:
            await life
    assert "in looks_up_what_is_not_there" in "".join(traceback.format_exception(failure.value))
    assert explain(failure.value) is None


async def test_a_process_that_cannot_start_at_first_ends_all_with_its_exit_code(
    dsn: str, tmp_path: Path, pids: Pids
) -> None:
    (tmp_path / "2").write_text("7")
    async with supervised(dsn, tmp_path) as life:
        with pytest.raises(ProcessFailed, match="process 2 could not start: it has ended with exit code 7") as failure:
            await asyncio.wait_for(life, 30)
        assert failure.value.code == 7
    for pid in pids(1):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# The port


@contextmanager
def listening(port: int, *, shared: bool, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A socket that listens, as servers do: with SO_REUSEADDR."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen()
        yield listener


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_reserved_port_is_for_those_who_share_it_and_for_nobody_else(host: str) -> None:
    with ReservedPort(host, 0) as reserved:
        for other in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(NotShared, match=r"is the port in use\?"):
                ReservedPort(other, reserved.port)
            with pytest.raises(OSError, match="in use"), listening(reserved.port, shared=False, host=other):
                pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", reserved.port))  # it does not listen itself
        with listening(reserved.port, shared=True) as first, listening(reserved.port, shared=True):
            with pytest.raises(NotShared):
                ReservedPort(host, reserved.port)
            with socket.create_connection(first.getsockname()):
                pass
        with pytest.raises(NotShared):
            ReservedPort(host, reserved.port)  # also while none of them runs
    with ReservedPort(host, reserved.port):
        pass  # connections that have ended are no obstacle


def test_a_port_that_others_share_among_themselves_is_not_reserved() -> None:
    """As those of a server of the same user with SO_REUSEPORT, which would get a part of the connections."""
    with listening(0, shared=True) as other, pytest.raises(NotShared):
        ReservedPort("127.0.0.1", other.getsockname()[1])


def test_a_host_that_is_not_here_is_told() -> None:
    with pytest.raises(NotShared, match=r"can't listen on 192\.0\.2\.1:7654: Cannot assign"):
        ReservedPort("192.0.2.1", 7654)


@pytest.mark.parametrize("port", [0, 7654])
def test_a_host_that_nobody_knows_is_told(port: int) -> None:
    with pytest.raises(NotShared, match=rf"can't listen on no\.such\.host\.invalid:{port}: "):
        ReservedPort("no.such.host.invalid", port)


def test_a_host_that_is_not_here_is_told_for_any_port() -> None:
    with pytest.raises(NotShared, match=r"can't listen on 192\.0\.2\.1:0: Cannot assign"):
        ReservedPort("192.0.2.1", 0)


def test_of_two_who_reserve_a_port_at_the_same_time_one_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have bound to it, which neither is refused, before either goes on."""
    both_bound = threading.Barrier(2, timeout=30)

    class Slow(socket.socket):
        def bind(self, address: Any) -> None:
            super().bind(address)
            if address[1]:
                both_bound.wait()

    def reserve() -> ReservedPort | None:
        try:
            return ReservedPort("127.0.0.1", port)
        except NotShared:
            return None

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(socket, "socket", Slow)
    with ThreadPoolExecutor(2) as pool:
        reserved = [found for found in pool.map(lambda _: reserve(), range(2)) if found is not None]
    for port_of_one in reserved:
        port_of_one.close()
    assert len(reserved) == 1
