"""The migrated database that a test gets is as the migrations have left it, whatever the test before has
done.
"""

from __future__ import annotations

import psycopg
import pytest

from tests.fixtures.tables import Tables
from tests.fixtures.waiting import wait_until


def connect(dsn: str) -> psycopg.Connection:
    return psycopg.connect(dsn, autocommit=True, connect_timeout=30)


@pytest.mark.parametrize("_again", [1, 2])
def test_what_a_test_does_to_its_database_is_gone_in_the_next_one(
    tables: Tables, request: pytest.FixtureRequest, _again: int
) -> None:
    with connect(tables.dsn) as connection:
        before = connection.execute("select clock_timestamp()").fetchone()
    assert before is not None
    with connect(request.getfixturevalue("dsn")) as connection:
        state = connection.execute("select epoch, hold_until < now(), last_pass_at > %s from cluster", before)
        assert state.fetchall() == [(0, True, True)], "as it was, and as if a server had just looked"
        assert connection.execute("select count(*) from server").fetchone() == (0,)
        connection.execute("update cluster set epoch = 7, hold_until = now() + interval '1 hour'")
        connection.execute("insert into server (server_id) values (gen_random_uuid())")


def test_the_migrations_are_recorded_in_a_cloned_database(dsn: str) -> None:
    with connect(dsn) as connection:
        versions = connection.execute("select version from schema_migration order by version").fetchall()
    assert [version for (version,) in versions] == list(range(1, len(versions) + 1))
    assert versions


def test_a_session_that_a_test_forgot_does_not_stay(dsn: str, request: pytest.FixtureRequest) -> None:
    forgotten = connect(dsn)
    forgotten.execute("begin")
    forgotten.execute("lock table cluster in access exclusive mode")
    request.getfixturevalue("tables").reset()
    wait_until(lambda: _is_dead(forgotten))
    forgotten.close()


def _is_dead(connection: psycopg.Connection) -> bool:
    try:
        connection.execute("select 1")
    except psycopg.OperationalError:
        return True
    return False
