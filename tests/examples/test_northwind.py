"""The Northwind example: its data, its mishaps, its steps and their ledger."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import psycopg
import pytest

from examples.northwind import demo, mishaps, steps
from examples.northwind.books import Books
from examples.northwind.dataset import Dataset, Line, Order, load
from examples.northwind.documents import PricedOrder, Sale
from examples.northwind.ledger import StaleToken
from examples.northwind.reconciliation import EFFECTS, expected_totals
from fencepost import TaskKind
from fencepost_server.domain.manifest import StepNode, parse_manifest
from tests.examples.orders import FIRST_TO_SHIP, context, corrected, count, fulfil, on_hand, unlucky
from tests.fixtures.waiting import until_blocked


def test_the_files_have_the_orders_lines_and_revenue_that_they_are_known_for() -> None:
    dataset = load()
    totals = expected_totals(dataset)
    assert len(dataset.orders) == 830
    assert totals.lines == 2155
    assert totals.charged == Decimal("1265793.0395")
    assert (totals.completed, totals.undone) == (623, 207)
    assert (totals.kept, totals.refunded) == (Decimal("858851.1450"), Decimal("406941.8945"))
    assert totals.steps == 4980
    assert (len(dataset.stock), len(dataset.companies)) == (77, 91)


def test_the_manifest_has_the_handlers_that_the_worker_offers_and_the_reconciliation_checks() -> None:
    manifest = parse_manifest(demo.MANIFEST.read_text("utf-8"), yaml=True)
    nodes = [node for node in manifest.nodes if isinstance(node, StepNode)]
    undos = [node.undo for node in nodes if node.undo is not None]
    wanted = {(node.handler, node.queue, TaskKind.STEP) for node in nodes}
    wanted |= {(undo.handler, undo.queue, TaskKind.UNDO) for undo in undos}
    assert {(handler.name, handler.queue, handler.kind) for handler in steps.HANDLERS} == wanted
    assert {handler.name for handler in steps.HANDLERS} == {f"northwind.{step}" for step in EFFECTS}
    assert [node.id for node in nodes if node.undo is not None] == ["reserve", "charge"]


def test_some_orders_meet_each_mishap_some_both_and_most_none() -> None:
    met = [{kind for kind in mishaps.ONE_OF if mishaps.is_due(kind, order.order_id)} for order in load().orders]
    assert {frozenset(kinds) for kinds in met} == {
        frozenset(),
        *map(frozenset, ([k] for k in mishaps.ONE_OF)),
        frozenset(mishaps.ONE_OF),
    }
    assert met.count(set()) > len(met) / 2


def test_a_repeated_step_gives_the_first_answer_and_has_no_second_effect(
    ledger: psycopg.Connection, dataset: Dataset
) -> None:
    order = dataset.orders[FIRST_TO_SHIP]
    first = fulfil(order)
    assert first is not None
    assert fulfil(order) == first
    assert [count(ledger, table) for table in ("accepted_order", "payment", "shipment", "outbox")] == [1] * 4
    assert count(ledger, "priced_line") == count(ledger, "reservation") == len(order.lines)
    assert Books(ledger).without_effect() == {"repeated": 6}


def test_an_order_with_a_discontinued_product_is_refused_and_undone_once(
    ledger: psycopg.Connection, dataset: Dataset
) -> None:
    order = dataset.orders[0]
    stock = on_hand(ledger)
    assert fulfil(order) is None
    assert fulfil(order) is None
    assert [count(ledger, table) for table in ("payment", "refund", "shipment", "outbox")] == [1, 1, 0, 0]
    assert count(ledger, "reservation") == count(ledger, "unreservation") == len(order.lines)
    assert (
        ledger.execute("select amount from refund").fetchall()
        == ledger.execute("select amount from payment").fetchall()
    )
    bought: dict[int, int] = dict(ledger.execute("select product_id, quantity from purchase").fetchall())
    assert on_hand(ledger) == {product_id: units + bought.get(product_id, 0) for product_id, units in stock.items()}
    assert Books(ledger).without_effect() == {"repeated": 6}


@pytest.mark.parametrize(("undo", "table"), [("refund", "refund"), ("unreserve", "unreservation")])
def test_undoing_with_a_stale_token_is_refused(
    fulfilled: psycopg.Connection, dataset: Dataset, undo: str, table: str
) -> None:
    before = count(fulfilled, table)
    order = dataset.orders[0]
    fulfilled.execute("update fence set token = 3 where order_id = %s and step = %s", [order.order_id, undo])
    fulfilled.execute("delete from effect where order_id = %s and step = %s", [order.order_id, undo])
    with pytest.raises(StaleToken):
        fulfil(order)
    assert count(fulfilled, table) == before


def test_a_garbled_price_leaves_no_effect_and_comes_right_with_feedback(
    ledger: psycopg.Connection, dataset: Dataset
) -> None:
    order = unlucky(dataset, mishaps.GARBLED)
    for token in (1, 2):  # as often as nobody complains
        assert isinstance(steps.price(order, context(order, "price", token)), dict)
    assert count(ledger, "effect") == count(ledger, "priced_line") == 0
    assert isinstance(steps.price(order, corrected(order)), PricedOrder)
    assert count(ledger, "priced_line") == len(order.lines)
    assert count(ledger, "mishap") == 1


def test_a_busy_provider_charges_nothing_and_does_when_asked_again(
    ledger: psycopg.Connection, dataset: Dataset
) -> None:
    order = unlucky(dataset, mishaps.BUSY)
    sale = Sale(order.order_id, order.customer_id, order.ship_country, order.freight, Decimal("12.5000"))
    with pytest.raises(steps.ProviderBusy):
        steps.charge(sale, context(order, "charge"))
    assert (count(ledger, "payment"), count(ledger, "mishap")) == (0, 1)
    assert steps.charge(sale, context(order, "charge", token=2)) == sale
    assert (count(ledger, "payment"), count(ledger, "mishap")) == (1, 1)


def test_a_stale_token_is_refused_and_has_no_effect(ledger: psycopg.Connection, dataset: Dataset) -> None:
    order = dataset.orders[0]
    steps.validate(order, context(order, "validate", token=7))
    with pytest.raises(StaleToken):
        steps.validate(order, context(order, "validate", token=6))
    assert count(ledger, "accepted_order") == 1
    assert Books(ledger).without_effect() == {"stale": 1}


def test_no_late_attempt_of_a_step_acts_after_its_undo(ledger: psycopg.Connection, dataset: Dataset) -> None:
    """Also not of one that had not acted by then."""
    order = dataset.orders[0]
    sale = Sale(order.order_id, order.customer_id, order.ship_country, order.freight, Decimal("12.5000"))
    steps.refund(sale, sale, context(order, "refund", 3, of="charge"))
    with pytest.raises(StaleToken):
        steps.charge(sale, context(order, "charge", 2))
    assert (count(ledger, "payment"), count(ledger, "refund")) == (0, 1)


def test_a_step_that_fails_leaves_nothing_and_may_succeed_later(ledger: psycopg.Connection, dataset: Dataset) -> None:
    order = dataset.orders[0]
    ctx = context(order, "price")
    half_done = [order.order_id, order.lines[0].product_id]
    with contextlib.suppress(ZeroDivisionError), steps.ledger.entry(ctx, order.order_id, "price") as entry:
        entry.db.execute("insert into priced_line values (%s, %s, 1, 1)", half_done)
        _ = 1 / 0
    assert (count(ledger, "priced_line"), count(ledger, "effect"), count(ledger, "fence")) == (0, 0, 0)
    steps.price(order, ctx)
    assert count(ledger, "priced_line") == len(order.lines)


async def test_of_two_attempts_at_once_one_has_the_effect_and_both_have_the_answer(
    ledger: psycopg.Connection, fresh_dsn: str, dataset: Dataset
) -> None:
    order = dataset.orders[0]
    with ThreadPoolExecutor(1) as other:
        with steps.ledger.entry(context(order, "validate", token=1), order.order_id, "validate") as entry:
            second = other.submit(steps.validate, order, context(order, "validate", token=2))
            await until_blocked(fresh_dsn)  # by the fence's row, until the first transaction ends
            first = entry.remember(order)
        assert second.result(timeout=30) == first
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
    with pytest.raises(steps.UnknownProduct, match="999"):
        steps.validate(wrong, context(wrong, "validate"))
    assert count(ledger, "accepted_order") == 0
