"""Tool calls as structural formats: what a model has to write, to the letter, for a call to be one.

The counterpart of `proxy.tokens.formats`, which reads them. Formats are those of `proxy.grammars.structural_tag`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.engines.grammars import MOST_WHITESPACE
from proxy.grammars.schemas import SchemaRefused, referenced
from proxy.grammars.structural_tag import xml_kinds
from proxy.tokens.formats import hermes, llama3_json, mistral, qwen3_coder

Format = dict[str, Any]

_PLAIN_NAME = re.compile(r"""[^\s<>\[\]{}"]{1,128}""")
_XML_KEY = re.compile(r"[^<>\n]{1,128}")


class AllowedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function that may be called, and the schema of its arguments. `strict`: all of it is promised."""

    name: str
    schema: dict[str, Any]
    strict: bool


def json_format(schema: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": dict(schema), "max_whitespace_cnt": MOST_WHITESPACE}


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def any_text(*excludes: str) -> Format:
    return {"type": "any_text", "excludes": list(excludes)}


def calls_only(style: str, calls: Sequence[AllowedCall], *, parallel: bool) -> Format:
    """One call or, `parallel`, one or more, and nothing else. `style` is the name of a tool format; Mistral's models
    have three. Raises SchemaRefused, with the function's name before
    the place, for what this style cannot carry."""
    tags = _tags(style, calls)
    if style == "mistral_list":
        return tag(f"{mistral.OPEN}[", _listed(tags, ", ", parallel=parallel), "]")
    return _listed(tags, _SEPARATORS[style], parallel=parallel)


def text_or_calls(style: str, calls: Sequence[AllowedCall], *, parallel: bool, excludes: Sequence[str]) -> Format:
    """Text without any of `excludes`, in which whatever begins like a call is one of the calls."""
    tags = _tags(style, calls)
    if style == "llama3_json":
        # A bare object is a call only where an answer begins with it.
        said = sequence({"type": "regex", "pattern": r"\s{0,8}[^\s{<]"}, any_text(llama3_json.TAG, *excludes))
        called = sequence(optional(text(llama3_json.TAG)), _listed(tags, _SEPARATORS[style], parallel=parallel))
        return either(called, said)
    if style == "mistral_list":
        tags, parallel = [tag(f"{mistral.OPEN}[", _listed(tags, ", ", parallel=parallel), "]")], False
    return {
        "type": "triggered_tags",
        "triggers": [_TRIGGERS[style]],
        "tags": tags,
        "stop_after_first": not parallel,
        "excludes": list(excludes),
    }


_TRIGGERS = {
    "hermes": hermes.OPEN,
    "qwen3_coder": qwen3_coder.OPEN,
    "mistral": mistral.OPEN,
    "mistral_ids": mistral.OPEN,
    "mistral_list": mistral.OPEN,
}
_SEPARATORS = {"hermes": "\n", "qwen3_coder": "\n", "llama3_json": "; ", "mistral": "", "mistral_ids": ""}


def _listed(tags: Sequence[Format], separator: str, *, parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _tags(style: str, calls: Sequence[AllowedCall]) -> list[Format]:
    return [_tag(style, call) for call in calls]


def _tag(style: str, call: AllowedCall) -> Format:
    name = json.dumps(call.name, ensure_ascii=False)
    if style == "hermes":
        begin, end = f'{hermes.OPEN}\n{{"name": {name}, "arguments": ', f"}}\n{hermes.CLOSE}"
        return tag(begin, json_format(call.schema), end)
    if style == "llama3_json":
        return tag(f'{{"name": {name}, "parameters": ', json_format(call.schema), "}")
    if style == "mistral_list":
        return tag(f'{{"name": {name}, "arguments": ', json_format(call.schema), "}")
    if not _PLAIN_NAME.fullmatch(call.name):
        raise SchemaRefused((), "the model writes names without white space, brackets and quotes")
    if style == "mistral_ids":
        behind = sequence(
            {"type": "regex", "pattern": "[a-zA-Z0-9]{9}"}, text(mistral.ARGUMENTS), json_format(call.schema)
        )
        return tag(f"{mistral.OPEN}{call.name}{mistral.CALL_ID}", behind, "")
    if style == "mistral":
        return tag(f"{mistral.OPEN}{call.name}{mistral.ARGUMENTS}", json_format(call.schema), "")
    return tag(
        f"{qwen3_coder.OPEN}\n<function={call.name}>\n",
        {**json_format(_schema_for_xml(call)), "style": "qwen_xml"},
        f"\n</function>\n{qwen3_coder.CLOSE}",
    )


def _schema_for_xml(call: AllowedCall) -> dict[str, Any]:
    try:
        _check_for_xml(call.schema)
    except SchemaRefused as error:
        if call.strict:
            raise SchemaRefused((call.name, *error.place), error.reason) from error
        return {"type": "object"}
    return call.schema


def _check_for_xml(schema: Mapping[str, Any]) -> None:
    """Between XML tags, text stands as it is and all else as JSON: which of them a value is has to be clear."""
    for keyword in sorted(schema.keys() & {"anyOf", "oneOf", "allOf", "patternProperties", "minProperties"}):
        raise SchemaRefused((keyword,), "the model writes arguments as XML, to which this cannot be held")
    if isinstance(schema.get("additionalProperties"), Mapping) and schema["additionalProperties"]:
        raise SchemaRefused(
            ("additionalProperties",), "the model writes arguments as XML: true or false are possible"
        )
    missing = set(schema.get("required", ())) - set(schema.get("properties", ()))
    if missing:
        raise SchemaRefused(("required",), f"{min(missing)!r} is not among the properties")
    for key, each in schema.get("properties", {}).items():
        place = ("properties", key)
        if not _XML_KEY.fullmatch(key):
            raise SchemaRefused(place, "the model writes arguments as XML: a name in it has no <, > or line break")
        _check_value_for_xml(each, schema, place)


def _check_value_for_xml(schema: Any, root: Mapping[str, Any], place: tuple[str, ...]) -> None:
    if isinstance(schema, Mapping) and "$ref" in schema:
        schema = referenced(root, schema["$ref"], place)
    if not isinstance(schema, Mapping):
        raise SchemaRefused(place, "the model writes arguments as XML: the schema of one is an object")
    kinds = xml_kinds(schema)
    if "string" not in kinds:
        return
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    for value in values:
        if isinstance(value, str) and (value.strip("\n") != value or "</parameter>" in value):
            raise SchemaRefused(place, "the model writes arguments as XML, in which this text cannot stand")
    if not values and kinds not in ({"string"}, {"string", "null"}) and not _says_nothing(schema):
        raise SchemaRefused(
            place, "the model writes arguments as XML, where text beside other types is not told apart"
        )
    for keyword in ("pattern", "format"):
        if keyword in schema and not values:
            raise SchemaRefused((*place, keyword), "the model writes arguments as XML, where text is free")


def _says_nothing(schema: Mapping[str, Any]) -> bool:
    return not schema.keys() & {"type", "anyOf", "oneOf", "allOf", "enum", "const"}
