"""Every error as the envelope that OpenAI clients read; never FastAPI's `detail`."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from proxy.errors import BaseRlError, InvalidRequest
from proxy.http.body import invalid

_LOCATIONS = ("body", "query", "path", "header", "cookie")


def error_response(error: BaseRlError) -> Response:
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    return _response(error.envelope(), error.status, headers)


def install(app: FastAPI) -> None:
    """Handlers for our own errors, the framework's, and its validation."""
    app.add_exception_handler(BaseRlError, _on_ours)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_framework)


async def _on_ours(_request: Request, error: Exception) -> Response:
    assert isinstance(error, BaseRlError)
    return error_response(error)


async def _on_validation(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    if faults and faults[0]["type"] == "json_invalid":
        return error_response(InvalidRequest("the body is not valid JSON"))
    located = [
        {**fault, "loc": fault["loc"][1:] if fault["loc"] and fault["loc"][0] in _LOCATIONS else fault["loc"]}
        for fault in faults
    ]
    return error_response(invalid(located))


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
    return _response(envelope, error.status_code, dict(error.headers or {}))


def _response(envelope: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    """ASCII, because a message may quote text that no encoding takes."""
    return Response(json.dumps(envelope), status, headers, "application/json")
