"""The databases of the plans: built once for all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from tests.plans.rows import build, opened


@pytest.fixture(scope="session")
def databases(cluster: Any, template: str) -> Iterator[dict[str, psycopg.Connection[Any]]]:
    """Twice the same rows, in tables that were analyzed when they were ``full``; or while they were ``empty``, and not
    again.
    """
    names = {how: f"{cluster.prefix}plans_{how}_{os.getpid()}" for how in ("empty", "full")}
    try:
        build(cluster.create(names["empty"], template))
        cluster.create(names["full"], names["empty"])
        with ExitStack() as stack:
            connections = {how: stack.enter_context(opened(cluster.dsn(name))) for how, name in names.items()}
            connections["full"].execute("vacuum analyze")
            yield connections
    finally:
        for name in names.values():
            cluster.drop(name)
