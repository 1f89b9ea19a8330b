"""What onboarding acts upon: accounts, laptops and mail, as rows of one SQLite file.

A step may run more than once, so every deed brings the idempotency key of its step: the second time it changes nothing.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from fencepost import StepContext

_TABLE = "create table if not exists deed (key text primary key, person text not null, what text not null)"


class Office:
    """The deeds of one file. Steps use the one that `open` was given last; from any thread."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def open(self, path: Path) -> None:
        """Keep deeds in this file from now on."""
        self._path = path

    def do(self, ctx: StepContext, person: str, what: str) -> None:
        """Do something for somebody, if this step has not done it before."""
        with closing(self._connect()) as db, db:
            db.execute("insert or ignore into deed values (?, ?, ?)", (ctx.idempotency_key, person, what))

    def deeds(self, person: str) -> list[str]:
        """All that was done for somebody, in order."""
        with closing(self._connect()) as db:
            return [what for (what,) in db.execute("select what from deed where person = ? order by rowid", (person,))]

    def _connect(self) -> sqlite3.Connection:
        if self._path is None:
            raise RuntimeError("no office was opened")
        db = sqlite3.connect(self._path, timeout=10)
        db.execute(_TABLE)
        return db


office = Office()
