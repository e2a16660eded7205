"""Argument values that a model wrote as plain text, as the JSON that the tool's schema asks for."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.tokens.formats.calls import Tools

_ANY = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MOST_SCHEMAS = 200
"""How many schemas are looked at for one value before what is left counts as "anything": references may go in
circles."""
_LONGEST_LITERAL = 65_536


class ParameterSchemas:
    """What one function's parameters are. Of a parameter that nothing is known of, the value is text."""

    def __init__(self, parameters: Any) -> None:
        self._root: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        properties = self._root.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}

    @classmethod
    def of(cls, name: str, tools: Tools) -> ParameterSchemas:
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and function.get("name") == name:
                return cls(function.get("parameters"))
        return cls(None)

    def json_value(self, key: str, text: str) -> str:
        """`text` as JSON. Where the schema allows several types, text is the last that it is taken for; what fits
        none of them is text as well."""
        if key not in self._properties:
            return _quoted(text)
        kinds = _Kinds(self._root).of(self._properties[key])
        word = text.strip()
        for written in (_word(word, kinds), _number(word, kinds), _structure(word, kinds)):
            if written is not None:
                return written
        return _quoted(text)


class _Kinds:
    """The JSON types that schemas allow, as far as that is said by types, values, alternatives and references."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._patience = _MOST_SCHEMAS

    def of(self, schema: Any) -> frozenset[str]:
        self._patience -= 1
        if not isinstance(schema, Mapping) or self._patience < 0:
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
    """What a reference inside of the same schema (`#/$defs/Name`) names; None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _word(word: str, kinds: frozenset[str]) -> str | None:
    """Templates write Python's `True`, `False` and `None`, and so do models."""
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
    """An object or a list: JSON as it is written, or else a Python literal, which some templates write."""
    wanted = [kind for kind, name in ((dict, "object"), (list, "array")) if name in kinds]
    if not wanted or word[:1] not in ("{", "["):
        return None
    try:
        return word if isinstance(msgspec.json.decode(word), tuple(wanted)) else None
    except (ValueError, RecursionError):
        literal = _python_literal(word)
        return literal[1] if literal is not None and isinstance(literal[0], tuple(wanted)) else None


def _python_literal(word: str) -> tuple[Any, str] | None:
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
