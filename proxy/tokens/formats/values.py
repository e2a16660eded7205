"""Conversion of argument values from plain text to the JSON types of the tool's schema."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.tokens.formats.parsing import Tools

_ANY = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# References may go in circles: after this many schemas for one value, the remaining ones count as "any type".
_MOST_SCHEMAS = 200
# `ast.literal_eval` takes far more time and memory per character than a JSON decoder.
_LONGEST_LITERAL = 65_536


class ParameterSchemas:
    """The parameter schemas of one function. The value of a parameter without a schema is text."""

    def __init__(self, parameters: Any) -> None:
        self._root: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        properties = self._root.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}

    @classmethod
    def of(cls, name: str, tools: Tools) -> ParameterSchemas:
        """Return the schemas of the function called `name`; empty ones if the request has no such tool."""
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and function.get("name") == name:
                return cls(function.get("parameters"))
        return cls(None)

    def json_value(self, key: str, text: str) -> str:
        """Return the value that the model wrote as `text` in JSON. If the schema allows several types, `string` is
        tried last; a value that fits none of them becomes a string too."""
        if key not in self._properties:
            return _quoted(text)
        kinds = _Kinds(self._root).of(self._properties[key])
        word = text.strip()
        for written in (_word(word, kinds), _number(word, kinds), _structure(word, kinds)):
            if written is not None:
                return written
        return _quoted(text)


class _Kinds:
    """Finds the JSON types that a schema allows by its types, values, alternatives and references."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._schemas_left = _MOST_SCHEMAS

    def of(self, schema: Any) -> frozenset[str]:
        self._schemas_left -= 1
        if not isinstance(schema, Mapping) or self._schemas_left < 0:
            return _ANY
        kinds = _ANY
        if "$ref" in schema:
            kinds &= self.of(_referenced(schema["$ref"], self._root))
        if "type" in schema:
            named = schema["type"]
            kinds &= _known(named if isinstance(named, list) else [named])
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            kinds &= frozenset(map(_kind_of, values))
        for choice in ("anyOf", "oneOf"):
            if isinstance(schema.get(choice), list):
                kinds &= frozenset().union(*map(self.of, schema[choice]))
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            kinds &= self.of(part)
        return kinds | {"null"} if schema.get("nullable") is True else kinds


def _known(names: list[Any]) -> frozenset[str]:
    known = frozenset(name for name in names if isinstance(name, str)) & _ANY
    return known or _ANY


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "string")


def _referenced(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference within `root` (`#/$defs/Name`) leads to; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _word(word: str, kinds: frozenset[str]) -> str | None:
    # Templates show models Python's `True`, `False` and `None`, so models write these too.
    lower = word.lower()
    if lower in ("null", "none") and "null" in kinds:
        return "null"
    return lower if lower in ("true", "false") and "boolean" in kinds else None


def _number(word: str, kinds: frozenset[str]) -> str | None:
    if not kinds & {"integer", "number"} or not _NUMBER.fullmatch(word):
        return None
    value = float(word)
    return word if math.isfinite(value) and ("number" in kinds or value.is_integer()) else None


def _structure(word: str, kinds: frozenset[str]) -> str | None:
    """Return `word` if it is the JSON of an allowed object or list, or the JSON of the Python literal that it is:
    some templates show models Python literals."""
    wanted = [kind for kind, name in ((dict, "object"), (list, "array")) if name in kinds]
    if not wanted or word[:1] not in ("{", "["):
        return None
    try:
        return word if isinstance(msgspec.json.decode(word), tuple(wanted)) else None
    except (ValueError, RecursionError):
        literal = _python_literal(word)
        return literal[1] if literal is not None and isinstance(literal[0], tuple(wanted)) else None


def _python_literal(word: str) -> tuple[Any, str] | None:
    """Return the value of a Python literal, and its JSON; None if it is neither."""
    if len(word) > _LONGEST_LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = ast.literal_eval(word)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return value, written


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
