"""Read the tools and the tool choice of chat completions.

OpenAI deprecated `functions` and `function_call` in favour of `tools` and `tool_choice`. A request may use either
form, and is answered in the form that it uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from proxy.calls.call import ToolChoice, ToolUse
from proxy.dialects.fields import list_at, object_at, plain, text_at
from proxy.errors import InvalidRequest, UnsupportedParameter

Function = dict[str, Any]
"""A tool of type `function`, in the shape that chat templates expect."""


def uses_deprecated_form(body: Mapping[str, Any]) -> bool:
    """Return whether a request declares `functions`, so that its answer must hold a `function_call`."""
    return body.get("functions") is not None


def read_tools(tools: list[Any]) -> tuple[list[Function], list[str]]:
    """Return the functions among `tools`, and a warning for each tool of another type.

    Raise InvalidRequest if a tool is invalid.
    """
    functions, warnings = [], []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        kind = text_at(object_at(tool, where).get("type"), f"{where}.type")
        if kind != "function":
            warnings.append(f"{where} of type {plain(kind)} is ignored")
            continue
        _check_function(tool.get("function"), f"{where}.function")
        # Templates print the fields that are there, so an explicit null must not differ from an absent field.
        functions.append({key: item for key, item in tool.items() if item is not None})
    return functions, warnings


def read_deprecated_functions(functions: list[Any]) -> list[Function]:
    """Return the elements of `functions` as tools. Raise InvalidRequest if one is invalid."""
    return [
        {"type": "function", "function": _check_function(function, f"functions[{index}]")}
        for index, function in enumerate(functions)
    ]


def read_tool_choice(choice: Any, functions: list[Function]) -> tuple[ToolChoice, list[Function]]:
    """Read `tool_choice`. Return the choice, and those of `functions` that may be called.

    Raise InvalidRequest, or UnsupportedParameter if a tool is chosen that the model is not offered.
    """
    if choice is None:
        return ToolChoice(), functions
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = object_at(choice.get("allowed_tools"), "tool_choice.allowed_tools")
        functions = _allowed(allowed.get("tools"), functions)
        choice = allowed.get("mode")
        if choice not in ("auto", "required"):
            raise InvalidRequest(
                "the mode of allowed_tools must be auto or required", param="tool_choice.allowed_tools.mode"
            )
    if isinstance(choice, str) and choice in tuple(ToolUse):
        use = ToolUse(choice)
        if use is ToolUse.REQUIRED and not functions:
            raise InvalidRequest("tool_choice requires a call, but no functions are declared", param="tool_choice")
        return ToolChoice(use=use), [] if use is ToolUse.NONE else functions
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = object_at(choice.get("function"), "tool_choice.function")
        return _named(function, "tool_choice.function", _names(functions)), functions
    if isinstance(choice, Mapping) and isinstance(choice.get("type"), str):
        raise UnsupportedParameter(
            f"tools of type {plain(choice['type'])} are ignored, so none can be chosen", param="tool_choice.type"
        )
    raise InvalidRequest("tool_choice must be auto, none, required or an object with a type", param="tool_choice")


def read_deprecated_choice(choice: Any, functions: list[Function]) -> tuple[ToolChoice, list[Function]]:
    """Read `function_call`. Return the choice, and those of `functions` that may be called. Raise InvalidRequest."""
    if choice is None or choice == "auto":
        return ToolChoice(), functions
    if choice == "none":
        return ToolChoice(use=ToolUse.NONE), []
    if isinstance(choice, Mapping):
        return _named(choice, "function_call", _names(functions)), functions
    raise InvalidRequest("function_call must be auto, none or an object with a name", param="function_call")


def _check_function(value: Any, where: str) -> dict[str, Any]:
    function = object_at(value, where)
    if not text_at(function.get("name"), f"{where}.name"):
        raise InvalidRequest("a function must have a name", param=f"{where}.name")
    if function.get("parameters") is not None:
        object_at(function["parameters"], f"{where}.parameters")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"{where}.strict must be true or false", param=f"{where}.strict")
    return function


def _allowed(listed: Any, functions: list[Function]) -> list[Function]:
    where = "tool_choice.allowed_tools.tools"
    known = _names(functions)
    names = set()
    for index, tool in enumerate(list_at(listed, where)):
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
