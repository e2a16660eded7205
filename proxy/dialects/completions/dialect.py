"""Write answers and streams in the wire format of OpenAI's completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from proxy.calls.call import Answer, Choice, Delta, ModelCall, StreamHead, TextDelta, TokenLogprob
from proxy.dialects.openai_parts import CompletionStream, completion


class Completions:
    """The dialect of POST /v1/completions."""

    name = "completions"

    def response(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        choices = [_choice(call, index, choice) for index, choice in enumerate(answer.choices)]
        return completion("text_completion", answer, choices)

    def stream(self, call: ModelCall, head: StreamHead) -> TextStream:
        return TextStream(call, head)


class TextStream(CompletionStream):
    """Writer of one answer as `text_completion` events."""

    kind = "text_completion"

    def __init__(self, call: ModelCall, head: StreamHead) -> None:
        super().__init__(call, head)
        self._offsets = [_Offset() for _ in range(head.choices)]

    def opening(self) -> bytes:
        # Unlike chat completions, completions have no first chunk with a role.
        if not self._call.echoes:
            return b""
        return b"".join(self._chunk(index, _echo(self._call, index)) for index in range(self._head.choices))

    def delta(self, delta: Delta) -> bytes:
        assert isinstance(delta, TextDelta), "raw completions are never parsed for reasoning or tool calls"
        logprobs = _logprobs(delta.logprobs, self._offsets[delta.choice]) if self._call.logprobs else None
        return self._chunk(delta.choice, delta.text, logprobs)

    def closing(self, answer: Answer) -> bytes:
        last = [_written(index, "", finish=choice.finish_reason.value) for index, choice in enumerate(answer.choices)]
        return self._ending(answer, last)

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        return self._event([_written(index, text, logprobs=logprobs)])


class _Offset:
    """Count of the characters before each token of an answer.

    All tokens of a character that is split among several have that character's offset.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def take(self, token: bytes) -> int:
        begin = self._characters
        self._characters += len(self._decoder.decode(token))
        return begin


def _written(
    index: int, text: str, *, logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _choice(call: ModelCall, index: int, choice: Choice) -> dict[str, Any]:
    logprobs = _logprobs(choice.logprobs, _Offset()) if choice.logprobs is not None else None
    text = _echo(call, index) + choice.text
    return _written(index, text, logprobs=logprobs, finish=choice.finish_reason.value)


def _echo(call: ModelCall, index: int) -> str:
    # Choices are grouped by prompt: `n` for the first prompt, then `n` for the second.
    return call.echoes[index // call.n] if call.echoes else ""


def _logprobs(tokens: Iterable[TokenLogprob], offset: _Offset) -> dict[str, Any]:
    entries = list(tokens)
    tops = [_top(entry) for entry in entries]
    return {
        "tokens": [_text(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops if any(entry.top for entry in entries) else None,
        "text_offset": [offset.take(entry.token) for entry in entries],
    }


def _top(entry: TokenLogprob) -> dict[str, float]:
    """Return the most probable tokens and the sampled one, which OpenAI's API always includes."""
    return {_text(other.token): other.logprob for other in entry.top} | {_text(entry.token): entry.logprob}


def _text(token: bytes) -> str:
    """Return a token's text, or `bytes:\\xNN…` if it is not valid UTF-8 on its own, as OpenAI writes it."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
