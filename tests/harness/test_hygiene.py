"""A test that leaves something behind fails, and says what it was. Each case runs as a pytest of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.processes import Process

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
pytest_plugins = ["tests.fixtures.hygiene", "tests.fixtures.processes"]
"""
CASES = """
import asyncio, subprocess, sys
import grpc
import pytest_asyncio

FORGOTTEN = []

async def test_forgets_a_task():
    FORGOTTEN.append(asyncio.create_task(asyncio.Event().wait(), name="forgotten"))

def test_forgets_a_process():
    FORGOTTEN.append(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]))

async def test_forgets_an_aio_channel():
    FORGOTTEN.append(grpc.aio.insecure_channel("127.0.0.1:1"))

def test_forgets_a_channel():
    FORGOTTEN.append(grpc.insecure_channel("127.0.0.1:2"))

@pytest_asyncio.fixture
async def tidy():
    task = asyncio.create_task(asyncio.Event().wait())
    yield
    task.cancel()

async def test_is_tidy(tidy):
    async with grpc.aio.insecure_channel("127.0.0.1:3"):
        pass
    with grpc.insecure_channel("127.0.0.1:4"):
        pass
    subprocess.run([sys.executable, "-c", ""], check=True)
    FORGOTTEN.append(asyncio.create_task(asyncio.sleep(0.05)))

def test_shows_logs_when_it_fails(python_process):
    process = python_process("-c", "print('these are my', 'last words')")
    assert process.wait() == 1
"""


def test_what_a_test_leaves_behind_fails_it(tmp_path: Path, python_process: Callable[..., Process]) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {ROOT}\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-rA"]
    process = python_process("-m", "pytest", *options, cwd=tmp_path)
    assert process.wait(150) == pytest.ExitCode.TESTS_FAILED, process.logs
    logs = process.logs
    for name in ("a_task", "a_process", "an_aio_channel", "a_channel"):
        assert f"ERROR test_cases.py::test_forgets_{name}" in logs, logs
        assert f"PASSED test_cases.py::test_forgets_{name}" in logs
    assert "name='forgotten'" in logs
    assert "the test left processes: ['" in logs
    assert "the test left gRPC channels open to: ['127.0.0.1:1']" in logs
    assert "the test left gRPC channels open to: ['127.0.0.1:2']" in logs
    assert "PASSED test_cases.py::test_is_tidy" in logs
    assert "ERROR test_cases.py::test_is_tidy" not in logs
    assert "these are my last words" in logs
