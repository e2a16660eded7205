"""Write every error in the envelope of OpenAI's or Anthropic's API instead of FastAPI's `detail`."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from proxy.errors import BaseRlError, InvalidRequest
from proxy.http.anthropic import anthropic_envelope, request_id_of, speaks_anthropic
from proxy.http.body import invalid

_LOCATIONS = ("body", "query", "path", "header", "cookie")


def error_response(error: BaseRlError, scope: Scope) -> Response:
    """Build the response to the request `scope`, in the envelope that its client expects."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    return _response(scope, error.envelope(), error.status, headers)


def install(app: FastAPI) -> None:
    """Install handlers for our own errors, the framework's errors and its validation errors."""
    app.add_exception_handler(BaseRlError, _on_own_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_framework_error)
    app.add_exception_handler(Exception, _reraise)


async def _reraise(_request: Request, error: Exception) -> Response:
    # RequestBoundary answers exceptions that nobody caught. Without this handler Starlette's outermost layer would
    # answer them before, in plain text.
    raise error


async def _on_own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BaseRlError)
    return error_response(error, request.scope)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(named(error), request.scope)


def named(error: RequestValidationError) -> InvalidRequest:
    """Turn the framework's validation error into an InvalidRequest, which names the field."""
    errors = error.errors()
    if errors and errors[0]["type"] == "json_invalid":
        return InvalidRequest("the body is not valid JSON")
    # The framework's locations begin with the part of the request, such as ("query", "limit").
    located = [
        {**one, "loc": one["loc"][1:] if one["loc"] and one["loc"][0] in _LOCATIONS else one["loc"]} for one in errors
    ]
    return invalid(located)


async def _on_framework_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths, wrong methods and other requests that the framework refuses."""
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"there is nothing at {request.url.path}", "not_found"
    elif error.status_code == 405:
        message, code = f"{request.url.path} does not answer {request.method}", "method_not_allowed"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    if error.status_code >= 500:
        kind = "server_error"
    envelope = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return _response(request.scope, envelope, error.status_code, dict(error.headers or {}))


def _response(scope: Scope, envelope: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    if speaks_anthropic(scope):
        request_id = request_id_of(scope)
        envelope = anthropic_envelope(envelope, request_id)
        if request_id is not None:
            headers["request-id"] = request_id
    # json.dumps escapes everything but ASCII: a message may quote unpaired surrogates, which UTF-8 cannot encode.
    return Response(json.dumps(envelope), status, headers, "application/json")
