"""The key of a request."""

from __future__ import annotations

from fastapi import Request

from proxy.credentials.service import Credentials, Principal, PrincipalKind
from proxy.errors import AuthenticationFailed, PermissionDenied

_SCHEME = b"bearer "


async def principal(request: Request) -> Principal:
    """Who sends this request, by `Authorization: Bearer …` or `x-api-key`. Raises AuthenticationFailed."""
    token = bearer_token(request)
    if not token:
        raise AuthenticationFailed("no API key: send it as 'Authorization: Bearer …' or 'x-api-key: …'")
    credentials: Credentials = request.app.state.credentials
    return await credentials.authenticate(token)


def bearer_token(request: Request) -> str | None:
    """The text of the key, if one was sent."""
    other: str | None = None
    for name, value in request.scope["headers"]:
        if name == b"authorization" and value[: len(_SCHEME)].lower() == _SCHEME:
            return str(value[len(_SCHEME) :].strip(), "latin-1")
        if name == b"x-api-key" and other is None:
            other = str(value, "latin-1")
    return other


def require(who: Principal, *kinds: PrincipalKind) -> None:
    """Raises PermissionDenied unless the key is of one of these kinds."""
    if who.kind not in kinds:
        wanted = " or ".join(kind.value for kind in kinds)
        raise PermissionDenied(f"this needs a key of kind {wanted}, and yours is of kind {who.kind.value}")
