"""`fencepost serve` and `fencepost migrate`, as processes."""

from __future__ import annotations

import subprocess
import sys

from tests.fixtures.servers import StartServerProcess


def run(*arguments: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fencepost_server.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_migrate_tells_what_it_applied_and_then_that_all_is_up_to_date(fresh_dsn: str) -> None:
    first = run("migrate", "--dsn", fresh_dsn)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.startswith("applied 0001")
    second = run("migrate", "--dsn", fresh_dsn)
    assert (second.returncode, second.stdout, second.stderr) == (0, "up to date\n", "")


def test_serve_serves_until_it_is_told_to_stop(server_process: StartServerProcess, dsn: str) -> None:
    process = server_process(dsn)
    assert process.terminate() == 0


def test_an_empty_database_is_told_from_a_schema_that_is_too_old(fresh_dsn: str) -> None:
    result = run("serve", "--dsn", fresh_dsn, "--grpc-port", "0", "--http-port", "0")
    assert result.returncode == 1
    assert "run `fencepost migrate`" in result.stderr
    assert "Traceback" not in result.stderr
