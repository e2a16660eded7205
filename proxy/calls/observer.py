"""Who wants to hear of finished turns: metrics."""

from __future__ import annotations

from typing import Protocol

from proxy.contract.turn import Turn


class TurnObserver(Protocol):
    """`turn_finished` is called once per recorded turn, after its commit. Neither raises nor waits."""

    def tokens_redacted(self, tokens: int) -> None:
        """So many of the turns that are about to be recorded."""
        ...

    def turn_finished(self, turn: Turn, *, attributed_by: str, prompt_tokens: int, dialect: str) -> None:
        """`prompt_tokens` counts the full prompt, shared tokens included; `dialect` is the wire format's name."""
        ...

    def call_unrecorded(self, *, reason: str, dialect: str) -> None:
        """A call was answered, and its turns are not in the store."""
        ...
