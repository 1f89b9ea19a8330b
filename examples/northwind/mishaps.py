"""What goes wrong on the way, apart from the killed worker: for which orders is decided by their number alone.

So every demo meets the same mishaps, and the reconciliation knows which orders must have met them. Each order meets
one of a kind once; the ledger keeps which have been met.
"""

from __future__ import annotations

import hashlib

from psycopg import Connection

from examples.northwind.documents import PricedOrder

GARBLED = "garbled price"
BUSY = "busy provider"
ONE_OF = {GARBLED: 12, BUSY: 8}
"""For each kind of mishap: one of so many orders meets it."""

MEET = "insert into mishap values (%s, %s) on conflict do nothing returning order_id"


def is_due(kind: str, order_id: int) -> bool:
    """Whether an order is to meet a mishap of this kind."""
    digest = hashlib.sha256(f"{kind}/{order_id}".encode()).digest()
    return int.from_bytes(digest) % ONE_OF[kind] == 0


def price_is_garbled(db: Connection, order_id: int) -> bool:
    """Whether the price list answers in a broken shape, as it does for some orders to who did not complain."""
    if not is_due(GARBLED, order_id):
        return False
    db.execute(MEET, [order_id, GARBLED])
    return True


def provider_is_busy(db: Connection, order_id: int) -> bool:
    """Whether the payment provider turns a request away, as it does with the first one of some orders."""
    return is_due(BUSY, order_id) and db.execute(MEET, [order_id, BUSY]).fetchone() is not None


def wait_for_provider(db: Connection, order_id: int) -> None:
    """Wait while the payment provider does not answer: the demo holds this lock to kill a worker that waits for it."""
    db.execute("select pg_advisory_xact_lock_shared(%s)", [order_id])


def garbled(order: PricedOrder) -> dict[str, object]:
    """The broken shape: no lines, and a net amount with its currency, as in "440.0000 USD"."""
    return {
        "order_id": order.order_id,
        "customer_id": order.customer_id,
        "ship_country": order.ship_country,
        "freight": order.freight,
        "net": f"{order.net} USD",
    }
