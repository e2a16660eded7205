"""The body of POST /v1/chat/completions, checked: every fault is a 400 that names its field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from proxy.chat.call import ModelCall, ToolChoice, ToolUse
from proxy.chat.conversation import WireMessages
from proxy.chat.fields import decode_element, decode_listing, object_at, plain, text_at
from proxy.chat.sampling_fields import SamplingFields
from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.http.body import validated

_ROLES = ("system", "developer", "user", "assistant", "tool")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class ChatCompletionBody(SamplingFields):
    """Explicit null is the same as absent; fields that are not named here are ignored.

    `messages` and `tools` are checked by hand, so that a fault names its exact place whatever else is allowed there.
    """

    model: str
    messages: list[Any] = Field(min_length=1)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    n: int | None = Field(default=None, ge=1, le=128)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None


def parse_chat_completion(raw: bytes) -> ModelCall:
    """Raises InvalidRequest with `param`, UnsupportedParameter for what is understood and cannot be honoured."""
    value = decode_listing(raw, "messages")
    body = validated(ChatCompletionBody, value)
    _refuse_unsupported(body)
    tools, warnings = _tools(body.tools or [])
    choice = _tool_choice(body.tool_choice)
    return ModelCall(
        model=body.model,
        messages=WireMessages(body.messages, _read_message),
        tools=tools if tools and choice.use is not ToolUse.NONE else None,
        tool_choice=choice,
        parallel_calls=body.parallel_tool_calls is not False,
        sampling=body.requested(body.max_completion_tokens or body.max_tokens),
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
        body={key: item for key, item in value.items() if key != "messages"},
        warnings=tuple(warnings),
    )


def _refuse_unsupported(body: ChatCompletionBody) -> None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    for name in ("functions", "function_call"):
        if getattr(body, name) is not None:
            raise UnsupportedParameter(f"{name} is the old form of tools, which are supported", param=name)
    if body.response_format is None:
        return
    kind = body.response_format.get("type") if isinstance(body.response_format, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidRequest("response_format is an object with a type", param="response_format")
    if kind != "text":
        raise UnsupportedParameter(
            f"response_format {kind!r} needs constrained decoding, which this engine is not set up for",
            param="response_format",
        )


def _tool_choice(choice: Any) -> ToolChoice:
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice(use=ToolUse.NONE)
    if choice == "required" or (isinstance(choice, Mapping) and isinstance(choice.get("type"), str)):
        raise UnsupportedParameter(
            "tool_choice can be auto or none: to require a call needs constrained decoding, which this engine is not "
            "set up for",
            param="tool_choice",
        )
    raise InvalidRequest("tool_choice is auto, none, required or an object with a type", param="tool_choice")


def _tools(tools: list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The function tools, and what to warn of. Other kinds have no effect, and calls are not held to a schema."""
    functions, warnings = [], []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        kind = text_at(object_at(tool, where).get("type"), f"{where}.type")
        if kind != "function":
            warnings.append(f"{where} of type {plain(kind)} is ignored")
            continue
        function = object_at(tool.get("function"), f"{where}.function")
        name = text_at(function.get("name"), f"{where}.function.name")
        if not name:
            raise InvalidRequest("a function has a name", param=f"{where}.function.name")
        if function.get("parameters") is not None:
            object_at(function["parameters"], f"{where}.function.parameters")
        if function.get("strict"):
            warnings.append(f"{where}.function.strict is not enforced")
        functions.append({key: item for key, item in tool.items() if item is not None})
    return functions, warnings


def _read_message(raw: msgspec.Raw, position: int) -> dict[str, Any]:
    where = f"messages[{position}]"
    return _message(decode_element(raw, where), where)


def _message(value: Any, where: str) -> dict[str, Any]:
    message = object_at(value, where)
    role = text_at(message.get("role"), f"{where}.role")
    if role == "function":
        raise UnsupportedParameter("role function is the old form of role tool", param=f"{where}.role")
    if role not in _ROLES:
        raise InvalidRequest(f"role is one of {', '.join(_ROLES)}", param=f"{where}.role")
    _check_content(message.get("content"), f"{where}.content")
    if message.get("content") is None and role != "assistant":
        raise InvalidRequest(f"a message of role {role} has content", param=f"{where}.content")
    if message.get("function_call") is not None:
        raise UnsupportedParameter("function_call is the old form of tool_calls", param=f"{where}.function_call")
    if message.get("tool_calls") is not None:
        if role != "assistant":
            raise InvalidRequest("only assistant messages have tool_calls", param=f"{where}.tool_calls")
        _check_calls(message["tool_calls"], f"{where}.tool_calls")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            text_at(message[key], f"{where}.{key}")
    return message


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequest("content is text, a list of parts, or null", param=where)
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = text_at(object_at(part, place).get("type"), f"{place}.type")
        if kind not in ("text", "refusal"):
            raise UnsupportedParameter(f"content of type {kind!r} is not supported: text only", param=f"{place}.type")
        text_at(part.get(kind), f"{place}.{kind}")


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise InvalidRequest("tool_calls is a list", param=where)
    for index, call in enumerate(calls):
        place = f"{where}[{index}]"
        kind = object_at(call, place).get("type")
        if kind not in (None, "function"):
            raise UnsupportedParameter(f"tool calls of type {kind!r} are not supported", param=f"{place}.type")
        function = object_at(call.get("function"), f"{place}.function")
        text_at(function.get("name"), f"{place}.function.name")
        if function.get("arguments") is not None:
            text_at(function["arguments"], f"{place}.function.arguments")
        if call.get("id") is not None:
            text_at(call["id"], f"{place}.id")
