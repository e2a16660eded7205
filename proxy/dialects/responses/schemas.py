"""JSON schema that /openapi.json shows for the input of the Responses API, which is checked by hand.

It describes the forms that most clients send. The checks by hand accept more forms than these."""

from __future__ import annotations

from proxy.dialects.json_schema import NAME, TEXT, Schema, object_schema, optional

_ROLES: Schema = {"enum": ["user", "system", "developer", "assistant"]}
INPUT: Schema = optional(
    {
        "anyOf": [
            NAME,
            {
                "type": "array",
                "minItems": 1,
                "items": object_schema({"role": _ROLES, "content": TEXT}, required=("role", "content")),
            },
        ]
    }
)
