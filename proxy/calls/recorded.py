"""Find recorded answers by the ids under which clients refer to them: to read one again, or to continue it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from proxy.auth.access import Principal, Right, covers_session, has_right
from proxy.calls.call import Answer
from proxy.calls.conversation import KnownMessages, RememberedMessages
from proxy.calls.models import ModelCatalog
from proxy.calls.remembered import Remembered
from proxy.contract.identifiers import TurnId
from proxy.contract.turn import TurnState
from proxy.turns.conversations import Conversations, RecordedTurn

_TURN_ID = re.compile(r"turn_[0-9a-hjkmnp-tv-z]{26}")


class _Conversation(msgspec.Struct, frozen=True):
    """A conversation that ends with an answer. Immutable: it is shared."""

    messages: tuple[dict[str, Any], ...] = ()
    known: KnownMessages = KnownMessages()
    size: int = 0

    def followed_by(self, messages: list[dict[str, Any]]) -> _Conversation:
        return _Conversation(
            (*self.messages, *messages),
            self.known.followed_by(messages),
            self.size + len(msgspec.json.encode(messages)),
        )


class RecordedAnswers:
    """Reads the answers that a key may see. Conversations stay in `remembered`, so that continuing one is cheap."""

    def __init__(self, conversations: Conversations, remembered: Remembered[Any], models: ModelCatalog) -> None:
        self._models = models
        self._conversations = conversations
        self._remembered = remembered

    async def find(self, principal: Principal, turn_id: str) -> RecordedTurn | None:
        """Find a turn in the key's scope. None also for a turn that was requested with `store` false, and for a
        shadow answer."""
        # Any text may come as an id; what cannot be one does not reach the store.
        if _TURN_ID.fullmatch(turn_id) is None:
            return None
        turn = await self._conversations.turn(turn_id)
        if turn is None or not has_right(principal, Right.CALL) or turn.request.get("store") is False:
            return None
        if turn.state is TurnState.SHADOW:
            return None
        run = await self._models.run(turn.run_id)
        return turn if covers_session(principal, run, turn.session_id) else None

    async def asked(self, turn: RecordedTurn) -> list[dict[str, Any]]:
        """Return the conversation that the turn answered."""
        return list((await self._up_to(turn)).messages[:-1])

    async def answered(self, turn: RecordedTurn) -> RememberedMessages:
        """Return the conversation up to and with the turn's answer."""
        conversation = await self._up_to(turn)
        return RememberedMessages(conversation.messages, start=len(conversation.messages), known=conversation.known)

    async def _up_to(self, turn: RecordedTurn) -> _Conversation:
        known = self._recall(turn.id)
        if known is not None:
            return known
        # Most clients continue the newest answer, whose predecessor is remembered: then only one turn is added.
        before = self._recall(turn.continues) if turn.continues is not None else _Conversation()
        if before is None:
            before = _Conversation()
            for exchange in (await self._conversations.up_to(turn.id))[:-1]:
                before = before.followed_by([*exchange.messages, answer_message(answer_of(exchange.response))])
        conversation = before.followed_by([*turn.messages, answer_message(answer_of(turn.response))])
        self._remembered.put(turn.id.encode(), conversation, size=conversation.size)
        return conversation

    def _recall(self, turn_id: TurnId) -> _Conversation | None:
        known: _Conversation | None = self._remembered.get(turn_id.encode())
        return known


def answer_of(response: dict[str, Any]) -> Answer:
    """Return the answer as it was recorded."""
    return msgspec.convert(response, Answer)


def answer_message(answer: Answer) -> dict[str, Any]:
    """Return an answer of one choice as a message of the conversation."""
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
