"""The orders, products and customers in data/*.csv, as values.

Money, prices and discounts are Decimal from the file to the ledger: no float ever holds them. In JSON they
are strings.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Line:
    """One product of an order. ``discount`` is a fraction: 0.15 is 15 %."""

    product_id: int
    unit_price: Decimal
    quantity: int
    discount: Decimal


@dataclass(frozen=True, slots=True)
class Order:
    """One order: what a run of the workflow starts with. ``order_date`` is an ISO date."""

    order_id: int
    customer_id: str
    order_date: str
    ship_country: str
    freight: Decimal
    lines: list[Line]


@dataclass(frozen=True, slots=True)
class Dataset:
    """All of it: orders in the order of the file, what is in stock by product, and companies by customer.

    ``discontinued`` are products that are not made any more: some are in stock, but none is shipped.
    """

    orders: tuple[Order, ...]
    stock: Mapping[int, int]
    discontinued: frozenset[int]
    companies: Mapping[str, str]


def load(limit: int | None = None) -> Dataset:
    """Read the files; with a ``limit`` only so many of the orders, from the first on."""
    lines: dict[int, list[Line]] = defaultdict(list)
    for row in _rows("order_lines"):
        lines[int(row["order_id"])].append(
            Line(
                product_id=int(row["product_id"]),
                unit_price=Decimal(row["unit_price"]),
                quantity=int(row["quantity"]),
                discount=Decimal(row["discount"]),
            )
        )
    orders = [
        Order(
            order_id=int(row["order_id"]),
            customer_id=row["customer_id"],
            order_date=row["order_date"],
            ship_country=row["ship_country"],
            freight=Decimal(row["freight"]),
            lines=lines[int(row["order_id"])],
        )
        for row in _rows("orders")
    ]
    products = list(_rows("products"))
    return Dataset(
        orders=tuple(orders[:limit]),
        stock={int(row["product_id"]): int(row["units_in_stock"]) for row in products},
        discontinued=frozenset(int(row["product_id"]) for row in products if row["discontinued"] == "1"),
        companies={row["customer_id"]: row["company_name"] for row in _rows("customers")},
    )


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)
