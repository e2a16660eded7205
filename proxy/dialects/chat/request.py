"""Parse the body of POST /v1/chat/completions. Every error is a 400 that names the field."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from pydantic import Field, WithJsonSchema

from proxy.calls.bounds import DEFAULT_BOUNDS, check_lists
from proxy.calls.call import ModelCall, ToolChoice
from proxy.calls.conversation import WireMessages
from proxy.calls.remembered import Remembered
from proxy.dialects.answer_format import read_answer_format
from proxy.dialects.chat import schemas
from proxy.dialects.chat.messages import read_message
from proxy.dialects.chat.tools import (
    Function,
    read_deprecated_choice,
    read_deprecated_functions,
    read_tool_choice,
    read_tools,
    uses_deprecated_form,
)
from proxy.dialects.fields import decode_listing, split_listing, unknown_fields
from proxy.dialects.openai_fields import SamplingFields, StreamOptions
from proxy.dialects.template_arguments import read_template_arguments
from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.http.body import validated
from proxy.settings import RequestSettings

# Bytes of a remembered call beside its texts.
_CALL_BYTES = 2048


class ChatCompletionBody(SamplingFields):
    """The fields of the body. Null counts as absent; other fields are ignored with a warning.

    Fields of type Any, and the elements of `messages`, have several forms. They are checked by hand, because
    pydantic's errors for a union name every form that did not match instead of the place that is wrong.
    """

    model: str
    messages: Annotated[list[Any], WithJsonSchema(schemas.MESSAGES)] = Field(min_length=1)
    tools: Annotated[list[Any] | None, WithJsonSchema(schemas.TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(schemas.TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any] | None, WithJsonSchema(schemas.FUNCTIONS)] = None
    function_call: Annotated[Any, WithJsonSchema(schemas.FUNCTION_CALL)] = None
    response_format: Annotated[Any, WithJsonSchema(schemas.RESPONSE_FORMAT)] = None
    n: int | None = Field(default=None, ge=1, le=128)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    verbosity: str | None = None
    service_tier: str | None = None
    store: bool | None = None


def parse_chat_completion(
    raw: bytes,
    known: Set[str] = frozenset(),
    *,
    memory: Remembered[ModelCall] | None = None,
    bounds: RequestSettings = DEFAULT_BOUNDS,
) -> ModelCall:
    """Parse a body. `known` are the names of the arguments that the model's template reads. `memory` saves reading
    the other fields again when only the messages differ from an earlier body, as in most calls of an agent.

    Raise InvalidRequest for an invalid field and UnsupportedParameter for a field that cannot be honoured; both name
    the field.
    """
    split = split_listing(raw, "messages") if memory is not None else None
    if memory is None or split is None:
        return _parsed(raw, known, bounds)
    options, messages = split
    key = sha256(b"chat\n" + "\n".join(sorted(known)).encode() + b"\0" + options).digest()
    call = memory.get(key)
    if call is None:
        call = _parsed(raw, known, bounds)
        memory.put(key, msgspec.structs.replace(call, messages=()), size=_CALL_BYTES + len(options))
        return call
    check_lists({"messages": messages}, bounds)
    return msgspec.structs.replace(call, messages=_unread(messages, bounds))


def _parsed(raw: bytes, known: Set[str], bounds: RequestSettings) -> ModelCall:
    value = decode_listing(raw, "messages")
    check_lists(value, bounds)
    body = validated(ChatCompletionBody, value)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if "audio" in (body.modalities or ()):
        raise UnsupportedParameter("audio is not supported: the model answers in text only", param="modalities")
    choice, functions, warnings = _tools(body)
    arguments, unknown = read_template_arguments(body.reasoning_effort, body.chat_template_kwargs, known)
    return ModelCall(
        model=body.model,
        messages=_unread(body.messages, bounds),
        tools=functions or None,
        tool_choice=choice,
        # The deprecated form of an answer has room for one call.
        parallel_calls=body.parallel_tool_calls is not False and not uses_deprecated_form(value),
        answer_format=read_answer_format(body.response_format, "response_format", nested="json_schema"),
        template_arguments=arguments,
        sampling=body.requested(body.max_completion_tokens or body.max_tokens),
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
        body={key: item for key, item in value.items() if key != "messages"},  # messages are recorded as turns
        warnings=(*warnings, *unknown, *_without_effect(body), *unknown_fields(value, ChatCompletionBody)),
    )


def _unread(messages: Sequence[msgspec.Raw], bounds: RequestSettings) -> WireMessages:
    # Read on access: the messages that continue a known conversation need no reading.
    return WireMessages(messages, partial(read_message, most_parts=bounds.max_parts))


def _tools(body: ChatCompletionBody) -> tuple[ToolChoice, list[Function], list[str]]:
    if body.functions is None:
        if body.function_call is not None:
            raise InvalidRequest("function_call needs functions", param="function_call")
        functions, warnings = read_tools(body.tools or [])
        return *read_tool_choice(body.tool_choice, functions), warnings
    if body.tools or body.tool_choice is not None:
        raise InvalidRequest("functions is the deprecated form of tools: send only one of them", param="functions")
    return *read_deprecated_choice(body.function_call, read_deprecated_functions(body.functions)), []


def _without_effect(body: ChatCompletionBody) -> list[str]:
    """Return a warning for each field that asks for something which is accepted but not done."""
    ignored = {
        "audio": body.audio is not None,
        "prediction": body.prediction is not None,
        "web_search_options": body.web_search_options is not None,
        "verbosity": body.verbosity not in (None, "medium"),
        "service_tier": body.service_tier not in (None, "auto", "default"),
        "store": bool(body.store),
    }
    return [f"{name} has no effect" for name, is_asked in ignored.items() if is_asked]
