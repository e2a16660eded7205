"""The simulated customer, who reads the agent's answers and never sees the database."""

from __future__ import annotations

from dataclasses import dataclass

INSISTS = "Please make an exception."


@dataclass(kw_only=True)
class Customer:
    """Somebody who wants an order cancelled, or sent to `city`, says which when asked, and insists once after a
    refusal."""

    name: str
    number: int
    city: str | None
    names_order: bool
    has_insisted: bool = False

    @property
    def opening(self) -> str:
        order = f"order {self.number}" if self.names_order else "my order"
        wish = f"cancel {order}" if self.city is None else f"send {order} to {self.city}"
        return f"I am {self.name}. Please {wish}."

    def reply(self, answer: str) -> str | None:
        """Return what the customer says to an answer of the agent, None if that ends the conversation."""
        said = answer.casefold()
        if "which order" in said:
            return f"Order {self.number}."
        if "done" in said or self.has_insisted:
            return None
        self.has_insisted = True
        return INSISTS
