"""What one step hands to the next: dataclasses, from which the SDK makes JSON and which it makes from JSON."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal


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
