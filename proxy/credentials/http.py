"""The key of a request."""

from __future__ import annotations

from fastapi import Request

from proxy.credentials.service import Credentials, Principal, PrincipalKind
from proxy.errors import AuthenticationFailed, PermissionDenied

_SCHEME = "bearer "


async def principal(request: Request) -> Principal:
    """Who sends this request, by `Authorization: Bearer …` or `x-api-key`. Raises AuthenticationFailed."""
    token = bearer_token(request)
    if not token:
        raise AuthenticationFailed("no API key: send it as 'Authorization: Bearer …' or 'x-api-key: …'")
    credentials: Credentials = request.app.state.credentials
    return await credentials.authenticate(token)


def bearer_token(request: Request) -> str | None:
    """The text of the key, if one was sent."""
    authorization = request.headers.get("authorization", "")
    if authorization[: len(_SCHEME)].lower() == _SCHEME:
        return authorization[len(_SCHEME) :].strip()
    return request.headers.get("x-api-key")


def require(who: Principal, *kinds: PrincipalKind) -> None:
    """Raises PermissionDenied unless the key is of one of these kinds."""
    if who.kind not in kinds:
        wanted = " or ".join(kind.value for kind in kinds)
        raise PermissionDenied(f"this needs a key of kind {wanted}, and yours is of kind {who.kind.value}")
