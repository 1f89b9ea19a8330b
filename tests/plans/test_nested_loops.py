"""Plans without any join but loops: what the planner takes when it believes that few rows will come."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from fencepost_server.domain.model import PARKED_UNTIL
from fencepost_server.store import arrays
from fencepost_server.store.arrays import Uuids
from fencepost_server.store.queries import query
from tests.plans.planned import explained, passed_on, prelude, walk
from tests.plans.rows import NOW

RUN = str(uuid.UUID(int=7))
WAITS = 2000
TOLD = 1000
"""Pairs that one decision is told of."""
BUILD = """
insert into wait (run_id, seq, name, place) select %(run)s, n, 'go', '{}' from generate_series(1, %(waits)s) n;
insert into signal (run_id, seq, name, size) select %(run)s, %(waits)s + n, 'go', 1
from generate_series(1, %(waits)s) n;
"""


@pytest.mark.parametrize("generic", [False, True], ids=["for-its-parameters", "for-all"])
def test_matches_of_a_pause_are_no_loop_in_a_loop(new_database: Callable[..., str], *, generic: bool) -> None:
    """I12: each wait and each signal is read once and passes some nodes. Both sides numbered and joined in a loop are
    millions.
    """
    with psycopg.connect(new_database(migrated=True), autocommit=True) as connection:
        arrays.register(connection)  # type: ignore[arg-type]  # adapters are the same for both kinds
        for part in BUILD.split(";\n")[:-1]:
            connection.execute(part, {"run": RUN, "waits": WAITS})
        with connection.transaction(force_rollback=True):
            prelude(connection)
            connection.execute("set local enable_hashjoin = off")
            connection.execute("set local enable_mergejoin = off")
            asked: dict[str, Any] = {"a": Uuids([RUN]), "until": PARKED_UNTIL, "now": NOW}
            statement = query("extra", "matches")
            passed = passed_on(list(walk(explained(connection, statement, asked, generic=generic))))
            told = connection.execute(statement, asked).fetchall()
    assert [(wait, signal) for _, _, wait, _, _, signal, _ in told] == [(n, WAITS + n) for n in range(1, TOLD + 1)]
    assert passed <= 15 * 2 * WAITS
