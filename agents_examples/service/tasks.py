"""Requests to the customer service of a shop. `python -m agents_examples.service.tasks` writes `tasks.jsonl`.

The policy: the order of the customer who asks may be cancelled or sent elsewhere as long as it is open. For an order
that is shipped, and for somebody else's, there is a ticket, and the order stays as it is.
"""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

CUSTOMERS = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
CITIES = ("Oslo", "Rome", "Paris", "Vienna", "Madrid", "Lisbon", "Prague", "Dublin")
OPEN, SHIPPED, CANCELLED = "open", "shipped", "cancelled"
ORDERS = 4


class Case(StrEnum):
    """What the policy says of a request: for the last two there is a ticket."""

    ALLOWED = "allowed"
    SHIPPED = "shipped"
    NOT_THEIRS = "not theirs"


@dataclass(frozen=True, kw_only=True)
class Order:
    """A row of the database. The number has three digits."""

    number: int
    customer: str
    city: str
    state: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """A customer's wish: to send an order to `city`, or to cancel it if that is None.

    `names_order` says whether the first message has the order's number; else the customer gives it when asked.
    """

    case: Case
    customer: str
    number: int
    city: str | None
    names_order: bool
    orders: tuple[Order, ...]

    @property
    def wanted(self) -> dict[str, Any]:
        """The state of the database after the conversation, if the policy was kept."""
        rows = [dataclasses.astuple(self._served(order)) for order in self.orders]
        tickets = [] if self.case is Case.ALLOWED else [self.number]
        return {"orders": [list(row) for row in rows], "tickets": tickets}

    def _served(self, order: Order) -> Order:
        if order.number != self.number or self.case is not Case.ALLOWED:
            return order
        if self.city is None:
            return dataclasses.replace(order, state=CANCELLED)
        return dataclasses.replace(order, city=self.city)


def random_request(rng: random.Random) -> Request:
    """Return a request; cases, customers and wishes are equally likely."""
    case = rng.choice(list(Case))
    asking, other = rng.sample(CUSTOMERS, 2)
    numbers = rng.sample(range(100, 1000), ORDERS)
    orders = [
        Order(
            number=number, customer=rng.choice(CUSTOMERS), city=rng.choice(CITIES), state=rng.choice((OPEN, SHIPPED))
        )
        for number in numbers
    ]
    city, new_city = rng.sample(CITIES, 2)
    orders[0] = Order(
        number=numbers[0],
        customer=other if case is Case.NOT_THEIRS else asking,
        city=city,
        state=SHIPPED if case is Case.SHIPPED else OPEN,
    )
    return Request(
        case=case,
        customer=asking,
        number=numbers[0],
        city=rng.choice((None, new_city)),
        names_order=rng.random() < 0.5,
        orders=tuple(sorted(orders, key=lambda order: order.number)),
    )


def write_tasks(path: Path, count: int = 256) -> None:
    """Write requests as tasks, one JSON object per line."""
    rng = random.Random(0)
    lines = []
    for number in range(count):
        request = random_request(rng)
        task = {"id": f"{number}", "customer": request.customer, "number": request.number, "city": request.city}
        task |= {
            "names_order": request.names_order,
            "orders": [dataclasses.asdict(order) for order in request.orders],
        }
        lines.append(json.dumps({**task, "wanted": request.wanted}))
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_tasks(Path(__file__).with_name("tasks.jsonl"))
