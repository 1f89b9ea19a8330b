"""`fencepost serve`, `migrate` and `restore-epoch`, as processes."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from fencepost_server.config import Config
from tests.cli.program import PROGRAM, TIMEOUT, Program, run
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.processes import Process
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import InProcessServer

FREE_PORTS = ("--grpc-port", "0", "--http-port", "0")


@contextmanager
def taken_port() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield str(listener.getsockname()[1])


def execute(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement.encode())


def test_every_setting_is_a_flag_of_serve_with_its_documentation() -> None:
    words = " ".join(run("serve", "--help", COLUMNS="200").out.split())
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')} " in words
        assert " ".join(field.metadata["doc"].split()) in words


def test_flags_go_before_variables_and_variables_before_defaults(
    python_process: Callable[..., Process], dsn: str
) -> None:
    process = python_process(
        *("-m", "fencepost_server.cli", "serve", "--dsn", dsn, *FREE_PORTS, "--log-format", "json"),
        FENCEPOST_GRPC_PORT="1",
        FENCEPOST_LOG_FORMAT="text",
        FENCEPOST_LOG_LEVEL="debug",
    )
    ready = process.wait_event("serving")
    assert ready["grpc_port"] > 1
    assert process.terminate() == 0


@pytest.mark.parametrize("listens", [False, True])
def test_a_server_that_does_not_listen_says_once_that_it_polls(
    python_process: Callable[..., Process], dsn: str, *, listens: bool
) -> None:
    listen = ("--listen-dsn", dsn) if listens else ()
    process = python_process("-m", "fencepost_server.cli", "serve", "--dsn", dsn, *listen, *FREE_PORTS)
    process.wait_logged("fencepost serves" if listens else "no listen_dsn is set")
    assert process.terminate() == 0
    assert process.logs.count("no listen_dsn is set") == (0 if listens else 1)


def test_serve_can_bring_the_schema_up_to_date_first(python_process: Callable[..., Process], fresh_dsn: str) -> None:
    process = python_process(
        *("-m", "fencepost_server.cli", "serve", "--migrate", "--dsn", fresh_dsn, *FREE_PORTS, "--log-format", "json")
    )
    process.wait_event("serving")
    assert "applied 0001" in process.logs
    assert process.terminate() == 0


def test_migrate_tells_what_it_applied_and_then_that_all_is_up_to_date(fresh_dsn: str) -> None:
    first = run("migrate", "--dsn", fresh_dsn)
    assert (first.code, first.err) == (0, "")
    assert first.out.startswith("applied 0001")
    second = run("migrate", FENCEPOST_DSN=fresh_dsn)
    assert (second.code, second.out, second.err) == (0, "up to date\n", "")


def test_an_old_schema_says_what_to_run(fresh_dsn: str) -> None:
    error = run("serve", "--dsn", fresh_dsn, *FREE_PORTS).error
    assert error.startswith("fencepost: SCHEMA_VERSION_MISMATCH: ")
    assert "run `fencepost migrate`" in error
    assert error.count("\n") == 1


def test_a_newer_schema_says_so(new_database: Callable[..., str]) -> None:
    dsn = new_database(migrated=True)
    execute(dsn, "insert into schema_migration (version, name, checksum) values (9999, '9999_later.sql', '')")
    for command in (("serve", *FREE_PORTS), ("migrate",), ("restore-epoch", "--yes")):
        result = run(*command, "--dsn", dsn)
        assert result.code == 1
        assert result.error.startswith("fencepost: SCHEMA_VERSION_MISMATCH: ")
        assert "newer than this release" in result.error


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port"])
def test_a_port_in_use_is_one_line(dsn: str, option: str) -> None:
    with taken_port() as port:
        result = run("serve", "--dsn", dsn, *FREE_PORTS, option, port, "--log-level", "warning")
    assert result.code == 1
    assert result.error == f"fencepost: can't listen on 127.0.0.1:{port}: is the port in use?\n"


@pytest.mark.parametrize("command", [("serve",), ("migrate",), ("restore-epoch", "--yes")])
def test_a_database_that_is_away_is_one_line(command: tuple[str, ...]) -> None:
    away = run(*command, "--dsn", "postgresql://postgres@127.0.0.1:1/postgres")
    assert away.code == 1
    assert "the database can't be reached: " in away.error
    assert away.error.count("\n") == 1


def test_a_connection_string_that_is_none_is_one_line_and_its_lack_is_wrong_usage() -> None:
    for command in ("serve", "migrate"):
        broken = run(command, "--dsn", "no connection string")
        assert broken.code == 1
        assert broken.error.startswith("fencepost: the connection string can't be used: ")
        assert broken.error.count("\n") == 1
        assert run(command).code == 2


def test_all_faults_of_settings_are_told_at_once() -> None:
    result = run("serve", "--grpc-port", "x", "--lanes", "0", FENCEPOST_HTTP_PORT="70000", FENCEPOST_NONE="1")
    assert result.code == 2
    lines = result.error.splitlines()
    assert lines[0] == "fencepost: wrong settings:"
    for words in ("--grpc-port: 'x'", "--lanes: 0", "http_port: 70000", "FENCEPOST_NONE: "):
        assert any(words in line for line in lines[1:]), words


def test_debug_shows_the_traceback_wherever_it_stands(fresh_dsn: str) -> None:
    for arguments in (("--debug", "serve"), ("serve", "--debug")):
        result = run(*arguments, "--dsn", fresh_dsn, *FREE_PORTS)
        assert result.code == 1
        assert "Traceback" in result.err
        assert "SCHEMA_VERSION_MISMATCH" in result.err.splitlines()[-1]


async def test_restore_epoch_makes_later_tokens_larger_than_all_before_I3(
    server: InProcessServer, fencepost: Program, dsn: str, api: Api, connect_worker: Callable[..., Awaitable[RawWorker]]
) -> None:
    await api.register(manifest(1))
    worker = await connect_worker(server.grpc_address)
    await api.start()
    before = (await worker.task()).task.fencing_token
    refused = await fencepost("restore-epoch", "--dsn", dsn)
    assert refused.code == 2
    assert "restored" in refused.error
    raised = await fencepost("restore-epoch", "--dsn", dsn, "--yes")
    assert raised.code == 0
    epoch = int(raised.out.split()[3])
    await api.start()
    after = (await worker.task()).task.fencing_token
    assert before < epoch << 40 < after


def test_help_and_wrong_usage_are_quick_because_nothing_heavy_is_imported() -> None:
    code = """if True:
        import sys
        from fencepost_server.cli.faults import WrongUsage
        from fencepost_server.cli.program import make_program
        program = make_program()
        list(program.commands.values())
        try:
            program.main(["pause"])
        except WrongUsage:
            heavy = {'fencepost', 'grpc', 'google', 'msgspec', 'psycopg', 'rich', 'uvicorn'}
            print(sorted(heavy & set(sys.modules)))
    """
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert loaded.stdout.strip() == "[]"
    # Of what the server takes to import itself, because machines differ, and others may use this one, too.
    helped = min(processor_time(PROGRAM, "--help") for _ in range(3))
    served = processor_time(sys.executable, "-c", "import fencepost_server.app")
    assert helped < served / 2


def processor_time(*command: str | Path) -> float:
    """The seconds of a processor that a command takes."""
    before = os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=TIMEOUT, check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def test_the_version_is_told_and_nothing_at_all_prints_help() -> None:
    assert run("--version").out.startswith("fencepost 0.")
    alone = run()
    assert "restore-epoch" in alone.out + alone.err
    assert run("no-such-command").code == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("runs", "cancel"), "No such command 'cancel' here. There is: fencepost cancel\n"),
        (("history",), "No such command 'history' here. There is: fencepost runs history\n"),
        (("get", "x"), "There is: fencepost definitions get, fencepost runs get\n"),
        (("runs", "canel"), "No such command 'canel'.\n"),
        (("runs", "lst"), "Did you mean 'list'?"),
    ],
)
def test_a_command_in_the_wrong_place_is_told_the_right_one(words: tuple[str, ...], told: str) -> None:
    refused = run(*words)
    assert refused.code == 2
    assert told in refused.error


def test_the_module_is_the_same_program(python_process: Callable[..., Process]) -> None:
    process = python_process("-m", "fencepost_server.cli", "--version")
    assert process.wait() == 0
    assert process.logs == run("--version").out
