"""Where the kit's databases come from: one PostgreSQL server for the process, in it a template, and copies of that.

The server is an embedded one with a folder of its own that goes with the process, or one that the caller has. All of
it lives in the kit's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from fencepost_server.embedded import EmbeddedPostgres
from fencepost_server.store import shifted_clock
from fencepost_server.store.errors import is_away
from fencepost_server.store.migrate import migrate

_FOLDER = "fencepost-testkit-"
_YOUNG = 60.0  # seconds in which a folder may not have its lock yet

log = logging.getLogger("fencepost.testkit")


class Databases:
    """Makes databases on the server that ``admin_dsn`` names, or on an embedded one if that is ''."""

    def __init__(self, admin_dsn: str = "") -> None:
        self._admin_dsn = admin_dsn
        self._given = bool(admin_dsn)
        self._embedded = contextlib.ExitStack()
        self._template = ""
        self._lock = asyncio.Lock()
        self._process = f"{os.getpid()}_{uuid.uuid4().hex[:8]}"
        self._number = 0

    async def make(self) -> tuple[str, str]:
        """A new database. Returns its name, and how a server connects to it.

        The first call starts the server, if it is to be an embedded one, and makes the template: about two seconds.
        """
        async with self._lock:
            if not self._template:
                await self._prepare()
        self._number += 1
        name = f"{shifted_clock.PREFIX}{self._process}_{self._number}"
        await shifted_clock.create(self._admin_dsn, name, self._template)
        return name, shifted_clock.dsn_of(self._admin_dsn, name)

    def plain_dsn(self, name: str) -> str:
        """How people connect to it."""
        return shifted_clock.plain_dsn(self._admin_dsn, name)

    async def drop(self, name: str) -> None:
        """Drop a database that `make` has made."""
        await shifted_clock.drop(self._admin_dsn, name)

    async def close(self) -> None:
        """Drop the template, and end the embedded server."""
        try:
            if self._template and self._given:
                await self._drop_template()
        finally:
            self._template = ""
            self._embedded.close()

    async def _drop_template(self) -> None:
        try:
            await shifted_clock.drop(self._admin_dsn, self._template)
        except Exception as error:
            if not is_away(error):
                raise
            log.debug("the template %s is left, for its server has gone: %s", self._template, error)

    async def _prepare(self) -> None:
        if not self._admin_dsn:
            self._admin_dsn = self._start_embedded()
        template = f"{shifted_clock.PREFIX}{self._process}_template"
        await shifted_clock.create(self._admin_dsn, template)
        try:
            await migrate(shifted_clock.plain_dsn(self._admin_dsn, template))
            await shifted_clock.install(self._admin_dsn, template)
            await shifted_clock.seal(self._admin_dsn, template)
        except BaseException:
            await shifted_clock.drop(self._admin_dsn, template)
            raise
        self._template = template

    def _start_embedded(self) -> str:
        """Start PostgreSQL in a folder that goes with it. This is the thread that it lives as long as."""
        _remove_leftovers()
        with contextlib.ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix=_FOLDER)).resolve()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(_owned(folder))
            # For the server to go through when it runs as another user; what is in it is private.
            folder.chmod(0o711)
            embedded = stack.enter_context(EmbeddedPostgres(folder / "postgres", log.info, throwaway=True))
            self._embedded = stack.pop_all()
        return embedded.dsn


def _remove_leftovers() -> None:
    """Remove the folders of processes that were killed; their servers have ended with them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):  # somebody else's, or another process removes it just now
            found = folder.stat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _YOUNG:
                with _owned(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Keep others from removing a folder. Raises BlockingIOError if somebody keeps it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
