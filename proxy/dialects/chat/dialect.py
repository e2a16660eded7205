"""Write answers and streams in the wire format of OpenAI's chat completions."""

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
from proxy.dialects.chat.tools import uses_deprecated_form
from proxy.dialects.events import DONE, PING, event
from proxy.dialects.openai_parts import completion_usage, own_turn, token_logprob


class ChatCompletions:
    """The dialect of POST /v1/chat/completions."""

    name = "chat"

    def response(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        return {
            "id": answer.turn_id,
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "system_fingerprint": answer.fingerprint,
            "choices": [
                {**_choice(index, choice, uses_deprecated_form(call.body)), **own_turn(answer, choice)}
                for index, choice in enumerate(answer.choices)
            ],
            "usage": completion_usage(answer),
            **marks(answer.unrecorded),
        }

    def stream(self, call: ModelCall, head: StreamHead) -> ChatStream:
        return ChatStream(call, head)


class ChatStream:
    """Writer of one answer as `chat.completion.chunk` events."""

    def __init__(self, call: ModelCall, head: StreamHead) -> None:
        self._call = call
        self._head = head
        self._deprecated_form = uses_deprecated_form(call.body)

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
                finish=_finish_reason(choice, self._deprecated_form),
                turn=own_turn(answer, choice),
                fingerprint=fingerprint,
                unrecorded=answer.unrecorded,
            )
            for index, choice in enumerate(answer.choices)
        )
        if self._call.include_usage:
            last += event({**self._envelope(fingerprint), "choices": [], "usage": completion_usage(answer)})
        return last + DONE

    def failure(self, envelope: Mapping[str, Any]) -> bytes:
        return event(envelope)

    def _call_chunks(self, made: CallDelta) -> bytes:
        """Write one chunk with id, type and name, then one with the arguments.

        Clients append the arguments of later chunks to those of the first, as OpenAI's API streams them.
        """
        head = {"name": made.call.name, "arguments": ""}
        rest = {"arguments": made.call.arguments}
        if self._deprecated_form:
            deltas: list[dict[str, Any]] = [{"function_call": head}, {"function_call": rest}]
        else:
            index = made.call.index
            deltas = [
                {"tool_calls": [{"index": index, "id": made.id, "type": "function", "function": head}]},
                {"tool_calls": [{"index": index, "function": rest}]},
            ]
        return b"".join(self._chunk(made.choice, delta) for delta in deltas)

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
        written = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **turn}
        chunk = {**self._envelope(fingerprint), "choices": [written], **marks(unrecorded)}
        if self._call.include_usage:
            chunk["usage"] = None  # OpenAI's API sends a null in each chunk before the one with the usage
        return event(chunk)


def _finish_reason(choice: Choice, deprecated_form: bool) -> str:
    # Clients of the deprecated form execute a call only if the finish reason is `function_call`.
    return "function_call" if deprecated_form and choice.tool_calls else choice.finish_reason.value


def _choice(index: int, choice: Choice, deprecated_form: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["content"] = choice.text or None
        calls = [
            {
                "id": made.id,
                "type": "function",
                "function": {"name": made.call.name, "arguments": made.call.arguments},
            }
            for made in choice.tool_calls
        ]
        message |= {"function_call": calls[0]["function"]} if deprecated_form else {"tool_calls": calls}
    return {
        "index": index,
        "message": message,
        "logprobs": _wire_logprobs(choice.logprobs) if choice.logprobs is not None else None,
        "finish_reason": _finish_reason(choice, deprecated_form),
    }


def _wire_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [
        {
            **token_logprob(entry.token, entry.logprob),
            "top_logprobs": [token_logprob(other.token, other.logprob) for other in entry.top],
        }
        for entry in tokens
    ]
    return {"content": content, "refusal": None}
