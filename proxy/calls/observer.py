"""The observer of turns, which counts them for metrics."""

from __future__ import annotations

from typing import Protocol

from proxy.contract.turn import Turn


class TurnObserver(Protocol):
    """Counts turns. Its methods neither raise nor wait."""

    def tokens_redacted(self, tokens: int) -> None:
        """Count tokens that were redacted in turns that are about to be recorded."""
        ...

    def turn_finished(self, turn: Turn, *, attributed_by: str, prompt_tokens: int, dialect: str) -> None:
        """Count a turn, once, after its commit. `prompt_tokens` covers the whole prompt, shared tokens included;
        `dialect` is the name of the wire format."""
        ...

    def shadow_dropped(self, *, reason: str) -> None:
        """Count a shadow answer that was not recorded."""
        ...

    def candidate_answered(self, *, outcome: str) -> None:
        """Count a candidate's answer that nobody sees: `recorded`, `failed`, or why it was dropped."""
        ...

    def call_unrecorded(self, *, reason: str, dialect: str) -> None:
        """Count a call that was answered although its turns are not in the store."""
        ...
