"""The conversation that leads to a session's last answer, as chat-completion messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.contract.turn import Continuation, TurnState
from proxy.transfer.records import TurnRecord

_CONTINUES = (Continuation.EXACT, Continuation.RETEMPLATED)


def messages_of(turns: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    """Return the messages of the path from the first turn to the last one with an answer, that answer included."""
    last = next((index for index in reversed(range(len(turns))) if turns[index].state is not TurnState.FAILED), None)
    path: list[TurnRecord] = []
    while last is not None:
        path.append(turns[last])
        # An edited or new conversation begins with messages of its own; only exact and retemplated turns extend the
        # parent's.
        last = turns[last].parent if turns[last].continuation in _CONTINUES else None
    messages: list[dict[str, Any]] = []
    for turn in reversed(path):
        messages += turn.messages
        answer = _answer(turn.response)
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


def _answer(response: Mapping[str, Any]) -> dict[str, Any] | None:
    match response:
        case {"choices": [{"text": str(text)} as choice, *_]}:
            message: dict[str, Any] = {"role": "assistant", "content": text}
        case _:
            return None
    if choice.get("reasoning"):
        message["reasoning_content"] = choice["reasoning"]
    calls = [_call(made) for made in choice.get("tool_calls") or () if "call" in made]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(made: Mapping[str, Any]) -> dict[str, Any]:
    call = made["call"]
    function = {"name": call.get("name"), "arguments": call.get("arguments")}
    return {"id": made.get("id"), "type": "function", "function": function}
