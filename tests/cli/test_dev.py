"""`fencepost dev`: started, ended by all kinds of signals, and started again on the same folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from fencepost_server import embedded
from fencepost_server.embedded import EmbeddedFailed, EmbeddedPostgres
from fencepost_server.leash import leashed
from tests.cli.program import PROGRAM, run
from tests.fixtures.manifests import manifest
from tests.fixtures.processes import START_TIMEOUT, STOP_TIMEOUT, Process
from tests.fixtures.waiting import wait_until

FREE = ("--grpc-port", "0", "--http-port", "0")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user for PostgreSQL")


class Dev(Process):
    """`fencepost dev` on a folder, with free ports."""

    def __init__(self, folder: Path, log: Path, *arguments: str) -> None:
        self.folder = folder
        self.address = ""
        ports = (*FREE, "--log-format", "json")
        super().__init__([str(PROGRAM), "dev", "--data-dir", str(folder), *ports, *arguments], log)

    def wait_serving(self) -> Dev:
        """Wait until it serves."""
        self.address = f"127.0.0.1:{self.wait_event('serving')['grpc_port']}"
        return self

    @property
    def dsn(self) -> str:
        """That of its database."""
        return str(self.wait_event("database")["dsn"])

    @property
    def postmaster(self) -> psutil.Process:
        """Its PostgreSQL."""
        return psutil.Process(int((self.folder / "data" / "postmaster.pid").read_text().split("\n")[0]))

    def ask(self, *arguments: str, stdin: str = "") -> Any:
        """Run a client command and return the document that it prints."""
        return run(*arguments, "--json", "--address", self.address, stdin=stdin).document


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def is_ready(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return "ready" in (folder / "data" / "postmaster.pid").read_text()
    return False


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that is not there yet, below one that PostgreSQL's user can enter."""
    parent = Path(tempfile.mkdtemp(prefix="fencepost-dev-test-"))
    parent.chmod(0o755)
    yield parent / "data-dir"
    shutil.rmtree(parent)


@pytest.fixture
def dev(folder: Path, tmp_path: Path, adopt: Callable[[Process], None]) -> Iterator[Callable[..., Dev]]:
    """Starts `fencepost dev`; its PostgreSQL has ended, too, at the test's end."""
    started: list[Dev] = []

    def start(*arguments: str, folder: Path = folder, wait: bool = True) -> Dev:
        process = Dev(folder, tmp_path / f"dev-{len(started)}.log", *arguments)
        started.append(process)
        adopt(process)
        process.start()
        return process.wait_serving() if wait else process

    yield start
    for process in started:
        if process.running:
            process.terminate()
    with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess, IndexError):
        postmaster = started[0].postmaster
        wait_until(lambda: has_ended(postmaster), 30)


def write(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("create table kept as select 42 as answer")


def is_kept(dsn: str) -> bool:
    with psycopg.connect(dsn) as connection:
        return connection.execute("select answer from kept").fetchone() == (42,)


def test_one_command_gives_a_server_and_sigterm_ends_all_of_it(dev: Callable[..., Dev], folder: Path) -> None:
    process = dev()
    assert process.ask("definitions", "register", "-", stdin=manifest())["created"] is True
    run_id = process.ask("runs", "start", "wf")["run_id"]
    with psycopg.connect(process.dsn) as connection:
        settings = "select current_setting('fsync'), current_setting('listen_addresses')"
        assert connection.execute(settings).fetchone() == ("on", "")
    postmaster = process.postmaster
    assert process.terminate() == 0
    assert has_ended(postmaster)
    assert not (folder / "data" / "postmaster.pid").exists()
    again = dev()
    assert again.ask("runs", "get", run_id)["state"] == "PENDING"
    again.signal(signal.SIGINT)
    assert again.wait() == 0


def test_a_terminal_that_is_closed_ends_all_of_it(dev: Callable[..., Dev], folder: Path) -> None:
    process = dev()
    process.signal(signal.SIGHUP)
    assert process.wait() == 0
    assert not (folder / "data" / "postmaster.pid").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells programs of their parent's death")
def test_a_kill_takes_postgres_along_and_loses_nothing(dev: Callable[..., Dev]) -> None:
    process = dev()
    write(process.dsn)
    postmaster = process.postmaster
    process.signal(signal.SIGKILL)
    process.wait()
    again = dev()  # at once: it waits for the former PostgreSQL
    assert has_ended(postmaster)
    assert is_kept(again.dsn)


def test_a_kill_of_everything_at_once_loses_nothing(dev: Callable[..., Dev]) -> None:
    process = dev()
    write(process.dsn)
    process.kill()
    assert is_kept(dev().dsn)


def test_a_start_that_was_killed_in_the_middle_is_made_up_for(dev: Callable[..., Dev], folder: Path) -> None:
    place = folder
    for n in range(5):  # the first is enough, unless it comes through before the kill
        place = folder.with_name(f"data-dir-{n}")
        process = dev(folder=place, wait=False)
        wait_until((place / "data.new" / "base").exists, START_TIMEOUT)
        process.kill()
        if not (place / "data").exists():
            break
    assert not (place / "data").exists()
    with EmbeddedPostgres(place) as server:
        write(server.dsn)
    assert not (place / "data.new").exists()


def test_a_pid_that_is_somebody_elses_by_now_is_no_obstacle(folder: Path) -> None:
    pid_file = folder / "data" / "postmaster.pid"
    with EmbeddedPostgres(folder) as server:
        write(server.dsn)
        content = pid_file.read_text()
    assert not pid_file.exists()
    pid_file.write_text(content.replace(content.split("\n")[0], str(os.getpid()), 1))
    (folder / "data" / ".s.PGSQL.5432.lock").write_text(pid_file.read_text())
    with EmbeddedPostgres(folder) as server:
        assert is_kept(server.dsn)


def test_a_postgres_that_an_earlier_dev_left_is_ended_and_a_foreign_one_is_not(folder: Path) -> None:
    pid_file = folder / "data" / "postmaster.pid"
    with EmbeddedPostgres(folder):
        command = psutil.Process(int(pid_file.read_text().split("\n")[0])).cmdline()
    found = (folder / "data").stat()
    user = (found.st_uid, found.st_gid) if os.geteuid() == 0 else None

    def start(words: list[str]) -> subprocess.Popen[bytes]:
        server = subprocess.Popen(leashed(words, user=user), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: is_ready(folder), 30)
        return server

    foreign = start([word.replace("cluster_name=fencepost-dev", "cluster_name=other") for word in command])
    with pytest.raises(EmbeddedFailed, match=rf"\(pid {foreign.pid}\) runs on {folder}/data: stop it first"):
        EmbeddedPostgres(folder).__enter__()
    assert foreign.poll() is None
    foreign.send_signal(signal.SIGINT)
    assert foreign.wait(STOP_TIMEOUT) == 0
    left = start(command)
    told: list[str] = []
    with EmbeddedPostgres(folder, told.append):
        assert left.wait(STOP_TIMEOUT) == 0
    assert any("left by an earlier" in sentence for sentence in told)


def test_a_second_dev_on_the_folder_says_who_has_it(folder: Path) -> None:
    with EmbeddedPostgres(folder) as server:
        server.note(address="127.0.0.1:7654")
        refused = run("dev", *FREE, "--data-dir", str(folder))
    assert refused.code == 1
    assert refused.error == (
        f"fencepost: {folder} is in use by another `fencepost dev` (pid {os.getpid()}), "
        "which serves on 127.0.0.1:7654\n"
    )


class _Enough(Exception):
    """Ends a start."""


def test_who_has_the_folder_is_told_while_it_starts_as_well(folder: Path) -> None:
    def amid_the_start() -> None:
        with pytest.raises(EmbeddedFailed, match=rf"in use by another `fencepost dev` \(pid {os.getpid()}\)"):
            EmbeddedPostgres(folder).__enter__()
        raise _Enough

    with pytest.raises(_Enough):
        EmbeddedPostgres(folder, check=amid_the_start).__enter__()


@pytest.mark.parametrize("taken", ["--grpc-port", "--http-port"])
def test_a_port_in_use_is_told_before_anything_is_made(folder: Path, taken: str) -> None:
    other = {"--grpc-port": "--http-port", "--http-port": "--grpc-port"}[taken]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        result = run("dev", "--data-dir", str(folder), taken, port, other, "0")
    assert result.code == 1
    assert result.error == f"fencepost: can't listen on 127.0.0.1:{port}: is the port in use?\n"
    assert [entry.name for entry in folder.iterdir()] == ["fencepost-dev.lock"]


def test_a_postgres_that_ends_by_itself_ends_the_rest(dev: Callable[..., Dev]) -> None:
    process = dev("--shutdown-grace", "1")
    process.postmaster.send_signal(signal.SIGINT)
    assert process.wait() == 1
    assert "PostgreSQL has ended" in process.logs
    assert "database system is shut down" in process.logs
    assert "Traceback" not in process.logs


def test_people_are_told_how_to_go_on(folder: Path, tmp_path: Path, adopt: Callable[[Process], None]) -> None:
    process = Process([str(PROGRAM), "dev", "--data-dir", str(folder), *FREE], tmp_path / "dev.log")
    adopt(process)
    process.start()
    process.wait_logged("runs list")
    for words in ("Ctrl-C ends it", "export FENCEPOST_ADDRESS=127.0.0.1:", "definitions register", "psql", str(folder)):
        assert words in process.logs
    if os.geteuid() == 0:
        assert "runs as the user nobody" in process.logs
    assert process.terminate() == 0


@as_root
def test_for_root_postgres_owns_its_data_only_and_no_folder_is_opened(dev: Callable[..., Dev], folder: Path) -> None:
    process = dev()
    assert process.postmaster.username() == "nobody"
    assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (0, 0o755)
    assert stat.S_IMODE((folder / "data").stat().st_mode) == 0o700
    made = {entry.name: entry.stat().st_uid for entry in folder.iterdir()}
    # A copy of the programs is there if `nobody` can't reach the installed ones, as in a private clone.
    copies = {name for name in made if name.startswith("postgresql-")}
    assert made.keys() - copies == {"data", "fencepost-dev.lock", "postgres.log"}
    assert {name for name, owner in made.items() if owner != 0} == {"data"}


@as_root
def test_for_root_a_folder_below_a_private_one_is_refused_and_stays_private(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    result = run("dev", *FREE, "--data-dir", str(folder / "sub" / "data"))
    assert result.code == 1
    assert f"the user nobody can't enter {folder}" in result.error
    assert "/var/lib/fencepost" in result.error
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.fixture
def private_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is installed where only root can reach it."""
    package, version = embedded.installed()
    private = folder.parent / "private"
    shutil.copytree(package, private / package.name, symlinks=True)
    shutil.copytree(package.with_name(f"{package.name}.libs"), private / f"{package.name}.libs")
    private.chmod(0o700)
    monkeypatch.setattr(embedded, "installed", lambda: (private / package.name, version))


@as_root
@pytest.mark.usefixtures("private_programs")
def test_for_root_programs_that_its_user_can_not_reach_are_copied(folder: Path) -> None:
    told: list[str] = []
    with EmbeddedPostgres(folder, told.append) as server:
        assert server.psql.is_relative_to(folder)
        assert any("copying PostgreSQL" in sentence for sentence in told)
    assert not server.running


@as_root
@pytest.mark.usefixtures("private_programs")
def test_for_root_programs_are_copied_elsewhere_if_they_can_not_be_in_such_a_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quoted = folder / 'a "b" $HOME'
    with EmbeddedPostgres(quoted) as server:
        assert not server.psql.is_relative_to(quoted)
        place = server.psql
        assert place.exists()
    assert not place.exists(), "the copy goes with its server"
    private = folder.parent / "private"
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    with pytest.raises(EmbeddedFailed, match="choose another --data-dir, or set TMPDIR"):
        EmbeddedPostgres(quoted).__enter__()
    assert not list(private.glob("fencepost-programs-*"))


def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    result = run("dev", *FREE, "--data-dir", str(folder))
    assert result.code == 1
    assert "is neither empty nor a folder of `fencepost dev`" in result.error
    assert [entry.name for entry in folder.iterdir()] == ["thesis.txt"]


def test_a_folder_that_is_nowhere_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for folder in ("~nobody-of-this-name/data", str(circle)):
        with pytest.raises(EmbeddedFailed, match="can't be used: "):
            EmbeddedPostgres(Path(folder))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for name in ("XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(EmbeddedFailed, match="no home to keep data in: choose a --data-dir"):
        embedded.default_folder()


def test_data_of_another_postgres_release_is_refused(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "fencepost-dev.lock").touch()
    (folder / "data" / "PG_VERSION").write_text("14\n")
    if os.geteuid() == 0:
        shutil.chown(folder / "data", "nobody")
    assert "is of PostgreSQL 14" in run("dev", *FREE, "--data-dir", str(folder)).error


def test_a_path_too_long_for_a_socket_gets_a_private_one_elsewhere(folder: Path) -> None:
    long = folder / ("x" * 60) / ("y" * 60)
    with EmbeddedPostgres(long) as server:
        with psycopg.connect(server.dsn) as connection:
            assert connection.execute("select 1").fetchone() == (1,)
        socket_folder = Path(server.dsn.partition("host=")[2])
        assert len(str(socket_folder)) < 60
        assert stat.S_IMODE(socket_folder.stat().st_mode) == 0o700
    assert not socket_folder.exists()


@pytest.mark.parametrize("name", ['a b "c"%20&d', "a,b"])
def test_a_path_with_signs_that_urls_and_settings_use_works(folder: Path, name: str) -> None:
    with EmbeddedPostgres(folder / name) as server, psycopg.connect(server.dsn) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_without_the_wheel_people_are_told_how_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with (
        pytest.raises(EmbeddedFailed, match=r"pip install \./worker_sdk/python '\./server\[dev\]'"),
        EmbeddedPostgres(folder),
    ):
        pass


def test_the_default_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    assert embedded.default_folder() == Path("/somewhere/fencepost")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", "/people/me")
    assert embedded.default_folder() == Path("/people/me/.local/share/fencepost")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert embedded.default_folder() == Path("/var/lib/fencepost")
