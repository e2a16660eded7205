"""Write answers and streams in the wire format of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.calls.call import (
    Answer,
    CallDelta,
    Choice,
    Delta,
    ModelCall,
    StreamHead,
    TextDelta,
    marks,
)
from proxy.contract.turn import FinishReason
from proxy.dialects.events import event
from proxy.http.anthropic import anthropic_envelope

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}

# The `caller` of a tool: the model itself, not a program that Anthropic runs for it.
_CALLER = {"type": "direct"}

# Fields of `usage` that clients expect to exist and that have no meaning here.
_EMPTY_USAGE = {
    "cache_creation": None,
    "inference_geo": None,
    "output_tokens_details": None,
    "server_tool_use": None,
    "service_tier": "standard",
}


class Messages:
    """The dialect of POST /v1/messages."""

    name = "messages"

    def response(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        choice = answer.choices[0]
        return {
            **_message(answer),
            "content": _content(call, answer.turn_id, choice),
            **_ending(choice),
            "usage": {**_EMPTY_USAGE, **_usage(answer)},
            **marks(answer.unrecorded),
        }

    def stream(self, call: ModelCall, head: StreamHead) -> MessagesStream:
        return MessagesStream(call, head)


class MessagesStream:
    """Writer of one answer as events: each block is opened, filled and closed before the next one opens."""

    def __init__(self, call: ModelCall, head: StreamHead) -> None:
        self._head = head
        self._shows_thinking = not _omits_thinking(call)
        self._index = -1
        self._open: str | None = None

    def opening(self) -> bytes:
        message = {
            **_message(self._head),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {**_EMPTY_USAGE, **_prompt_usage(self._head), "output_tokens": 0},
        }
        return _event("message_start", message=message)

    def delta(self, delta: Delta) -> bytes:
        if isinstance(delta, CallDelta):
            opened = self._begin(
                {"type": "tool_use", "id": delta.id, "name": delta.call.name, "input": {}, "caller": _CALLER}
            )
            filled = self._fill({"type": "input_json_delta", "partial_json": delta.call.arguments})
            return opened + filled + self._end()
        if not delta.text:
            return b""
        if isinstance(delta, TextDelta):
            opened = b"" if self._open == "text" else self._begin({"type": "text", "text": "", "citations": None})
            return opened + self._fill({"type": "text_delta", "text": delta.text})
        opened = b""
        if self._open != "thinking":
            opened = self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if not self._shows_thinking:  # the block is still written: clients expect one before the text
            return opened
        return opened + self._fill({"type": "thinking_delta", "thinking": delta.text})

    def ping(self) -> bytes:
        return _event("ping")

    def closing(self, answer: Answer) -> bytes:
        fields = {"delta": _ending(answer.choices[0]), "usage": _usage(answer), **marks(answer.unrecorded)}
        return self._end() + _event("message_delta", **fields) + _event("message_stop")

    def failure(self, envelope: Mapping[str, Any]) -> bytes:
        return event(anthropic_envelope(envelope), "error")

    def _begin(self, block: dict[str, Any]) -> bytes:
        ended = self._end()
        self._index += 1
        self._open = block["type"]
        return ended + _event("content_block_start", index=self._index, content_block=block)

    def _fill(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._fill({"type": "signature_delta", "signature": _signature(self._head.turn_id)})
        self._open = None
        return signed + _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _message(known: Answer | StreamHead) -> dict[str, Any]:
    return {"id": known.turn_id, "type": "message", "role": "assistant", "model": known.model, "container": None}


def _content(call: ModelCall, turn_id: str, choice: Choice) -> list[dict[str, Any]]:

    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        shown = "" if _omits_thinking(call) else choice.reasoning
        blocks.append({"type": "thinking", "thinking": shown, "signature": _signature(turn_id)})
    if choice.text:
        blocks.append({"type": "text", "text": choice.text, "citations": None})
    return blocks + [
        {
            "type": "tool_use",
            "id": made.id,
            "name": made.call.name,
            # The exact bytes that the model wrote. The parsers of tool calls only accept JSON objects.
            "input": msgspec.Raw(made.call.arguments.encode()),
            "caller": _CALLER,
        }
        for made in choice.tool_calls
    ]


def _ending(choice: Choice) -> dict[str, Any]:
    # A stop string can also end an answer that has tool calls. Its finish reason is TOOL_CALLS then, which must win:
    # clients execute the calls only if the stop reason is `tool_use`.
    if choice.stopped_by is not None and choice.finish_reason is FinishReason.STOP:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped_by, "stop_details": None}
    return {"stop_reason": _STOP_REASONS[choice.finish_reason], "stop_sequence": None, "stop_details": None}


def _usage(answer: Answer) -> dict[str, Any]:
    usage: dict[str, Any] = {**_prompt_usage(answer), "output_tokens": answer.completion_tokens}
    if answer.reasoning_tokens:
        usage["output_tokens_details"] = {"thinking_tokens": answer.reasoning_tokens}
    return usage


def _prompt_usage(known: Answer | StreamHead) -> dict[str, int]:
    return {
        "input_tokens": known.prompt_tokens - known.cached_tokens,  # unlike OpenAI, Anthropic excludes cached ones
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": known.cached_tokens,
    }


def _omits_thinking(call: ModelCall) -> bool:
    thinking = call.body.get("thinking")
    return isinstance(thinking, Mapping) and thinking.get("display") == "omitted"


def _signature(turn_id: str) -> str:
    # Clients require a signature on thinking and send it back. It is not checked: the turn's tokens are recorded, so
    # thinking that a client changed does not match them.
    return f"base-rl.{turn_id}"
