"""The Northwind example: its data, its ledger, its reconciliation, and the whole demo as a process."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from examples.northwind import worker
from examples.northwind.books import Books, fill
from examples.northwind.dataset import Dataset, Line, Order, load
from examples.northwind.ledger import StaleToken
from examples.northwind.reconciliation import EFFECTS, Reconciliation, expected_totals, reconcile
from fencepost import PermanentError, Step, StepContext
from fencepost_server.domain.manifest import StepNode, parse_manifest
from fencepost_server.embedded import EmbeddedPostgres
from tests.fixtures.postgres_server import has_ended
from tests.fixtures.processes import Process
from tests.fixtures.waiting import until_blocked, wait_until

ORDERS = 12
MANIFEST = Path(worker.__file__).with_name("workflow.yaml")
LAST_LINE = re.compile(
    r"demo: (\d+) of (\d+) orders completed, (\d+) lines, net ([\d.]+), (\d+) lost, (\d+) repeated effects, "
    r"(\d+) steps in (\d+\.\d) s"
)


@pytest.fixture
def dataset() -> Dataset:
    return load(ORDERS)


@pytest.fixture
def ledger(fresh_dsn: str, dataset: Dataset) -> Iterator[psycopg.Connection]:
    """The example's ledger in a database of its own; steps that the test calls write to it."""
    with psycopg.connect(fresh_dsn, autocommit=True) as db:
        fill(db, dataset)
        with worker.ledger.connected(fresh_dsn, worker="test", connections=2):
            yield db


def context(order: Order, step: str, token: int = 1) -> StepContext:
    key = f"{order.order_id}/{step}"
    return StepContext.for_test(node_id=step, idempotency_key=key, fencing_token=token)


def fulfil(order: Order) -> worker.Receipt:
    """Run all steps of an order, one after the other, as a workflow would."""
    checked = worker.validate(order, context(order, "validate"))
    priced = worker.price(checked, context(order, "price"))
    sale = worker.reserve(priced, context(order, "reserve"))
    sale = worker.charge(sale, context(order, "charge"))
    sale = worker.ship(sale, context(order, "ship"))
    return worker.notify(sale, context(order, "notify"))


@pytest.fixture
def fulfilled(ledger: psycopg.Connection, dataset: Dataset) -> psycopg.Connection:
    """The ledger after all orders."""
    for order in dataset.orders:
        fulfil(order)
    return ledger


def completed(dataset: Dataset) -> dict[str, list[str]]:
    return {str(order.order_id): ["COMPLETED"] for order in dataset.orders}


def count(ledger: psycopg.Connection, table: str) -> int:
    rows: int = ledger.execute(f"select count(*) from {table}").fetchall()[0][0]
    return rows


# The data


def test_the_files_have_the_orders_lines_and_revenue_that_they_are_known_for() -> None:
    dataset = load()
    totals = expected_totals(dataset)
    assert len(dataset.orders) == 830
    assert totals.lines == 2155
    assert totals.net == Decimal("1265793.0395")
    assert (len(dataset.stock), len(dataset.companies)) == (77, 91)


def test_the_manifest_has_the_steps_that_the_worker_runs_and_the_reconciliation_checks() -> None:
    manifest = parse_manifest(MANIFEST.read_text("utf-8"), yaml=True)
    steps: list[Step[..., Any]] = [worker.validate, worker.price, worker.reserve]
    steps += [worker.charge, worker.ship, worker.notify]
    nodes = [node for node in manifest.nodes if isinstance(node, StepNode)]
    assert [(node.handler, node.queue) for node in nodes] == [(step.name, step.queue) for step in steps]
    assert [node.id for node in manifest.nodes] == list(EFFECTS)


# The ledger


def test_a_repeated_step_gives_the_first_answer_and_has_no_second_effect(
    ledger: psycopg.Connection, dataset: Dataset
) -> None:
    order = dataset.orders[0]
    first = fulfil(order)
    assert fulfil(order) == first
    assert [count(ledger, table) for table in ("accepted_order", "payment", "shipment", "outbox")] == [1] * 4
    assert count(ledger, "priced_line") == count(ledger, "reservation") == len(order.lines)
    assert Books(ledger).without_effect() == {"repeated": 6}


def test_a_stale_token_is_refused_and_has_no_effect(ledger: psycopg.Connection, dataset: Dataset) -> None:
    order = dataset.orders[0]
    worker.validate(order, context(order, "validate", token=7))
    with pytest.raises(StaleToken):
        worker.validate(order, context(order, "validate", token=6))
    assert count(ledger, "accepted_order") == 1
    assert Books(ledger).without_effect() == {"stale": 1}


def test_a_step_that_fails_leaves_nothing_and_may_succeed_later(ledger: psycopg.Connection, dataset: Dataset) -> None:
    order = dataset.orders[0]
    ctx = context(order, "price")
    half_done = [order.order_id, order.lines[0].product_id]
    with contextlib.suppress(ZeroDivisionError), worker.ledger.entry(ctx, order.order_id) as entry:
        entry.db.execute("insert into priced_line values (%s, %s, 1, 1)", half_done)
        _ = 1 / 0
    assert (count(ledger, "priced_line"), count(ledger, "effect"), count(ledger, "fence")) == (0, 0, 0)
    worker.price(order, ctx)
    assert count(ledger, "priced_line") == len(order.lines)


async def test_of_two_attempts_at_once_one_has_the_effect_and_both_have_the_answer(
    ledger: psycopg.Connection, fresh_dsn: str, dataset: Dataset
) -> None:
    order = dataset.orders[0]
    with ThreadPoolExecutor(1) as other:
        with worker.ledger.entry(context(order, "validate", token=1), order.order_id) as entry:
            second = other.submit(worker.validate, order, context(order, "validate", token=2))
            await until_blocked(fresh_dsn)  # by the fence's row, until the first transaction ends
            first = entry.remember(order)
        assert second.result(timeout=10) == first
    assert count(ledger, "effect") == 1
    assert Books(ledger).without_effect() == {"repeated": 1}


def test_an_order_for_an_unknown_product_fails_for_good(ledger: psycopg.Connection, dataset: Dataset) -> None:
    order = dataset.orders[0]
    wrong = Order(
        order.order_id,
        order.customer_id,
        order.order_date,
        order.ship_country,
        order.freight,
        [Line(999, Decimal("1.00"), 1, Decimal(0))],
    )
    with pytest.raises(PermanentError, match="999"):
        worker.validate(wrong, context(wrong, "validate"))
    assert count(ledger, "accepted_order") == 0


# The reconciliation


def reconciled(dataset: Dataset, ledger: psycopg.Connection) -> Reconciliation:
    return reconcile(dataset, ledger, completed(dataset))


def test_what_the_steps_did_agrees_with_the_files(fulfilled: psycopg.Connection, dataset: Dataset) -> None:
    result = reconciled(dataset, fulfilled)
    assert result.differences == ()
    assert (result.completed, result.lost, result.repeated) == (ORDERS, 0, 0)
    assert result.totals == expected_totals(dataset)
    assert result.totals.steps == ORDERS * 6


@pytest.mark.parametrize(
    ("step", "table"),
    [
        ("validate", "accepted_order"),
        ("price", "priced_line"),
        ("reserve", "reservation"),
        ("charge", "payment"),
        ("ship", "shipment"),
        ("notify", "outbox"),
    ],
)
class TestEachStep:
    def test_a_lost_effect_is_found(
        self, fulfilled: psycopg.Connection, dataset: Dataset, step: str, table: str
    ) -> None:
        victim = dataset.orders[3].order_id
        fulfilled.execute(f"delete from {table} where order_id = %s", [victim])
        result = reconciled(dataset, fulfilled)
        assert (result.lost, result.repeated) == (1, 0)
        assert any(f"order {victim}, {step}" in difference for difference in result.differences)

    def test_a_doubled_effect_is_found(
        self, fulfilled: psycopg.Connection, dataset: Dataset, step: str, table: str
    ) -> None:
        victim = dataset.orders[3].order_id
        fulfilled.execute(f"insert into {table} select * from {table} where order_id = %s", [victim])
        result = reconciled(dataset, fulfilled)
        assert (result.lost, result.repeated) == (0, 1)
        assert any(f"order {victim}, {step}" in difference for difference in result.differences)

    def test_an_effect_that_is_not_recorded_is_found(
        self, fulfilled: psycopg.Connection, dataset: Dataset, step: str, table: str
    ) -> None:
        victim = dataset.orders[3].order_id
        assert count(fulfilled, table) > 0
        fulfilled.execute("delete from effect where order_id = %s and step = %s", [victim, step])
        assert any(f"order {victim}, {step}" in difference for difference in reconciled(dataset, fulfilled).differences)


@pytest.mark.parametrize(
    "change",
    [
        "update payment set amount = amount + 0.0001 where order_id = %s",
        "update shipment set freight = freight - 0.01 where order_id = %s",
        "update outbox set total = 0 where order_id = %s",
        "update priced_line set net = net + 1 where order_id = %s",
        "update reservation set quantity = quantity + 1 where order_id = %s",
        "update accepted_order set customer_id = 'ALFKI' where order_id = %s",
    ],
)
def test_a_wrong_fact_is_found(fulfilled: psycopg.Connection, dataset: Dataset, change: str) -> None:
    victim = dataset.orders[3].order_id
    fulfilled.execute(change.encode(), [victim])
    result = reconciled(dataset, fulfilled)
    assert any(f"order {victim}" in difference for difference in result.differences)


def test_two_wrongs_that_cancel_out_are_both_found(fulfilled: psycopg.Connection, dataset: Dataset) -> None:
    one, other = dataset.orders[3].order_id, dataset.orders[4].order_id
    fulfilled.execute("update payment set amount = amount + 1 where order_id = %s", [one])
    fulfilled.execute("update payment set amount = amount - 1 where order_id = %s", [other])
    differences = reconciled(dataset, fulfilled).differences
    assert [difference.split(",")[0] for difference in differences] == [f"order {one}", f"order {other}"]


def test_an_order_that_was_never_filled_is_found(ledger: psycopg.Connection, dataset: Dataset) -> None:
    *filled, missing = dataset.orders
    for order in filled:
        fulfil(order)
    states = completed(dataset)
    del states[str(missing.order_id)]
    result = reconcile(dataset, ledger, states)
    assert (result.completed, result.lost, result.repeated) == (ORDERS - 1, 6, 0)
    assert f"order {missing.order_id}: its run is not there, not COMPLETED" in result.differences


@pytest.mark.parametrize("found", [["FAILED"], ["RUNNING"], ["COMPLETED", "COMPLETED"]])
def test_a_run_that_is_not_the_one_completed_run_of_its_order_is_found(
    fulfilled: psycopg.Connection, dataset: Dataset, found: list[str]
) -> None:
    states = completed(dataset) | {str(dataset.orders[0].order_id): found}
    result = reconcile(dataset, fulfilled, states)
    assert result.completed == ORDERS - 1
    assert len(result.differences) == 1


def test_a_run_for_no_order_is_found(fulfilled: psycopg.Connection, dataset: Dataset) -> None:
    result = reconcile(dataset, fulfilled, completed(dataset) | {"1": ["COMPLETED"]})
    assert result.differences == ("there are runs for '1', which is no order",)


def test_stock_that_is_not_as_it_should_be_is_found(fulfilled: psycopg.Connection, dataset: Dataset) -> None:
    fulfilled.execute("update product set on_hand = on_hand + 1 where product_id = 11")
    assert [difference[:10] for difference in reconciled(dataset, fulfilled).differences] == ["product 11"]


# The whole demo


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for the demo's files, which PostgreSQL's user can enter if the tests run as root."""
    folder = Path(tempfile.mkdtemp(prefix="northwind-test-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def test_the_demo_fills_every_order_once_though_a_worker_is_killed(
    python_process: Callable[..., Process], folder: Path
) -> None:
    demo = python_process(
        *("-m", "examples.northwind", "--orders", "60"), TMPDIR=str(folder), FENCEPOST_DISCONNECT_GRACE="1.5"
    )
    assert demo.wait(timeout=90) == 0
    lines = demo.logs.splitlines()
    found = LAST_LINE.fullmatch(lines[-1])
    assert found is not None, demo.logs
    wanted = expected_totals(load(60))
    assert found.groups()[:7] == ("60", "60", str(wanted.lines), str(wanted.net), "0", "0", "360")
    assert any("worker-1 is killed (SIGKILL) while it holds" in line for line in lines)
    assert any(re.search(r"worker-[23] goes on with .* after the kill", line) for line in lines), demo.logs
    assert list(folder.iterdir()) == []


def test_an_interrupted_demo_leaves_no_process_and_no_file(
    python_process: Callable[..., Process], folder: Path
) -> None:
    demo = python_process("-m", "examples.northwind", TMPDIR=str(folder))
    demo.wait_logged("830 orders are submitted")
    started = psutil.Process(demo.pid).children(recursive=True)
    assert len(started) > 3
    demo.signal(signal.SIGINT)
    assert demo.wait(timeout=60) == 130
    wait_until(lambda: all(map(has_ended, started)))
    assert list(folder.iterdir()) == []


def test_a_demo_that_loses_its_server_fails_and_leaves_no_process_and_no_file(
    python_process: Callable[..., Process], folder: Path
) -> None:
    demo = python_process("-m", "examples.northwind", TMPDIR=str(folder))
    demo.wait_logged("830 orders are submitted")
    started = psutil.Process(demo.pid).children(recursive=True)
    server = next(process for process in started if "fencepost_server.cli" in process.cmdline())
    server.kill()
    assert demo.wait(timeout=90) == 1
    assert "demo: failed: " in demo.logs
    wait_until(lambda: all(map(has_ended, started)))
    assert list(folder.iterdir()) == []


def test_the_data_can_be_kept(python_process: Callable[..., Process], folder: Path) -> None:
    demo = python_process(
        *("-m", "examples.northwind", "--orders", "3", "--keep"), TMPDIR=str(folder), FENCEPOST_DISCONNECT_GRACE="1.5"
    )
    assert demo.wait(timeout=90) == 0
    (kept,) = folder.iterdir()
    assert f"fencepost dev --data-dir {kept / 'data'}" in demo.logs
    with EmbeddedPostgres(kept / "data") as postgres:
        ledger_dsn = make_conninfo(postgres.dsn, dbname="northwind")
        with psycopg.connect(ledger_dsn, autocommit=True) as ledger:
            assert reconciled(load(3), ledger).differences == ()
