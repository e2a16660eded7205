"""Write answers and streams in the wire format of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterable
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
)
from proxy.dialects.chat.tools import uses_deprecated_form
from proxy.dialects.openai_parts import CompletionStream, completion, token_logprob


class ChatCompletions:
    """The dialect of POST /v1/chat/completions."""

    name = "chat"

    def response(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        deprecated_form = uses_deprecated_form(call.body)
        choices = [_choice(index, choice, deprecated_form) for index, choice in enumerate(answer.choices)]
        return completion("chat.completion", answer, choices)

    def stream(self, call: ModelCall, head: StreamHead) -> ChatStream:
        return ChatStream(call, head)


class ChatStream(CompletionStream):
    """Writer of one answer as `chat.completion.chunk` events."""

    kind = "chat.completion.chunk"

    def __init__(self, call: ModelCall, head: StreamHead) -> None:
        super().__init__(call, head)
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
        return self._chunk(delta.choice, {"content": delta.text}, logprobs)

    def closing(self, answer: Answer) -> bytes:
        last = [
            _written(index, {}, finish=_finish_reason(choice, self._deprecated_form))
            for index, choice in enumerate(answer.choices)
        ]
        return self._ending(answer, last)

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

    def _chunk(self, choice: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> bytes:
        return self._event([_written(choice, delta, logprobs=logprobs)])


def _written(
    choice: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


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
