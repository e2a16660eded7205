"""What chat completions say of tools and of the answer's form, in the old words and in the new.

`functions` and `function_call` are the old form of `tools` and `tool_choice`. A call that uses it is answered in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from proxy.calls.call import AnswerFormat, ToolChoice, ToolUse
from proxy.dialects.fields import object_at, plain, text_at
from proxy.errors import InvalidRequest, UnsupportedParameter

Function = dict[str, Any]
"""A tool of type `function`, as templates write it."""

_WORDS = {"auto": ToolUse.AUTO, "none": ToolUse.NONE, "required": ToolUse.REQUIRED}


def speaks_old(body: Mapping[str, Any]) -> bool:
    """Whether a request's body has tools in the old form, and its answer is to have calls in it."""
    return body.get("functions") is not None


def read_tools(tools: list[Any]) -> tuple[list[Function], list[str]]:
    """The functions, and what to warn of: other kinds have no effect."""
    functions, warnings = [], []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        kind = text_at(object_at(tool, where).get("type"), f"{where}.type")
        if kind != "function":
            warnings.append(f"{where} of type {plain(kind)} is ignored")
            continue
        _checked(tool.get("function"), f"{where}.function")
        functions.append({key: item for key, item in tool.items() if item is not None})
    return functions, warnings


def read_old_tools(functions: list[Any]) -> list[Function]:
    """`functions` as tools."""
    return [
        {"type": "function", "function": _checked(function, f"functions[{index}]")}
        for index, function in enumerate(functions)
    ]


def read_tool_choice(choice: Any, functions: list[Function]) -> tuple[ToolChoice, list[Function]]:
    """The choice, and the functions that are left to it."""
    if choice is None:
        return ToolChoice(), functions
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = object_at(choice.get("allowed_tools"), "tool_choice.allowed_tools")
        functions = _allowed(allowed.get("tools"), functions)
        choice = allowed.get("mode")
        if choice not in ("auto", "required"):
            raise InvalidRequest(
                "the mode of allowed_tools is auto or required", param="tool_choice.allowed_tools.mode"
            )
    if isinstance(choice, str) and choice in _WORDS:
        use = _WORDS[choice]
        if use is ToolUse.REQUIRED and not functions:
            raise InvalidRequest("tool_choice requires a call, and there are no functions", param="tool_choice")
        return ToolChoice(use=use), [] if use is ToolUse.NONE else functions
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = object_at(choice.get("function"), "tool_choice.function")
        return _named(function, "tool_choice.function", _names(functions)), functions
    if isinstance(choice, Mapping) and isinstance(choice.get("type"), str):
        raise UnsupportedParameter(
            f"tools of type {plain(choice['type'])} are ignored, so that none can be chosen", param="tool_choice.type"
        )
    raise InvalidRequest("tool_choice is auto, none, required or an object with a type", param="tool_choice")


def read_old_tool_choice(choice: Any, functions: list[Function]) -> tuple[ToolChoice, list[Function]]:
    """`function_call` as tool_choice."""
    if choice is None or choice == "auto":
        return ToolChoice(), functions
    if choice == "none":
        return ToolChoice(use=ToolUse.NONE), []
    if isinstance(choice, Mapping):
        return _named(choice, "function_call", _names(functions)), functions
    raise InvalidRequest("function_call is auto, none or an object with a name", param="function_call")


def read_answer_format(form: Any) -> AnswerFormat | None:
    """`response_format`; None for plain text."""
    if form is None:
        return None
    kind = text_at(object_at(form, "response_format").get("type"), "response_format.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerFormat(where="response_format")
    if kind != "json_schema":
        raise InvalidRequest(
            "response_format is of type text, json_object or json_schema", param="response_format.type"
        )
    where = "response_format.json_schema"
    described = object_at(form.get("json_schema"), where)
    name, schema, strict = described.get("name"), described.get("schema"), described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{where}.strict is true or false", param=f"{where}.strict")
    return AnswerFormat(
        schema=object_at(schema, f"{where}.schema") if schema is not None else {},
        name=text_at(name, f"{where}.name") if name is not None else None,
        strict=bool(strict),
    )


def _checked(value: Any, where: str) -> dict[str, Any]:
    function = object_at(value, where)
    if not text_at(function.get("name"), f"{where}.name"):
        raise InvalidRequest("a function has a name", param=f"{where}.name")
    if function.get("parameters") is not None:
        object_at(function["parameters"], f"{where}.parameters")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"{where}.strict is true or false", param=f"{where}.strict")
    return function


def _allowed(listed: Any, functions: list[Function]) -> list[Function]:
    where = "tool_choice.allowed_tools.tools"
    if not isinstance(listed, list):
        raise InvalidRequest(f"{where} is a list", param=where)
    known = _names(functions)
    names = set()
    for index, tool in enumerate(listed):
        place = f"{where}[{index}]"
        if object_at(tool, place).get("type") != "function":
            raise UnsupportedParameter("only tools of type function can be allowed", param=f"{place}.type")
        function = object_at(tool.get("function"), f"{place}.function")
        names.add(_named(function, f"{place}.function", known).name)
    return [function for function in functions if function["function"]["name"] in names]


def _names(functions: list[Function]) -> frozenset[str]:
    return frozenset(function["function"]["name"] for function in functions)


def _named(choice: Mapping[str, Any], where: str, known: Set[str]) -> ToolChoice:
    name = text_at(choice.get("name"), f"{where}.name")
    if name not in known:
        raise InvalidRequest(f"there is no function {name!r}", param=f"{where}.name")
    return ToolChoice(use=ToolUse.REQUIRED, name=name)
