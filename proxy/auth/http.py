"""Authenticate HTTP requests by their API key."""

from __future__ import annotations

from fastapi import Request
from starlette.types import Scope

from proxy.auth.access import Principal
from proxy.auth.service import Credentials
from proxy.errors import AuthenticationFailed
from proxy.http.services import service

_SCHEME = b"bearer "


async def principal(request: Request) -> Principal:
    """Return who sends this request, by `Authorization: Bearer …` or `x-api-key`. Raise AuthenticationFailed."""
    known = await authenticate(request.scope)
    if known is None:
        raise AuthenticationFailed("no API key: send it as 'Authorization: Bearer …' or 'x-api-key: …'")
    return known


async def authenticate(scope: Scope) -> Principal | None:
    """Return the principal of the request's key; None for a request without a key. Raise AuthenticationFailed."""
    # Cached for the request: the admission of the body needs the principal, and the endpoint needs it again.
    state = scope.setdefault("state", {})
    known: Principal | None = state.get("principal")
    if known is None:
        token = bearer_token(scope)
        if token:
            known = state["principal"] = await service(scope, Credentials).authenticate(token)
    return known


def bearer_token(scope: Scope) -> str | None:
    """Return the text of the key; None if the request has none. A bearer token wins over `x-api-key`."""
    other: str | None = None
    for name, value in scope["headers"]:
        if name == b"authorization" and value[: len(_SCHEME)].lower() == _SCHEME:
            return str(value[len(_SCHEME) :].strip(), "latin-1")
        if name == b"x-api-key" and other is None:
            other = str(value, "latin-1")
    return other
