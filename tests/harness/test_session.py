"""A session's PostgreSQL is shared by its test workers and ends with the session, however that ends.

These tests run pytest as a process on a test file made for the purpose.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest

from tests.fixtures.postgres_server import PostgresServer, has_ended
from tests.fixtures.processes import Process
from tests.fixtures.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
# Of a pytest that hangs: several programs are started one after the other, and a database is made.
TIMEOUT = 150.0

CONFTEST = """
import json
import pytest

pytest_plugins = ["tests.fixtures.hygiene", "tests.fixtures.databases", "tests.fixtures.processes"]

@pytest.fixture
def record(cluster, pytestconfig):
    from tests.fixtures.databases import SESSION
    session = pytestconfig.stash[SESSION]
    with open("record", "a") as file:
        file.write(json.dumps({**session.state(), "folder": str(session.folder)}) + "\\n")
"""
SHARED = """
import psycopg
import pytest

@pytest.mark.parametrize("n", range(6))
def test_it(n, record, fresh_dsn):
    with psycopg.connect(fresh_dsn) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
"""
HANGS = """
import signal

def test_it(record):
    signal.pause()
"""
CRASHES = """
import os, signal, sys

def test_it(record, python_process):
    process = python_process("-c", "import signal; signal.pause()")
    with open("child", "w") as file:
        file.write(str(process.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""
PURE = """
def test_it(pytestconfig):
    from tests.fixtures.databases import SESSION
    assert pytestconfig.stash[SESSION].state() == {}
"""


@pytest.fixture
def run(
    tmp_path: Path, python_process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Process]:
    """Starts pytest on one test file: ``run(text, "-n", "2")``."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)

    def start(text: str, *options: str, **variables: str) -> Process:
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "test_it.py").write_text(text)
        (tmp_path / "pytest.ini").write_text(
            f"[pytest]\npythonpath = {ROOT}\nfilterwarnings = error\nasyncio_default_fixture_loop_scope = function\n"
        )
        return python_process("-m", "pytest", "-p", "no:cacheprovider", *options, cwd=tmp_path, **variables)

    return start


def records(folder: Path) -> list[dict[str, str]]:
    path = folder / "record"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def first_record(process: Process, folder: Path) -> dict[str, str]:
    """Wait until a test runs."""
    wait_until(lambda: records(folder) or not process.running, TIMEOUT, what="a test runs")
    assert process.running, process.logs
    return records(folder)[0]


def is_gone(pid: int) -> bool:
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def leaves_no_trace(record: dict[str, str]) -> bool:
    """Keeper, server and folder are gone."""
    port = record["admin_dsn"].rsplit(":", 1)[1].split("/")[0]
    servers = [p for p in psutil.process_iter(["cmdline"]) if ["-p", port] == (p.info["cmdline"] or [])[3:5]]
    return is_gone(int(record["keeper"])) and not Path(record["folder"]).exists() and not servers


def test_all_test_workers_share_one_server_and_it_ends_with_the_session(
    run: Callable[..., Process], tmp_path: Path
) -> None:
    process = run(SHARED, "-n", "2")
    assert process.wait(TIMEOUT) == 0, process.logs
    found = records(tmp_path)
    assert len(found) == 6
    assert len({record["admin_dsn"] for record in found}) == 1
    assert leaves_no_trace(found[0])


def test_a_session_that_is_killed_takes_its_server_with_it(run: Callable[..., Process], tmp_path: Path) -> None:
    process = run(HANGS, "-n", "1")
    record = first_record(process, tmp_path)
    process.signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: leaves_no_trace(record), 60, what="nothing is left")


def test_a_session_that_is_interrupted_takes_its_server_with_it(run: Callable[..., Process], tmp_path: Path) -> None:
    process = run(HANGS)
    record = first_record(process, tmp_path)
    process.signal(signal.SIGINT)
    assert process.wait() == pytest.ExitCode.INTERRUPTED
    assert leaves_no_trace(record)


def test_the_processes_of_a_test_worker_that_crashes_die_with_it(run: Callable[..., Process], tmp_path: Path) -> None:
    process = run(CRASHES, "-n", "1", "--max-worker-restart", "0")
    assert process.wait(TIMEOUT) == pytest.ExitCode.TESTS_FAILED, process.logs
    assert leaves_no_trace(records(tmp_path)[0])
    wait_until(lambda: is_gone(int((tmp_path / "child").read_text())), what="its child is gone")


def test_a_test_without_a_database_starts_no_server(run: Callable[..., Process]) -> None:
    process = run(PURE)
    assert process.wait(TIMEOUT) == 0, process.logs


def test_a_server_named_by_the_environment_is_used_and_left_as_it_was(
    run: Callable[..., Process], tmp_path: Path, postgres_process: PostgresServer
) -> None:
    process = run(SHARED, FENCEPOST_TEST_DSN=postgres_process.dsn())
    assert process.wait(TIMEOUT) == 0, process.logs
    record = records(tmp_path)[0]
    assert record["admin_dsn"] == postgres_process.dsn()
    assert "keeper" not in record
    with psycopg.connect(postgres_process.dsn()) as connection:
        databases = connection.execute("select datname from pg_database where not datistemplate").fetchall()
    assert databases == [("postgres",)]
