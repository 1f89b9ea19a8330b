"""The volume of the database runs full, under load: a stage of its own, on a small file system in memory.

Mounting one needs the right to; where it is not given, this is left out, and the report says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg

from tests.faults.scene import fetch
from tests.faults.soak.faults import Act, Fault, touched
from tests.faults.soak.report import Report
from tests.faults.soak.soaking import soak
from tests.faults.soak.stage import Stage, stage
from tests.fixtures.waiting import eventually, paced

SIZE = 400 << 20
FULL = 6.0
TIMES, EVERY = 2, 12.0
PIECE = 1 << 20
_TABLE = "create table no_room as select repeat('x', 1000) from generate_series(1, 4096)"
"""Four times what `fill` tries to take at once."""
LEFT_OUT = "left out: nothing may be mounted here"
SETTINGS = {"min_wal_size": "32MB", "max_wal_size": "64MB"}


@contextlib.contextmanager
def small_volume(size: int) -> Iterator[Path | None]:
    """A folder that holds no more than ``size`` bytes; None where that can't be had."""
    with tempfile.TemporaryDirectory(prefix="fencepost-volume-") as folder:
        path = Path(folder)
        path.chmod(0o711)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0711", "tmpfs", folder]
        try:
            mounted = subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
        except OSError:
            mounted = False
        if not mounted:
            yield None
            return
        try:
            yield path
        finally:
            subprocess.run(["umount", folder], timeout=30, check=True)


def fill(path: Path) -> None:
    """Take all the room that there is."""
    with path.open("ab", buffering=0) as file:
        size = PIECE
        while size:
            try:
                file.write(os.urandom(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2


async def fill_disk(played: Stage, fault: Fault) -> None:
    """No room for some seconds, whatever is deleted meanwhile; then there is, and a database that has ended is started
    again.
    """
    filler = played.postgres.folder / "filler"
    end = asyncio.get_running_loop().time() + FULL
    refused = False
    while asyncio.get_running_loop().time() < end:
        await asyncio.to_thread(fill, filler)
        refused = refused or await _refuses(played)
        await paced(0.1)
    filler.unlink()
    assert refused, "the database had room all the time"
    await eventually(lambda: _has_recovered(played), 60.0, interval=0.1)


async def _refuses(played: Stage) -> bool:
    """Whether the database takes nothing more: it says that there is no room, or has ended for want of it."""
    try:
        await fetch(played.dsn, _TABLE)
    except psycopg.OperationalError:  # DiskFull is one
        return True
    await fetch(played.dsn, "drop table no_room")
    return False


async def _has_recovered(played: Stage) -> bool:
    """Whether it answers; it may first end, because it could not recover while there was no room."""
    if not played.postgres.running:
        await asyncio.to_thread(played.postgres.start)
    try:
        await fetch(played.dsn, "select 1")
    except psycopg.OperationalError:
        return False
    return True


ACTS: Mapping[str, Act] = {"fill disk": fill_disk}


async def disk_full(seed: int) -> Report | None:
    """A short soak in which nothing else happens than that the volume runs full, twice; None if it can't be done."""
    with small_volume(SIZE) as volume:
        if volume is None:
            return None
        async with stage(data=volume / "postgres", postgres=SETTINGS) as played:
            plan = [Fault("fill disk", 0, number, touched("fill disk", 0)) for number in range(TIMES)]
            return await soak(played, seed, plan, EVERY, acts=ACTS)
