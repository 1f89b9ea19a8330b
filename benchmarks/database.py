"""The PostgreSQL server of a benchmark: the embedded wheel's, on a disk, with its default settings.

`fsync`, `synchronous_commit` and `full_page_writes` are read back from the running server, and a benchmark refuses
to measure without them: a figure that a power cut would undo is none.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import psycopg
from psycopg.conninfo import make_conninfo

from fencepost_server.embedded import EmbeddedPostgres

PREFIX = "fencepost-bench-"
DURABLE = ("fsync", "synchronous_commit", "full_page_writes")
_SHOWN = (*DURABLE, "wal_level", "wal_sync_method", "shared_buffers", "max_wal_size", "checkpoint_timeout")
# Settings that say where it is and what it is called; they change nothing.
_PLACES = frozenset(
    {"cluster_name", "config_file", "data_directory", "hba_file", "ident_file", "port", "unix_socket_directories"}
)
_MEMORY = frozenset({"tmpfs", "ramfs"})
_SYNCS = 50
_SYNC_BYTES = 8192


class NotDurable(Exception):
    """The database would lose what it has committed."""


def filesystem(path: Path) -> str:
    """The type of the file system that holds ``path``, "unknown" if the machine does not tell."""
    path = path.resolve()
    mounts = {Path(entry.mountpoint): entry.fstype for entry in psutil.disk_partitions(all=True)}
    return next((mounts[place] for place in (path, *path.parents) if place in mounts), "unknown")


def sync_seconds(folder: Path) -> float:
    """How long the disk under ``folder`` takes to make one page durable: the median of some `fdatasync`."""
    took = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_SYNCS):
            file.write(os.urandom(_SYNC_BYTES))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def make_folder() -> Path:
    """A new folder that PostgreSQL's user can reach: in TMPDIR, or in /var/tmp if only that is on a disk."""
    own = Path(tempfile.gettempdir())
    places = [place for place in (own, Path("/var/tmp")) if _reachable(place)] or [own]
    place = next((place for place in places if filesystem(place) not in _MEMORY), places[0])
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    folder.chmod(0o711)
    return folder


def _reachable(place: Path) -> bool:
    """Whether the user that PostgreSQL runs as, who is not root, can enter the folder."""
    place = place.resolve()
    return place.is_dir() and (
        os.geteuid() != 0 or all(folder.stat().st_mode & stat.S_IXOTH for folder in (place, *place.parents))
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """What the database itself is. ``changed`` are the settings that are not PostgreSQL's defaults."""

    version: str
    settings: Mapping[str, str]
    changed: Mapping[str, str]
    filesystem: str
    fdatasync_ms: float

    @property
    def in_memory(self) -> bool:
        """Whether the data is on no disk, so that a sync costs nothing."""
        return self.filesystem in _MEMORY

    def as_json(self) -> dict[str, Any]:
        """For the result."""
        return {
            "settings": dict(self.settings),
            "changed_settings": dict(self.changed),
            "filesystem": self.filesystem,
            "in_memory": self.in_memory,
            "fdatasync_ms": round(self.fdatasync_ms, 3),
        }


class Postgres:
    """One running server in a folder of its own, for a ``with`` block. Entering raises EmbeddedFailed."""

    def __init__(self) -> None:
        self.folder = make_folder()
        self._server = EmbeddedPostgres(self.folder / "postgres")
        self._numbers = itertools.count(1)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            stack.enter_context(self._server)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        return int((self._server.data / "postmaster.pid").read_text().split("\n", 1)[0])

    def create(self) -> tuple[str, str]:
        """Create an empty database; returns its name and its connection string."""
        name = f"bench_{next(self._numbers)}"
        self._execute(f"create database {name}")
        return name, make_conninfo(self._server.dsn, dbname=name)

    def drop(self, name: str) -> None:
        """Drop a database, whoever is connected to it."""
        self._execute(f"drop database if exists {name} with (force)")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self._server.dsn, autocommit=True, connect_timeout=10) as connection:
            connection.execute(statement.encode())

    @property
    def log(self) -> Path:
        """Its log file."""
        return self._server.folder / "postgres.log"

    def facts(self) -> Facts:
        """Read back what runs. Raises NotDurable unless commits are."""
        with psycopg.connect(self._server.dsn, autocommit=True, connect_timeout=10) as connection:
            rows = connection.execute(
                "select name, current_setting(name), source = 'command line' from pg_settings"
            ).fetchall()
            version = connection.execute("show server_version").fetchone()
        settings = {name: value for name, value, _ in rows}
        if off := [name for name in DURABLE if settings[name] != "on"]:
            raise NotDurable(f"the database runs without {', '.join(off)}")
        ours = {name for name, _, changed in rows if changed} - _PLACES
        return Facts(
            version=str(version[0]) if version else "",
            settings={name: settings[name] for name in _SHOWN},
            changed={name: settings[name] for name in sorted(ours)},
            filesystem=filesystem(self.folder),
            fdatasync_ms=sync_seconds(self.folder) * 1000,
        )
