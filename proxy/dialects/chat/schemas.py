"""JSON schemas of what bodies have that is checked by hand: for /openapi.json.

They have the forms that every client sends; the other dialects take more than is here."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of_kind(kind: str, **properties: Schema) -> Schema:
    """An object that says by `type` what it is."""
    return _object({"type": {"const": kind}, **properties}, needs=("type", *properties))


def _object(properties: Schema, needs: tuple[str, ...]) -> Schema:
    return {"type": "object", "properties": properties, "required": list(needs)}


_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}
_CONTENT: Schema = {
    "anyOf": [
        _TEXT,
        {
            "type": "array",
            "items": {"anyOf": [_one_of_kind("text", text=_TEXT), _one_of_kind("refusal", refusal=_TEXT)]},
        },
    ]
}
_CALL = _one_of_kind("function", function=_object({"name": _TEXT, "arguments": _TEXT}, needs=("name",)))
_FUNCTION = _object(
    {
        "name": _NAME,
        "description": optional(_TEXT),
        "parameters": optional({"type": "object"}),
        "strict": optional({"type": "boolean"}),
    },
    needs=("name",),
)
_CHOSEN = _one_of_kind("function", function=_object({"name": _NAME}, needs=("name",)))

MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _object(
                {"role": {"enum": ["system", "developer", "user", "tool"]}, "content": _CONTENT},
                needs=("role", "content"),
            ),
            _object(
                {
                    "role": {"const": "assistant"},
                    "content": optional(_CONTENT),
                    "reasoning_content": optional(_TEXT),
                    "tool_calls": optional({"type": "array", "items": _CALL}),
                },
                needs=("role",),
            ),
        ]
    },
}
TOOLS: Schema = optional({"type": "array", "items": _one_of_kind("function", function=_FUNCTION)})
TOOL_CHOICE: Schema = {"anyOf": [{"enum": ["auto", "none", "required", None]}, _CHOSEN]}
FUNCTIONS: Schema = optional({"type": "array", "items": _FUNCTION})
FUNCTION_CALL: Schema = {"anyOf": [{"enum": ["auto", "none", None]}, _object({"name": _NAME}, needs=("name",))]}
RESPONSE_FORMAT: Schema = {
    "anyOf": [
        _one_of_kind("text"),
        _one_of_kind("json_object"),
        _one_of_kind(
            "json_schema", json_schema=_object({"name": _NAME, "schema": {"type": "object"}}, needs=("name",))
        ),
        {"type": "null"},
    ]
}

_SAID: Schema = {"anyOf": [_NAME, {"type": "array", "minItems": 1, "items": _one_of_kind("text", text=_NAME)}]}
ANTHROPIC_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": _object({"role": {"enum": ["user", "assistant"]}, "content": _SAID}, needs=("role", "content")),
}
ANTHROPIC_SYSTEM: Schema = optional(_SAID)
ANTHROPIC_TOOLS: Schema = optional(
    {
        "type": "array",
        "items": _object({"name": _NAME, "input_schema": {"type": "object"}}, needs=("name", "input_schema")),
    }
)

_ROLES: Schema = {"enum": ["user", "system", "developer", "assistant"]}
RESPONSES_INPUT: Schema = optional(
    {
        "anyOf": [
            _NAME,
            {
                "type": "array",
                "minItems": 1,
                "items": _object({"role": _ROLES, "content": _TEXT}, needs=("role", "content")),
            },
        ]
    }
)
