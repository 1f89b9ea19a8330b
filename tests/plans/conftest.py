"""The databases of the plans: built once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.plans.rows import built


@pytest.fixture(scope="session")
def connection(cluster: Any, template: str) -> Iterator[psycopg.Connection[Any]]:
    """A database of 50,000 runs and all that they may have, analyzed."""
    with built(cluster, template, "plans") as connection:
        connection.execute("vacuum analyze")
        yield connection


@pytest.fixture(scope="session")
def grown(cluster: Any, template: str) -> Iterator[psycopg.Connection[Any]]:
    """The same, but it was analyzed while it was empty, and not again."""
    with built(cluster, template, "grown", autovacuum=False) as connection:
        yield connection
