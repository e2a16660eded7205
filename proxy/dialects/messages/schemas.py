"""JSON schemas that /openapi.json shows for the fields of Anthropic's messages that are checked by hand.

They describe the forms that most clients send. The checks by hand accept more forms than these."""

from __future__ import annotations

from proxy.dialects.json_schema import NAME, Schema, object_schema, optional, tagged_object

_CONTENT: Schema = {"anyOf": [NAME, {"type": "array", "minItems": 1, "items": tagged_object("text", text=NAME)}]}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": object_schema(
        {"role": {"enum": ["user", "assistant"]}, "content": _CONTENT}, required=("role", "content")
    ),
}
SYSTEM: Schema = optional(_CONTENT)
TOOLS: Schema = optional(
    {
        "type": "array",
        "items": object_schema({"name": NAME, "input_schema": {"type": "object"}}, required=("name", "input_schema")),
    }
)
