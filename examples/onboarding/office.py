"""What onboarding acts upon: accounts, laptops and mail, as rows of one SQLite file.

A step may run more than once, so every deed brings the idempotency key of its step: the second time it changes nothing.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from fencepost import StepContext

_TABLE = """
create table if not exists deed_of_run (
    key text primary key, run text not null, person text not null, what text not null
)
"""


class Office:
    """The deeds of one file. Steps use the one that `open` was given last; from any thread."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def open(self, path: Path) -> None:
        """Keep deeds in this file from now on."""
        self._path = path

    def do(self, ctx: StepContext, person: str, what: str) -> None:
        """Do something for somebody, if this step has not done it before."""
        values = (ctx.idempotency_key, ctx.run_id, person, what)
        with closing(self._connect()) as db, db:
            db.execute("insert or ignore into deed_of_run values (?, ?, ?, ?)", values)

    def deeds(self, run_id: str, person: str) -> list[str]:
        """All that one run did for somebody, in order. The file has the deeds of all runs, for days and restarts."""
        query = "select what from deed_of_run where run = ? and person = ? order by rowid"
        with closing(self._connect()) as db:
            return [what for (what,) in db.execute(query, (run_id, person))]

    def _connect(self) -> sqlite3.Connection:
        if self._path is None:
            raise RuntimeError("no office was opened")
        db = sqlite3.connect(self._path, timeout=10)
        db.execute(_TABLE)
        return db


office = Office()
