"""Create, check, rotate and revoke API keys. A key's text is shown once; the store only has its HMAC."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Connection

from proxy.auth.access import Principal, PrincipalKind
from proxy.auth.changes import changed_key, check_limited, check_other_admin, require_key
from proxy.auth.keys import (
    BOOTSTRAP,
    KeyChange,
    KeyRequest,
    KeyView,
    NewKey,
    RotatedKey,
    end_of,
    lasts,
    principal_of,
    successor,
    view_of,
)
from proxy.auth.repository import KeyRepository, KeyRow
from proxy.auth.users import users_of
from proxy.bounded_cache import BoundedCache
from proxy.clock import Clock
from proxy.contract.identifiers import KeyId, new_key_id
from proxy.database.unit_of_work import Database
from proxy.errors import AuthenticationFailed, Conflict, KeyExpired, StoreUnavailable
from proxy.log import logger
from proxy.settings import ConfigurationError, UsageLimits

# `Principal` and `PrincipalKind` too: most rooms that manage keys need them together with `Credentials`.
__all__ = [
    "BOOTSTRAP",
    "Credentials",
    "KeyChange",
    "KeyRequest",
    "KeyView",
    "NewKey",
    "Principal",
    "PrincipalKind",
    "RotatedKey",
]

_TEXT_BYTES = 32  # of randomness in a key, so that nobody can guess one
_PSEUDONYM_BYTES = 16  # enough that two names never share one, and half the space of a whole digest
_CACHED_KEYS = 8192  # each session may have a key of its own

# How long a valid key is cached, so how long a key works here after another proxy has revoked it.
_CACHED_SECONDS = 5.0

# How long a known key is accepted without asking an unavailable store again.
_RETRY_STORE_SECONDS = 1.0

# `last_used_at` may lag by this much, so that a busy key costs one small write a minute.
_USE_RESOLUTION_SECONDS = 60.0

_LOG = logger(__name__)


class _Known(msgspec.Struct, frozen=True):
    """A cached key, accepted until `until` without asking the store, and never after `ends_at`."""

    principal: Principal
    until: float
    ends_at: float | None


class Credentials:
    """The API keys of an installation. A revocation takes effect here at once, in other proxies within seconds."""

    def __init__(self, database: Database, secret: bytes, clock: Clock, *, outlive_store: bool = False) -> None:
        """With `outlive_store`, keys that were valid before are accepted while the store is unavailable."""
        self._outlive_store = outlive_store
        self._database = database
        self._hmac = hmac.new(secret, digestmod="sha256")
        self._clock = clock
        self._known: BoundedCache[bytes, _Known] = BoundedCache(_CACHED_KEYS)
        self._used: dict[str, float] = {}

    async def authenticate(self, token: str) -> Principal:
        """Return the holder of a key. Raise AuthenticationFailed if the key is unknown, revoked or expired."""
        digest = self._digest(token)
        known = self._known.get(digest)
        now = self._clock()
        # Every model call is authenticated, so most of them must not wait for the store.
        if known is not None and now < known.until:
            return known.principal
        try:
            row = await self._database.read(lambda connection: KeyRepository(connection).by_digest(digest))
        except StoreUnavailable:
            if not self._outlive_store or known is None or not lasts(known.ends_at, now):
                raise
            self._known.put(digest, _known(known.principal, known.ends_at, now + _RETRY_STORE_SECONDS))
            return known.principal
        if row is None or not lasts(row.revoked_at, now):
            self._known.drop(digest)
            raise AuthenticationFailed("the API key is unknown or was revoked: use a valid key of this installation")
        if not lasts(row.expires_at, now):
            self._known.drop(digest)
            raise KeyExpired(
                f"this API key expired at {_written(row.expires_at)}: ask an administrator of this installation for a"
                " new one (`base-rl keys create`)"
            )
        principal = principal_of(row)
        if principal.kind is not PrincipalKind.SESSION:  # thousands of keys, each for a short time
            self._used[principal.key_id] = now
        self._known.put(digest, _known(principal, end_of(row), now + _CACHED_SECONDS))
        return principal

    async def create(
        self,
        kind: PrincipalKind,
        *,
        run_id: str | None = None,
        session_id: str | None = None,
        project_id: str | None = None,
        label: str | None = None,
        expires_in: float | None = None,
        limits: UsageLimits | None = None,
    ) -> NewKey:
        """Create a key. It expires `expires_in` seconds from now; None: never. Raise InvalidRequest for limits of a
        key that calls no models."""
        check_limited(kind, limits)
        request = KeyRequest(
            kind=kind,
            run_id=run_id,
            session_id=session_id,
            project_id=project_id,
            label=label,
            expires_at=None if expires_in is None else self._clock() + expires_in,
            limits=limits,
        )
        (key,) = await self._database.commit(lambda connection: self.create_within(connection, [request]))
        return key

    def create_within(self, connection: Connection, requests: Sequence[KeyRequest]) -> list[NewKey]:
        """Create keys in the caller's transaction and return them in the order of the requests."""
        now = self._clock()
        keys = [NewKey(id=new_key_id(), text=_random_text(request.kind)) for request in requests]
        KeyRepository(connection).insert(
            [self._row(key, request, now) for key, request in zip(keys, requests, strict=True)]
        )
        return keys

    async def register(self, kind: PrincipalKind, text: str, *, run_id: str | None = None) -> KeyId:
        """Create a key of the configuration, and revoke earlier ones of the configuration for its kind and run.

        Nothing is created if the key exists. If it was revoked, it stays revoked and replaces nothing: a proxy that
        is restarted with an old configuration must neither restore a revoked key nor revoke its successor. A trainer
        key of the configuration changes between one run and every run with it. Raise ConfigurationError if the text
        is a key of another kind or run.
        """
        key = NewKey(id=new_key_id(), text=text)
        now = self._clock()
        new = self._row(key, KeyRequest(kind=kind, run_id=run_id, label=BOOTSTRAP), now)

        def replace(connection: Connection) -> tuple[KeyRow | None, list[str]]:
            repository = KeyRepository(connection)
            row = repository.by_digest(new["digest"])
            if row is None:
                repository.insert([new])
            elif _changes_scope(row, kind, run_id):
                # The configuration went from one run to several, or back; the trainer goes on with its key.
                repository.set(row.id, run_id=run_id)
                row = repository.by_digest(new["digest"])
            elif row.revoked_at is not None or (row.kind, row.run_id) != (kind.value, run_id):
                return row, []
            key_id = key.id if row is None else row.id
            replaced = repository.revoke_labelled(BOOTSTRAP, kind=kind.value, run_id=run_id, but=key_id, at=now)
            return row, replaced

        row, replaced = await self._database.commit(replace)
        self._forget(*replaced)
        for key_id in replaced:
            _LOG.warning("the configuration has a new key: its predecessor is revoked", kind=kind, key=key_id)
        if row is None:
            return key.id
        if (row.kind, row.run_id) != (kind.value, run_id):
            raise ConfigurationError(
                f"bootstrap.{kind}_key is already a key of another run or kind: choose another text"
            )
        if row.revoked_at is not None:
            _LOG.error(
                f"bootstrap.{kind}_key was revoked and stays revoked: put the key that replaced it, or a new text, "
                "into the configuration",
                key=row.id,
            )
        return KeyId(row.id)

    async def list_(self, run_id: str) -> list[KeyView]:
        """List the keys of a run, oldest first, without those of its sessions."""
        kinds = [PrincipalKind.RUN, PrincipalKind.TRAINER, PrincipalKind.REVIEWER]
        rows = await self._database.read(lambda connection: KeyRepository(connection).of_run(run_id, kinds))
        return [view_of(row) for row in rows]

    async def page(
        self,
        *,
        kinds: Sequence[PrincipalKind],
        run_id: str | None = None,
        project_id: str | None = None,
        with_revoked: bool = False,
        below: tuple[float, str] | None = None,
        limit: int = 50,
    ) -> list[KeyView]:
        """List keys of these kinds, newest first, after the key `below` (`created_at`, `id`) of the previous page.

        With `project_id`, list the keys of the project and of its runs. Without `with_revoked`, leave out revoked and
        expired ones.
        """
        valid_at = None if with_revoked else self._clock()
        rows = await self._database.read(
            lambda connection: KeyRepository(connection).page(
                kinds=[kind.value for kind in kinds],
                run_id=run_id,
                project_id=project_id,
                valid_at=valid_at,
                below=below,
                limit=limit,
            )
        )
        return [view_of(row) for row in rows]

    async def limited(self, *, project_id: str | None) -> list[KeyView]:
        """List the valid keys that limits of keys bind; with `project_id`, those of the project and of its runs."""
        now = self._clock()
        rows = await self._database.read(
            lambda connection: KeyRepository(connection).limited(project_id=project_id, valid_at=now)
        )
        return [view_of(row) for row in rows]

    async def find(self, key_id: str) -> KeyView | None:
        """Find a key by its id, whether revoked or not."""
        row = await self._database.read(lambda connection: KeyRepository(connection).by_id(key_id))
        return None if row is None else view_of(row)

    async def find_valid(self, key_id: str) -> Principal | None:
        """Find the holder of a key that is valid now. The store is asked, never the cache."""
        row = await self._database.read(lambda connection: KeyRepository(connection).by_id(key_id))
        return None if row is None or not lasts(end_of(row), self._clock()) else principal_of(row)

    async def rotate(self, key_id: str, *, grace_seconds: float = 0.0) -> RotatedKey:
        """Replace a key by a new one with the same rights; the old one works for `grace_seconds` more.

        The new key lives as long, from now, as the old one did from its creation. Raise NotFound, or Conflict if the
        key was revoked or rotated already or has expired.
        """
        now = self._clock()

        def replace(connection: Connection) -> RotatedKey:
            repository = KeyRepository(connection)
            row = require_key(repository, key_id)
            if row.revoked_at is not None:
                raise Conflict(f"the key {key_id!r} was revoked or rotated already: create a new one instead")
            if not lasts(row.expires_at, now):
                raise Conflict(f"the key {key_id!r} expired at {_written(row.expires_at)}: create a new one instead")
            request = successor(row, now)
            (key,) = self.create_within(connection, [request])
            until = now + grace_seconds
            repository.revoke(key_id, until)
            created = repository.by_id(key.id)
            assert created is not None
            return RotatedKey(key=key, view=view_of(created), replaced_until=until)

        rotated = await self._database.commit(replace)
        self._forget(key_id)
        return rotated

    async def change(self, key_id: str, change: KeyChange) -> KeyView:
        """Change a key's name, expiry or limits, which are those of every key that is counted with it.

        Raise NotFound; Conflict for a revoked key, for an expiry of the last admin key that lasts, and for a new name
        or an expiry of a key of the configuration; InvalidRequest for limits of a key that calls no models.
        """
        now = self._clock()

        view = await self._database.commit(lambda connection: changed_key(connection, key_id, change, now))
        self._forget_where(lambda principal: view.limited_as == principal.limited_as)
        return view

    async def revoke(self, key_id: str) -> None:
        """Revoke a key at once; do nothing if it is revoked.

        Raise NotFound, or Conflict for the last admin key, without which nobody could create another one.
        """
        now = self._clock()

        def revoke(connection: Connection) -> None:
            repository = KeyRepository(connection)
            check_other_admin(repository, require_key(repository, key_id))
            repository.revoke(key_id, now)

        await self._database.commit(revoke)
        self._forget(key_id)

    async def write_uses(self) -> None:
        """Write the times at which keys were used since the last write. To be called every few seconds."""
        if not self._used:
            return
        used, self._used = self._used, {}  # replaced before the wait, so that uses in the meantime are not lost

        def write(connection: Connection) -> None:
            KeyRepository(connection).note_used(used, resolution=_USE_RESOLUTION_SECONDS)

        await self._database.commit(write)

    def pseudonyms_of(self, body: Mapping[str, Any]) -> tuple[bytes, ...]:
        """Return the pseudonyms of the users whom the body of a call or of a new session names."""
        return tuple(self.pseudonym(name) for name in users_of(body))

    def pseudonym(self, name: str) -> bytes:
        """Return 16 bytes that represent a user's name in the store and reveal nothing of it without the secret."""
        return self._digest(f"user\0{name}")[:_PSEUDONYM_BYTES]

    def _forget(self, *key_ids: str) -> None:
        """Drop keys from the cache, so that their revocation takes effect here at once."""
        self._forget_where(lambda principal: principal.key_id in key_ids)

    def _forget_where(self, drops: Callable[[Principal], bool]) -> None:
        for digest in [digest for digest, known in self._known.items() if drops(known.principal)]:
            self._known.drop(digest)

    def _digest(self, text: str) -> bytes:
        keyed = self._hmac.copy()  # creating one would cost more than everything else that authentication does
        keyed.update(text.encode("utf-8", "surrogatepass"))
        return keyed.digest()

    def _row(self, key: NewKey, request: KeyRequest, now: float) -> dict[str, Any]:
        return {
            "id": key.id,
            "kind": request.kind.value,
            "digest": self._digest(key.text),
            "run_id": request.run_id,
            "session_id": request.session_id,
            "project_id": request.project_id,
            "label": request.label,
            "created_at": now,
            "expires_at": request.expires_at,
            "limits": None if request.limits is None else request.limits.stored,
            "limited_as": request.limited_as,
        }


def _known(principal: Principal, ends_at: float | None, until: float) -> _Known:
    return _Known(principal, until if ends_at is None else min(until, ends_at), ends_at)


def _written(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _changes_scope(row: KeyRow, kind: PrincipalKind, run_id: str | None) -> bool:
    """Return whether a configured trainer key, valid for one run, is now for every run, or the other way round."""
    is_configured = row.label == BOOTSTRAP and row.kind == kind.value and row.revoked_at is None
    return is_configured and kind is PrincipalKind.TRAINER and (row.run_id is None) != (run_id is None)


def _random_text(kind: PrincipalKind) -> str:
    return f"rl-{kind.value}-{secrets.token_urlsafe(_TEXT_BYTES)}"
