"""The Response object: what was asked, echoed, around what was answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.calls.call import Answer, Choice, StreamHead, marks
from proxy.contract.turn import FinishReason
from proxy.dialects.responses.items import Item

_ECHOED: dict[str, Any] = {
    "background": False,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""The parameters that come back with a response, and what they are where the request says nothing."""


def response_object(
    body: Mapping[str, Any],
    of: StreamHead | Answer,
    *,
    status: str,
    output: Sequence[Item] = (),
    usage: dict[str, Any] | None = None,
    fingerprint: str | None = None,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`body` is the request's. `of` says which turn it is, of which model."""
    echoed = {name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()}
    return {
        "id": of.turn_id,
        "object": "response",
        "created_at": of.created,
        "completed_at": of.choices[0].completed if isinstance(of, Answer) and status == "completed" else None,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": of.model,
        "system_fingerprint": fingerprint,
        **echoed,
        "tools": [_tool(tool) for tool in echoed["tools"]],
        "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
        "text": {"format": {"type": "text"}, **_given(body.get("text"))},
        "output": list(output),
        "usage": usage,
        **marks(of.unrecorded),
    }


def _tool(tool: Any) -> Any:
    """A function's fields all stand in the echo."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}


def response_status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason is FinishReason.LENGTH else "completed"


def usage_of(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _given(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (fields or {}).items() if value is not None}
