"""The ledger of the Northwind example and a folder for its demo; servers with time that skips for the workflows."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from examples.northwind import steps
from examples.northwind.books import fill
from examples.northwind.dataset import Dataset, load
from tests.examples.orders import ORDERS, fulfil
from tests.testing_kit.conftest import env, kit_database, patient_watchdog, start

__all__ = ["env", "kit_database", "patient_watchdog", "start"]


@pytest.fixture
def dataset() -> Dataset:
    return load(ORDERS)


@pytest.fixture
def ledger(fresh_dsn: str, dataset: Dataset) -> Iterator[psycopg.Connection]:
    """The example's ledger in a database of its own; steps that the test calls write to it."""
    with psycopg.connect(fresh_dsn, autocommit=True) as db:
        fill(db, dataset)
        with steps.ledger.connected(fresh_dsn, worker="test", connections=2):
            yield db


@pytest.fixture
def fulfilled(ledger: psycopg.Connection, dataset: Dataset) -> psycopg.Connection:
    """The ledger after all orders."""
    for order in dataset.orders:
        fulfil(order)
    return ledger


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for the demo's files, which PostgreSQL's user can enter if the tests run as root."""
    folder = Path(tempfile.mkdtemp(prefix="northwind-test-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)
