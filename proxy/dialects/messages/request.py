"""Parse the bodies of POST /v1/messages and /v1/messages/count_tokens. Every error is a 400 that names the field."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from proxy.calls.bounds import DEFAULT_BOUNDS, check_lists
from proxy.calls.call import AnswerFormat, ModelCall, RequestedSampling, ToolChoice, ToolUse
from proxy.dialects.fields import decode_body, object_at, plain, text_at, unknown_fields
from proxy.dialects.messages import schemas
from proxy.dialects.messages.history import read_history
from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.http.body import validated
from proxy.settings import RequestSettings

_MOST_STOPS = 16  # as in OpenAI's dialects: every new piece of text is searched for each of them

# The effort that templates know for each of Anthropic's. Templates know nothing above "high".
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}

# Whether the template's thinking is switched on, by the type of `thinking`.
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}

Warn = Callable[[str], None]


class Metadata(BaseModel):
    model_config = ConfigDict(strict=True)

    user_id: str | None = None


class CountTokensBody(BaseModel):
    """The fields of the body. Null counts as absent; other fields are ignored with a warning.

    Fields of type Any, and the elements of `messages` and `tools`, have several forms. They are checked by hand,
    because pydantic's errors for a union name every form that did not match instead of the place that is wrong.
    """

    model_config = ConfigDict(strict=True)

    model: str
    messages: Annotated[list[Any], WithJsonSchema(schemas.MESSAGES)] = Field(min_length=1)
    system: Annotated[Any, WithJsonSchema(schemas.SYSTEM)] = None
    tools: Annotated[list[Any] | None, WithJsonSchema(schemas.TOOLS)] = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None
    output_format: Any = None
    context_management: Any = None
    container: Any = None
    mcp_servers: Any = None


class MessagesBody(CountTokensBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(default=None, max_length=_MOST_STOPS)
    temperature: float | None = Field(default=None, ge=0, le=2)  # as in the other dialects; Anthropic's bound is 1
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    metadata: Metadata | None = None
    stream: bool | None = None


def parse_messages(
    raw: bytes, known: Set[str], *, system_anywhere: bool = True, bounds: RequestSettings = DEFAULT_BOUNDS
) -> ModelCall:
    """Parse the body of a call.

    `known` are the names of the arguments that the model's template reads; `system_anywhere` is whether the template
    accepts system messages after the first message.

    Raise InvalidRequest for an invalid field and UnsupportedParameter for a field that cannot be honoured; both name
    the field.
    """
    value = decode_body(raw)
    check_lists(value, bounds)
    body = validated(MessagesBody, value)
    sampling = RequestedSampling(
        max_new_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k or None,
        stop=_stops(body.stop_sequences or []),
    )
    return _call(body, value, known, sampling, bounds, system_anywhere=system_anywhere)


def parse_count_tokens(
    raw: bytes, known: Set[str], *, system_anywhere: bool = True, bounds: RequestSettings = DEFAULT_BOUNDS
) -> ModelCall:
    """Parse the body of a count into the call whose prompt is to be counted, as `parse_messages` does."""
    value = decode_body(raw)
    check_lists(value, bounds)
    body = validated(CountTokensBody, value)
    return _call(body, value, known, RequestedSampling(), bounds, system_anywhere=system_anywhere)


def _call(
    body: CountTokensBody,
    value: dict[str, Any],
    known: Set[str],
    sampling: RequestedSampling,
    bounds: RequestSettings,
    *,
    system_anywhere: bool,
) -> ModelCall:
    # A count accepts the fields of a call: clients send the same body to both.
    warnings = unknown_fields(value, MessagesBody)
    history = read_history(body.system, body.messages, system_anywhere=system_anywhere, most_parts=bounds.max_parts)
    _refuse_unsupported(body, warnings.append)
    tools = _tools(body.tools or [], warnings.append)
    choice, parallel = _tool_choice(body.tool_choice, [tool["function"]["name"] for tool in tools])
    return ModelCall(
        model=body.model,
        messages=history.messages,
        prefill=history.prefill,
        tools=tools if tools and choice.use is not ToolUse.NONE else None,
        tool_choice=choice,
        parallel_calls=parallel,
        answer_format=_answer_format(body),
        template_arguments=_template_arguments(body, known, warnings.append),
        sampling=sampling,
        stream=bool(value.get("stream")),
        # Messages and the system prompt are recorded as the converted messages.
        body={key: item for key, item in value.items() if key not in ("messages", "system")},
        warnings=tuple(warnings),
    )


def _stops(stops: list[str]) -> tuple[str, ...]:
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidRequest("a stop sequence must not be empty", param=f"stop_sequences[{index}]")
    return tuple(stops)


def _refuse_unsupported(body: CountTokensBody, warn: Warn) -> None:
    # An agent would fail without the tools of its servers or the files of its container, so these are errors. It
    # works with an unmanaged context, only with longer prompts, so that is a warning.
    for name, missing in (("mcp_servers", "their tools"), ("container", "its skills and files")):
        if getattr(body, name):
            raise UnsupportedParameter(f"{name} is not supported: only Anthropic can provide {missing}", param=name)
    if body.context_management:
        warn("context_management is ignored: nothing is cleared from the conversation")


def _tools(tools: list[Any], warn: Warn) -> list[dict[str, Any]]:
    """Return the client's own tools, in the shape of chat completions.

    Tools that Anthropic defines are ignored with a warning: their schemas are only known to Anthropic's models, or
    they run on Anthropic's servers.
    """
    functions: list[dict[str, Any]] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        kind = object_at(tool, where).get("type")
        if kind is not None and text_at(kind, f"{where}.type") != "custom":
            warn(f"{where} of type {plain(kind)} is ignored")
            continue
        function = _function(tool, where)
        if function["name"] in names:
            raise InvalidRequest("two tools have the same name", param=f"{where}.name")
        names.add(function["name"])
        functions.append({"type": "function", "function": function})
    return functions


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    # The order of the keys matters: templates print it, and models were trained on name, description, parameters.
    name = text_at(tool.get("name"), f"{where}.name")
    if not name:
        raise InvalidRequest("a tool must have a name", param=f"{where}.name")
    function: dict[str, Any] = {"name": name}
    if tool.get("description") is not None:
        function["description"] = text_at(tool["description"], f"{where}.description")
    function["parameters"] = object_at(tool.get("input_schema"), f"{where}.input_schema")
    if tool.get("strict"):
        function["strict"] = True
    return function


def _tool_choice(value: Any, names: list[str]) -> tuple[ToolChoice, bool]:
    """Return the choice, and whether an answer may have several calls."""
    if value is None:
        return ToolChoice(), True
    choice = object_at(value, "tool_choice")
    kind = text_at(choice.get("type"), "tool_choice.type")
    parallel = choice.get("disable_parallel_tool_use") is not True
    if kind == "auto":
        return ToolChoice(), parallel
    if kind == "none":
        return ToolChoice(use=ToolUse.NONE), parallel
    if kind not in ("any", "tool"):
        raise InvalidRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    if not names:
        raise InvalidRequest("tool_choice requires a call, but no tools are declared", param="tool_choice")
    if kind == "any":
        return ToolChoice(use=ToolUse.REQUIRED), parallel
    name = text_at(choice.get("name"), "tool_choice.name")
    if name not in names:
        raise InvalidRequest(f"there is no tool {name!r}", param="tool_choice.name")
    return ToolChoice(use=ToolUse.REQUIRED, name=name), parallel


def _answer_format(body: CountTokensBody) -> AnswerFormat | None:
    """Read `output_config.format`, or `output_format`, its name while it was in beta."""
    value, where = body.output_format, "output_format"
    if body.output_config is not None:
        config = object_at(body.output_config, "output_config")
        if config.get("format") is not None:
            value, where = config["format"], "output_config.format"
    if value is None:
        return None
    kind = text_at(object_at(value, where).get("type"), f"{where}.type")
    if kind != "json_schema":
        raise UnsupportedParameter(f"an output format of type {kind!r} is not supported", param=f"{where}.type")
    return AnswerFormat(where=where, schema=object_at(value.get("schema"), f"{where}.schema"), strict=True)


def _template_arguments(body: CountTokensBody, known: Set[str], warn: Warn) -> dict[str, Any]:
    """Return the arguments that switch the model's thinking; warn of a switch that its template does not have."""
    arguments: dict[str, Any] = {}
    if body.thinking is not None:
        arguments.update(_thinking(object_at(body.thinking, "thinking"), known, warn))
    effort = object_at(body.output_config, "output_config").get("effort") if body.output_config is not None else None
    if effort is not None:
        level = _EFFORTS.get(text_at(effort, "output_config.effort"))
        if level is None:
            raise InvalidRequest(f"effort must be one of {', '.join(_EFFORTS)}", param="output_config.effort")
        if "reasoning_effort" in known:
            arguments["reasoning_effort"] = level
        else:
            warn("output_config.effort has no effect: the model's template does not read reasoning_effort")
    return arguments


def _thinking(thinking: dict[str, Any], known: Set[str], warn: Warn) -> dict[str, Any]:
    kind = text_at(thinking.get("type"), "thinking.type")
    if kind not in _THINKING:
        raise InvalidRequest(f"thinking.type must be one of {', '.join(_THINKING)}", param="thinking.type")
    if thinking.get("budget_tokens") is not None:
        budget = thinking["budget_tokens"]
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
            raise InvalidRequest("budget_tokens must be a positive integer", param="thinking.budget_tokens")
        # Not enforced: cutting thinking off would force tokens that the policy did not sample.
        warn("thinking.budget_tokens is not enforced: max_tokens bounds thinking and answer together")
    if thinking.get("display") not in (None, "summarized", "omitted"):
        raise InvalidRequest("display must be summarized or omitted", param="thinking.display")
    if "enable_thinking" not in known:
        warn(f"thinking of type {kind} has no effect: the model's template does not read enable_thinking")
        return {}
    return {"enable_thinking": _THINKING[kind]}
