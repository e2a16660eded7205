"""Conversations read back from recorded turns, from the store and from memory."""

from __future__ import annotations

from typing import Any

from proxy.auth.service import Principal, PrincipalKind
from proxy.calls.conversation import ConversationIndex
from proxy.calls.recorded import RecordedAnswers
from proxy.calls.remembered import Remembered
from proxy.contract.identifiers import KeyId
from proxy.turns.conversations import Conversations, RecordedTurn
from tests.proxy.calls.world import CALL, TOOLS, USER, World


def whose(world: World) -> Principal:
    return Principal(kind=PrincipalKind.RUN, key_id=KeyId("key"), run_id=world.store.run.id, session_id=None)


async def found(world: World, answers: RecordedAnswers, turn_id: str) -> RecordedTurn:
    turn = await answers.find(whose(world), turn_id)
    assert turn is not None
    return turn


async def test_a_conversation_is_the_same_from_the_store_and_from_memory(world: World) -> None:
    world.say("First.", CALL, "Third.", "Fourth.")
    messages: list[Any] = [USER]
    for _ in range(4):
        answer = (await world.post({"messages": messages, "tools": TOOLS})).json()["choices"][0]["message"]
        messages.append({key: value for key, value in answer.items() if key != "refusal"})
        if answer.get("tool_calls"):
            messages.append({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "42"})
        else:
            messages.append({"role": "user", "content": "And then?"})
    conversations = Conversations(world.store.database)
    warm: RecordedAnswers = RecordedAnswers(conversations, Remembered(), world.calls.models)
    for turn in await world.turns():
        cold: RecordedAnswers = RecordedAnswers(conversations, Remembered(most_bytes=0), world.calls.models)
        from_store = await cold.answered(await found(world, cold, turn.id))
        from_memory = await warm.answered(await found(world, warm, turn.id))
        assert list(from_memory) == list(from_store)
        assert from_memory.known == from_store.known
        assert from_store.known.hash == turn.conversation_hash
        assert ConversationIndex().read(list(from_store)).hash == turn.conversation_hash
        assert await cold.asked(await found(world, cold, turn.id)) == list(from_store)[:-1]
    assert [message["role"] for message in from_store] == [message["role"] for message in messages[:-1]]


async def test_ids_that_are_not_of_turns_are_not_looked_up(world: World) -> None:
    answers = RecordedAnswers(Conversations(world.store.database), Remembered(), world.calls.models)
    for name in ("", "turn_", "ses_01m7zrzm1dq96rr5zq53070bmm", "turn_" + "\x00" * 26, "turn_" + "u" * 26):
        assert await answers.find(whose(world), name) is None
