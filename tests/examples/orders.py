"""Orders of the Northwind example, taken through the steps by hand, as a workflow would."""

from __future__ import annotations

import psycopg

from examples.northwind import mishaps, steps
from examples.northwind.dataset import Dataset, Order
from examples.northwind.documents import PricedOrder, Receipt
from examples.northwind.reconciliation import COMPLETED, REFUSED, Reconciliation, is_refused, reconcile
from fencepost import Failure, FailureKind, StepContext, Value

ORDERS = 12
FIRST_TO_SHIP = 1  # the first order that has no discontinued product; the one before has one


def context(order: Order, step: str, token: int = 1, *, of: str = "") -> StepContext:
    """Of an attempt; ``of``: the step that it undoes."""
    key = f"{order.order_id}/{step}"
    undone = f"{order.order_id}/{of}" if of else ""
    return StepContext.for_test(node_id=step, idempotency_key=key, fencing_token=token, step_idempotency_key=undone)


def fulfil(order: Order) -> Receipt | None:
    """Run all steps of an order, one after the other, as a workflow would; undo them if it is refused at ship."""
    checked = steps.validate(order, context(order, "validate"))
    priced = steps.price(checked, context(order, "price"))
    if isinstance(priced, dict):
        priced = steps.price(checked, corrected(order))
    assert isinstance(priced, PricedOrder)
    sale = steps.reserve(priced, context(order, "reserve"))
    try:
        charged = steps.charge(sale, context(order, "charge"))
    except steps.ProviderBusy:
        charged = steps.charge(sale, context(order, "charge"))
    try:
        shipped = steps.ship(charged, context(order, "ship"))
    except steps.Discontinued:
        steps.refund(sale, charged, context(order, "refund", of="charge"))
        steps.unreserve(priced, context(order, "unreserve", of="reserve"))
        return None
    return steps.notify(shipped, context(order, "notify"))


def corrected(order: Order) -> StepContext:
    """The context of the second attempt at a price, after the server has refused the first one's output."""
    before = Failure(FailureKind.CORRECTIVE, "OUTPUT_SCHEMA_MISMATCH", "/net: …", Value(json='[{"path": "/net"}]'))
    return StepContext.for_test(
        node_id="price", idempotency_key=f"{order.order_id}/price", fencing_token=2, attempt=2, failure_before=before
    )


def ends(dataset: Dataset) -> dict[str, list[str]]:
    """How the server's runs have to end."""
    return {str(order.order_id): [REFUSED if is_refused(order, dataset) else COMPLETED] for order in dataset.orders}


def count(ledger: psycopg.Connection, table: str) -> int:
    rows: int = ledger.execute(f"select count(*) from {table}").fetchall()[0][0]
    return rows


def on_hand(ledger: psycopg.Connection) -> dict[int, int]:
    return dict(ledger.execute("select product_id, on_hand from product").fetchall())


def unlucky(dataset: Dataset, kind: str) -> Order:
    """The first order that meets a mishap of a kind."""
    return next(order for order in dataset.orders if mishaps.is_due(kind, order.order_id))


def reconciled(dataset: Dataset, ledger: psycopg.Connection) -> Reconciliation:
    return reconcile(dataset, ledger, ends(dataset))
