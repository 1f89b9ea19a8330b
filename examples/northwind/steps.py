"""The six steps of an order, and how two of them are undone.

Each step takes what the one before has returned, and has one effect on the ledger. All have the same shape:
open an entry in the ledger; if this is a repeat, return what was returned the first time; else write, and
remember what is returned. ledger.py tells why that makes each effect happen once.

An undo handler has the same shape, for it may run twice as well. It takes what its step took and returned.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from examples.northwind import mishaps
from examples.northwind.dataset import Order
from examples.northwind.documents import PricedLine, PricedOrder, Receipt, Sale
from examples.northwind.ledger import Ledger
from fencepost import OperationalError, PermanentError, Step, StepContext, step, undo

ledger = Ledger()  # connected by who runs the steps


class UnknownProduct(PermanentError):
    """Nobody sells it. Trying again would not help, so the run fails at once, and what it has done is undone."""


class Discontinued(PermanentError):
    """It is not made any more, which shows only when it is to leave the warehouse."""


class ProviderBusy(OperationalError):
    """Not now: the step is tried again. (So it is with every exception that says no kind of its own.)"""


@step("northwind.validate", queue="northwind")
def validate(order: Order, ctx: StepContext) -> Order:
    """Accept the order, if the customer and all products are known."""
    with ledger.entry(ctx, order.order_id, "validate") as entry:
        if entry.is_repeat:
            return entry.first_answer(Order)
        wanted = {line.product_id for line in order.lines}
        known = entry.db.execute("select product_id from product where product_id = any(%s)", [list(wanted)])
        if unknown := wanted - {product_id for (product_id,) in known}:
            raise UnknownProduct(f"unknown products: {sorted(unknown)}")
        entry.db.execute("insert into accepted_order values (%s, %s)", [order.order_id, order.customer_id])
        return entry.remember(order)


@step("northwind.price", queue="northwind")
def price(order: Order, ctx: StepContext) -> PricedOrder | dict[str, object]:
    """Compute what each line and the whole order cost."""
    with ledger.entry(ctx, order.order_id, "price") as entry:
        if entry.is_repeat:
            return entry.first_answer(PricedOrder)
        lines = []
        for line in order.lines:
            net = (line.unit_price * line.quantity * (1 - line.discount)).quantize(Decimal("0.0001"))
            lines.append(PricedLine(line.product_id, line.quantity, net))
        net = sum((line.net for line in lines), Decimal(0))
        priced = PricedOrder(order.order_id, order.customer_id, order.ship_country, order.freight, net, lines)
        # The server checks what is returned against the schema in workflow.yaml. What breaks it comes back at once as
        # ctx.feedback: a list of the faults, each with its place. So nothing is remembered yet of a doubtful answer.
        if ctx.feedback is None and mishaps.price_is_garbled(entry.db, order.order_id):
            return mishaps.garbled(priced)
        entry.db.cursor().executemany(
            "insert into priced_line values (%s, %s, %s, %s)",
            [(order.order_id, line.product_id, line.quantity, line.net) for line in lines],
        )
        return entry.remember(priced)


@step("northwind.reserve", queue="northwind")
def reserve(order: PricedOrder, ctx: StepContext) -> Sale:
    """Take the goods out of the stock, and buy what is short."""
    with ledger.entry(ctx, order.order_id, "reserve") as entry:
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


@undo("northwind.unreserve", queue="northwind")
def unreserve(order: PricedOrder, ctx: StepContext) -> None:
    """Put the goods back into the stock, those that were bought for the order too."""
    with ledger.entry(ctx, order.order_id, "unreserve") as entry:
        if entry.is_repeat:
            return
        for line in sorted(order.lines, key=lambda line: line.product_id):
            entry.db.execute(
                "update product set on_hand = on_hand + %s where product_id = %s", [line.quantity, line.product_id]
            )
            entry.db.execute(
                "insert into unreservation values (%s, %s, %s)", [order.order_id, line.product_id, line.quantity]
            )
        entry.remember(None)


@step("northwind.charge", queue="northwind")
def charge(sale: Sale, ctx: StepContext) -> Sale:
    """Take the customer's money."""
    with ledger.entry(ctx, sale.order_id, "charge") as entry:
        if entry.is_repeat:
            return entry.first_answer(Sale)
        if not mishaps.provider_is_busy(entry.db, sale.order_id):
            entry.db.execute("insert into payment values (%s, %s, %s)", [sale.order_id, sale.customer_id, sale.net])
            return entry.remember(sale)
    raise ProviderBusy("the payment provider has too much to do", retry_after=0.2)


@undo("northwind.refund", queue="northwind")
def refund(_: Sale, charged: Sale, ctx: StepContext) -> None:
    """Give back what the customer was charged."""
    with ledger.entry(ctx, charged.order_id, "refund") as entry:
        if entry.is_repeat:
            return
        mishaps.wait_for_provider(entry.db, charged.order_id)
        row = [charged.order_id, charged.customer_id, charged.net]
        entry.db.execute("insert into refund values (%s, %s, %s)", row)
        entry.remember(None)


@step("northwind.ship", queue="northwind")
def ship(sale: Sale, ctx: StepContext) -> Sale:
    """Send the parcel, and charge its freight. Refused, for good, if a product of it is discontinued."""
    with ledger.entry(ctx, sale.order_id, "ship") as entry:
        if entry.is_repeat:
            return entry.first_answer(Sale)
        reserved = entry.db.execute(
            "select product_id, discontinued from reservation join product using (product_id) where order_id = %s",
            [sale.order_id],
        )
        if gone := sorted(product_id for product_id, discontinued in reserved if discontinued):
            raise Discontinued(f"discontinued products: {gone}")
        entry.db.execute("insert into shipment values (%s, %s, %s)", [sale.order_id, sale.ship_country, sale.freight])
        return entry.remember(sale)


@step("northwind.notify", queue="northwind")
def notify(sale: Sale, ctx: StepContext) -> Receipt:
    """Put a message for the customer into the outbox, from which a mailer would send it."""
    with ledger.entry(ctx, sale.order_id, "notify") as entry:
        if entry.is_repeat:
            return entry.first_answer(Receipt)
        total = sale.net + sale.freight
        entry.db.execute("insert into outbox values (%s, %s, %s)", [sale.order_id, sale.customer_id, total])
        return entry.remember(Receipt(sale.order_id, total))


HANDLERS: list[Step[..., Any]] = [validate, price, reserve, unreserve, charge, refund, ship, notify]
