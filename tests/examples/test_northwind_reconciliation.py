"""What went wrong is found by the Northwind example's reconciliation, whatever it is."""

from __future__ import annotations

import re

import psycopg
import pytest

from examples.northwind import mishaps
from examples.northwind.dataset import Dataset
from examples.northwind.reconciliation import COMPLETED, REFUSED, expected_totals, reconcile
from tests.examples.orders import FIRST_TO_SHIP, ORDERS, count, ends, fulfil, reconciled, unlucky


def test_what_the_steps_did_agrees_with_the_files(fulfilled: psycopg.Connection, dataset: Dataset) -> None:
    result = reconciled(dataset, fulfilled)
    assert result.differences == ()
    assert (result.lost, result.repeated) == (0, 0)
    assert result.found == result.expected == expected_totals(dataset)
    assert (result.found.completed, result.found.undone) == (ORDERS - 4, 4)
    assert result.found.steps == ORDERS * 6


@pytest.mark.parametrize(
    ("step", "table", "index"),
    [
        ("validate", "accepted_order", 3),
        ("price", "priced_line", 3),
        ("reserve", "reservation", 3),
        ("charge", "payment", 3),
        ("ship", "shipment", 3),
        ("notify", "outbox", 3),
        ("charge", "payment", 0),
        ("refund", "refund", 0),
        ("unreserve", "unreservation", 0),
    ],
)
class TestEachStep:
    def test_a_lost_effect_is_found(
        self, fulfilled: psycopg.Connection, dataset: Dataset, step: str, table: str, index: int
    ) -> None:
        victim = dataset.orders[index].order_id
        fulfilled.execute(f"delete from {table} where order_id = %s", [victim])
        result = reconciled(dataset, fulfilled)
        assert (result.lost, result.repeated) == (1, 0)
        assert any(f"order {victim}, {step}" in difference for difference in result.differences)

    def test_a_doubled_effect_is_found(
        self, fulfilled: psycopg.Connection, dataset: Dataset, step: str, table: str, index: int
    ) -> None:
        victim = dataset.orders[index].order_id
        fulfilled.execute(f"insert into {table} select * from {table} where order_id = %s", [victim])
        result = reconciled(dataset, fulfilled)
        assert (result.lost, result.repeated) == (0, 1)
        assert any(f"order {victim}, {step}" in difference for difference in result.differences)

    def test_an_effect_that_is_not_recorded_is_found(
        self, fulfilled: psycopg.Connection, dataset: Dataset, step: str, table: str, index: int
    ) -> None:
        victim = dataset.orders[index].order_id
        assert count(fulfilled, table) > 0
        fulfilled.execute("delete from effect where order_id = %s and step = %s", [victim, step])
        assert any(f"order {victim}, {step}" in difference for difference in reconciled(dataset, fulfilled).differences)


@pytest.mark.parametrize(
    ("step", "effect"),
    [
        ("refund", "refund select order_id, customer_id, amount from payment"),
        ("unreserve", "unreservation select order_id, product_id, quantity from reservation"),
    ],
)
def test_what_was_undone_of_a_completed_order_is_found(
    fulfilled: psycopg.Connection, dataset: Dataset, step: str, effect: str
) -> None:
    victim = dataset.orders[FIRST_TO_SHIP].order_id
    fulfilled.execute(f"insert into {effect} where order_id = %s", [victim])
    differences = reconciled(dataset, fulfilled).differences
    assert any(re.fullmatch(f"order {victim}, {step}: .+ instead of nothing", text) for text in differences)


def test_what_was_done_for_an_order_that_was_refused_is_found(fulfilled: psycopg.Connection, dataset: Dataset) -> None:
    refused = dataset.orders[0].order_id
    fulfilled.execute("insert into shipment values (%s, 'France', 32.38)", [refused])
    differences = reconciled(dataset, fulfilled).differences
    assert f"order {refused}, ship: France 32.38 instead of nothing" in differences


def test_an_effect_that_is_recorded_but_not_due_is_found(fulfilled: psycopg.Connection, dataset: Dataset) -> None:
    refused = dataset.orders[0].order_id
    fulfilled.execute("insert into effect values ('a key', %s, 'ship', 'null')", [refused])
    assert f"order {refused}, ship: is recorded 1 times, not 0" in reconciled(dataset, fulfilled).differences


@pytest.mark.parametrize("kind", mishaps.ONE_OF)
def test_a_mishap_that_was_not_met_is_found(fulfilled: psycopg.Connection, dataset: Dataset, kind: str) -> None:
    victim = unlucky(dataset, kind).order_id
    fulfilled.execute("delete from mishap where order_id = %s and kind = %s", [victim, kind])
    assert f"order {victim}: has not met a {kind}" in reconciled(dataset, fulfilled).differences


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
    check_found(fulfilled, dataset, change, dataset.orders[3].order_id)


@pytest.mark.parametrize(
    "change",
    [
        "update refund set amount = amount - 0.0001 where order_id = %s",
        "update unreservation set quantity = quantity - 1 where order_id = %s",
    ],
)
def test_a_wrong_fact_of_what_was_undone_is_found(fulfilled: psycopg.Connection, dataset: Dataset, change: str) -> None:
    check_found(fulfilled, dataset, change, dataset.orders[0].order_id)


def check_found(ledger: psycopg.Connection, dataset: Dataset, change: str, order_id: int) -> None:
    ledger.execute(change.encode(), [order_id])
    assert any(f"order {order_id}" in difference for difference in reconciled(dataset, ledger).differences)


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
    found = ends(dataset)
    del found[str(missing.order_id)]
    result = reconcile(dataset, ledger, found)
    assert (result.found.completed, result.lost, result.repeated) == (result.expected.completed - 1, 6, 0)
    assert f"order {missing.order_id}: its run is not there, not COMPLETED" in result.differences


@pytest.mark.parametrize("found", [[REFUSED], ["RUNNING"], [COMPLETED, COMPLETED]])
def test_a_run_that_is_not_the_one_completed_run_of_its_order_is_found(
    fulfilled: psycopg.Connection, dataset: Dataset, found: list[str]
) -> None:
    order_id = str(dataset.orders[FIRST_TO_SHIP].order_id)
    result = reconcile(dataset, fulfilled, ends(dataset) | {order_id: found})
    assert result.found.completed == result.expected.completed - 1
    assert [difference for difference in result.differences if order_id in difference] != []


@pytest.mark.parametrize("found", [[COMPLETED], ["UNDOING"], ["FAILED at charge (PERMANENT Discontinued)"]])
def test_a_run_that_did_not_fail_as_its_order_had_to_is_found(
    fulfilled: psycopg.Connection, dataset: Dataset, found: list[str]
) -> None:
    order_id = str(dataset.orders[0].order_id)
    result = reconcile(dataset, fulfilled, ends(dataset) | {order_id: found})
    assert result.found.undone == result.expected.undone - 1
    assert f"order {order_id}: its run is {found[0]}, not {REFUSED}" in result.differences


def test_a_run_for_no_order_is_found(fulfilled: psycopg.Connection, dataset: Dataset) -> None:
    result = reconcile(dataset, fulfilled, ends(dataset) | {"1": [COMPLETED]})
    assert result.differences == ("there are runs for '1', which is no order",)


@pytest.mark.parametrize(
    "change",
    [
        "update product set on_hand = on_hand + 1 where product_id = 11",
        # Bought though there was enough: the books of the stock balance, but nobody needed it.
        """
        with extra as (insert into purchase values (10248, 11, 500))
        update product set on_hand = on_hand + 500 where product_id = 11
        """,
    ],
)
def test_stock_that_is_not_as_it_should_be_is_found(
    fulfilled: psycopg.Connection, dataset: Dataset, change: str
) -> None:
    fulfilled.execute(change.encode())
    assert [difference[:10] for difference in reconciled(dataset, fulfilled).differences] == ["product 11"]
