"""The six steps of an order, and the process that runs them.

Each step takes what the one before has returned, and has one effect on the ledger. All have the same shape:
open an entry in the ledger; if this is a repeat, return what was returned the first time; else write, and
remember what is returned. ledger.py tells why that makes each effect happen once.

Try it by hand: `python -m examples.northwind.worker --help`.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from decimal import Decimal

from examples.northwind.dataset import Order
from examples.northwind.ledger import Ledger
from fencepost import PermanentError, StepContext, Worker, step

SLOTS = 10  # steps that one worker process runs at a time

ledger = Ledger()  # connected in main


@dataclass(frozen=True, slots=True)
class PricedLine:
    """How many units of a product, and what they cost together."""

    product_id: int
    quantity: int
    net: Decimal


@dataclass(frozen=True, slots=True)
class PricedOrder:
    """An order that has its price, to four decimals."""

    order_id: int
    customer_id: str
    ship_country: str
    freight: Decimal
    net: Decimal
    lines: list[PricedLine]


@dataclass(frozen=True, slots=True)
class Sale:
    """What is left to do for an order whose goods are set aside."""

    order_id: int
    customer_id: str
    ship_country: str
    freight: Decimal
    net: Decimal


@dataclass(frozen=True, slots=True)
class Receipt:
    """The end: what the customer has paid in all."""

    order_id: int
    total: Decimal


@step("northwind.validate", queue="northwind")
def validate(order: Order, ctx: StepContext) -> Order:
    """Accept the order, if the customer and all products are known."""
    with ledger.entry(ctx, order.order_id) as entry:
        if entry.is_repeat:
            return entry.first_answer(Order)
        wanted = {line.product_id for line in order.lines}
        known = entry.db.execute("select product_id from product where product_id = any(%s)", [list(wanted)])
        if unknown := wanted - {product_id for (product_id,) in known}:
            # Trying again would not help, so the run fails at once. Any other exception is tried again.
            raise PermanentError(f"unknown products: {sorted(unknown)}")
        entry.db.execute("insert into accepted_order values (%s, %s)", [order.order_id, order.customer_id])
        return entry.remember(order)


@step("northwind.price", queue="northwind")
def price(order: Order, ctx: StepContext) -> PricedOrder:
    """Compute what each line and the whole order cost."""
    with ledger.entry(ctx, order.order_id) as entry:
        if entry.is_repeat:
            return entry.first_answer(PricedOrder)
        lines = []
        for line in order.lines:
            net = (line.unit_price * line.quantity * (1 - line.discount)).quantize(Decimal("0.0001"))
            lines.append(PricedLine(line.product_id, line.quantity, net))
            entry.db.execute(
                "insert into priced_line values (%s, %s, %s, %s)",
                [order.order_id, line.product_id, line.quantity, net],
            )
        net = sum((line.net for line in lines), Decimal(0))
        return entry.remember(
            PricedOrder(order.order_id, order.customer_id, order.ship_country, order.freight, net, lines)
        )


@step("northwind.reserve", queue="northwind")
def reserve(order: PricedOrder, ctx: StepContext) -> Sale:
    """Take the goods out of the stock, and buy what is short."""
    with ledger.entry(ctx, order.order_id) as entry:
        if entry.is_repeat:
            return entry.first_answer(Sale)
        # Always in the same order, so that two orders never wait for each other's products.
        for line in sorted(order.lines, key=lambda line: line.product_id):
            found = entry.db.execute("select on_hand from product where product_id = %s for update", [line.product_id])
            short = max(0, line.quantity - found.fetchall()[0][0])
            if short:
                entry.db.execute("insert into purchase values (%s, %s, %s)", [order.order_id, line.product_id, short])
            entry.db.execute(
                "update product set on_hand = on_hand + %s where product_id = %s",
                [short - line.quantity, line.product_id],
            )
            entry.db.execute(
                "insert into reservation values (%s, %s, %s)",
                [order.order_id, line.product_id, line.quantity],
            )
        return entry.remember(Sale(order.order_id, order.customer_id, order.ship_country, order.freight, order.net))


@step("northwind.charge", queue="northwind")
def charge(sale: Sale, ctx: StepContext) -> Sale:
    """Take the customer's money."""
    with ledger.entry(ctx, sale.order_id) as entry:
        if entry.is_repeat:
            return entry.first_answer(Sale)
        entry.db.execute("insert into payment values (%s, %s, %s)", [sale.order_id, sale.customer_id, sale.net])
        return entry.remember(sale)


@step("northwind.ship", queue="northwind")
def ship(sale: Sale, ctx: StepContext) -> Sale:
    """Send the parcel, and charge its freight."""
    with ledger.entry(ctx, sale.order_id) as entry:
        if entry.is_repeat:
            return entry.first_answer(Sale)
        entry.db.execute("insert into shipment values (%s, %s, %s)", [sale.order_id, sale.ship_country, sale.freight])
        return entry.remember(sale)


@step("northwind.notify", queue="northwind")
def notify(sale: Sale, ctx: StepContext) -> Receipt:
    """Put a message for the customer into the outbox, from which a mailer would send it."""
    with ledger.entry(ctx, sale.order_id) as entry:
        if entry.is_repeat:
            return entry.first_answer(Receipt)
        total = sale.net + sale.freight
        entry.db.execute("insert into outbox values (%s, %s, %s)", [sale.order_id, sale.customer_id, total])
        return entry.remember(Receipt(sale.order_id, total))


def main() -> None:
    """Run steps until SIGTERM or SIGINT; those under way are finished first."""
    parser = argparse.ArgumentParser(description="Run the steps of Northwind's orders until stopped.")
    parser.add_argument("--address", default="127.0.0.1:7654", help="the server's gRPC, host:port")
    parser.add_argument("--ledger", required=True, metavar="DSN", help="the database that steps work on")
    parser.add_argument("--name", default="worker", help="shown wherever this worker is mentioned")
    options = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with ledger.connected(options.ledger, worker=options.name, connections=SLOTS):
        Worker(options.address, [validate, price, reserve, charge, ship, notify], slots=SLOTS, name=options.name).run()


if __name__ == "__main__":
    main()
