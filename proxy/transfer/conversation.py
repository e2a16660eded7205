"""The conversation of a session's last answer, as a list of messages in the shape of chat completions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.contract.turn import Continuation, TurnState
from proxy.transfer.records import TurnRecord

_CONTINUES = (Continuation.EXACT, Continuation.RETEMPLATED)


def messages_of(turns: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    """What was said on the way to the last turn that was answered, its answer included."""
    last = next((index for index in reversed(range(len(turns))) if turns[index].state is not TurnState.FAILED), None)
    line: list[TurnRecord] = []
    while last is not None:
        line.append(turns[last])
        last = turns[last].parent if turns[last].continuation in _CONTINUES else None
    messages: list[dict[str, Any]] = []
    for turn in reversed(line):
        messages += turn.messages
        answer = _answer(turn.response)
        if answer is not None:
            messages.append(answer)
    return messages


def tools_of(turns: Sequence[TurnRecord]) -> list[Any] | None:
    """As the last request that had any wrote them."""
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
