"""Complete /openapi.json with what FastAPI cannot infer: bodies that are checked by hand, errors and keys.

Endpoints that read their bodies themselves describe them in `openapi_extra`:

    @router.post("/v1/sessions", openapi_extra=described(CreateSessionBody, created="Session"))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

Schema = dict[str, Any]

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSALS = {
    "4XX": "The request is refused; `error.param` names the field.",
    "5XX": "The engine or the store failed or cannot be reached.",
}
_SECURITY: Schema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_WITHOUT_KEY = ("/healthz", "/readyz", "/metrics", "/")


def described(
    body: type[BaseModel] | None = None,
    *,
    answers: Mapping[int, str],
    may_be_absent: bool = False,
    may_be_list: bool = False,
    may_stream: bool = False,
    media_type: str = JSON,
) -> dict[str, Any]:
    """Return an `openapi_extra` with the JSON `body` and the descriptions of successful `answers` by status.

    Answers are JSON objects unless `media_type` is another one. `may_stream` adds server-sent events, `may_be_list`
    lists of bodies.
    """
    media = {media_type: {"schema": {"type": "object"} if media_type == JSON else {}}}
    if may_stream:
        media[EVENT_STREAM] = {"schema": {}}
    extra: dict[str, Any] = {
        "responses": {str(status): {"description": text, "content": media} for status, text in answers.items()}
    }
    if body is not None:
        schema = schema_of(body)
        if may_be_list:
            schema = {"anyOf": [schema, {"type": "array", "items": schema, "minItems": 1}]}
        extra["requestBody"] = {"required": not may_be_absent, "content": {JSON: {"schema": schema}}}
    return extra


def schema_of(model: type[BaseModel]) -> Schema:
    """Return the model's JSON schema, with references replaced by the schemas that they refer to."""
    # `openapi_extra` has no place for definitions.
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    resolved: Schema = _resolved(schema, definitions)
    return resolved


def install(app: FastAPI) -> None:
    """Make the OpenAPI document of `app` describe its errors and keys."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(
                get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    components["securitySchemes"] = _SECURITY
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # invalid requests are answered with 400 and an envelope
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    content = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for statuses, text in _REFUSALS.items():
                operation["responses"][statuses] = {"description": text, "content": content}
            if path not in _WITHOUT_KEY:
                operation["security"] = [{name: []} for name in _SECURITY]
    return document


def _resolved(value: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_resolved(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    reference = value.get("$ref")
    if isinstance(reference, str):
        return _resolved(definitions[reference.rpartition("/")[2]], definitions)
    return {key: _resolved(item, definitions) for key, item in value.items()}
