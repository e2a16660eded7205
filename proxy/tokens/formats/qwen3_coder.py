"""The format of Qwen3-Coder, Qwen3.5 and after, and Nemotron 3:

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Values are plain text, with one line break on either side; their types are in the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from proxy.grammars.nodes import Node, tag, xml_parameters
from proxy.grammars.schemas import SchemaRefused, referenced
from proxy.grammars.structural_tag import xml_kinds
from proxy.tokens.formats.parsing import CallParser, NamedArguments, Tools
from proxy.tokens.formats.tool_format import AllowedCall, ToolFormat, check_plain_name
from proxy.tokens.formats.values import ParameterSchemas

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_NAME = re.compile(r"[^<>\s]*")
_KEY = re.compile(r"[^<>\n]*")
_SCHEMA_KEY = re.compile(r"[^<>\n]{1,128}")


class Qwen3CoderFormat(ToolFormat):
    """A function with its parameters as XML elements."""

    name = "qwen3_coder"
    markers = (_OPEN, _CLOSE)
    call_end = _CLOSE
    trigger = _OPEN
    separator = "\n"

    def writes(self, template: str) -> bool:
        return all(each in template for each in (_OPEN, _FUNCTION, _PARAMETER))

    def parser(self, tools: Tools | None = None) -> CallParser:
        return Qwen3CoderParser(tools)

    def call_tag(self, call: AllowedCall) -> Node:
        check_plain_name(call)
        begin = f"{_OPEN}\n{_FUNCTION}{call.name}>\n"
        return tag(begin, xml_parameters(_enforced_schema(call)), f"\n{_FUNCTION_END}\n{_CLOSE}")


def _enforced_schema(call: AllowedCall) -> dict[str, Any]:
    """Return the part of the call's schema that XML can carry: all of it, or nothing but an object."""
    try:
        _check_schema(call.schema)
    except SchemaRefused as error:
        if call.strict:
            raise SchemaRefused((call.name, *error.place), error.reason) from error
        return {"type": "object"}
    return call.schema


def _check_schema(schema: Mapping[str, Any]) -> None:
    """Raise SchemaRefused for a schema that XML cannot carry. Text stands between the tags as it is and every other
    value as JSON, so the schema must say which of the two a value is."""
    for keyword in sorted(schema.keys() & {"anyOf", "oneOf", "allOf", "patternProperties", "minProperties"}):
        raise SchemaRefused((keyword,), "the model writes arguments as XML, for which this cannot be enforced")
    if isinstance(schema.get("additionalProperties"), Mapping) and schema["additionalProperties"]:
        raise SchemaRefused(
            ("additionalProperties",), "the model writes arguments as XML: true or false are possible"
        )
    missing = set(schema.get("required", ())) - set(schema.get("properties", ()))
    if missing:
        raise SchemaRefused(("required",), f"{min(missing)!r} is not among the properties")
    for key, each in schema.get("properties", {}).items():
        place = ("properties", key)
        if not _SCHEMA_KEY.fullmatch(key):
            raise SchemaRefused(place, "the model writes arguments as XML: a name in it has no <, > or line break")
        _check_parameter(each, schema, place)


def _check_parameter(schema: Any, root: Mapping[str, Any], place: tuple[str, ...]) -> None:
    if isinstance(schema, Mapping) and "$ref" in schema:
        schema = referenced(root, schema["$ref"], place)
    if not isinstance(schema, Mapping):
        raise SchemaRefused(place, "the model writes arguments as XML: the schema of an argument is an object")
    kinds = xml_kinds(schema)
    if "string" not in kinds:
        return
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    for value in values:
        if isinstance(value, str) and (value.strip("\n") != value or _PARAMETER_END in value):
            raise SchemaRefused(place, "the model writes arguments as XML, which cannot carry this text")
    if not values and kinds not in ({"string"}, {"string", "null"}) and not _allows_anything(schema):
        raise SchemaRefused(
            place, "the model writes arguments as XML, where text cannot be distinguished from other types"
        )
    for keyword in ("pattern", "format"):
        if keyword in schema and not values:
            raise SchemaRefused((*place, keyword), "the model writes arguments as XML, where text is free")


def _allows_anything(schema: Mapping[str, Any]) -> bool:
    return not schema.keys() & {"type", "anyOf", "oneOf", "allOf", "enum", "const"}


class Qwen3CoderParser(CallParser):
    """Parses calls in the Qwen3-Coder format. A call is emitted at the end of its function.

    The outer tags are layout: the models sometimes omit one of them. `</parameter>` ends a value only if another
    parameter or the end of the function follows, so that values may contain the tag. If a parameter comes twice, the
    last value counts.
    """

    openings = (_OPEN, _FUNCTION)

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._function_name = ""
        self._key = ""
        self._value: list[str] = []
        self._after_value: list[str] = []
        self._values: dict[str, str] = {}

    def _begin_call(self, marker: str) -> None:
        self._name = ""
        self._values = {}
        self._step = self._after_tag if marker == _OPEN else self._function

    def _after_tag(self) -> bool:
        self._consume_space(self._call)
        return self._expect({_FUNCTION: self._before_function})

    def _before_function(self) -> bool:
        self._consume(self._at + len(_FUNCTION), self._call)
        self._step = self._function
        return True

    def _function(self) -> bool:
        name = self._consume_name(_NAME)
        if name is None:
            return False
        if not name or self._window[self._at] != ">":
            return self._reject()
        self._consume(self._at + 1, self._call)
        self._function_name, self._step = name, self._after_function
        return True

    def _after_function(self) -> bool:
        """The place behind the function's tag: a parameter follows, or the end."""
        self._consume_space(self._call)
        return self._expect({_PARAMETER: self._parameter, _FUNCTION_END: self._function_end})

    def _parameter(self) -> bool:
        self._consume(self._at + len(_PARAMETER), self._call)
        self._name, self._value = "", []
        self._step = self._parameter_key
        return True

    def _parameter_key(self) -> bool:
        key = self._consume_name(_KEY)
        if key is None:
            return False
        if not key or self._window[self._at] != ">":
            return self._reject()
        self._consume(self._at + 1, self._call)
        self._key, self._step = key, self._parameter_value
        return True

    def _parameter_value(self) -> bool:
        if not self._consume_until(_PARAMETER_END, self._value):
            return False
        self._after_value = []
        self._consume(self._at + len(_PARAMETER_END), self._after_value)
        self._step = self._parameter_end
        return True

    def _parameter_end(self) -> bool:
        """The place behind an end tag, which is part of the value unless the call goes on from there."""
        self._consume_space(self._after_value)
        found = self._next((_PARAMETER, _FUNCTION_END))
        if found is None:
            return False
        if not found:
            self._value += self._after_value
            self._after_value = []
            self._step = self._parameter_value
            return True
        value = "".join(self._value)
        self._values[self._key] = value.removeprefix("\n").removesuffix("\n")
        self._call += [value, *self._after_value]
        self._value, self._after_value = [], []
        return self._parameter() if found == _PARAMETER else self._function_end()

    def _function_end(self) -> bool:
        self._consume(self._at + len(_FUNCTION_END), self._call)
        calls = self._calls()
        self._end_call(calls)
        if calls is not None:
            self._step = self._closing
        return True

    def _calls(self) -> list[NamedArguments] | None:
        """Return the call, or None if its values cannot be written as JSON."""
        schemas = ParameterSchemas.of(self._function_name, self._tools)
        written = ", ".join(
            f"{json.dumps(key, ensure_ascii=False)}: {schemas.json_value(key, value)}"
            for key, value in self._values.items()
        )
        arguments = f"{{{written}}}"
        try:
            arguments.encode()
        except UnicodeEncodeError:  # a lone surrogate
            return None
        return [(self._function_name, arguments)]

    def _closing(self) -> bool:
        """Drop the outer end tag behind a call."""
        self._consume_space(self._space)
        found = self._next((_CLOSE,))
        if found is None:
            return False
        if found:
            self._at += len(_CLOSE)
            self._space = []
        self._step = self._text
        return True

    def _pending(self) -> list[str]:
        return [*self._value, *self._after_value]
