"""The body of POST /v1/responses, checked: every fault is a 400 that names its field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from proxy.calls.bounds import DEFAULT_BOUNDS, check_lists, check_tools
from proxy.calls.call import AnswerFormat, ModelCall, PreviousAnswer
from proxy.calls.remembered import Remembered
from proxy.contract.identifiers import TurnId
from proxy.dialects.fields import decode_listing, list_at, object_at, plain, text_at, unknown_fields
from proxy.dialects.responses import schemas
from proxy.dialects.responses.items import (
    Item,
    ItemReader,
    ReadItems,
    RememberedAnswer,
    UnknownItem,
    references,
)
from proxy.dialects.responses.tools import read_tool_choice, read_tools
from proxy.dialects.sampling_fields import SamplingFields
from proxy.dialects.template_arguments import read_template_arguments
from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.http.body import validated
from proxy.settings import RequestSettings

_LOGPROBS = "message.output_text.logprobs"


class ResponseBody(SamplingFields):
    """Explicit null is the same as absent; fields that are not named here are ignored with a warning.

    `input`, `tools` and what has many forms are checked by hand, so that a fault names its exact place.
    """

    model: str
    input: Annotated[Any, WithJsonSchema(schemas.INPUT)] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(default=None, ge=1)
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


ItemMemory = Remembered[ReadItems]
"""Of the beginnings of conversations that were sent before."""


class UnresolvedReferences(Exception):
    """The input refers to items, by these ids, which have to be found first."""

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__(f"{len(ids)} references")
        self.ids = ids


def read_response_request(
    raw: bytes,
    *,
    referenced: Mapping[str, Item] | None = None,
    known: Set[str] = frozenset(),
    memory: ItemMemory | None = None,
    bounds: RequestSettings = DEFAULT_BOUNDS,
) -> ModelCall:
    """Parse a body. Raises what `parse_response_request` raises, and UnresolvedReferences where there are references
    and `referenced` is None: find the items and parse again."""
    value = decode_listing(raw, "input")
    try:
        return parse_response_request(value, referenced or {}, known=known, memory=memory, bounds=bounds)
    except UnknownItem:
        if referenced is not None:
            raise
        raise UnresolvedReferences(references(value["input"])) from None


def parse_response_request(
    value: dict[str, Any],
    referenced: Mapping[str, Item],
    *,
    known: Set[str] = frozenset(),
    memory: ItemMemory | None = None,
    bounds: RequestSettings = DEFAULT_BOUNDS,
) -> ModelCall:
    """The items of `value["input"]` are as they came (`fields.decode_listing`). `referenced` are those that
    `item_reference` names (`items.references`), `known` the arguments that the model's template reads.

    Raises InvalidRequest with `param`, UnsupportedParameter for what is understood and cannot be honoured,
    UnknownItem for a reference to nothing.
    """
    check_lists(value, bounds)
    body = validated(ResponseBody, value)
    _refuse_unsupported(body)
    reader = _read_input(body, referenced, memory, bounds)
    declared = {"tools": body.tools or [], **reader.added_tools}
    check_tools(sum(map(len, declared.values())), bounds)
    offered = read_tools(declared)
    check_tools(len(offered.functions), bounds)
    if not reader.messages and not body.previous_response_id:
        raise InvalidRequest("there is nothing to answer: input is empty", param="input")
    choice, functions = read_tool_choice(body.tool_choice, offered)
    reasoning = body.reasoning or {}
    effort = text_at(reasoning["effort"], "reasoning.effort") if reasoning.get("effort") is not None else None
    arguments, unknown = read_template_arguments(effort, body.chat_template_kwargs, known)
    return ModelCall(
        model=body.model,
        messages=reader.conversation,
        tools=functions or None,
        tool_places=offered.places,
        tool_choice=choice,
        parallel_calls=body.parallel_tool_calls is not False,
        template_arguments=arguments,
        answer_format=_answer_format((body.text or {}).get("format")),
        sampling=body.requested(body.max_output_tokens),
        previous=PreviousAnswer(turn_id=TurnId(body.previous_response_id)) if body.previous_response_id else None,
        stream=bool(body.stream),
        logprobs=_LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
        top_logprobs=body.top_logprobs or 0,
        body={
            **{key: item for key, item in value.items() if key != "input"},
            "tools": [tool for tools in declared.values() for tool in tools],
        },
        warnings=(
            *reader.warnings,
            *offered.warnings,
            *unknown,
            *_without_effect(body),
            *unknown_fields(value, ResponseBody),
        ),
    )


def _refuse_unsupported(body: ResponseBody) -> None:
    if body.background:
        raise UnsupportedParameter("a response is answered while you wait: background is false", param="background")
    if body.conversation is not None:
        raise UnsupportedParameter(
            "there are no stored conversations: go on by previous_response_id, or send the items",
            param="conversation",
        )
    if body.prompt is not None:
        raise UnsupportedParameter("there are no stored prompts: send instructions and input", param="prompt")


def _without_effect(body: ResponseBody) -> list[str]:
    """Warn of fields that are accepted and change nothing, where they ask for a change."""
    asked = {
        "reasoning.summary": (body.reasoning or {}).get("summary") is not None,
        "text.verbosity": (body.text or {}).get("verbosity") not in (None, "medium"),
        "service_tier": body.service_tier not in (None, "auto", "default"),
        "stream_options.include_obfuscation": bool((body.stream_options or {}).get("include_obfuscation")),
        "max_tool_calls": body.max_tool_calls is not None,
        **{f"include {plain(name)}": name != _LOGPROBS for name in body.include or ()},
    }
    warnings = [f"{name} has no effect" for name, has in asked.items() if has]
    if body.store is False:
        warnings.append("store false has no effect: every call is recorded")
    if body.truncation == "auto":
        warnings.append("truncation auto has no effect: a prompt that is too long is refused")
    return warnings


def _answer_format(form: Any) -> AnswerFormat | None:
    if form is None:
        return None
    kind = text_at(object_at(form, "text.format").get("type"), "text.format.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerFormat(where="text.format")
    if kind != "json_schema":
        raise InvalidRequest("text.format is of type text, json_object or json_schema", param="text.format.type")
    name, strict = form.get("name"), form.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest("text.format.strict is true or false", param="text.format.strict")
    return AnswerFormat(
        where="text.format",
        schema=object_at(form.get("schema"), "text.format.schema"),
        name=text_at(name, "text.format.name") if name is not None else None,
        strict=bool(strict),
    )


def _read_input(
    body: ResponseBody, referenced: Mapping[str, Item], memory: ItemMemory | None, bounds: RequestSettings
) -> ItemReader:
    """Reads what was not read before in these very bytes."""
    if body.input is None or isinstance(body.input, str):
        reader = _begun(body, referenced, bounds)
        if body.input is not None:
            reader.say("user", body.input)
        return reader
    items = list_at(body.input, "input")
    if memory is None or referenced:
        reader = _begun(body, referenced, bounds)
        reader.read(items)
        return reader
    known = memory.beginning(b"responses\n" + (body.instructions or "").encode(), items)
    behind = _read_behind(items, known.count, known.state, bounds) if known.state is not None else None
    reader = behind or _begun(body, referenced, bounds)
    if behind is None:
        reader.read(items)
    state = reader.state()
    if state is not None:
        memory.put(known.key, state, size=known.size)
    return reader


def _begun(body: ResponseBody, referenced: Mapping[str, Item], bounds: RequestSettings) -> ItemReader:
    reader = ItemReader(referenced, most_parts=bounds.max_parts)
    if body.instructions:
        reader.say("system", body.instructions)
    return reader


def _read_behind(items: list[Any], count: int, state: ReadItems, bounds: RequestSettings) -> ItemReader | None:
    """The reader of the items behind the first `count`; None where one of them changes what `state` holds."""
    reader = ItemReader({}, state, most_parts=bounds.max_parts)
    try:
        reader.read(items, count)
    except RememberedAnswer:
        return None
    return reader
