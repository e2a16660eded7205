"""Dispatch requests to endpoints that only take a request, without the framework's overhead."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.errors import BaseRlError
from proxy.http.errors import error_response

Endpoint = Callable[[Request], Awaitable[Response]]


class _Plain(NamedTuple):
    route: APIRoute
    endpoint: Endpoint


class PlainRoutes:
    """ASGI layer that answers requests to the POST routes of `routers` whose endpoints only take the request.

    FastAPI would try every route's pattern twice, solve dependencies that such an endpoint does not have, and open
    exit stacks for them, which is about a twelfth of the CPU time of a call. The routes are registered there all the
    same, for its OpenAPI document and for requests that are not matched here.
    """

    def __init__(self, app: ASGIApp, routers: Sequence[APIRouter]) -> None:
        self._app = app
        self._exact: dict[str, _Plain] = {}
        self._by_last_segment: dict[str, list[_Plain]] = {}
        for plain in _plain_routes(routers):
            if plain.route.param_convertors:
                self._by_last_segment.setdefault(_last_segment(plain.route.path), []).append(plain)
            else:
                self._exact[plain.route.path] = plain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plain = self._find(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if plain is None:
            await self._app(scope, receive, send)
            return
        scope["route"], scope["endpoint"] = plain
        try:
            response = await plain.endpoint(_Request(scope, receive, send))
        except BaseRlError as error:
            response = error_response(error, scope)
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> _Plain | None:
        """Return the route of a request and put its path parameters into `scope`; None if there is none."""
        if scope.get("root_path"):  # mounted below another path, which only the framework can strip
            return None
        path = scope["path"]
        plain = self._exact.get(path)
        if plain is not None:
            scope["path_params"] = {}
            return plain
        for plain in self._by_last_segment.get(_last_segment(path), ()):
            match = plain.route.path_regex.match(path)
            if match is not None:
                converters = plain.route.param_convertors
                scope["path_params"] = {
                    name: converters[name].convert(text) for name, text in match.groupdict().items()
                }
                return plain
        return None


class _Request(Request):
    """A request that reads its body without Starlette's generators, which serve endpoints that read it in parts."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            parts: list[bytes] = []
            more = True
            while more:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
            self._body = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._body


def _plain_routes(routers: Iterable[APIRouter]) -> Iterable[_Plain]:
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.methods == {"POST"} and not route.dependencies:
                parameters = inspect.signature(route.endpoint).parameters
                if list(parameters) == ["request"]:
                    yield _Plain(route, route.endpoint)


def _last_segment(path: str) -> str:
    return path.rpartition("/")[2]
