"""Write answers and recorded conversations as items of the Responses API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proxy.calls.call import CallDelta, Choice, TokenLogprob
from proxy.contract.identifiers import part_id
from proxy.contract.turn import FinishReason
from proxy.dialects.openai_parts import token_logprob
from proxy.dialects.responses.tools import SpecialTools, custom_input
from proxy.tokens.canonical import text_of
from proxy.tokens.formats import ToolCall

Item = dict[str, Any]
Message = dict[str, Any]

VERBATIM = "_verbatim"
"""Suffix of the id of a custom tool call whose input is the model's arguments as they are, because the model did not
wrap its text in them. The suffix tells the reader of the item not to wrap the input."""


def output_items(turn_id: str, choice: Choice, special: SpecialTools) -> list[Item]:
    """Return the items of an answer: reasoning, text, calls. An answer without calls has a message, even if empty."""
    items: list[Item] = []
    if choice.reasoning:
        items.append(reasoning_item(turn_id, choice.reasoning))
    if choice.text or not choice.tool_calls:
        items.append(message_item(turn_id, choice.text, answer_status(choice), choice.logprobs or ()))
    return [*items, *(call_item(turn_id, made, special) for made in choice.tool_calls)]


def answer_status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason is FinishReason.LENGTH else "completed"


def reasoning_item(turn_id: str, text: str, number: int = 0) -> Item:
    return {
        "id": part_id("rs", turn_id, number or None),
        "type": "reasoning",
        "summary": [],
        "content": [reasoning_part(text)],
        "encrypted_content": None,
    }


def message_item(turn_id: str, text: str, status: str, logprobs: Iterable[TokenLogprob], number: int = 0) -> Item:
    return {
        "id": part_id("msg", turn_id, number or None),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [text_part(text, logprobs)],
    }


def reasoning_part(text: str) -> Item:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, logprobs: Iterable[TokenLogprob] = ()) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": wire_logprobs(logprobs)}


def call_item(turn_id: str, made: CallDelta, special: SpecialTools) -> Item:
    """Return a call as an item, under the name and the kind that the client declared for the tool."""
    tool, index = special.get(made.call.name), made.call.index
    name: Item = {"name": tool.name if tool else made.call.name}
    if tool is not None and tool.namespace is not None:
        name["namespace"] = tool.namespace
    if tool is None or not tool.custom:
        return {
            "id": part_id("fc", turn_id, index),
            "type": "function_call",
            "status": "completed",
            "call_id": made.id,
            **name,
            "arguments": made.call.arguments,
        }
    text = custom_input(made.call.arguments)
    suffix = "" if text is not None else VERBATIM
    return {
        "id": part_id("ctc", turn_id, index) + suffix,
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": made.id,
        **name,
        "input": made.call.arguments if text is None else text,
    }


def wire_logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {
            **token_logprob(entry.token, entry.logprob),
            "top_logprobs": [token_logprob(other.token, other.logprob) for other in entry.top],
        }
        for entry in tokens
    ]


def input_items(turn_id: str, messages: Sequence[Message], special: SpecialTools) -> list[Item]:
    """Return the messages of a recorded conversation as items, numbered under the id of the turn that they led to."""
    items: list[Item] = []
    custom_calls: set[str] = set()
    for message in messages:
        items += _items_of(message, special, custom_calls)
    # Stored messages have no ids of items. Numbering makes them stable, so that they can serve as cursors.
    for position, item in enumerate(items):
        item["id"] = part_id("item", turn_id, position)
    return items


def _items_of(message: Message, special: SpecialTools, custom_calls: set[str]) -> list[Item]:
    role, text = message["role"], text_of(message.get("content"))
    if role == "tool":
        call_id = message.get("tool_call_id")
        kind = "custom_tool_call_output" if call_id in custom_calls else "function_call_output"
        return [{"id": "", "type": kind, "status": "completed", "call_id": call_id, "output": text}]
    if role != "assistant":
        content = [{"type": "input_text", "text": text}]
        return [{"id": "", "type": "message", "role": role, "status": "completed", "content": content}]
    items: list[Item] = []
    if message.get("reasoning_content"):
        items.append(reasoning_item("", message["reasoning_content"]))
    if text or not message.get("tool_calls"):
        items.append(message_item("", text, "completed", ()))
    for call in message.get("tool_calls") or ():
        item = _item_of_call(call, special)
        if item["type"] == "custom_tool_call":
            custom_calls.add(item["call_id"])
        items.append(item)
    return items


def _item_of_call(call: Mapping[str, Any], special: SpecialTools) -> Item:
    function = call["function"]
    known = ToolCall(index=0, name=function["name"], arguments=function.get("arguments") or "{}")
    return call_item("", CallDelta(call.get("id") or "", known), special)
