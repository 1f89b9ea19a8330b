"""Compares what the ledger and the server say at the end with what the CSV files demand.

All that is expected is computed here, from the files alone. Nothing is taken from the steps, not even their formula
for a price: a mistake that the steps made would be made here too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import LiteralString

from psycopg import Connection

from examples.northwind import mishaps
from examples.northwind.dataset import Dataset, Order

# What each step leaves in the ledger, and the undoing of some: rows that begin with the order's id.
EFFECTS: Mapping[str, LiteralString] = {
    "validate": "select order_id, customer_id from accepted_order",
    "price": "select order_id, product_id, quantity, net from priced_line",
    "reserve": "select order_id, product_id, quantity from reservation",
    "charge": "select order_id, customer_id, amount from payment",
    "ship": "select order_id, country, freight from shipment",
    "notify": "select order_id, customer_id, total from outbox",
    "refund": "select order_id, customer_id, amount from refund",
    "unreserve": "select order_id, product_id, quantity from unreservation",
}
STOCK: LiteralString = """
    select product_id, on_hand,
        coalesce((select sum(quantity) from purchase where product_id = p.product_id), 0),
        coalesce((select sum(quantity) from reservation where product_id = p.product_id), 0),
        coalesce((select sum(quantity) from unreservation where product_id = p.product_id), 0)
    from product p
"""
MONEY: LiteralString = """
    select (select coalesce(sum(amount), 0) from payment), (select coalesce(sum(amount), 0) from refund),
        (select coalesce(sum(freight), 0) from shipment)
"""
COUNTS: LiteralString = """
    select (select count(*) from priced_line), (select count(*) from mishap where kind = %s),
        (select count(*) from mishap where kind = %s), (select count(*) from effect)
"""

COMPLETED = "COMPLETED"
REFUSED = "FAILED at ship (PERMANENT Discontinued)"

Row = tuple[object, ...]
Rows = dict[int, Counter[Row]]
"""By order: the rows that a step left, each with its number."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What all orders add up to.

    ``completed`` and ``undone`` are numbers of orders; ``charged`` is all that was charged, ``refunded`` what was given
    back of it, and ``kept`` the rest. ``corrected`` and ``waited`` are the orders whose price was garbled once and that
    found the provider busy once; ``steps`` is the number of effects.
    """

    completed: int
    undone: int
    lines: int
    charged: Decimal
    refunded: Decimal
    kept: Decimal
    freight: Decimal
    corrected: int
    waited: int
    steps: int


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The outcome: what the files demand, what ledger and server have, and all ``differences``.

    ``lost`` and ``repeated`` are numbers of effects, where each step of an order has one.
    """

    expected: Totals
    found: Totals
    lost: int
    repeated: int
    differences: tuple[str, ...]


def reconcile(dataset: Dataset, ledger: Connection, ends: Mapping[str, list[str]]) -> Reconciliation:
    """Find all differences. ``ends`` has, by order id, how all runs ended that the server lists for it."""
    expected = {step: _by_order(rows) for step, rows in _expected_effects(dataset).items()}
    found = {step: _by_order(ledger.execute(query)) for step, query in EFFECTS.items()}
    recorded = Counter(ledger.execute("select order_id, step from effect").fetchall())
    lost, repeated, differences = _compare_effects(expected, found, recorded)
    differences += _compare_runs(dataset, ends)
    differences += _compare_stock(dataset, ledger)
    differences += _compare_mishaps(dataset, ledger)
    there, wanted = _found_totals(dataset, ledger, ends, found), expected_totals(dataset)
    differences += _compare_totals(wanted, there)
    return Reconciliation(wanted, there, lost, repeated, tuple(differences))


def is_refused(order: Order, dataset: Dataset) -> bool:
    """Whether an order can't be shipped, so that what was done for it must be undone."""
    return any(line.product_id in dataset.discontinued for line in order.lines)


def expected_orders(dataset: Dataset) -> Mapping[str, int]:
    """For how many orders each step has to have an effect."""
    return {step: len(_by_order(rows)) for step, rows in _expected_effects(dataset).items()}


def expected_totals(dataset: Dataset) -> Totals:
    """Compute from the files what all orders have to add up to."""
    kept = refunded = freight = Decimal(0)
    undone = 0
    for order in dataset.orders:
        net = sum((line.unit_price * line.quantity * (1 - line.discount) for line in order.lines), Decimal(0))
        if is_refused(order, dataset):
            undone += 1
            refunded += net
        else:
            kept += net
            freight += order.freight
    return Totals(
        completed=len(dataset.orders) - undone,
        undone=undone,
        lines=sum(len(order.lines) for order in dataset.orders),
        charged=kept + refunded,
        refunded=refunded,
        kept=kept,
        freight=freight,
        corrected=sum(mishaps.is_due(mishaps.GARBLED, order.order_id) for order in dataset.orders),
        waited=sum(mishaps.is_due(mishaps.BUSY, order.order_id) for order in dataset.orders),
        steps=sum(expected_orders(dataset).values()),
    )


def _found_totals(
    dataset: Dataset, ledger: Connection, ends: Mapping[str, list[str]], found: Mapping[str, Rows]
) -> Totals:
    """Add up what ledger and server have."""
    charged, refunded, freight = ledger.execute(MONEY).fetchall()[0]
    lines, corrected, waited, steps = ledger.execute(COUNTS, [mishaps.GARBLED, mishaps.BUSY]).fetchall()[0]
    given_back = found["refund"].keys() & found["unreserve"].keys()
    return Totals(
        completed=sum(ends.get(str(order.order_id)) == [COMPLETED] for order in dataset.orders),
        undone=sum(ends.get(str(order_id)) == [REFUSED] for order_id in given_back),
        lines=lines,
        charged=charged,
        refunded=refunded,
        kept=charged - refunded,
        freight=freight,
        corrected=corrected,
        waited=waited,
        steps=steps,
    )


def _expected_effects(dataset: Dataset) -> Mapping[str, list[Row]]:
    """The rows that each step has to leave. An order that is refused at ship leaves two that undo two others."""
    rows: dict[str, list[Row]] = {step: [] for step in EFFECTS}
    for order in dataset.orders:
        order_id, customer_id, net = order.order_id, order.customer_id, Decimal(0)
        refused = is_refused(order, dataset)
        for line in order.lines:
            cost = line.unit_price * line.quantity * (1 - line.discount)
            net += cost
            rows["price"].append((order_id, line.product_id, line.quantity, cost))
            rows["reserve"].append((order_id, line.product_id, line.quantity))
            if refused:
                rows["unreserve"].append((order_id, line.product_id, line.quantity))
        rows["validate"].append((order_id, customer_id))
        rows["charge"].append((order_id, customer_id, net))
        if refused:
            rows["refund"].append((order_id, customer_id, net))
        else:
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
        noted = {order_id for order_id, of in recorded if of == step and isinstance(order_id, int)}
        for order_id in sorted(expected[step].keys() | found[step].keys() | noted):
            wanted, there = expected[step].get(order_id, Counter()), found[step].get(order_id, Counter())
            entries, due = recorded[order_id, step], 1 if wanted else 0
            if wanted == there and entries == due:
                continue
            what = f"order {order_id}, {step}"
            if wanted - there and not there - wanted:
                lost += 1
                differences.append(f"{what}: the effect is lost: {_listed(wanted - there)}")
            elif wanted and there.keys() <= wanted.keys() and there - wanted:
                repeated += 1
                differences.append(f"{what}: the effect is repeated: {_listed(there - wanted)} once too often")
            elif wanted != there:
                differences.append(f"{what}: {_listed(there)} instead of {_listed(wanted)}")
            if entries != due:
                differences.append(f"{what}: is recorded {entries} times, not {due}")
    return lost, repeated, differences


def _compare_runs(dataset: Dataset, ends: Mapping[str, list[str]]) -> Iterator[str]:
    """Every order has one run, which ended as it had to, and there is no other run."""
    wanted = {str(order.order_id): REFUSED if is_refused(order, dataset) else COMPLETED for order in dataset.orders}
    for order_id in sorted(wanted.keys() | ends.keys()):
        if order_id not in wanted:
            yield f"there are runs for {order_id!r}, which is no order"
        elif (runs := ends.get(order_id, [])) != [wanted[order_id]]:
            yield f"order {order_id}: its run is {' and '.join(runs) or 'not there'}, not {wanted[order_id]}"


def _compare_stock(dataset: Dataset, ledger: Connection) -> Iterator[str]:
    """By product: what was ordered was reserved, what was not shipped is back, and the stock is what comes of that.

    How much was bought depends on the order in which the orders came and were undone, but only within limits: at the
    least what the stock could not give to those that were shipped, at the most what it could not give to all.
    """
    ordered, undone = Counter[int](), Counter[int]()
    for order in dataset.orders:
        for line in order.lines:
            ordered[line.product_id] += line.quantity
            undone[line.product_id] += line.quantity if is_refused(order, dataset) else 0
    for product_id, on_hand, bought, *moved in ledger.execute(STOCK):
        wanted, stock = [ordered[product_id], undone[product_id]], dataset.stock[product_id]
        if moved != wanted:
            yield f"product {product_id}: reserved and given back are {moved}, not {wanted}"
        least, most = max(0, wanted[0] - wanted[1] - stock), max(0, wanted[0] - stock)
        if not least <= bought <= most:
            yield f"product {product_id}: bought are {bought}, not {least} to {most}"
        if on_hand != (rest := stock + bought - wanted[0] + wanted[1]):
            yield f"product {product_id}: left over are {on_hand}, not {rest}"


def _compare_mishaps(dataset: Dataset, ledger: Connection) -> Iterator[str]:
    """Each order has met the mishaps that were due to it, so each of these has been got over."""
    met = set(ledger.execute("select order_id, kind from mishap").fetchall())
    due = {
        (order.order_id, kind)
        for order in dataset.orders
        for kind in mishaps.ONE_OF
        if mishaps.is_due(kind, order.order_id)
    }
    for order_id, kind in sorted(met ^ due):
        yield f"order {order_id}: has {'' if (order_id, kind) in met else 'not '}met a {kind}"


def _compare_totals(wanted: Totals, there: Totals) -> Iterator[str]:
    for field in fields(Totals):
        one, other = getattr(wanted, field.name), getattr(there, field.name)
        if one != other:
            yield f"in total, {field.name} is {other}, not {one}"


def _listed(rows: Counter[Row]) -> str:
    return ", ".join(" ".join(map(str, row)) for row in rows.elements()) or "nothing"


def table(result: Reconciliation) -> Iterator[str]:
    """The totals in lines of text, one beside the other: by the files, and by ledger and server."""
    titles = {
        "completed": "orders completed",
        "kept": "  net kept",
        "freight": "  freight",
        "undone": "orders undone",
        "refunded": "  net refunded",
        "charged": "net charged to all of them",
        "lines": "lines priced",
        "corrected": "garbled prices corrected",
        "waited": "busy providers asked again",
    }
    yield f"{'':28}{'by the files':>16}{'by what is there':>20}"
    for name, title in titles.items():
        one, other = (
            f"{value:.4f}" if isinstance(value, Decimal) else str(value)
            for value in (getattr(result.expected, name), getattr(result.found, name))
        )
        yield f"{title:28}{one:>16}{other:>20}"
