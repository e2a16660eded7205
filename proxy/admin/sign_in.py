"""Who is signed in to the page: a signed cookie that names a key, never holds it, and dies with it."""

from __future__ import annotations

import hashlib
from urllib.parse import urlsplit

import msgspec
from fastapi import Request
from fastapi.responses import Response
from itsdangerous import BadSignature, URLSafeSerializer

from proxy.clock import Clock
from proxy.credentials.service import Credentials, PrincipalKind
from proxy.errors import PermissionDenied
from proxy.overview.service import OverviewService
from proxy.overview.views import KeyHolder

COOKIE = "base_rl_admin"
_PATH = "/admin"
_SALT = b"base-rl admin page"


class SignInNeeded(Exception):
    """Nobody is signed in, or no longer: to the form, and back to `path` from there."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Visitor(msgspec.Struct, frozen=True, kw_only=True):
    """A signed-in browser. An admin sees everything; others the run of their key."""

    key_id: str
    is_admin: bool
    run_id: str | None

    def may_see(self, run_id: str) -> bool:
        return self.is_admin or run_id == self.run_id


class SignIn:
    """`secret` signs the cookies; it is the installation's own. A cookie is good for `seconds`."""

    def __init__(self, *, secret: bytes, clock: Clock, seconds: float = 12 * 3600.0) -> None:
        self._clock = clock
        self._seconds = seconds
        self._serializer = URLSafeSerializer(
            secret, salt=_SALT, signer_kwargs={"key_derivation": "hmac", "digest_method": hashlib.sha256}
        )

    async def enter(self, key: str, credentials: Credentials) -> Visitor:
        """Raises AuthenticationFailed for a key that is not known, PermissionDenied for one that opens no page."""
        who = await credentials.authenticate(key)
        if who.kind not in (PrincipalKind.ADMIN, PrincipalKind.RUN):
            raise PermissionDenied(f"that is a {who.kind.value} key; the page opens with an admin key or a run key")
        return Visitor(key_id=who.key_id, is_admin=who.kind is PrincipalKind.ADMIN, run_id=who.run_id)

    def remember(self, visitor: Visitor, response: Response, *, secure: bool) -> None:
        text = self._serializer.dumps({"key": visitor.key_id, "until": self._clock() + self._seconds})
        assert isinstance(text, str)
        response.set_cookie(
            COOKIE, text, max_age=int(self._seconds), path=_PATH, secure=secure, httponly=True, samesite="strict"
        )

    def forget(self, response: Response) -> None:
        response.delete_cookie(COOKIE, path=_PATH, httponly=True, samesite="strict")

    async def visitor(self, request: Request, overview: OverviewService) -> Visitor:
        """Asks the store each time, so that a revoked key is out at once. Raises SignInNeeded."""
        holder = await self._holder(request.cookies.get(COOKIE, ""), overview)
        if holder is None or holder.kind not in {PrincipalKind.ADMIN.value, PrincipalKind.RUN.value}:
            raise SignInNeeded(request.url.path)
        return Visitor(key_id=holder.key_id, is_admin=holder.kind == PrincipalKind.ADMIN.value, run_id=holder.run_id)

    async def _holder(self, cookie: str, overview: OverviewService) -> KeyHolder | None:
        try:
            content = self._serializer.loads(cookie)
        except BadSignature:
            return None
        if content["until"] < self._clock():
            return None
        return await overview.key_holder(content["key"])


def check_origin(request: Request, public_url: str | None) -> None:
    """A change must come from our own page: browsers name the page's origin with every POST.

    Raises PermissionDenied. `public_url` is our address where a gateway stands before us.
    """
    origin = urlsplit(request.headers.get("origin", "")).netloc
    ours = {request.headers.get("host", ""), urlsplit(public_url or "").netloc} - {""}
    if not origin or origin not in ours:
        raise PermissionDenied("this request does not come from the admin page itself")


def local_path(path: str) -> str:
    """Where to go after signing in: a page of ours, whatever the form says."""
    parts = urlsplit(path)
    is_ours = not parts.scheme and not parts.netloc and (parts.path == _PATH or parts.path.startswith(_PATH + "/"))
    is_plain = "\\" not in path and path.isprintable() and not parts.path.startswith(f"{_PATH}/login")
    return path if is_ours and is_plain else _PATH
