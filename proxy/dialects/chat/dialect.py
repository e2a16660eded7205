"""The dialect of chat completions: answers and streams as OpenAI's SDKs read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from proxy.calls.call import (
    Answer,
    CallDelta,
    Choice,
    Delta,
    ModelCall,
    ReasoningDelta,
    StreamHead,
    TokenLogprob,
    marks,
)
from proxy.dialects.chat.tools import speaks_old
from proxy.dialects.events import DONE, PING, event
from proxy.tokens.formats import ToolCall


class ChatCompletions:
    """POST /v1/chat/completions."""

    name = "chat"

    def response(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        return {
            "id": answer.turn_id,
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "system_fingerprint": answer.fingerprint,
            "choices": [
                {**_choice(index, choice, speaks_old(call.body)), **own_turn(answer, choice)}
                for index, choice in enumerate(answer.choices)
            ],
            "usage": wire_usage(answer),
            **marks(answer.unrecorded),
        }

    def stream(self, call: ModelCall, head: StreamHead) -> ChatStream:
        return ChatStream(call, head)


class ChatStream:
    """The chunks of one answer."""

    def __init__(self, call: ModelCall, head: StreamHead) -> None:
        self._call = call
        self._head = head

    def opening(self) -> bytes:
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, first) for index in range(self._head.choices))

    def delta(self, delta: Delta) -> bytes:
        if isinstance(delta, CallDelta):
            return self._call_chunks(delta)
        if isinstance(delta, ReasoningDelta):
            return self._chunk(delta.choice, {"reasoning_content": delta.text})
        logprobs = _wire_logprobs(delta.logprobs) if self._call.logprobs else None
        return self._chunk(delta.choice, {"content": delta.text}, logprobs=logprobs)

    def ping(self) -> bytes:
        return PING

    def closing(self, answer: Answer) -> bytes:
        fingerprint = answer.fingerprint
        last = b"".join(
            self._chunk(
                index,
                {},
                finish=_finish_reason(choice, speaks_old(self._call.body)),
                turn=own_turn(answer, choice),
                fingerprint=fingerprint,
                unrecorded=answer.unrecorded,
            )
            for index, choice in enumerate(answer.choices)
        )
        if self._call.include_usage:
            last += event({**self._envelope(fingerprint), "choices": [], "usage": wire_usage(answer)})
        return last + DONE

    def failure(self, envelope: Mapping[str, Any]) -> bytes:
        return event(envelope)

    def _call_chunks(self, made: CallDelta) -> bytes:
        """Id, type and name once; then the arguments."""
        if speaks_old(self._call.body):
            named_old = {"function_call": {"name": made.call.name, "arguments": ""}}
            filled_old = {"function_call": {"arguments": made.call.arguments}}
            return self._chunk(made.choice, named_old) + self._chunk(made.choice, filled_old)
        index = made.call.index
        function = {"name": made.call.name, "arguments": ""}
        named = {"index": index, "id": made.id, "type": "function", "function": function}
        filled = {"index": index, "function": {"arguments": made.call.arguments}}
        return b"".join(self._chunk(made.choice, {"tool_calls": [part]}) for part in (named, filled))

    def _envelope(self, fingerprint: str | None) -> dict[str, Any]:
        return {
            "id": self._head.turn_id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": fingerprint,
        }

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
        turn: Mapping[str, Any] = MappingProxyType({}),
        fingerprint: str | None = None,
        unrecorded: str | None = None,
    ) -> bytes:
        told = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **turn}
        chunk = {**self._envelope(fingerprint), "choices": [told], **marks(unrecorded)}
        if self._call.include_usage:
            chunk["usage"] = None
        return event(chunk)


def own_turn(answer: Answer, choice: Choice) -> dict[str, Any]:
    """What a choice's reward is sent to, where the answer's own id is not that of all its choices."""
    return {"turn_id": choice.turn_id} if len(answer.choices) > 1 else {}


def _finish_reason(choice: Choice, in_old_form: bool) -> str:
    """In OpenAI's words; a client that speaks of functions waits for another one than one that speaks of tools."""
    return "function_call" if in_old_form and choice.tool_calls else choice.finish_reason.value


def _choice(index: int, choice: Choice, in_old_form: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["content"] = choice.text or None
        calls = [_wire_call(made) for made in choice.tool_calls]
        message |= {"function_call": calls[0]["function"]} if in_old_form else {"tool_calls": calls}
    return {
        "index": index,
        "message": message,
        "logprobs": _wire_logprobs(choice.logprobs) if choice.logprobs is not None else None,
        "finish_reason": _finish_reason(choice, in_old_form),
    }


def wire_usage(answer: Answer) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
    if answer.reasoning_tokens:
        usage["completion_tokens_details"] = {"reasoning_tokens": answer.reasoning_tokens}
    return usage


def _wire_call(made: CallDelta) -> dict[str, Any]:
    call: ToolCall = made.call
    return {"id": made.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _wire_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [
        {
            "token": entry.token.decode(errors="replace"),
            "logprob": entry.logprob,
            "bytes": list(entry.token),
            "top_logprobs": [
                {"token": other.token.decode(errors="replace"), "logprob": other.logprob, "bytes": list(other.token)}
                for other in entry.top
            ],
        }
        for entry in tokens
    ]
    return {"content": content, "refusal": None}
