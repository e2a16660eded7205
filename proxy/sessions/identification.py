"""What a model call says about its session, and what we answer."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from proxy.contract.identifiers import GroupId, RunId, SessionId
from proxy.contract.trajectory import Purpose
from proxy.errors import InvalidRequest

_OWN_ID = re.compile(r"ses_[0-9a-hjkmnp-tv-z]{26}")
_NAME_LENGTH = 200


class AttributedBy(StrEnum):
    """How a call came to its session, or a session into being."""

    CREATED = "created"
    KEY = "key"
    PATH = "path"
    HEADER = "header"
    CONVERSATION = "conversation"
    NEW = "new"


class SessionHints(msgspec.Struct, frozen=True, kw_only=True):
    """`path_id` and `header_id` are our session ids or the client's own names. `group` matters where a session is
    opened. `conversation_hashes` are those of the conversation's recorded answers, longest conversation first."""

    path_id: str | None = None
    header_id: str | None = None
    group: str | None = None
    conversation_hashes: tuple[bytes, ...] = ()


class SessionContext(msgspec.Struct, frozen=True, kw_only=True):
    """The session of a call. Only `attributed_by` differs between calls of one session."""

    id: SessionId
    run_id: RunId
    purpose: Purpose
    attributed_by: AttributedBy
    group_id: GroupId | None


def is_own_id(name: str) -> bool:
    """Whether a name has the form of our session ids, so that it can only be one."""
    return _OWN_ID.fullmatch(name) is not None


def checked_name(name: str, *, param: str) -> str:
    """A client's own name for a session or group. Raises InvalidRequest."""
    if not 0 < len(name) <= _NAME_LENGTH or not name.isprintable():
        raise InvalidRequest(f"{param} is 1 to {_NAME_LENGTH} printable characters", param=param)
    return name
