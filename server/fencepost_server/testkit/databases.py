"""Where the kit's databases come from: one PostgreSQL server for the process, in it a template, and copies of that.

The server is an embedded one with a folder of its own that goes with the process, or one that the caller has. All of
it lives in the kit's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import uuid
from pathlib import Path

from fencepost_server.embedded import EmbeddedPostgres
from fencepost_server.store import shifted_clock
from fencepost_server.store.errors import is_away
from fencepost_server.store.migrate import migrate

log = logging.getLogger("fencepost.testkit")


class Databases:
    """Makes databases on the server that ``admin_dsn`` names, or on an embedded one if that is ''."""

    def __init__(self, admin_dsn: str = "") -> None:
        self._admin_dsn = admin_dsn
        self._given = bool(admin_dsn)
        self._embedded: EmbeddedPostgres | None = None
        self._folder: Path | None = None
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
            if self._embedded is not None:
                self._embedded.__exit__(None, None, None)
                self._embedded = None
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

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
            await shifted_clock.hurry(self._admin_dsn)
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
        # The folder itself is for the server to go through when it runs as another user; what is in it is private.
        self._folder = Path(tempfile.mkdtemp(prefix="fencepost-testkit-")).resolve()
        self._folder.chmod(0o711)
        embedded = EmbeddedPostgres(self._folder / "postgres", log.info)
        embedded.__enter__()
        self._embedded = embedded
        return embedded.dsn
