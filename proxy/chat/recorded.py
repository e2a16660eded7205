"""Recorded answers, as clients name them later: read again, or gone on from."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from proxy.chat.call import Answer
from proxy.contract.turn import TurnState
from proxy.credentials.service import Principal, PrincipalKind
from proxy.trajectories.conversations.service import Conversations, RecordedTurn

_TURN_ID = re.compile(r"turn_[0-9a-hjkmnp-tv-z]{26}")


class RecordedAnswers:
    """What keys may see of the store."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def find(self, principal: Principal, turn_id: str) -> RecordedTurn | None:
        """A turn of the key's run, or session. None also for one that was asked with `store` false."""
        if _TURN_ID.fullmatch(turn_id) is None:
            return None
        turn = await self._conversations.turn(turn_id)
        if turn is None or not _may_see(principal, turn) or turn.request.get("store") is False:
            return None
        return turn

    async def asked(self, turn: RecordedTurn) -> list[dict[str, Any]]:
        """The conversation that the turn answered."""
        messages: list[dict[str, Any]] = []
        exchanges = await self._conversations.up_to(turn.id)
        for index, exchange in enumerate(exchanges):
            messages += exchange.messages
            if index < len(exchanges) - 1:
                messages.append(answer_message(answer_of(exchange.response)))
        return messages


def answer_of(response: dict[str, Any]) -> Answer:
    """The answer as it was recorded."""
    return msgspec.convert(response, Answer)


def answer_message(answer: Answer) -> dict[str, Any]:
    """An answer of one choice, as the message that goes on with the conversation."""
    choice = answer.choices[0]
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            {
                "id": made.id,
                "type": "function",
                "function": {"name": made.call.name, "arguments": made.call.arguments},
            }
            for made in choice.tool_calls
        ]
    return message


def has_answer(turn: RecordedTurn) -> bool:
    """Whether there is something to go on from."""
    return turn.state is not TurnState.FAILED and bool(answer_of(turn.response).choices)


def _may_see(principal: Principal, turn: RecordedTurn) -> bool:
    if principal.kind not in (PrincipalKind.RUN, PrincipalKind.SESSION) or principal.run_id != turn.run_id:
        return False
    return principal.session_id is None or principal.session_id == turn.session_id
