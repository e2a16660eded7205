"""JSON schemas that /openapi.json shows for the fields of chat completions that are checked by hand.

They describe the forms that most clients send. The checks by hand accept more forms than these."""

from __future__ import annotations

from proxy.dialects.json_schema import NAME, TEXT, Schema, object_schema, optional, tagged_object

_CONTENT: Schema = {
    "anyOf": [
        TEXT,
        {
            "type": "array",
            "items": {"anyOf": [tagged_object("text", text=TEXT), tagged_object("refusal", refusal=TEXT)]},
        },
    ]
}
_CALL = tagged_object("function", function=object_schema({"name": TEXT, "arguments": TEXT}, required=("name",)))
_FUNCTION = object_schema(
    {
        "name": NAME,
        "description": optional(TEXT),
        "parameters": optional({"type": "object"}),
        "strict": optional({"type": "boolean"}),
    },
    required=("name",),
)
_CHOSEN = tagged_object("function", function=object_schema({"name": NAME}, required=("name",)))

MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            object_schema(
                {"role": {"enum": ["system", "developer", "user", "tool"]}, "content": _CONTENT},
                required=("role", "content"),
            ),
            object_schema(
                {
                    "role": {"const": "assistant"},
                    "content": optional(_CONTENT),
                    "reasoning_content": optional(TEXT),
                    "tool_calls": optional({"type": "array", "items": _CALL}),
                },
                required=("role",),
            ),
        ]
    },
}
TOOLS: Schema = optional({"type": "array", "items": tagged_object("function", function=_FUNCTION)})
TOOL_CHOICE: Schema = {"anyOf": [{"enum": ["auto", "none", "required", None]}, _CHOSEN]}
FUNCTIONS: Schema = optional({"type": "array", "items": _FUNCTION})
FUNCTION_CALL: Schema = {
    "anyOf": [{"enum": ["auto", "none", None]}, object_schema({"name": NAME}, required=("name",))]
}
RESPONSE_FORMAT: Schema = {
    "anyOf": [
        tagged_object("text"),
        tagged_object("json_object"),
        tagged_object(
            "json_schema", json_schema=object_schema({"name": NAME, "schema": {"type": "object"}}, required=("name",))
        ),
        {"type": "null"},
    ]
}
