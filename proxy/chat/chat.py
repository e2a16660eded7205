"""The dialect of chat completions: answers and streams as OpenAI's SDKs read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from proxy.chat.call import Answer, CallDelta, Delta, StreamHead, TokenLogprob
from proxy.tokens.tool_calls import ToolCall

_DONE = b"data: [DONE]\n\n"


class ChatCompletions:
    """POST /v1/chat/completions."""

    name = "chat"

    def response(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.tool_calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [_wire_call(made) for made in answer.tool_calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _wire_logprobs(answer.logprobs) if answer.logprobs is not None else None,
            "finish_reason": answer.finish_reason.value,
        }
        return {
            "id": answer.turn_id,
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "system_fingerprint": answer.fingerprint,
            "choices": [choice],
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            },
        }

    def opening(self, head: StreamHead) -> bytes:
        return _chunk(head, {"role": "assistant", "content": "", "refusal": None})

    def delta(self, head: StreamHead, delta: Delta) -> bytes:
        if isinstance(delta, CallDelta):
            return _call_chunks(head, delta.call.index, _wire_call(delta))
        logprobs = _wire_logprobs(delta.logprobs) if head.logprobs else None
        return _chunk(head, {"content": delta.text}, logprobs=logprobs)

    def closing(self, head: StreamHead, response: Mapping[str, Any]) -> bytes:
        fingerprint = response["system_fingerprint"]
        last = _chunk(head, {}, finish=response["choices"][0]["finish_reason"], fingerprint=fingerprint)
        if head.include_usage:
            last += _event({**_envelope(head, fingerprint), "choices": [], "usage": response["usage"]})
        return last + _DONE

    def replay(self, head: StreamHead, response: Mapping[str, Any]) -> bytes:
        choice = response["choices"][0]
        message = choice["message"]
        whole = self.opening(head)
        if message["content"]:
            whole += _chunk(head, {"content": message["content"]}, logprobs=choice["logprobs"])
        for index, call in enumerate(message.get("tool_calls", ())):
            whole += _call_chunks(head, index, call)
        return whole + self.closing(head, response)

    def failure(self, envelope: Mapping[str, Any]) -> bytes:
        return _event(envelope)


def _wire_call(made: CallDelta) -> dict[str, Any]:
    call: ToolCall = made.call
    return {"id": made.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _wire_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [
        {
            "token": entry.token.decode(errors="replace"),
            "logprob": entry.logprob,
            "bytes": list(entry.token),
            "top_logprobs": [],
        }
        for entry in tokens
    ]
    return {"content": content, "refusal": None}


def _call_chunks(head: StreamHead, index: int, call: Mapping[str, Any]) -> bytes:
    """Id, type and name once; then the arguments."""
    function = call["function"]
    named = {
        "index": index,
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": ""},
    }
    filled = {"index": index, "function": {"arguments": function["arguments"]}}
    return _chunk(head, {"tool_calls": [named]}) + _chunk(head, {"tool_calls": [filled]})


def _envelope(head: StreamHead, fingerprint: str | None) -> dict[str, Any]:
    return {
        "id": head.turn_id,
        "object": "chat.completion.chunk",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": fingerprint,
    }


def _chunk(
    head: StreamHead,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish: str | None = None,
    fingerprint: str | None = None,
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    chunk = {**_envelope(head, fingerprint), "choices": [choice]}
    if head.include_usage:
        chunk["usage"] = None
    return _event(chunk)


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
