"""Changes of keys within a transaction, and the checks that all changes share."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection

from proxy.auth.access import PrincipalKind
from proxy.auth.keys import BOOTSTRAP, KeyChange, KeyView, end_of, lasts, view_of
from proxy.auth.repository import KeyRepository, KeyRow
from proxy.errors import Conflict, InvalidRequest, NotFound
from proxy.settings import UsageLimits

_LIMITED_KINDS = (PrincipalKind.PROJECT, PrincipalKind.RUN)
"""The kinds whose keys call models. Keys of sessions do too, and are bound by the limits of those that made them."""


def changed_key(connection: Connection, key_id: str, change: KeyChange, now: float) -> KeyView:
    """Change a key and return it (`Credentials.change`)."""
    repository = KeyRepository(connection)
    row = require_key(repository, key_id)
    if not lasts(row.revoked_at, now):
        raise Conflict(f"the key {key_id!r} was revoked: create a new one instead")
    if change.limits is not msgspec.UNSET:
        check_limited(PrincipalKind(row.kind), change.limits)
        repository.set(row.limited_as, limits=change.limits.stored)
    if change.name is not msgspec.UNSET or change.expires_in is not msgspec.UNSET:
        _check_not_configured(row)
    if change.name is not msgspec.UNSET:
        repository.set(key_id, label=change.name)
    if change.expires_in is not msgspec.UNSET:
        if change.expires_in is not None:
            check_other_admin(repository, row)
        repository.set(key_id, expires_at=None if change.expires_in is None else now + change.expires_in)
    return view_of(require_key(repository, key_id))


def require_key(repository: KeyRepository, key_id: str) -> KeyRow:
    """Return the row of a key. Raise NotFound."""
    row = repository.by_id(key_id)
    if row is None:
        raise NotFound(f"there is no key {key_id!r}")
    return row


def check_limited(kind: PrincipalKind, limits: UsageLimits | None) -> None:
    """Raise InvalidRequest for limits that would bind nothing."""
    if limits is not None and limits.bound_calls and kind not in _LIMITED_KINDS:
        raise InvalidRequest(
            f"a {kind.value} key has no limits of its own: limits bind model calls, so give them to a run key or a"
            " project key",
            param="limits",
        )


def _check_not_configured(row: KeyRow) -> None:
    """Raise Conflict for a key of the configuration, whose name and life are the configuration's."""
    if row.label == BOOTSTRAP:
        raise Conflict(
            f"the key {row.id!r} is in the configuration ([bootstrap]): change it there, or create another one"
        )


def check_other_admin(repository: KeyRepository, row: KeyRow) -> None:
    """Raise Conflict for the last admin key that lasts."""
    is_lasting_admin = row.kind == PrincipalKind.ADMIN.value and end_of(row) is None
    if is_lasting_admin and not repository.lasting_admins(other_than=row.id):
        raise Conflict(
            "this is the last admin key, without which nobody could manage keys: create another one first, "
            "or rotate this one"
        )
