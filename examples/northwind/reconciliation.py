"""Compares what the ledger and the server say at the end with what the CSV files demand.

All that is expected is computed here, from the files alone. Nothing is taken from the steps, not even their formula
for a price: a mistake that the steps made would be made here too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import LiteralString

from psycopg import Connection

from examples.northwind.dataset import Dataset, Order

# What each step leaves in the ledger: rows that begin with the order's id.
EFFECTS: Mapping[str, LiteralString] = {
    "validate": "select order_id, customer_id from accepted_order",
    "price": "select order_id, product_id, quantity, net from priced_line",
    "reserve": "select order_id, product_id, quantity from reservation",
    "charge": "select order_id, customer_id, amount from payment",
    "ship": "select order_id, country, freight from shipment",
    "notify": "select order_id, customer_id, total from outbox",
}
STOCK: LiteralString = """
    select product_id,
        coalesce((select sum(quantity) from reservation where product_id = p.product_id), 0),
        coalesce((select sum(quantity) from purchase where product_id = p.product_id), 0),
        on_hand
    from product p
"""
TOTALS: LiteralString = """
    select (select count(*) from priced_line), (select coalesce(sum(amount), 0) from payment),
        (select coalesce(sum(freight), 0) from shipment), (select count(*) from effect)
"""

Row = tuple[object, ...]
Rows = dict[int, Counter[Row]]
"""By order: the rows that a step left, each with its number."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What all orders add up to. ``steps`` is the number of effects."""

    lines: int
    net: Decimal
    freight: Decimal
    steps: int


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The outcome. ``totals`` are the ledger's; it is ``differences`` that tell whether they are right.

    ``lost`` and ``repeated`` are numbers of effects, where each step of an order has one.
    """

    completed: int
    totals: Totals
    lost: int
    repeated: int
    differences: tuple[str, ...]


def reconcile(dataset: Dataset, ledger: Connection, states: Mapping[str, list[str]]) -> Reconciliation:
    """Find all differences. ``states`` has, by order id, the states of all runs that the server lists for it."""
    expected = {step: _by_order(rows) for step, rows in _expected_effects(dataset.orders).items()}
    found = {step: _by_order(ledger.execute(query)) for step, query in EFFECTS.items()}
    recorded = Counter(ledger.execute("select order_id, step from effect").fetchall())
    lost, repeated, differences = _compare_effects(expected, found, recorded)
    differences += _compare_runs(dataset.orders, states)
    differences += _compare_stock(dataset, ledger)
    totals = Totals(*ledger.execute(TOTALS).fetchall()[0])
    if totals != (wanted := expected_totals(dataset)):
        differences.append(f"the totals are {totals}, not {wanted}")
    completed = sum(states.get(str(order.order_id)) == ["COMPLETED"] for order in dataset.orders)
    return Reconciliation(completed, totals, lost, repeated, tuple(differences))


def expected_totals(dataset: Dataset) -> Totals:
    """Compute from the files what all orders have to add up to."""
    lines = [line for order in dataset.orders for line in order.lines]
    return Totals(
        lines=len(lines),
        net=sum((line.unit_price * line.quantity * (1 - line.discount) for line in lines), Decimal(0)),
        freight=sum((order.freight for order in dataset.orders), Decimal(0)),
        steps=len(dataset.orders) * len(EFFECTS),
    )


def _expected_effects(orders: Iterable[Order]) -> Mapping[str, list[Row]]:
    """The rows that each step has to leave."""
    rows: dict[str, list[Row]] = {step: [] for step in EFFECTS}
    for order in orders:
        order_id, customer_id, net = order.order_id, order.customer_id, Decimal(0)
        for line in order.lines:
            cost = line.unit_price * line.quantity * (1 - line.discount)
            net += cost
            rows["price"].append((order_id, line.product_id, line.quantity, cost))
            rows["reserve"].append((order_id, line.product_id, line.quantity))
        rows["validate"].append((order_id, customer_id))
        rows["charge"].append((order_id, customer_id, net))
        rows["ship"].append((order_id, order.ship_country, order.freight))
        rows["notify"].append((order_id, customer_id, net + order.freight))
    return rows


def _by_order(rows: Iterable[Row]) -> Rows:
    by_order: Rows = defaultdict(Counter)
    for order_id, *facts in rows:
        assert isinstance(order_id, int)
        by_order[order_id][tuple(facts)] += 1
    return by_order


def _compare_effects(
    expected: Mapping[str, Rows], found: Mapping[str, Rows], recorded: Counter[Row]
) -> tuple[int, int, list[str]]:
    """Compare step by step; return how many effects are lost and repeated, and all differences."""
    lost, repeated = 0, 0
    differences: list[str] = []
    for step in EFFECTS:
        for order_id in sorted(expected[step].keys() | found[step].keys()):
            wanted, there = expected[step].get(order_id, Counter()), found[step].get(order_id, Counter())
            entries = recorded[order_id, step]
            if wanted == there and entries == 1:
                continue
            what = f"order {order_id}, {step}"
            if wanted - there and not there - wanted:
                lost += 1
                differences.append(f"{what}: the effect is lost: {_listed(wanted - there)}")
            elif there.keys() <= wanted.keys() and there - wanted:
                repeated += 1
                differences.append(f"{what}: the effect is repeated: {_listed(there - wanted)} once too often")
            elif wanted != there:
                differences.append(f"{what}: {_listed(there)} instead of {_listed(wanted)}")
            if entries != 1:
                differences.append(f"{what}: is recorded {entries} times, not once")
    return lost, repeated, differences


def _compare_runs(orders: Iterable[Order], states: Mapping[str, list[str]]) -> Iterator[str]:
    """Every order has one run, which is COMPLETED, and there is no other run."""
    order_ids = {str(order.order_id) for order in orders}
    for order_id in sorted(order_ids | states.keys()):
        if order_id not in order_ids:
            yield f"there are runs for {order_id!r}, which is no order"
        elif (runs := states.get(order_id, [])) != ["COMPLETED"]:
            yield f"order {order_id}: its run is {' and '.join(runs) or 'not there'}, not COMPLETED"


def _compare_stock(dataset: Dataset, ledger: Connection) -> Iterator[str]:
    """By product: what was ordered was reserved, what was short was bought, and the rest is still there.

    It does not matter in which order the orders came: as soon as one is short, nothing is left over for the others.
    """
    units: Counter[int] = Counter()
    for order in dataset.orders:
        for line in order.lines:
            units[line.product_id] += line.quantity
    for product_id, *there in ledger.execute(STOCK):
        ordered, stock = units[product_id], dataset.stock[product_id]
        wanted = [ordered, max(0, ordered - stock), max(0, stock - ordered)]
        if there != wanted:
            yield f"product {product_id}: reserved, bought and left over are {there}, not {wanted}"


def _listed(rows: Counter[Row]) -> str:
    return ", ".join(" ".join(map(str, row)) for row in rows.elements()) or "nothing"
