"""A PostgreSQL server of a test's own can be stopped, killed, frozen and started again, and leaves
nothing behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import psycopg
import pytest

from tests.fixtures.postgres_server import (
    PostgresFailed,
    PostgresServer,
    has_ended,
    install,
    major_version,
    reachable,
)
from tests.fixtures.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


def execute(server: PostgresServer, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(server.dsn(), autocommit=True, connect_timeout=30) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def is_gone(pid: int) -> bool:
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def segments() -> set[str]:
    """The ids of all SysV shared memory segments of this machine."""
    return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()}


def test_it_is_a_server_of_the_version_that_was_chosen_with_durable_commits(postgres_process: PostgresServer) -> None:
    settings = "select current_setting('server_version_num')::int / 10000, current_setting('fsync')"
    assert execute(postgres_process, settings) == [(major_version(postgres_process.programs), "on")]


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_what_is_committed_outlives_its_process(postgres_process: PostgresServer, how: str) -> None:
    execute(postgres_process, "create table t as select 1 as x")
    address, pid = postgres_process.address, postgres_process.pid
    if how == "stop":
        postgres_process.stop()
    else:
        postgres_process.kill()
    assert not postgres_process.running
    assert not psutil.pid_exists(pid)
    with pytest.raises(psycopg.OperationalError):
        execute(postgres_process, "select 1")
    postgres_process.start()
    assert postgres_process.address == address
    assert execute(postgres_process, "select x from t") == [(1,)]


def test_a_restart_ends_its_sessions(postgres_process: PostgresServer) -> None:
    with psycopg.connect(postgres_process.dsn(), autocommit=True) as connection:
        postgres_process.restart()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    assert execute(postgres_process, "select 1") == [(1,)]


def test_a_frozen_server_keeps_its_sessions_and_goes_on_later(postgres_process: PostgresServer) -> None:
    with (
        psycopg.connect(postgres_process.dsn(), autocommit=True) as connection,
        ThreadPoolExecutor(1) as thread,
    ):
        connection.execute("select 1")
        postgres_process.pause()
        answer = thread.submit(connection.execute, "select 2")
        with pytest.raises(TimeoutError):
            answer.result(0.2)
        postgres_process.resume()
        assert answer.result(60).fetchall() == [(2,)]


def test_a_frozen_server_can_be_removed(new_postgres: Callable[..., PostgresServer]) -> None:
    server = new_postgres(wal_level="logical")
    assert execute(server, "show wal_level") == [("logical",)]
    pid = server.pid
    server.pause()
    server.remove()
    assert not psutil.pid_exists(pid)
    assert not server.folder.exists()


def test_a_killed_server_leaves_no_shared_memory(new_postgres: Callable[..., PostgresServer]) -> None:
    server = new_postgres()
    segment = (server.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
    assert segment in segments()
    server.kill()
    assert segment in segments()
    server.remove()
    assert segment not in segments()


def test_what_it_refuses_is_told_with_its_log(new_postgres: Callable[..., PostgresServer]) -> None:
    with pytest.raises(PostgresFailed, match="no_such_setting"):
        new_postgres(no_such_setting="1")


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import os, sys, tempfile; from pathlib import Path\n"
        "from tests.fixtures.postgres_server import PostgresServer\n"
        "folder = Path(tempfile.mkdtemp(prefix='fencepost-orphan-')); folder.chmod(0o711)\n"
        "server = PostgresServer(folder / 'own'); server.start()\n"
        "print(server.pid, folder, flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, folder = done.stdout.split()
    wait_until(lambda: is_gone(int(pid)), 30, what="PostgreSQL goes with its parent")
    shutil.rmtree(folder)


def test_programs_that_the_server_user_cannot_reach_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fixtures.postgres_server.reachable", lambda _: False)
    programs = install(tmp_path)
    assert programs.is_relative_to(tmp_path)
    assert (programs / "initdb").exists()
    version = subprocess.run([programs / "initdb", "--version"], capture_output=True, text=True, check=True)
    assert "PostgreSQL" in version.stdout
    assert install(tmp_path) == programs


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes users")
def test_a_private_folder_is_not_reachable_for_another_user(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    tmp_path.chmod(0o700)
    assert not reachable(inner)
