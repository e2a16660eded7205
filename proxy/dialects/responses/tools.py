"""Convert the tools of the Responses API into the functions that the model is offered.

A custom tool takes plain text instead of JSON: the model is offered a function whose only argument is that text, and
its call is written back as a call of the custom tool. A tool in a namespace is offered as `namespace__name`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from typing import Any

import msgspec

from proxy.calls.call import ToolChoice, ToolUse
from proxy.dialects.fields import list_at, object_at, plain, text_at
from proxy.errors import InvalidRequest, UnsupportedParameter

# The namespace in which Codex puts functions that have none of their own.
_BARE_NAMESPACE = "functions"

_INPUT = "input"


class SpecialTool(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of a tool that the model knows under another name or as another kind of tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


SpecialTools = Mapping[str, SpecialTool]
"""Special tools by the name under which the model knows them."""


class OfferedTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request that the model is offered.

    `functions` are in the shape of chat completions. `places` is where each function is in the body, as an error's
    `param` names it, by the function's name. `warnings` name the tools that are ignored, and the grammars that are
    not enforced.
    """

    functions: list[dict[str, Any]]
    places: dict[str, str]
    warnings: list[str]

    @property
    def names(self) -> list[str]:
        return [function["function"]["name"] for function in self.functions]


def offered_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model knows a tool."""
    return name if namespace in (None, "", _BARE_NAMESPACE) else f"{namespace}__{name}"


def read_tools(declared: Mapping[str, Iterable[Any]]) -> OfferedTools:
    """Read lists of declared tools, by the place of each list. Raise InvalidRequest if a tool is invalid."""
    offered = OfferedTools(functions=[], places={}, warnings=[])
    for where, tools in declared.items():
        _offer(offered, tools, where, namespace=None)
    return offered


def special_tools(tools: Any) -> dict[str, SpecialTool]:
    """Return the custom tools and those in a namespace. `tools` were checked by `read_tools`."""
    special: dict[str, SpecialTool] = {}
    for tool in tools if isinstance(tools, list) else ():
        if tool.get("type") == "namespace":
            namespace = tool["name"]
            for inner in tool["tools"]:
                if inner.get("type") in ("function", "custom"):
                    _note(special, inner, namespace)
        elif tool.get("type") == "custom":
            _note(special, tool, None)
    return special


def read_tool_choice(choice: Any, offered: OfferedTools) -> tuple[ToolChoice, list[dict[str, Any]]]:
    """Read `tool_choice`. Return the choice, and the functions that may be called.

    Raise InvalidRequest, or UnsupportedParameter if a tool is chosen that the model is not offered.
    """
    functions = offered.functions
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        mode = choice.get("mode")
        if mode not in ("auto", "required"):
            raise InvalidRequest("the mode of allowed_tools must be auto or required", param="tool_choice.mode")
        functions = _allowed(choice.get("tools"), offered)
        choice = mode
    if choice is None or choice == "auto":
        return ToolChoice(), functions
    if choice == "none":
        return ToolChoice(use=ToolUse.NONE), []
    if choice == "required":
        if not functions:
            raise InvalidRequest("tool_choice requires a call, but no tools are declared", param="tool_choice")
        return ToolChoice(use=ToolUse.REQUIRED), functions
    if isinstance(choice, Mapping) and isinstance(choice.get("type"), str):
        return ToolChoice(
            use=ToolUse.REQUIRED, name=_named(choice, "tool_choice", frozenset(offered.names))
        ), functions
    raise InvalidRequest("tool_choice must be auto, none, required or an object with a type", param="tool_choice")


def custom_arguments(text: str) -> str:
    """Return the JSON arguments for calling a custom tool's function with `text`."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str | None:
    """Return the text in the JSON arguments of a custom tool's function; None if they have another form."""
    try:
        value = json.loads(arguments)  # the model may have written invalid or deeply nested JSON
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or set(value) != {_INPUT} or not isinstance(value[_INPUT], str):
        return None
    return str(value[_INPUT])


def _offer(offered: OfferedTools, tools: Iterable[Any], where: str, *, namespace: str | None) -> None:
    for index, value in enumerate(tools):
        place = f"{where}[{index}]"
        tool = object_at(value, place)
        kind = text_at(tool.get("type"), f"{place}.type")
        if kind == "namespace" and namespace is None:
            name = text_at(tool.get("name"), f"{place}.name")
            _offer(offered, list_at(tool.get("tools"), f"{place}.tools"), f"{place}.tools", namespace=name)
        elif kind in ("function", "custom"):
            function = _function(tool, place, namespace)
            offered.functions.append(function)
            # For errors about a tool's schema: the model's name for a tool does not tell its place in the body.
            offered.places[function["function"]["name"]] = place
            offered.warnings.extend(_unenforced(tool, place))
        else:
            offered.warnings.append(f"{place} of type {plain(kind)} is ignored")


def _function(tool: Mapping[str, Any], place: str, namespace: str | None) -> dict[str, Any]:
    """Return a tool in the shape of chat completions."""
    # The order of the keys is always the same: templates print it, and a changed prompt could not reuse the
    # session's earlier tokens.
    name = text_at(tool.get("name"), f"{place}.name")
    if not name:
        raise InvalidRequest("a tool must have a name", param=f"{place}.name")
    function: dict[str, Any] = {"name": offered_name(name, namespace)}
    if tool.get("description") is not None:
        function["description"] = text_at(tool["description"], f"{place}.description")
    if tool["type"] == "custom":
        return {"type": "function", "function": {**function, **_custom_fields(tool, function, place)}}
    if tool.get("parameters") is not None:
        function["parameters"] = object_at(tool["parameters"], f"{place}.parameters")
    if tool.get("strict") is not None and not isinstance(tool["strict"], bool):
        raise InvalidRequest(f"{place}.strict must be true or false", param=f"{place}.strict")
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _custom_fields(tool: Mapping[str, Any], function: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the parameters of a custom tool's function, and a description that includes the tool's grammar."""
    described: dict[str, Any] = {}
    form = tool.get("format")
    if form is not None and object_at(form, f"{place}.format").get("type") == "grammar":
        syntax = text_at(form.get("syntax"), f"{place}.format.syntax")
        definition = text_at(form.get("definition"), f"{place}.format.definition")
        grammar = f"The input is text of this grammar ({syntax}):\n{definition}"
        described["description"] = "\n\n".join(part for part in (function.get("description"), grammar) if part)
    parameters = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
    return {**described, "parameters": parameters}


def _unenforced(tool: Mapping[str, Any], place: str) -> list[str]:
    if tool["type"] == "custom" and (tool.get("format") or {}).get("type") == "grammar":
        return [f"the grammar of {place} is described to the model but not enforced"]
    return []


def _note(special: dict[str, SpecialTool], tool: Mapping[str, Any], namespace: str | None) -> None:
    known = SpecialTool(name=tool["name"], namespace=namespace, custom=tool["type"] == "custom")
    special[offered_name(known.name, namespace)] = known


def _allowed(tools: Any, offered: OfferedTools) -> list[dict[str, Any]]:
    allowed, known = set(), frozenset(offered.names)
    for index, tool in enumerate(list_at(tools, "tool_choice.tools")):
        place = f"tool_choice.tools[{index}]"
        if object_at(tool, place).get("type") in ("function", "custom"):
            allowed.add(_named(tool, place, known))
    return [function for function in offered.functions if function["function"]["name"] in allowed]


def _named(choice: Mapping[str, Any], where: str, known: Set[str]) -> str:
    """Return the offered name of the tool that `choice` names."""
    kind = choice["type"]
    if kind not in ("function", "custom"):
        raise UnsupportedParameter(
            f"tools of type {kind!r} are not offered to the model, so none can be required", param=f"{where}.type"
        )
    namespace = choice.get("namespace")
    name = offered_name(
        text_at(choice.get("name"), f"{where}.name"),
        text_at(namespace, f"{where}.namespace") if namespace is not None else None,
    )
    if name not in known:
        raise InvalidRequest(f"there is no callable tool {name!r} in the request", param=f"{where}.name")
    return name
