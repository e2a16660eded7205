"""The conversation that leads to a session's last answer, as chat-completion messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.contract.turn import Continuation, TurnState
from proxy.transfer.records import TurnRecord
from proxy.turns.answers import answer_message

_CONTINUES = (Continuation.EXACT, Continuation.RETEMPLATED)


def messages_of(turns: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    """Return the messages of the path from the first turn to the last one with an answer, that answer included."""
    no_answers = (TurnState.FAILED, TurnState.SHADOW)
    last = next((index for index in reversed(range(len(turns))) if turns[index].state not in no_answers), None)
    return [] if last is None else messages_to(turns, last)


def messages_to(turns: Sequence[TurnRecord], index: int) -> list[dict[str, Any]]:
    """Return the messages of the path from the first turn to the turn at `index`, its answer included."""
    path: list[TurnRecord] = []
    place: int | None = index
    while place is not None:
        path.append(turns[place])
        # An edited or new conversation begins with messages of its own; only exact and retemplated turns extend the
        # parent's.
        place = turns[place].parent if turns[place].continuation in _CONTINUES else None
    messages: list[dict[str, Any]] = []
    for turn in reversed(path):
        messages += turn.messages
        answer = answer_message(turn.response)
        if answer is not None:
            messages.append(answer)
    return messages


def tools_of(turns: Sequence[TurnRecord]) -> list[Any] | None:
    """Return the tools of the last request that sent any, or None."""
    for turn in reversed(turns):
        tools = turn.request.get("tools")
        if isinstance(tools, list) and tools:
            return tools
    return None
