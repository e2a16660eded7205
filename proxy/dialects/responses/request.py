"""Parse the body of POST /v1/responses. Every error is a 400 that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from proxy.calls.bounds import DEFAULT_BOUNDS, check_lists, check_tools
from proxy.calls.call import ModelCall, PreviousAnswer
from proxy.calls.remembered import Remembered
from proxy.contract.identifiers import TurnId
from proxy.dialects.answer_format import read_answer_format
from proxy.dialects.fields import decode_listing, list_at, plain, text_at, unknown_fields
from proxy.dialects.openai_fields import SamplingFields
from proxy.dialects.responses import schemas
from proxy.dialects.responses.item_reader import (
    ChangesEarlierAnswer,
    ItemReader,
    ReaderState,
    UnknownItem,
    references,
)
from proxy.dialects.responses.items import Item
from proxy.dialects.responses.tools import OfferedTools, read_tool_choice, read_tools
from proxy.dialects.template_arguments import read_template_arguments
from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.http.body import validated
from proxy.settings import RequestSettings

_LOGPROBS = "message.output_text.logprobs"


class ResponseBody(SamplingFields):
    """The fields of the body. Null counts as absent; other fields are ignored with a warning.

    Fields of type Any, and the elements of `input` and `tools`, have several forms. They are checked by hand, because
    pydantic's errors for a union name every form that did not match instead of the place that is wrong.
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


ItemMemory = Remembered[ReaderState]
"""Cache of what was read from earlier requests, by conversation: a request that continues one is read from there
on."""


class UnresolvedReferences(Exception):
    """The input refers to items by these ids: find the items and parse the body again."""

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
    """Parse a body, as `parse_response_request` does.

    Raise UnresolvedReferences if the input refers to items and `referenced` is None.
    """
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
    """Make a ModelCall of a decoded body, in which the items of `input` are undecoded (see `fields.decode_listing`).

    `referenced` are the items that the input may refer to, `known` the names of the arguments that the model's
    template reads. `memory` saves reading the items that an earlier request began with.

    Raise InvalidRequest for an invalid field, UnsupportedParameter for a field that cannot be honoured, UnknownItem
    for a reference to an item that is not among `referenced`; all name the field.
    """
    check_lists(value, bounds)
    body = validated(ResponseBody, value)
    _refuse_unsupported(body)
    reader = _read_input(body, referenced, memory, bounds)
    if not reader.messages and not body.previous_response_id:
        raise InvalidRequest("input is empty: send a text or at least one message", param="input")
    declared = {"tools": body.tools or [], **reader.added_tools}
    offered = _read_bounded_tools(declared, bounds)
    choice, functions = read_tool_choice(body.tool_choice, offered)
    arguments, unknown = read_template_arguments(_effort(body), body.chat_template_kwargs, known)
    return ModelCall(
        model=body.model,
        messages=reader.conversation,
        tools=functions or None,
        tool_places=offered.places,
        tool_choice=choice,
        parallel_calls=body.parallel_tool_calls is not False,
        template_arguments=arguments,
        answer_format=read_answer_format((body.text or {}).get("format"), "text.format"),
        sampling=body.requested(body.max_output_tokens),
        previous=PreviousAnswer(turn_id=TurnId(body.previous_response_id)) if body.previous_response_id else None,
        stream=bool(body.stream),
        logprobs=_LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
        top_logprobs=body.top_logprobs or 0,
        # The input is recorded as messages. Tools that an item added are part of the request's tools, so that a
        # response read from its record has the same ones.
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


def _read_bounded_tools(declared: Mapping[str, list[Any]], bounds: RequestSettings) -> OfferedTools:
    check_tools(sum(map(len, declared.values())), bounds)
    offered = read_tools(declared)
    check_tools(len(offered.functions), bounds)  # again, since one namespace may contain thousands of functions
    return offered


def _effort(body: ResponseBody) -> str | None:
    effort = (body.reasoning or {}).get("effort")
    return text_at(effort, "reasoning.effort") if effort is not None else None


def _refuse_unsupported(body: ResponseBody) -> None:
    if body.background:
        raise UnsupportedParameter(
            "background responses are not supported: leave background out and wait for the answer",
            param="background",
        )
    if body.conversation is not None:
        raise UnsupportedParameter(
            "stored conversations are not supported: use previous_response_id or send all items",
            param="conversation",
        )
    if body.prompt is not None:
        raise UnsupportedParameter("stored prompts are not supported: send instructions and input", param="prompt")


def _without_effect(body: ResponseBody) -> list[str]:
    """Return a warning for each field that asks for something which is accepted but not done."""
    ignored = {
        "reasoning.summary": (body.reasoning or {}).get("summary") is not None,
        "text.verbosity": (body.text or {}).get("verbosity") not in (None, "medium"),
        "service_tier": body.service_tier not in (None, "auto", "default"),
        "stream_options.include_obfuscation": bool((body.stream_options or {}).get("include_obfuscation")),
        "max_tool_calls": body.max_tool_calls is not None,
        **{f"include {plain(name)}": name != _LOGPROBS for name in body.include or ()},
    }
    warnings = [f"{name} has no effect" for name, is_asked in ignored.items() if is_asked]
    if body.store is False:
        warnings.append("with store false the call is recorded all the same, but cannot be read again")
    if body.truncation == "auto":
        warnings.append("truncation auto has no effect: a prompt that is too long is refused")
    return warnings


def _read_input(
    body: ResponseBody, referenced: Mapping[str, Item], memory: ItemMemory | None, bounds: RequestSettings
) -> ItemReader:
    """Read the input, except items that an earlier request sent in the same bytes and `memory` has a state for."""
    if body.input is None or isinstance(body.input, str):
        reader = _new_reader(body, referenced, bounds)
        if body.input is not None:
            reader.say("user", body.input)
        return reader
    items = list_at(body.input, "input")
    # The bytes of a reference do not determine the messages that it stands for, so such inputs are not cached.
    if memory is None or referenced:
        reader = _new_reader(body, referenced, bounds)
        reader.read(items)
        return reader
    # Instructions are the first message, so a state only applies to a request with the same ones.
    known = memory.beginning(b"responses\n" + (body.instructions or "").encode(), items)
    continued = _continue(items, known.count, known.state, bounds) if known.state is not None else None
    reader = continued or _new_reader(body, referenced, bounds)
    if continued is None:
        reader.read(items)
    state = reader.state()
    if state is not None:
        memory.put(known.key, state, size=known.size)
    return reader


def _new_reader(body: ResponseBody, referenced: Mapping[str, Item], bounds: RequestSettings) -> ItemReader:
    reader = ItemReader(referenced, most_parts=bounds.max_parts)
    if body.instructions:
        reader.say("system", body.instructions)
    return reader


def _continue(items: list[Any], count: int, state: ReaderState, bounds: RequestSettings) -> ItemReader | None:
    """Read the items after the first `count`, whose state is known; None if one of them changes an earlier answer."""
    reader = ItemReader({}, state, most_parts=bounds.max_parts)
    try:
        reader.read(items, count)
    except ChangesEarlierAnswer:
        return None
    return reader
