"""Read the arguments that a request passes to the model's chat template, beside messages and tools."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from proxy.dialects.fields import plain


def read_template_arguments(
    effort: str | None, further: Mapping[str, Any] | None, known: Set[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that the template reads, and a warning for each other one.

    `effort` is the requested reasoning effort, `further` the value of `chat_template_kwargs`, and `known` the names
    of the arguments that the template reads.
    """
    asked = dict(further or {})
    # Templates that only switch thinking on and off (such as Qwen3's) have no levels of effort; "none" switches it
    # off. An explicit template argument wins over the effort.
    if effort == "none" and "reasoning_effort" not in known and "enable_thinking" in known:
        asked.setdefault("enable_thinking", False)
    elif effort is not None:
        asked.setdefault("reasoning_effort", effort)
    warnings = [f"the model's template does not read {plain(name)}" for name in asked if name not in known]
    return {name: value for name, value in asked.items() if name in known}, warnings
