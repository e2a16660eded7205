"""Bearer keys and who is behind them. A key's text is shown once; the store keeps its HMAC."""

from __future__ import annotations

import hmac
import os
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Row

from proxy.clock import Clock
from proxy.contract.identifiers import KeyId, RunId, SessionId, new_key_id
from proxy.credentials.repository import KeyRepository
from proxy.credentials.users import users_of
from proxy.database.unit_of_work import Database
from proxy.errors import AuthenticationFailed, NotFound, StoreUnavailable
from proxy.settings import ConfigurationError

_SECRET_BYTES = 32
_PSEUDONYM_BYTES = 16
_CACHED_KEYS = 8192
_CACHED_SECONDS = 5.0
"""A key that another proxy revoked is refused after this long."""

_ASKED_AGAIN_SECONDS = 1.0
"""After this long a store is asked again that could not be reached."""


class PrincipalKind(StrEnum):
    """`admin`: everything. `run`: agents of one run. `session`: one session. `trainer`: claims and versions."""

    ADMIN = "admin"
    RUN = "run"
    SESSION = "session"
    TRAINER = "trainer"


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Who calls. `run_id` is None for admin keys only; `session_id` is set for session keys only."""

    kind: PrincipalKind
    key_id: KeyId
    run_id: RunId | None
    session_id: SessionId | None


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A key to be made."""

    kind: PrincipalKind
    run_id: str | None = None
    session_id: str | None = None
    label: str | None = None


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is what the client sends; it cannot be had again."""

    id: KeyId
    text: str


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its text."""

    id: KeyId
    kind: PrincipalKind
    label: str | None
    created_at: float
    revoked_at: float | None


class Credentials:
    """Makes, checks and revokes keys. A revocation is obeyed at once here, within seconds by other processes."""

    def __init__(self, database: Database, secret: bytes, clock: Clock, *, outlive_store: bool = False) -> None:
        """`outlive_store`: while the store is unavailable, keys that it knew are taken to be good still."""
        self._outlive_store = outlive_store
        self._database = database
        self._hmac = hmac.new(secret, digestmod="sha256")
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()

    async def authenticate(self, token: str) -> Principal:
        """Raises AuthenticationFailed for a key that is unknown or revoked."""
        digest = self._digest(token)
        known = self._known.get(digest)
        if known is not None and self._clock() < known[1]:
            return known[0]
        try:
            row = await self._database.look(lambda connection: KeyRepository(connection).by_digest(digest))
        except StoreUnavailable:
            if not self._outlive_store or known is None:
                raise
            self._known[digest] = (known[0], self._clock() + _ASKED_AGAIN_SECONDS)
            return known[0]
        if row is None or row.revoked_at is not None:
            self._known.pop(digest, None)
            raise AuthenticationFailed("the API key is not known here or was revoked")
        principal = _principal(row)
        self._known[digest] = (principal, self._clock() + _CACHED_SECONDS)
        self._known.move_to_end(digest)
        if len(self._known) > _CACHED_KEYS:
            self._known.popitem(last=False)
        return principal

    async def create(
        self,
        kind: PrincipalKind,
        *,
        run_id: str | None = None,
        session_id: str | None = None,
        label: str | None = None,
    ) -> NewKey:
        request = KeyRequest(kind=kind, run_id=run_id, session_id=session_id, label=label)
        (key,) = await self._database.transact(lambda connection: self.create_within(connection, [request]))
        return key

    def create_within(self, connection: Connection, requests: Sequence[KeyRequest]) -> list[NewKey]:
        """Keys in the caller's transaction, in the order of the requests."""
        now = self._clock()
        keys = [NewKey(id=new_key_id(), text=_random_text(request.kind)) for request in requests]
        KeyRepository(connection).insert(
            [self._row(key, request, now) for key, request in zip(keys, requests, strict=True)]
        )
        return keys

    async def register(
        self, kind: PrincipalKind, text: str, *, run_id: str | None = None, label: str | None = None
    ) -> KeyId:
        """A key whose text was chosen elsewhere; the same text again is the same key.

        Raises ConfigurationError when the text is already a key of another kind or run, or was revoked.
        """
        key = NewKey(id=new_key_id(), text=text)
        new = self._row(key, KeyRequest(kind=kind, run_id=run_id, label=label), self._clock())

        def find_or_insert(connection: Connection) -> Row[*tuple[Any, ...]] | None:
            repository = KeyRepository(connection)
            row = repository.by_digest(new["digest"])
            if row is None:
                repository.insert([new])
            return row

        row = await self._database.transact(find_or_insert)
        if row is None:
            return key.id
        if row.revoked_at is not None or (row.kind, row.run_id) != (kind.value, run_id):
            raise ConfigurationError(
                f"bootstrap.{kind}_key: this key was revoked or belongs to another run or kind; choose another text"
            )
        return KeyId(row.id)

    async def list_(self, run_id: str) -> list[KeyView]:
        """A run's own keys, oldest first, without those of its sessions."""
        kinds = [PrincipalKind.RUN, PrincipalKind.TRAINER]
        rows = await self._database.look(lambda connection: KeyRepository(connection).of_run(run_id, kinds))
        return [
            KeyView(
                id=KeyId(row.id),
                kind=PrincipalKind(row.kind),
                label=row.label,
                created_at=row.created_at,
                revoked_at=row.revoked_at,
            )
            for row in rows
        ]

    async def revoke(self, key_id: str) -> None:
        """Raises NotFound. Revoking twice is once."""
        now = self._clock()
        found = await self._database.transact(lambda connection: KeyRepository(connection).revoke(key_id, now))
        if not found:
            raise NotFound(f"there is no key {key_id!r}")
        for digest in [digest for digest, (principal, _) in self._known.items() if principal.key_id == key_id]:
            del self._known[digest]

    def pseudonyms_of(self, body: Mapping[str, Any]) -> tuple[bytes, ...]:
        """Of those on whose behalf a call is made, or a session is opened."""
        return tuple(self.pseudonym(name) for name in users_of(body))

    def pseudonym(self, name: str) -> bytes:
        """What stands for a user's name in the store: 16 bytes that nobody without the secret can lead back to it."""
        return self._digest(f"user\0{name}")[:_PSEUDONYM_BYTES]

    def _digest(self, text: str) -> bytes:
        keyed = self._hmac.copy()  # to begin one anew costs a model call more than all of the rest here
        keyed.update(text.encode("utf-8", "surrogatepass"))
        return keyed.digest()

    def _row(self, key: NewKey, request: KeyRequest, now: float) -> dict[str, Any]:
        return {
            "id": key.id,
            "kind": request.kind.value,
            "digest": self._digest(key.text),
            "run_id": request.run_id,
            "session_id": request.session_id,
            "label": request.label,
            "created_at": now,
        }


def _principal(row: Row[*tuple[Any, ...]]) -> Principal:
    return Principal(kind=PrincipalKind(row.kind), key_id=KeyId(row.id), run_id=row.run_id, session_id=row.session_id)


def _random_text(kind: PrincipalKind) -> str:
    return f"rl-{kind.value}-{secrets.token_urlsafe(_SECRET_BYTES)}"


def load_secret(data_dir: Path) -> bytes:
    """The key of the HMACs: `secret` in the data directory, made on first use, readable by its owner alone.

    Of several processes that start at once, one makes it and all read that one.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    path = data_dir / "secret"
    if not path.exists():
        descriptor, name = tempfile.mkstemp(dir=data_dir, prefix="secret.")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_SECRET_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                path.hardlink_to(temporary)
        finally:
            temporary.unlink()
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise ConfigurationError(f"{path} is damaged: {len(secret)} bytes where {_SECRET_BYTES} belong")
    return secret
