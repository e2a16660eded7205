"""Write the Response object of the Responses API: the request's parameters, echoed, and the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.calls.call import Answer, StreamHead, marks
from proxy.dialects.responses.items import Item

# The parameters that a response echoes, with the values for those that are absent from the request.
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


def response_object(
    body: Mapping[str, Any],
    answer: StreamHead | Answer,
    *,
    status: str,
    output: Sequence[Item] = (),
    usage: dict[str, Any] | None = None,
    fingerprint: str | None = None,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the Response object for the request `body` and its `answer`, or the head of the answer's stream."""
    echoed = {name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()}
    return {
        "id": answer.turn_id,
        "object": "response",
        "created_at": answer.created,
        "completed_at": (
            answer.choices[0].completed if isinstance(answer, Answer) and status == "completed" else None
        ),
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": answer.model,
        "system_fingerprint": fingerprint,
        **echoed,
        "tools": [_echoed_tool(tool) for tool in echoed["tools"]],
        "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
        "text": {"format": {"type": "text"}, **_without_nulls(body.get("text"))},
        "output": list(output),
        "usage": usage,
        **marks(answer.unrecorded),
    }


def _echoed_tool(tool: Any) -> Any:
    # OpenAI's API echoes every field of a function, although requests may leave some out.
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}


def response_usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _without_nulls(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (fields or {}).items() if value is not None}
