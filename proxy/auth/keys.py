"""Keys as values: the request for one, a created one, one as it is listed, and how they come from rows."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.auth.access import Limiter, Principal, PrincipalKind
from proxy.auth.repository import KeyRow
from proxy.contract.identifiers import KeyId
from proxy.settings import UsageLimits

BOOTSTRAP = "bootstrap"
"""Label of the keys in the configuration. No other key may have it: a new configured key revokes those that do."""


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a key to be created."""

    kind: PrincipalKind
    run_id: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    label: str | None = None
    expires_at: float | None = None
    limits: UsageLimits | None = None
    limited_as: str | None = None
    """The key whose limits bind this one; None: its own."""


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A created key. `text` is what clients send; it is not stored, so it cannot be shown again."""

    id: KeyId
    text: str


class RotatedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that replaces another one, which stops working at `replaced_until`."""

    key: NewKey
    view: KeyView
    replaced_until: float


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its text. `revoked_at` may be in the future, after a rotation with a grace period. `name` is the
    text that `label` has too, which was its only name before."""

    id: KeyId
    kind: PrincipalKind
    run_id: str | None
    session_id: str | None
    project_id: str | None
    name: str | None
    label: str | None
    created_at: float
    last_used_at: float | None
    """Up to about a minute late; None for session keys, whose use is not recorded."""
    revoked_at: float | None
    expires_at: float | None
    limits: dict[str, Any] | None
    """The limits that bind the key, as they are stored; those of the key that opened its session, for its key."""
    limited_as: KeyId
    """The key under which calls with this one are counted."""


class KeyChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a key; UNSET leaves a property as it is. `limits` without any limit removes them."""

    name: str | msgspec.UnsetType | None = msgspec.UNSET
    expires_in: float | msgspec.UnsetType | None = msgspec.UNSET
    """Seconds from now; None for never."""
    limits: UsageLimits | msgspec.UnsetType = msgspec.UNSET


def lasts(ends_at: float | None, now: float) -> bool:
    """Return whether something that ends at this time, or never if it is None, has not ended yet."""
    return ends_at is None or now < ends_at


def end_of(row: KeyRow) -> float | None:
    """Return when the key stops working, by revocation or expiry; None if no end is set."""
    return min((at for at in (row.revoked_at, row.expires_at) if at is not None), default=None)


def successor(row: KeyRow, now: float) -> KeyRequest:
    """Return the request for the key that replaces the one of this row."""
    return KeyRequest(
        kind=PrincipalKind(row.kind),
        run_id=row.run_id,
        session_id=row.session_id,
        project_id=row.project_id,
        label=row.label,
        expires_at=None if row.expires_at is None else now + row.expires_at - row.created_at,
        # Both keys work during the overlap, and a rotation must neither double nor renew what is left.
        limited_as=row.limited_as,
    )


def principal_of(row: KeyRow) -> Principal:
    """Return the holder of the key of this row."""
    return Principal(
        kind=PrincipalKind(row.kind),
        key_id=KeyId(row.id),
        run_id=row.run_id,
        session_id=row.session_id,
        project_id=row.project_id,
        limiter=Limiter(
            key_id=KeyId(row.limited_as),
            name=row.limiter_name,
            limits=None if row.limits is None else UsageLimits.model_validate(row.limits),
        ),
    )


def view_of(row: KeyRow) -> KeyView:
    """Return the key of this row without its digest."""
    return KeyView(
        id=KeyId(row.id),
        kind=PrincipalKind(row.kind),
        run_id=row.run_id,
        session_id=row.session_id,
        project_id=row.project_id,
        name=row.label,
        label=row.label,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
        expires_at=row.expires_at,
        limits=row.limits,
        limited_as=KeyId(row.limited_as),
    )
