"""What a request says to the model's chat template, beside messages and tools."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from proxy.dialects.fields import plain


def read_template_arguments(
    effort: str | None, further: Mapping[str, Any] | None, known: Set[str]
) -> tuple[dict[str, Any], list[str]]:
    """What the template is told, and a warning for what it has no use for. `effort` is that of reasoning, `further`
    are arguments by name (`chat_template_kwargs`), `known` those that the template reads."""
    asked = dict(further or {})
    if effort == "none" and "reasoning_effort" not in known and "enable_thinking" in known:
        asked.setdefault("enable_thinking", False)
    elif effort is not None:
        asked.setdefault("reasoning_effort", effort)
    warnings = [f"the model's template knows no {plain(name)}" for name in asked if name not in known]
    return {name: value for name, value in asked.items() if name in known}, warnings
