"""Signing in to the page and out: a signed cookie that names a key, never holds it, and ends with it.

Signing out is recorded in the store rather than signing in, so that the page can be opened while nothing can be
written (a full disk is when an operator wants to see it). The record holds for every proxy on the store.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any
from urllib.parse import urlsplit

import msgspec
from fastapi import Request
from fastapi.responses import Response
from itsdangerous import BadSignature, URLSafeSerializer

from proxy.admin.repository import SignOutRepository
from proxy.auth.service import Credentials, PrincipalKind
from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.errors import PermissionDenied

COOKIE = "base_rl_admin"
_PATH = "/admin"
_SALT = b"base-rl admin page"
_OPENING_KINDS = (PrincipalKind.ADMIN, PrincipalKind.RUN)


class SignInNeeded(Exception):
    """Nobody is signed in, or no longer. The form leads back to `path`."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Visitor(msgspec.Struct, frozen=True, kw_only=True):
    """A signed-in browser. An admin sees everything; others the run of their key. `sign_in` names the sign-in."""

    key_id: str
    sign_in: str
    is_admin: bool
    run_id: str | None

    def may_see(self, run_id: str) -> bool:
        return self.is_admin or run_id == self.run_id


class _Ticket(msgspec.Struct, frozen=True):
    """What a cookie says, once its signature is checked."""

    key: str
    until: float
    id: str


class SignIn:
    """`secret` signs the cookies; it is the installation's own. A cookie is good for `seconds`."""

    def __init__(
        self,
        *,
        secret: bytes,
        clock: Clock,
        credentials: Credentials,
        database: Database,
        seconds: float = 12 * 3600.0,
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._credentials = credentials
        self._database = database
        self._serializer = URLSafeSerializer(
            secret, salt=_SALT, signer_kwargs={"key_derivation": "hmac", "digest_method": hashlib.sha256}
        )

    async def enter(self, key: str) -> Visitor:
        """Raises AuthenticationFailed for a key that is not known, PermissionDenied for one that opens no page."""
        who = await self._credentials.authenticate(key)
        if who.kind not in _OPENING_KINDS:
            raise PermissionDenied(f"that is a {who.kind.value} key; the page opens with an admin key or a run key")
        return Visitor(
            key_id=who.key_id,
            sign_in=secrets.token_urlsafe(16),
            is_admin=who.kind is PrincipalKind.ADMIN,
            run_id=who.run_id,
        )

    def remember(self, visitor: Visitor, response: Response, *, secure: bool) -> None:
        ticket = _Ticket(key=visitor.key_id, until=self._clock() + self._seconds, id=visitor.sign_in)
        text = self._serializer.dumps(msgspec.to_builtins(ticket))
        assert isinstance(text, str)
        response.set_cookie(
            COOKIE, text, max_age=int(self._seconds), path=_PATH, secure=secure, httponly=True, samesite="strict"
        )

    async def leave(self, request: Request, response: Response) -> None:
        """End the sign-in of this request for good: a copy of its cookie opens nothing any more, on any proxy.

        Raises StoreUnavailable while that cannot be recorded.
        """
        ticket = self._ticket(request)
        if ticket is not None:
            now = self._clock()
            await self._database.commit(
                lambda connection: SignOutRepository(connection).end(ticket.id, until=ticket.until, now=now)
            )
        response.delete_cookie(COOKIE, path=_PATH, httponly=True, samesite="strict")

    async def visitor(self, request: Request) -> Visitor:
        """Ask the store each time, so that a revoked key and an ended sign-in are out at once. Raises
        SignInNeeded."""
        ticket = self._ticket(request)
        visitor = None if ticket is None else await self._holder(ticket)
        if visitor is None:
            raise SignInNeeded(request.url.path)
        return visitor

    async def is_signed_in(self, visitor: Visitor) -> bool:
        """Whether a visitor may still look on: for streams, which outlive the request that opened them."""
        ticket = _Ticket(key=visitor.key_id, until=0.0, id=visitor.sign_in)
        return await self._holder(ticket) is not None

    async def _holder(self, ticket: _Ticket) -> Visitor | None:
        who = await self._credentials.find_valid(ticket.key)
        if who is None or who.kind not in _OPENING_KINDS:
            return None
        if await self._database.read(lambda connection: SignOutRepository(connection).is_ended(ticket.id)):
            return None
        is_admin = who.kind is PrincipalKind.ADMIN
        return Visitor(key_id=who.key_id, sign_in=ticket.id, is_admin=is_admin, run_id=who.run_id)

    def _ticket(self, request: Request) -> _Ticket | None:
        """The cookie's content; None without a cookie of ours that is still good."""
        try:
            content: Any = self._serializer.loads(request.cookies.get(COOKIE, ""))
            ticket = msgspec.convert(content, _Ticket)
        except (BadSignature, msgspec.ValidationError):  # the latter: a cookie of an older version
            return None
        return ticket if self._clock() < ticket.until else None


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
