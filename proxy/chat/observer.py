"""Who wants to hear of finished turns: metrics."""

from __future__ import annotations

from typing import Protocol

from proxy.contract.turn import Turn


class TurnObserver(Protocol):
    """Called once per recorded turn, after its commit. It must not raise and not wait."""

    def turn_finished(self, turn: Turn, *, attributed_by: str, prompt_tokens: int, dialect: str) -> None:
        """`prompt_tokens` counts the full prompt, shared tokens included; `dialect` is the wire format's name."""
        ...
