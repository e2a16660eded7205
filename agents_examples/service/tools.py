"""The shop's database, in memory, and what the agent may do with it. It does as it is told: the policy is the
agent's to keep."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

POLICY = "Change only open orders of the customer. Otherwise open a ticket."

_TABLES = """
CREATE TABLE orders (number INTEGER PRIMARY KEY, customer TEXT, city TEXT, state TEXT);
CREATE TABLE tickets (number INTEGER, reason TEXT);
"""


class Shop:
    """Orders and tickets, and the customer who is signed in. Every method but `state` returns what the agent reads.
    To be used in the thread that made it."""

    def __init__(self, orders: Iterable[Mapping[str, Any]], *, customer: str) -> None:
        self._customer = customer
        self._database = sqlite3.connect(":memory:", isolation_level=None)
        self._database.executescript(_TABLES)
        self._database.executemany("INSERT INTO orders VALUES (:number, :customer, :city, :state)", orders)

    def find(self, number: int) -> str:
        row = self._database.execute(
            "SELECT customer, state FROM orders WHERE number = ?", (_whole(number),)
        ).fetchone()
        if row is None:
            return "no such order"
        return f"{'theirs' if row[0] == self._customer else 'not theirs'}, {row[1]}"

    def cancel(self, number: int) -> str:
        return self._change("UPDATE orders SET state = 'cancelled' WHERE number = ?", (_whole(number),))

    def send(self, number: int, city: str) -> str:
        return self._change("UPDATE orders SET city = ? WHERE number = ?", (city, _whole(number)))

    def open_ticket(self, number: int, reason: str) -> str:
        return self._change("INSERT INTO tickets VALUES (?, ?)", (_whole(number), reason))

    def state(self) -> dict[str, Any]:
        """Return all orders, and the numbers of the orders with tickets, whose reasons are free text."""
        orders = self._database.execute("SELECT * FROM orders ORDER BY number")
        tickets = self._database.execute("SELECT number FROM tickets ORDER BY number")
        return {"orders": [list(row) for row in orders], "tickets": [number for (number,) in tickets]}

    def _change(self, statement: str, values: tuple[Any, ...]) -> str:
        return "ok" if self._database.execute(statement, values).rowcount else "no such order"


def _whole(number: int) -> int:
    """Return the number, or 0, which no order has, if SQLite cannot store it."""
    return number if abs(number) < 2**63 else 0
