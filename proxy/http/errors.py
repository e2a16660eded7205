"""Every error as the envelope that OpenAI's clients read, or Anthropic's; never FastAPI's `detail`."""

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
    """Build the response in the dialect of the client whose request `scope` is."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    return _response(scope, error.envelope(), error.status, headers)


def install(app: FastAPI) -> None:
    """Install handlers for our own errors, the framework's, and its validation."""
    app.add_exception_handler(BaseRlError, _on_ours)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_framework)
    app.add_exception_handler(Exception, _leave_to_the_boundary)


async def _leave_to_the_boundary(_request: Request, error: Exception) -> Response:
    """Let `RequestBoundary` answer what nobody caught: Starlette's own outermost layer would answer first, in plain
    text."""
    raise error


async def _on_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, BaseRlError)
    return error_response(error, request.scope)


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(named(error), request.scope)


def named(error: RequestValidationError) -> InvalidRequest:
    """Turn the framework's validation error into ours, which names the field."""
    faults = error.errors()
    if faults and faults[0]["type"] == "json_invalid":
        return InvalidRequest("the body is not valid JSON")
    located = [
        {**fault, "loc": fault["loc"][1:] if fault["loc"] and fault["loc"][0] in _LOCATIONS else fault["loc"]}
        for fault in faults
    ]
    return invalid(located)


async def _on_framework(request: Request, error: Exception) -> Response:
    """Unknown paths, wrong methods and whatever else the framework refuses."""
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
    """ASCII, because a message may quote text that no encoding takes."""
    if speaks_anthropic(scope):
        request_id = request_id_of(scope)
        envelope = anthropic_envelope(envelope, request_id)
        if request_id is not None:
            headers["request-id"] = request_id
    return Response(json.dumps(envelope), status, headers, "application/json")
