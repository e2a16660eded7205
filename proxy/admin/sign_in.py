"""Signing in to the admin page and out of it, with a signed cookie.

The cookie carries the id of a key, not the key itself, and is worthless once the key is revoked. The store records
sign-outs rather than sign-ins, so that the page opens while the store cannot be written: a full disk is when an
operator needs it. Every proxy on the same store honours a recorded sign-out.
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
from proxy.auth.access import OwnedRun, Principal, Right, has_right, may, may_administrate, may_see
from proxy.auth.service import Credentials
from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.errors import PermissionDenied

COOKIE = "base_rl_admin"
_PATH = "/admin"
_SALT = b"base-rl admin page"


class SignInNeeded(Exception):
    """The request carries no valid sign-in. After signing in, the browser returns to `path`."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Visitor(msgspec.Struct, frozen=True, kw_only=True):
    """A signed-in browser, with the holder of the key that signed it in. `sign_in` is the id of the sign-in."""

    principal: Principal
    sign_in: str

    @property
    def kind(self) -> str:
        return self.principal.kind.value

    @property
    def is_admin(self) -> bool:
        return may_administrate(self.principal)

    @property
    def manages(self) -> bool:
        """Whether the visitor may manage keys and webhooks, in the scope of theirs."""
        return has_right(self.principal, Right.CHANGE)

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """The names and addresses of the pages that the header links."""
        if self.rates_only:
            return (("Review", self.home),)
        names = ["Runs"]
        if has_right(self.principal, Right.REWARD):
            names.append("Review")
        if has_right(self.principal, Right.SEE_PROJECT):
            names.append("Projects")
        if self.manages:
            names.append("Keys")
        if self.is_admin:
            names += ["Engines", "Jobs"]
        if self.manages:
            names.append("Webhooks")
        names.append("Events")
        return tuple((name, "/admin" if name == "Runs" else f"/admin/{name.lower()}") for name in names)

    @property
    def rates_only(self) -> bool:
        """Whether the visitor has only the pages on which sessions are rated."""
        return not has_right(self.principal, Right.READ)

    @property
    def home(self) -> str:
        """The address of the visitor's first page."""
        return "/admin/review" if self.rates_only else "/admin"

    def may_see(self, run: OwnedRun) -> bool:
        return may_see(self.principal, run)

    def may_review(self, run: OwnedRun) -> bool:
        """Return whether the visitor may rate the run's sessions."""
        return may(self.principal, Right.REWARD, run)


class _Ticket(msgspec.Struct, frozen=True):
    """The content of a cookie: the key's id, the time of expiry and the id of the sign-in."""

    key: str
    until: float
    id: str


class SignIn:
    """Signs visitors in and out, and checks their cookies.

    `secret` is the installation's own and signs the cookies; a cookie is valid for `seconds`.
    """

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
        """Sign in with a key. Raise AuthenticationFailed if it is unknown, PermissionDenied if its kind opens no
        page."""
        who = await self._credentials.authenticate(key)
        if not has_right(who, Right.OPEN_PAGE):
            raise PermissionDenied(
                f"this is a {who.kind.value} key: sign in with an admin, project, viewer, run or reviewer key"
            )
        return Visitor(principal=who, sign_in=secrets.token_urlsafe(16))

    def remember(self, visitor: Visitor, response: Response, *, secure: bool) -> None:
        """Set the visitor's cookie. `secure` confines it to HTTPS."""
        ticket = _Ticket(key=visitor.principal.key_id, until=self._clock() + self._seconds, id=visitor.sign_in)
        text = self._serializer.dumps(msgspec.to_builtins(ticket))
        assert isinstance(text, str)
        response.set_cookie(
            COOKIE, text, max_age=int(self._seconds), path=_PATH, secure=secure, httponly=True, samesite="strict"
        )

    async def leave(self, request: Request, response: Response) -> None:
        """Sign out: from now on no proxy on the store accepts the request's cookie or a copy of it.

        Raise StoreUnavailable if the store cannot record the sign-out.
        """
        ticket = self._ticket(request)
        if ticket is not None:
            now = self._clock()
            await self._database.commit(
                lambda connection: SignOutRepository(connection).end(ticket.id, until=ticket.until, now=now)
            )
        response.delete_cookie(COOKIE, path=_PATH, httponly=True, samesite="strict")

    async def visitor(self, request: Request) -> Visitor:
        """Return who is signed in. Raise SignInNeeded if nobody is."""
        # The store is read for every request, so that a revoked key and a sign-out take effect at once.
        ticket = self._ticket(request)
        visitor = None if ticket is None else await self._holder(ticket)
        if visitor is None:
            raise SignInNeeded(request.url.path)
        return visitor

    async def is_signed_in(self, visitor: Visitor) -> bool:
        """Return whether a visitor is still signed in. Event streams ask, as they outlive the request they began
        with."""
        ticket = _Ticket(key=visitor.principal.key_id, until=0.0, id=visitor.sign_in)
        return await self._holder(ticket) is not None

    async def _holder(self, ticket: _Ticket) -> Visitor | None:
        who = await self._credentials.find_valid(ticket.key)
        if who is None or not has_right(who, Right.OPEN_PAGE):
            return None
        if await self._database.read(lambda connection: SignOutRepository(connection).is_ended(ticket.id)):
            return None
        return Visitor(principal=who, sign_in=ticket.id)

    def _ticket(self, request: Request) -> _Ticket | None:
        """Return the content of the request's cookie, or None if it is missing, forged or expired."""
        try:
            content: Any = self._serializer.loads(request.cookies.get(COOKIE, ""))
            ticket = msgspec.convert(content, _Ticket)
        except (BadSignature, msgspec.ValidationError):  # ValidationError: an older release wrote the cookie
            return None
        return ticket if self._clock() < ticket.until else None


def check_origin(request: Request, public_url: str | None) -> None:
    """Raise PermissionDenied unless a changing request comes from the admin page itself.

    Browsers send the page's origin with every POST, so a form on another site cannot act with the visitor's cookie.
    `public_url` is the proxy's address behind a gateway, or None.
    """
    origin = urlsplit(request.headers.get("origin", "")).netloc
    ours = {request.headers.get("host", ""), urlsplit(public_url or "").netloc} - {""}
    if not origin or origin not in ours:
        raise PermissionDenied("this request was not sent by the admin page: repeat the action on the page")


def local_path(path: str) -> str:
    """Return `path` if it is an admin page, else the first page."""
    # The form's `next` field comes from the address: without this check a link could send a visitor to another site.
    parts = urlsplit(path)
    is_ours = not parts.scheme and not parts.netloc and (parts.path == _PATH or parts.path.startswith(_PATH + "/"))
    is_plain = "\\" not in path and path.isprintable() and not parts.path.startswith(f"{_PATH}/login")
    return path if is_ours and is_plain else _PATH
