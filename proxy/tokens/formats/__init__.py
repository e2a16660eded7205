"""Tool calls in a model's output: one file for each way of writing them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from proxy.tokens.formats import hermes, llama3_json, mistral, qwen3_coder
from proxy.tokens.formats.calls import CallParser, Event, ToolCall, Tools

__all__ = ["TOOL_FORMATS", "CallParser", "Event", "ToolCall", "ToolFormat", "Tools"]


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A way of writing tool calls. `markers` are added tokens of the models that write so; `call_end` is a text that
    ends a call and stands nowhere else, None where there is none."""

    name: str
    markers: tuple[str, ...]
    call_end: str | None
    parser: Callable[[Tools | None], CallParser]


_ALL = (
    ToolFormat(name="hermes", markers=(hermes.OPEN, hermes.CLOSE), call_end=hermes.CLOSE, parser=hermes.HermesParser),
    ToolFormat(
        name="qwen3_coder",
        markers=(qwen3_coder.OPEN, qwen3_coder.CLOSE),
        call_end=qwen3_coder.CLOSE,
        parser=qwen3_coder.Qwen3CoderParser,
    ),
    ToolFormat(name="llama3_json", markers=(llama3_json.TAG,), call_end=None, parser=llama3_json.Llama3JsonParser),
    ToolFormat(
        name="mistral",
        markers=(mistral.OPEN, mistral.CALL_ID, mistral.ARGUMENTS),
        call_end=None,
        parser=mistral.MistralParser,
    ),
)
TOOL_FORMATS = {each.name: each for each in _ALL}
