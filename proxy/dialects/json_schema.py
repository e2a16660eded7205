"""Building blocks for the JSON schemas that /openapi.json shows for fields whose values are checked by hand."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}


def optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def object_schema(properties: Schema, required: tuple[str, ...]) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def tagged_object(kind: str, **properties: Schema) -> Schema:
    """Return the schema of an object whose `type` field is `kind` and whose other properties are all required."""
    return object_schema({"type": {"const": kind}, **properties}, required=("type", *properties))
