"""What servers of a test's event loop ask of the database: the statements of each transaction, and its round trips."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import pytest

from fencepost_server import store
from fencepost_server.store import pipeline
from fencepost_server.store.queries import statements

ENDS = ["batch.begin", "batch.prelude", "batch.commit"]


@cache
def _names() -> dict[bytes, str]:
    """Statements by their text: ``task.claim``."""
    stems = [file.name.removesuffix(".sql") for file in (files(store) / "sql").iterdir()]
    return {text: f"{stem}.{name}" for stem in stems for name, text in statements(stem).items()}


@dataclass(slots=True)
class Transaction:
    """``statements`` by name, without those of its beginning and end. ``trips``: its end is one."""

    statements: list[str] = field(default_factory=list)
    trips: int = 1


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[list[Transaction]]:
    """The transactions that begin within the block, but for those that only tell or look (cluster.sql)."""
    by_session: dict[Any, Transaction] = {}
    found: list[Transaction] = []
    send, sync = pipeline.Session.send, pipeline.Session.sync

    def sending(self: Any, statement: bytes, params: Any = None) -> Any:
        name = _names()[statement]
        if name == "batch.begin":
            by_session[self] = Transaction()
        elif self in by_session and name not in ENDS:
            by_session[self].statements.append(name)
        return send(self, statement, params)

    async def syncing(self: Any) -> Any:
        if self in by_session:
            by_session[self].trips += 1
        return await sync(self)

    with patch.context() as inner:
        inner.setattr(pipeline.Session, "send", sending)
        inner.setattr(pipeline.Session, "sync", syncing)
        yield found
    found += [one for one in by_session.values() if not all(name.startswith("cluster.") for name in one.statements)]
